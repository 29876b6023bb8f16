"""Retry policies, in one place: what may pass by itself is tried again, what will not is not."""

from typing import Any

from templar.errors import PermanentError
from templar.interrupt import StoppedError


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a failed task is worth another try.

    A refused key or a missing object will not pass by itself, and a request to stop is no failure; a retry after
    anything else costs little.
    """
    return not isinstance(state.data, PermanentError | StoppedError)


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

LOCAL: dict[str, Any] = {"retries": 1, "retry_condition_fn": is_transient}
"""Work on this machine alone: a disk may have been full for a moment."""

WEIGHTS: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 4],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
"""Extrinsics: the step itself tries again what the chain refuses, by blocks; this is for whatever else fails."""

HOUSEKEEPING: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [2, 4, 8],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_transient,
}
"""Scheduled work: what still fails is healed by the next run."""
