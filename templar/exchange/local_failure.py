"""What this node cannot find out says nothing about anybody else."""

from collections.abc import Iterator
from contextlib import contextmanager

from templar.errors import PermanentError, RejectedError, TransientError
from templar.interrupt import StoppedError


@contextmanager
def as_own_failure() -> Iterator[None]:
    """Make what this node's own chain or data refuse transient, so that it is never a verdict on a peer or a roster.

    Raises:
        TransientError: For every other permanent error than a rejection or a stop.
    """
    try:
        yield
    except (RejectedError, StoppedError):
        raise
    except PermanentError as error:
        raise TransientError(error.reason, error.message) from error
