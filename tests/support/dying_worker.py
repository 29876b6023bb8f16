"""Makes a Dask worker die in the middle of a unit: `dask worker --preload tests/support/dying_worker.py`."""

import os
import signal
import sys

left = 2


def _die(event, arguments):
    """Kill this process while it writes its second file of a part."""
    global left  # noqa: PLW0603
    if event == "open" and ".work/parts/" in str(arguments[0]) and str(arguments[1]).startswith("x"):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(_die)
