"""Retry policies of all tasks: transient errors are tried again, permanent ones are not."""

from typing import Any

from templar.errors import PermanentError
from templar.interrupt import StoppedError


def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a failed task is tried again: after every error but a permanent one and a request to stop."""
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
