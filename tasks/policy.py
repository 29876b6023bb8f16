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


CHAIN: dict[str, Any] = {
    "retries": 5,
    "retry_delay_seconds": [1, 2, 4, 8, 16],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
"""Reads of the chain: flaky and cheap."""

STORE: dict[str, Any] = {
    "retries": 4,
    "retry_delay_seconds": [1, 2, 4, 8],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
"""Reads and writes of objects: idempotent."""

SETTLE: dict[str, Any] = STORE | {"retry_condition_fn": is_not_undecided}
"""The decision on a window. The step itself waits for it; after that the next window's opening goes on with it."""

LOCAL: dict[str, Any] = {"retries": 1, "retry_condition_fn": is_transient}
"""Work on this machine alone: the disk may have been full for a moment."""

WEIGHTS: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 4],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
"""Extrinsics: the step itself tries again, block by block, what the chain refuses; this covers all other errors."""

HOUSEKEEPING: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [2, 4, 8],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
"""Scheduled work: the next run repairs what still fails."""
