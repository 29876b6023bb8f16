"""What a payload promises to first order, what it does, and what lies between the two: the curvature.

It is measured exactly for some miners per window; here is what is assumed of the others. A miner's own past tells what
its work leaves out, as long as it promises about what it did then. But a step that goes too far promises the more, the
further it goes. So of who promises several times as much as others do, more is asked: such promises must have been kept
where they were measured, of the same miner or in the same window.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Self

from templar.scoring.evidence import Estimate, Measurement

WORST_SCORE = -1.0


def improvement(before: float | None, after: float | None) -> float:
    """The relative fall of a loss.

    The worst score there is, -1, is that of a loss that at least doubled or is not finite afterwards: otherwise an
    infinite loss would score higher than one that tripled. A baseline of 0 or less cannot be improved.
    """
    if before is None or before <= 0:
        return 0.0
    if after is None or not math.isfinite(after):
        return WORST_SCORE
    return max(WORST_SCORE, (before - after) / before)


def relative_gain(before: float | None, gain: float | None) -> float:
    """A gain to first order over the loss that it comes off, with the same limits as `improvement`."""
    if gain is None or not math.isfinite(gain):
        return 0.0 if before is None or before <= 0 else WORST_SCORE
    return improvement(before, None if before is None else before - gain)


def forecast(estimate: Estimate) -> float:
    """The linear score: the relative fall of the loss on others' data to first order."""
    return relative_gain(estimate.random_before, estimate.random_gain)


def promise_of(measurement: Measurement | None) -> float | None:
    """The linear score on the sequences of an exact measurement; None if that says nothing."""
    if measurement is None or measurement.random_gain is None:
        return None
    if measurement.random_before is None or measurement.random_before <= 0:
        return None
    return relative_gain(measurement.random_before, measurement.random_gain)


def curvature_of(measurement: Measurement | None) -> float | None:
    """What the linear score left out on the same sequences; None if there is none."""
    promise = promise_of(measurement)
    if measurement is None or promise is None:
        return None
    return improvement(measurement.random_before, measurement.random_after) - promise


@dataclass(frozen=True)
class Assumptions:
    """What is assumed of the curvature of whoever is not measured exactly in a window.

    Attributes:
        typical: The median curvature of the measured ones whose linear score is not large, but never a bonus.
        large: The linear score above which one is large: `ratio` times the median one of all miners, or times 0 if that
            is negative. None if nobody was measured, for then there is nothing to hold a large one against.
        broken: Of the measured ones that are large, the linear score and the share of it that was left out, in -1..0.
        ratio: `Scoring.large_promise_ratio`.
    """

    typical: float = 0.0
    large: float | None = None
    broken: tuple[tuple[float, float], ...] = ()
    ratio: float = 1.0

    @classmethod
    def of(cls, estimates: Collection[Estimate], measurements: Collection[Measurement], ratio: float) -> Self:
        """Of a window.

        Args:
            estimates: The linear scores of all.
            measurements: The exact ones.
            ratio: `Scoring.large_promise_ratio`.
        """
        promises = ((promise_of(each), curvature_of(each)) for each in measurements)
        found = [(promise, curve) for promise, curve in promises if promise is not None and curve is not None]
        if not found or not estimates:
            return cls(ratio=ratio)
        large = ratio * max(0.0, median(map(forecast, estimates)))
        broken = [(promise, min(0.0, max(-1.0, curve / promise))) for promise, curve in found if promise > large]
        others = [curve for promise, curve in found if promise <= large]
        return cls(
            typical=min(0.0, median(others)) if others else 0.0,
            large=large,
            broken=tuple(sorted(broken)),
            ratio=ratio,
        )

    def curvature(self, linear: float, known: float | None, promise: float) -> float:
        """The curvature to assume of a miner.

        That of its past, or the typical one. But of a large linear score no less of a share is left out than of its own
        measured ones, and than the median of this window's; either tells something of scores up to `ratio` times as
        large. If neither does, it counts for no more than one that is not quite large.

        Args:
            linear: Its linear score.
            known: The card's moving average of the curvature; None if it was never measured.
            promise: The card's moving average of the linear scores that it is of.
        """
        past = self.typical if known is None else known
        if self.large is None or linear <= self.large:
            return past
        proven = known is not None and linear <= self.ratio * promise
        left_out = [0.0, past * (linear / promise) if proven else past]
        alike = [share for size, share in self.broken if linear <= self.ratio * size]
        if alike:
            left_out.append(median(alike) * linear)
        elif not proven:
            left_out.append(self.large + self.typical - linear)
        return min(left_out)
