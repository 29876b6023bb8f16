"""What came of a gather: one outcome per peer, and what follows from all of them."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from templar.errors import Reason
from templar.exchange.reveal import Contribution


class Tier(StrEnum):
    """Why a miner is fetched."""

    GATHER = "gather"
    RESERVE = "reserve"
    OTHER = "other"


@dataclass(frozen=True)
class PeerOutcome:
    """What came of one peer.

    Attributes:
        uid: The peer.
        tier: Why it was fetched.
        contribution: What it contributed; None if nothing that counts.
        reason: Why nothing counts; None if something does.
        detail: The same for people.
        seconds: How long the fetch took, retries included, pauses between them not.
        num_bytes: Bytes of payload and signed objects that were fetched for it in this gather.
    """

    uid: int
    tier: Tier
    contribution: Contribution | None
    reason: Reason | None
    detail: str
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True)
class GatherReport:
    """The outcome for every peer that was asked, in uid order.

    Attributes:
        window: The window.
        outcomes: One per peer, in uid order.
        seconds: How long the gather took, the wait for the reveals to be final included.
        peer_list: Digest of the peer list that said whom to fetch; None if there was none.
    """

    window: int
    outcomes: tuple[PeerOutcome, ...]
    seconds: float = 0.0
    peer_list: str | None = None

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """Everything that counts, in uid order."""
        return tuple(outcome.contribution for outcome in self.outcomes if outcome.contribution is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes that were fetched."""
        return sum(outcome.num_bytes for outcome in self.outcomes)

    @property
    def rejected(self) -> dict[Reason, int]:
        """How many do not count, by reason, the most frequent one first."""
        reasons = Counter(outcome.reason for outcome in self.outcomes if outcome.reason is not None)
        return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))

    @property
    def summary(self) -> str:
        """The report in a line."""
        counts = [f"{len(self.contributions)} of {len(self.outcomes)} accepted"]
        counts += [f"{count} {reason}" for reason, count in self.rejected.items()]
        return f"{', '.join(counts)}; {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s"

    def outcome(self, uid: int) -> PeerOutcome | None:
        """The outcome of one peer, if it was asked."""
        return next((outcome for outcome in self.outcomes if outcome.uid == uid), None)
