"""Names of a dataset's files on the local disk: a final one means that every byte is right.

Names change under a lock on the folder, so that processes that open, complete and delete one file at the same time
never put a new, empty one in the place of a complete one.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from templar.errors import Reason, TransientError
from templar.store.files import local_file, locked

PARTIAL_SUFFIX = ".partial"
NAMES_LOCK = ".names.lock"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


def partial_of(path: Path) -> Path:
    """The name that a file has until it is known to be whole."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


@contextmanager
def disk_file(path: Path) -> Iterator[None]:
    """As `local_file`, but a disk without room has a reason of its own.

    Raises:
        TemplarError: `local_file`, `disk_full`.
    """
    with local_file(path):
        try:
            yield
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            raise TransientError(
                Reason.DISK_FULL,
                f"{path}: no space is left for the dataset's shards; free some, or give the neuron's home a larger "
                "disk",
            ) from error


@contextmanager
def names_of(folder: Path) -> Iterator[None]:
    """Nobody else changes names in the folder meanwhile, no thread and no process."""
    with locked(folder / NAMES_LOCK, wait=True):  # a folder itself cannot be locked on every disk
        yield


def keep_manifest(path: Path, data: bytes, described: Iterable[str]) -> None:
    """Put a manifest on the disk where there was another one, or none.

    Files are whole by the manifest beside them: those that this one describes lose their final names.

    Args:
        path: The manifest.
        data: What it says.
        described: Names of the shard's files.

    Raises:
        TemplarError: As in `disk_file`.
    """
    with disk_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with names_of(path.parent):
            for file in map(path.with_name, described):
                with suppress(FileNotFoundError):
                    file.replace(partial_of(file))
            partial_of(path).write_bytes(data)
            partial_of(path).replace(path)
