"""The course of a window as a trace: when each step began and ended, and the reason that it gave.

A step is timed as the flow sees it, with the retries of its task. Recording takes microseconds; what is recorded is
passed on once, at the window's end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from templar.errors import Reason

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """One step: nanoseconds since the epoch, and what it ended with."""

    name: str
    begin: int
    end: int
    reason: Reason | None = None
    error: str = ""  # the message, if it raised


@dataclass
class WindowTrace:
    """A window's run and its steps."""

    begin: int = field(default_factory=time.time_ns)
    end: int = 0
    window: int | None = None  # None until it is known
    outcome: str = "Failed"  # name of the run's final state
    reason: Reason | None = None
    steps: list[Span] = field(default_factory=list)


_current: ContextVar[WindowTrace | None] = ContextVar("tasks.sinks.trace", default=None)


@contextmanager
def tracing(publish: Callable[[WindowTrace], None]) -> Iterator[None]:
    """Record the window that the block runs, and pass it on at its end, unless the window never became known."""
    trace = WindowTrace()
    token = _current.set(trace)
    try:
        yield
    except BaseException as error:
        trace.reason = _reason_of(error)
        raise
    finally:
        _current.reset(token)
        trace.end = time.time_ns()
        if trace.window is not None:
            publish(trace)


def traced(name: str, step: Callable[P, R]) -> Callable[P, R]:
    """Return the step, which adds a span to the window's trace when it is called."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        trace, begin = _current.get(), time.time_ns()
        if trace is None:
            return step(*args, **kwargs)
        try:
            result = step(*args, **kwargs)
        except BaseException as error:
            message = str(error) or type(error).__name__
            trace.steps.append(Span(name, begin, time.time_ns(), _reason_of(error), message))
            raise
        trace.steps.append(Span(name, begin, time.time_ns(), _reason_of(result)))
        return result

    return call


def _reason_of(outcome: object) -> Reason | None:
    """The reason of an error or of a step's result, if it has one."""
    reason = getattr(outcome, "reason", None)
    return reason if isinstance(reason, Reason) else None


def name_window(window: int) -> None:
    """Note which window is run."""
    if (trace := _current.get()) is not None:
        trace.window = window


def conclude(outcome: str, reason: Reason | None) -> None:
    """Note the final state of the window's run; a run that raises has none."""
    if (trace := _current.get()) is not None:
        trace.outcome, trace.reason = outcome, reason
