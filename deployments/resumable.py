"""Commands that can be run again after any failure, and go on where they were."""

import sys
from collections.abc import Callable

from templar.errors import TemplarError, TransientError

GO_ON = "run the same command again: it goes on where it was"
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def status_of(work: Callable[[], None]) -> int:
    """Do a command's work; its exit status, after one line of why it failed."""
    try:
        work()
    except TemplarError as error:
        print(f"{error}; {GO_ON}" if isinstance(error, TransientError) else error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {GO_ON}", file=sys.stderr)
        return INTERRUPTED
    return 0
