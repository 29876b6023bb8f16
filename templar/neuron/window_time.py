"""Measure where a node's time in a window goes, and say when a miner's training must stop.

Each step of a window counts as one activity. The time that it sleeps in, until a block, the close or a decision, counts
as waiting instead. The figures are informative: no decision rests on them. On simulated time they have no meaning.
`TrainingEnd` does decide, by the chain's clock.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from templar import interrupt

log = logging.getLogger(__name__)

WAITING, OTHER = "waiting", "other"
RECENT_WINDOWS = 8  # whose commitments are remembered


class Timed(Protocol):
    """A node."""

    time: "WindowTime"


T = TypeVar("T")
N = TypeVar("N", bound=Timed)
P = ParamSpec("P")


@dataclass(frozen=True)
class StepTime:
    """The time that one step took of a window, repeated calls included."""

    activity: str  # training, compressing, exchanging, evaluating or applying
    seconds: float  # without the sleep
    waited: float  # seconds asleep: for a block, for the close or for a decision


class WindowTime:
    """The time of a node in a window by step, as it measures it in this process."""

    def __init__(self) -> None:
        self.window: int | None = None
        self.steps: dict[str, StepTime] = {}
        self._begun = time.perf_counter()
        self._is_inside = False

    def begin(self, window: int) -> None:
        """A window is taken up; one that was taken up before in this process goes on."""
        if window != self.window:
            self.window, self.steps, self._begun = window, {}, time.perf_counter()

    @contextmanager
    def spent(self, step: str, activity: str) -> Iterator[None]:
        """Count the block as a part of a step; a step that another one calls is a part of that."""
        if self._is_inside:
            yield
            return
        self._is_inside, started, before = True, time.perf_counter(), interrupt.waited_seconds()
        try:
            yield
        finally:
            waited = interrupt.waited_seconds() - before
            busy, known = time.perf_counter() - started - waited, self.steps.get(step, StepTime(activity, 0.0, 0.0))
            self.steps[step] = StepTime(activity, known.seconds + busy, known.waited + waited)
            self._is_inside = False

    def seconds(self, window: int) -> dict[str, float]:
        """Seconds by activity since a window was taken up: they add up to the whole. Empty for another window."""
        if window != self.window:
            return {}
        total, found = time.perf_counter() - self._begun, {WAITING: 0.0}
        for step in self.steps.values():
            found[step.activity] = found.get(step.activity, 0.0) + step.seconds
            found[WAITING] += step.waited
        return {**found, OTHER: max(0.0, total - sum(found.values()))}


class TrainingEnd:
    """When a window's training must stop, so that the payload is on the disk before the network's margin begins.

    Both times are the longest of the last windows.

    Args:
        finish_seconds: From the last step until the payload is on the disk: an estimate, until a window has shown it.
        margin_seconds: From then until the commitment is stored: the network's, until three windows have shown it.
        now: The clock, in seconds.
    """

    def __init__(self, finish_seconds: float, margin_seconds: float, now: Callable[[], float]) -> None:
        self._estimate, self._margin, self._now = finish_seconds, margin_seconds, now
        self._finishes, self._commits = (deque[float](maxlen=RECENT_WINDOWS) for _ in range(2))
        self._finished: float | None = None
        self.at = math.inf
        """When the training at hand must stop."""
        self._is_measured = False

    def begin(self, last: float) -> None:
        """Begin a training whose commitment must be stored at `last`.

        At least a quarter of the time that it has is for training, even if the commitment may be too late after it.
        """
        latest = last - self.margin
        finish = max(self._finishes, default=self._estimate)
        now, early, self._finished = self._now(), latest - finish, None
        self.at = min(latest, max(early, now + (latest - now) / 4))
        self._is_measured = now < latest
        if self._is_measured and self.at > early:
            log.warning(
                "there are %.0f s to train and to finish, which may take %.0f s: the commitment may come too late; a "
                "faster disk helps",
                *(latest - now, finish),
            )

    @property
    def margin(self) -> float:
        """Seconds to spare for the commitment: twice the longest recent one, and the second of the store's clock.

        They are the network's until three were measured, and at most twice that.
        """
        if len(self._commits) < 3:
            return self._margin
        return min(1 + 2 * max(self._commits), 2 * self._margin)

    def seconds_left(self) -> float:
        """How long the training may still take."""
        return self.at - self._now()

    def ended(self) -> None:
        """The training is over: all of its steps were taken, or it was stopped."""
        self.at = min(self.at, self._now())

    def finished(self) -> None:
        """The payload of that training is on the disk."""
        if self._is_measured:
            self._finished = self._now()
            self._finishes.append(self._finished - self.at)
        self._is_measured = False

    def committed(self) -> None:
        """The commitment of that training is stored, or came too late."""
        if self._finished is not None:
            self._commits.append(self._now() - self._finished)
        self._finished = None


def spends(activity: str) -> Callable[[Callable[Concatenate[N, P], T]], Callable[Concatenate[N, P], T]]:
    """Let a node's step count its time as an activity."""

    def counted(step: Callable[Concatenate[N, P], T]) -> Callable[Concatenate[N, P], T]:
        @wraps(step)
        def call(node: N, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with node.time.spent(step.__name__, activity):
                return step(node, *args, **kwargs)

        return call

    return counted
