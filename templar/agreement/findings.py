"""Findings: conflicts that a node saw in a window, published in a report with the signed objects that show them.

Some findings are proofs: anybody checks them from the exhibits (`is_proven`). Others are one node's word, since no
object in a bucket proves when it was stored; the majority of reports points to the fault (`named_by`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

from templar.agreement.ballot_rules import Said, convicting
from templar.agreement.roster import check_signatures
from templar.errors import Reason, RejectedError
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest, Roster, Word
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import (
    ENVELOPE_BYTES,
    Count,
    Hotkey,
    Network,
    Sealed,
    Uid,
    WindowBody,
    check_author,
    check_window,
    unseal,
)

EXHIBIT_BYTES = 1 << 20  # most bytes of exhibits in one report; further ones are left out
MAX_FINDINGS = 512
Place = Annotated[int, Field(ge=0, lt=MAX_FINDINGS)]

T = TypeVar("T", bound=WindowBody)


class Suspect(BaseModel):
    """A neuron that may be at fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    uid: Uid
    hotkey: Hotkey


class Exhibit(BaseModel):
    """A signed object as it was published; `text` is its bytes, which are ASCII."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["roster", "manifest", "word"]
    text: Annotated[str, Field(max_length=EXHIBIT_BYTES)]

    @classmethod
    def of(cls, sealed: Sealed[Roster] | Sealed[Manifest] | Sealed[Word]) -> "Exhibit":
        """Return the exhibit of an object."""
        return cls.model_validate({"kind": sealed.body.kind.value, "text": sealed.encode().decode()})


class Finding(BaseModel):
    """A conflict between observations."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

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

    Raises:
        PermanentError: `object_differs`; this node reported otherwise before, and that stands.
        TransientError: The store failed.
    """
    report = Report(**exchange.author(window), window=window, findings=findings, exhibits=exhibits)
    key = window_key(Kind.REPORT, window, report.uid)
    return publish_body(exchange.buckets.own, key, report, exchange.own_signer, clock=exchange.chain.clock)


def is_proven(finding: Finding, report: Report, network: Network) -> bool:
    """Return whether a finding's exhibits alone convict its suspect.

    Proofs are two different rosters, or two different manifests, that one hotkey signed for one window, two words of it
    that no honest validator signs both of, and a roster that names a payload which its author never signed.
    """
    check = _PROOFS.get(finding.reason)
    if check is None or len(finding.suspects) != 1 or max(finding.exhibits, default=0) >= len(report.exhibits):
        return False
    try:
        return check(_Trial(finding, network), [report.exhibits[place] for place in finding.exhibits])
    except RejectedError:
        return False


@dataclass(frozen=True)
class Accusation:
    """A finding of a public report, its reporter's hotkey, and whether its exhibits alone convict the suspect."""

    reporter: str
    finding: Finding
    is_proven: bool


def named_by(accusations: Iterable[Accusation], num_nodes: int) -> tuple[int, ...]:
    """Return the uids that the reports on a window point to.

    This points, and is no verdict: miners that together show one object to a publisher and another to everybody else
    look like a publisher that leaves them out.

    Args:
        accusations: Every finding of every report.
        num_nodes: Nodes whose reports were looked for, those without a report included.
    """
    reporters: dict[tuple[str, tuple[int, ...]], set[str]] = defaultdict(set)
    named: set[int] = set()
    for each in accusations:
        uids = tuple(suspect.uid for suspect in each.finding.suspects)
        reporters[each.finding.reason, uids].add(each.reporter)
        if each.is_proven:
            named.update(uids)
    # Proofs name their suspect. Of findings that more than half of the nodes report, those with one suspect name it...
    suspects = {uids for (_, uids), who in reporters.items() if 2 * len(who) > num_nodes}
    named.update(uids[0] for uids in suspects if len(uids) == 1)
    # ...and of two suspects the one that more such findings have in common; nobody, where they point to both alike.
    while unexplained := [uids for uids in suspects if named.isdisjoint(uids)]:
        counts = Counter(uid for uids in unexplained for uid in uids)
        most = max(counts.values())
        leading = {uid for uid, count in counts.items() if count == most}
        if any(leading.issuperset(uids) for uids in unexplained):
            break
        named |= leading
    return tuple(sorted(named))


@dataclass(frozen=True)
class _Trial:
    """Opens the exhibits of a finding."""

    finding: Finding
    network: Network

    def open(self, exhibit: Exhibit, body_type: type[T]) -> T:
        """Return an exhibit that the suspect signed for the finding's window.

        Raises:
            RejectedError: It is not such an object.
        """
        body, suspect = unseal(exhibit.text.encode(), body_type).body, self.finding.suspects[0]
        check_author(body, network=self.network, uid=suspect.uid, hotkey=suspect.hotkey)
        check_window(body, self.finding.window)
        return body

    def are_two(self, exhibits: list[Exhibit], body_type: type[T]) -> bool:
        """Return whether the exhibits are two different objects."""
        return len({self.open(exhibit, body_type).digest for exhibit in exhibits}) == 2


def _unsigned_entry(trial: _Trial, exhibits: list[Exhibit]) -> bool:
    for exhibit in exhibits:
        roster = trial.open(exhibit, Roster)
        try:
            check_signatures(roster)
        except RejectedError:
            return True
    return False


def _double_words(trial: _Trial, exhibits: list[Exhibit]) -> bool:
    words = [Said.of(trial.open(exhibit, Word)) for exhibit in exhibits]
    return bool(convicting(words))


_PROOFS: dict[str, Callable[[_Trial, list[Exhibit]], bool]] = {
    Reason.ROSTER_EQUIVOCATION: lambda trial, exhibits: trial.are_two(exhibits, Roster),
    Reason.MANIFEST_EQUIVOCATION: lambda trial, exhibits: trial.are_two(exhibits, Manifest),
    Reason.WORD_EQUIVOCATION: _double_words,
    Reason.BAD_SIGNATURE: _unsigned_entry,
}
