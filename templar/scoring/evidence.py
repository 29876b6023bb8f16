"""The evidence that a validator signs and publishes for one window, so that anybody can check its scores.

Its facts are observations and measurements. Everything else follows from them and from the evidence of the window
before, by `conclude`. An audit holds the facts against the public objects, and the rest against the facts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from templar.errors import Reason
from templar.exchange.object_keys import Kind
from templar.exchange.reveal import CONCLUSIVE
from templar.exchange.signed import ENVELOPE_BYTES, Count, Hex64, Hotkey, Record, Uid, WindowBody
from templar.scoring.standing import Event, Finite, Rating, ScoreCard, Standing

Tier = Annotated[str, Field(pattern="^(gather|reserve|other)$")]
BanSubject = Annotated[str, Field(pattern=r"^([0-9a-f]{64}|[1-9A-HJ-NP-Za-km-z]{46,50})$")]

MAX_BANS = 4096  # bans at a time; those that end first are forgotten first
MAX_DEPARTED = 512
"""Cards of hotkeys that are not registered any more; those that revealed least recently are forgotten first."""


class Estimate(Record):
    """The first-order measurement of a payload: mean losses and gains in nats per token.

    A number that is not finite is recorded as None: it is a verdict, not an error.
    """

    own_before: Finite | None  # loss on the miner's own segment
    own_gain: Finite | None  # first-order fall of that loss under the update
    random_before: Finite | None  # loss on the rest of the evaluation batch
    random_gain: Finite | None  # first-order fall of that loss under the update
    expected: Finite
    """How much easier the segment is than the rest for others: over the miners that were drawn for an exact
    measurement, the median of their relative gain on it less that on the rest. 0 if nobody else was drawn."""


class Measurement(Record):
    """The exact measurement of a payload: mean losses in nats per token before and after it is applied alone.

    `own_*` is on the miner's own segment, `random_*` on the sampled segments of others, and `random_gain` the
    first-order fall there. A number that is not finite is recorded as None: it is a verdict, not an error.
    """

    own_before: Finite | None
    own_after: Finite | None
    random_before: Finite | None
    random_after: Finite | None
    random_gain: Finite | None


class Likeness(Record):
    """The most similar payload of another miner, or of the window before."""

    uid: Uid  # its author
    share: Finite  # share of common coefficients beyond chance, 0..1


class MeasuredOn(Record):
    """The device that computed the losses and gains of a window."""

    device: Literal["cpu", "cuda"]  # kind of the device
    precision: Literal["float32", "bfloat16"]  # of the products; parameters and gradients are float32
    repeatable: bool
    """Whether it did so on one thread of a CPU in float32, with the preset's micro-batches: then the same kind of
    machine finds the same bits."""

    def __str__(self) -> str:
        return f"{self.device}/{self.precision}"


class MinerFacts(Record):
    """The observations and measurements of one miner in a window; unmeasured values are None."""

    uid: Uid
    hotkey: Hotkey
    registered_at: Count  # block in which the uid was registered
    bucket: Hex64 | None  # digest of its bucket's address; None if the chain named none
    tier: Tier  # why its payload was fetched
    assigned: bool  # whether it had data to train on; one that waits for a slot has nothing to publish
    payload_sha256: Hex64 | None  # the payload that counts
    applied: bool  # whether the decided roster has it
    sequences: Count | None  # of its data that its manifest says it trained on; None if nothing was measured
    reason: Annotated[Reason, Field(strict=False)] | None  # why no payload counts
    windows_behind: Count | None  # windows that its state was behind; None if its store failed
    estimate: Estimate | None
    measurement: Measurement | None  # None if it was not drawn for one
    norm_ratio: Finite | None  # norm of the payload over the median norm
    overlap: Likeness | None  # the most similar payload of the same window; None if there is no other
    repeat: Likeness | None  # the most similar payload of the window before (its own only if that was applied)


OF_THE_WINDOW = ("window", "roster", "root_before", "outer_steps", "seed_block", "loss", "measured_on")
"""Fields that facts and evidence have in common, besides the miners."""


@dataclass(frozen=True)
class WindowFacts:
    """The observations and measurements of a window: the input of `conclude`, besides the standing before."""

    window: int
    roster: str | None  # digest of the decided roster; None for a null window
    root_before: str  # of the state before the window
    outer_steps: int  # of that state
    seed_block: int  # the block that settled the window; its hash seeds the evaluation plan
    loss: float | None  # mean loss on the evaluation batch where payloads were measured; None if nothing was
    miners: tuple[MinerFacts, ...]  # one per registered miner, in uid order
    measured_on: MeasuredOn | None = None  # None if nothing was measured

    @cached_property
    def success_rate(self) -> float:
        """Share of the gather tier with a payload that counts; unreadable miners are left out, and 1 without a tier."""
        tier = [
            miner.payload_sha256 is not None
            for miner in self.miners
            if miner.tier == "gather" and (miner.reason is None or miner.reason in CONCLUSIVE)
        ]
        return sum(tier) / len(tier) if tier else 1.0

    @cached_property
    def is_well_read(self) -> bool:
        """Whether payloads of more than half of the assigned miners count, so that reading works here."""
        revealed = [miner.payload_sha256 is not None for miner in self.miners if miner.assigned]
        return 2 * sum(revealed) > len(revealed)


class SlashRecord(Record):
    """A penalty: the entry of the table, and the reason code."""

    event: Annotated[Event, Field(strict=False)]
    reason: Annotated[Reason, Field(strict=False)]


class MinerRecord(Record):
    """A miner's facts and their consequences."""

    facts: MinerFacts
    before: ScoreCard  # its card before the window
    gradient_score: Finite | None  # relative fall of the loss on others' data; None if it was not scored
    indicator: Annotated[int, Field(ge=-1, le=1)] | None
    """+1 if the loss fell more on the own data, else -1; None if it was not scored."""
    copied: bool  # whether its payload is like another one, even while that costs nothing yet
    discount: Annotated[Reason, Field(strict=False)] | None
    """Why its payload counts for less than its score; None if it counts in full."""
    slashes: Annotated[tuple[SlashRecord, ...], Field(strict=False, max_length=16), FailFast()]
    after: ScoreCard  # its card after the window

    @property
    def uid(self) -> int:
        """The miner's uid."""
        return self.facts.uid

    @property
    def final(self) -> float:
        """Its final score after the window."""
        return self.after.final


class Departed(Record):
    """The card of a hotkey that is not registered any more."""

    hotkey: Hotkey
    card: ScoreCard


class Ban(Record):
    """A ban of a hotkey, or of a bucket by the digest of its address, up to and including a window."""

    subject: BanSubject
    last_window: Count


class WeightRecord(Record):
    """A weight that follows from the final scores."""

    uid: Uid
    weight: Finite


class Evidence(WindowBody):
    """The evidence of one validator for one window; its fields `roster` to `measured_on` are as in `WindowFacts`."""

    kind = Kind.EVIDENCE
    max_bytes = ENVELOPE_BYTES + 2 * 1024 * 1024

    previous: Hex64 | None
    """Digest of the evidence that this one follows, whose cards are the ones before; None for the first."""
    previous_window: Count | None  # the window of that evidence
    roster: Hex64 | None
    root_before: Hex64
    outer_steps: Count
    seed_block: Count
    loss: Finite | None
    measured_on: MeasuredOn | None
    miners: Annotated[tuple[MinerRecord, ...], Field(strict=False, max_length=4096), FailFast()]
    """One record per registered miner, in uid order."""
    baseline_sigma: Finite  # uncertainty of the rating of the baseline, which final scores count from
    typical_advantage: Finite
    """Median positive advantage of the scored miners, before the window's penalties; skill is measured in it."""
    typical_own_excess: Finite
    """Median positive excess on own data of the scored miners with a positive advantage, likewise."""
    departed: Annotated[tuple[Departed, ...], Field(strict=False, max_length=MAX_DEPARTED), FailFast()]
    """Cards of hotkeys that are not registered any more, by hotkey."""
    bans: Annotated[tuple[Ban, ...], Field(strict=False, max_length=MAX_BANS), FailFast()]
    """Bans that hold in later windows, by subject."""
    weights: Annotated[tuple[WeightRecord, ...], Field(strict=False, max_length=4096), FailFast()]
    """The weights that follow from the final scores, in uid order."""

    @property
    def facts(self) -> WindowFacts:
        """The observations and measurements."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in OF_THE_WINDOW}
        return WindowFacts(**shared, miners=tuple(record.facts for record in self.miners))

    @property
    def standing(self) -> Standing:
        """The validator's memory after the window."""
        facts = [record.facts for record in self.miners]
        return Standing(
            window=self.window,
            evidence=self.digest,
            cards={record.facts.hotkey: record.after for record in self.miners},
            departed={each.hotkey: each.card for each in self.departed},
            bans={ban.subject: ban.last_window for ban in self.bans},
            payloads={
                record.uid: record.facts.payload_sha256
                for record in self.miners
                if record.facts.payload_sha256 is not None and not record.copied
            },
            applied=frozenset(miner.uid for miner in facts if miner.applied),
            baseline=self.baseline,
        )

    @property
    def baseline(self) -> Rating:
        """Rating of the baseline after the window."""
        return Rating(sigma=self.baseline_sigma)
