"""One process per neuron on this machine: a lock on a file in the neuron's folder.

The kernel drops the lock when the process ends, however it ends.
"""

import fcntl
import os
from pathlib import Path

from templar.errors import PermanentError, Reason
from templar.store.files import local_file


class NeuronLock:
    """An exclusive lock, held until `release`.

    Args:
        home: The neuron's folder; made when needed.

    Raises:
        PermanentError: `already_running`; another process holds it, and the message says which. `local_file`; the
            folder cannot be written.
    """

    def __init__(self, home: Path) -> None:
        path = home / "lock"
        with local_file(path):
            home.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise PermanentError(
                Reason.ALREADY_RUNNING,
                f"{home}: process {holder} already runs this neuron; stop it first, or give this one its own home",
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Let another process run the neuron."""
        self._file.close()
