"""Exit statuses of commands that can be run again after any failure and then continue."""

import sys
from collections.abc import Callable

from templar.errors import TemplarError, TransientError

GO_ON = "run the same command again: it goes on where it was"
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def status_of(work: Callable[[], None]) -> int:
    """Run a command; print one line if it fails, and return its exit status."""
    try:
        work()
    except TemplarError as error:
        print(f"{error}; {GO_ON}" if isinstance(error, TransientError) else error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {GO_ON}", file=sys.stderr)
        return INTERRUPTED
    return 0
