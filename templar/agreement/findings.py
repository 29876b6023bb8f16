"""Findings: conflicts that a node saw in a window, published in a report with the signed objects that show them.

Some findings are proofs, which anybody checks from the exhibits (docs/protocol.md 8). Others are one node's word, since
no object in a bucket proves when it was stored; the majority of reports points to the fault.
"""

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest, Roster, Word
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import ENVELOPE_BYTES, Count, Hotkey, Record, Sealed, Uid, WindowBody

EXHIBIT_BYTES = 1 << 20  # most bytes of exhibits in one report; further ones are left out
MAX_FINDINGS = 512
Place = Annotated[int, Field(ge=0, lt=MAX_FINDINGS)]


class Suspect(Record):
    """A neuron that may be at fault."""

    uid: Uid
    hotkey: Hotkey


class Exhibit(Record):
    """A signed object as it was published; `text` is its bytes, which are ASCII."""

    kind: Literal["roster", "manifest", "word"]
    text: Annotated[str, Field(max_length=EXHIBIT_BYTES)]

    @classmethod
    def of(cls, sealed: Sealed[Roster] | Sealed[Manifest] | Sealed[Word]) -> "Exhibit":
        """Return the exhibit of an object."""
        return cls.model_validate({"kind": sealed.body.kind.value, "text": sealed.encode().decode()})


class Finding(Record):
    """A conflict between observations."""

    window: Count  # the window of the conflict: the report's, or the one before
    reason: Annotated[str, Field(pattern=r"^[a-z_]{1,40}$")]  # the kind of conflict, a reason code
    suspects: Annotated[tuple[Suspect, ...], Field(min_length=1, max_length=2, strict=False), FailFast()]
    """Neurons, at least one of which is at fault."""
    detail: Annotated[str, Field(pattern=r"^[ -~]{0,300}$")]  # the same for people
    exhibits: Annotated[tuple[Place, ...], Field(max_length=2, strict=False), FailFast()]
    """Places in the report's list of exhibits."""

    @model_validator(mode="after")
    def _nobody_twice(self) -> Self:
        if len({suspect.uid for suspect in self.suspects}) != len(self.suspects):
            raise ValueError("a suspect is named twice")
        return self


class Report(WindowBody):
    """The findings of one node in a window, and the signed objects that show them."""

    kind = Kind.REPORT
    max_bytes = ENVELOPE_BYTES + 2 * EXHIBIT_BYTES + 1024 * MAX_FINDINGS

    findings: Annotated[tuple[Finding, ...], Field(max_length=MAX_FINDINGS, strict=False), FailFast()]
    exhibits: Annotated[tuple[Exhibit, ...], Field(max_length=MAX_FINDINGS, strict=False), FailFast()]


def publish_report(
    exchange: NetworkView, window: int, findings: tuple[Finding, ...], exhibits: tuple[Exhibit, ...]
) -> PublishReceipt:
    """Publish the findings of a window. On failure a later call with the same findings goes on.

    PermanentError: `object_differs`; this node reported otherwise before, and that stands.
    """
    report = Report(**exchange.author(window), window=window, findings=findings, exhibits=exhibits)
    key = window_key(Kind.REPORT, window, report.uid)
    return publish_body(exchange.buckets.own, key, report, exchange.own_signer, clock=exchange.chain.clock)
