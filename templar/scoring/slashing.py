"""What an event costs, as data: event -> factor that is left of a positive score.

A penalty never improves a negative score, and never touches a miner that the event does not name.
"""

from dataclasses import dataclass

from templar.errors import Reason
from templar.hparams import Slashing

_INVALID = frozenset(
    {
        Reason.COMMIT_MISMATCH,
        Reason.MALFORMED,
        Reason.BAD_SIGNATURE,
        Reason.WRONG_IDENTITY,
        Reason.WRONG_NETWORK,
        Reason.WRONG_WINDOW,
        Reason.WRONG_ASSIGNMENT,
        Reason.WRONG_SIZE,
        Reason.WRONG_HASH,
        Reason.WRONG_SHAPES,
        Reason.NOT_CANONICAL,
        Reason.BAD_PAYLOAD,
    }
)


@dataclass(frozen=True)
class Slash:
    """One penalty.

    Attributes:
        uid: Whose.
        reason: Why.
        factor: What is left of a positive score.
    """

    uid: int
    reason: Reason
    factor: float

    def apply(self, score: float) -> float:
        """The score after the penalty."""
        return score * self.factor if score > 0 else score


def slash_for_outcome(uid: int, reason: Reason, table: Slashing) -> Slash:
    """The penalty for a payload that did not count: `invalid` if what was revealed is wrong, else `missing`."""
    return Slash(uid, reason, table.invalid if reason in _INVALID else table.missing)
