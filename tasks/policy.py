"""Retry policies of all tasks: transient errors are tried again, permanent ones are not."""

from typing import Any

from templar.errors import PermanentError, Reason
from templar.interrupt import StoppedError

_WAITS_FOR_OTHERS = (Reason.DECISION_MISSING, Reason.MINORITY, Reason.WORDS_HAVE_EXPIRED)


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a failed task is tried again: after every error but a permanent one and a request to stop."""
    return not isinstance(state.data, PermanentError | StoppedError)


def is_not_undecided(task: Any, task_run: Any, state: Any) -> bool:
    """As `is_transient`, but not while a window is undecided: a pause would keep a validator from taking part."""
    reason = getattr(state.data, "reason", None)
    return is_transient(task, task_run, state) and reason not in _WAITS_FOR_OTHERS


def _retries(*delay_seconds: float, after: Any = is_transient) -> dict[str, Any]:
    """Options of a task that is tried again after each of these delays."""
    return {
        "retries": len(delay_seconds),
        "retry_delay_seconds": [*delay_seconds],
        "retry_jitter_factor": 0.5,
        "retry_condition_fn": after,
    }


CHAIN = _retries(1, 2, 4, 8, 16)
"""Reads of the chain: flaky and cheap."""

STORE = _retries(1, 2, 4, 8)
"""Reads and writes of objects: idempotent."""

SETTLE = _retries(1, 2, 4, 8, after=is_not_undecided)
"""The decision on a window. The step itself waits for it; after that the next window's opening goes on with it."""

LOCAL: dict[str, Any] = {"retries": 1, "retry_condition_fn": is_transient}
"""Work on this machine alone: the disk may have been full for a moment."""

WEIGHTS = _retries(2, 4)
"""Extrinsics: the step itself tries again, block by block, what the chain refuses; this covers all other errors."""

HOUSEKEEPING = _retries(2, 4, 8)
"""Scheduled work: the next run repairs what still fails."""
