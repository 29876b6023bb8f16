"""Whether readers storm an endpoint when a bucket fails: what they ask at the edge of a window, second by second."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from deployments.gauntlet.gate import Ask
from templar.timeline import WindowTimes

MOST = 2.0
"""Requests per second while a bucket fails, over those of a window in which none does (row 33)."""


@dataclass(frozen=True)
class Storm:
    """Requests of the healthy nodes at the edges of windows.

    Attributes:
        calm: Most requests in one second of a window in which no bucket fails.
        failing: Most requests in one second of a window in which one does.
        asked_calm: Most requests for the bucket that fails later, in a window in which it does not.
        asked_failing: Most requests for the failing bucket in a window.
    """

    calm: int
    failing: int
    asked_calm: int
    asked_failing: int

    @property
    def ratio(self) -> float:
        """How many times as many requests per second."""
        return self.failing / max(1, self.calm)

    @property
    def measured(self) -> dict[str, float]:
        """For a verdict."""
        return {
            "requests_per_second_calm": self.calm,
            "requests_per_second_failing": self.failing,
            "requests_of_the_bucket_calm": self.asked_calm,
            "requests_of_the_bucket_failing": self.asked_failing,
        }

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it should be."""
        if not self.asked_calm or not self.asked_failing:
            return ("nobody asked for the bucket that fails, so nothing was measured",)
        if self.ratio > MOST:
            return (
                f"{self.failing} requests in one second while a bucket fails, {self.ratio:.1f} times the {self.calm} "
                f"of a window in which none does; {MOST:g} times are legal",
            )
        return ()


def measure_storm(
    asks: Iterable[Ask],
    edges: Sequence[WindowTimes],
    *,
    num_calm: int,
    healthy: Collection[str],
    failing: Collection[str],
) -> Storm:
    """Count what the healthy nodes asked between the close of each window and the end of its first roster slot.

    Args:
        asks: Every request.
        edges: The windows' times.
        num_calm: So many windows at the beginning are without a failure.
        healthy: Accounts of the nodes to which nothing happens.
        failing: Accounts of the buckets that fail.
    """
    own = [ask for ask in asks if ask.who in healthy]
    seconds, buckets = [], []
    for times in edges:
        at_the_edge = [ask for ask in own if times.close < ask.at <= times.roster_slot(0).last]
        seconds.append(max(Counter(int(ask.at) for ask in at_the_edge).values(), default=0))
        buckets.append(sum(ask.bucket in failing for ask in at_the_edge))
    return Storm(
        calm=max(seconds[:num_calm], default=0),
        failing=max(seconds[num_calm:], default=0),
        asked_calm=max(buckets[:num_calm], default=0),
        asked_failing=max(buckets[num_calm:], default=0),
    )
