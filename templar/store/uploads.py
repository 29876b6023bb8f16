"""Uploads that were begun and not completed: no listing shows them, and they cost room until somebody ends them.

A writer that dies leaves one behind. Ages are measured by the clock of whoever keeps the bytes, against the last sign
of life of the upload, so no other clock can make a running upload look abandoned.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from templar.store.directory import INCOMING, DirectoryStore
from templar.store.files import local_file


@dataclass(frozen=True)
class Upload:
    """An upload that was not completed.

    Attributes:
        key: The object that it would be; a directory store knows only its own name for it.
        upload_id: Its name among the uploads of this key.
        idle_seconds: Time since its last sign of life, by the store's clock.
        num_bytes: What it holds so far.
    """

    key: str
    upload_id: str
    idle_seconds: float
    num_bytes: int


class Uploads(Protocol):
    """The unfinished uploads of one bucket. Errors are those of `templar.store.base.ObjectStore`."""

    def list(self) -> Iterator[Upload]:
        """Every upload that is not completed.

        Raises:
            PermanentError: `access_denied`, `store_refused`; the key may not, or the server cannot, list them.
        """
        ...

    def abort(self, upload: Upload) -> None:
        """End an upload and free its room; nothing happens if it was completed or ended meanwhile."""
        ...

    def store_in_parts(self, key: str, data: bytes) -> None:
        """Store an object as a multipart upload of one part; on failure nothing of it stays."""
        ...

    def close(self) -> None:
        """Give connections back. It can be used again afterwards."""
        ...


class DirectoryUploads:
    """What writers of a directory store have not put in its place yet; it has no uploads in parts.

    Args:
        root: The bucket's directory.
        clock: The machine's clock, against which the change times of files count.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._clock = clock

    def list(self) -> Iterator[Upload]:
        """Every file in the folder of objects that are being written."""
        try:
            entries = sorted(os.scandir(self._root / INCOMING), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # in its place since
                continue
            # Not its modification time, which the store sets to the object's stamp.
            yield Upload(entry.name, entry.name, max(0.0, self._clock() - status.st_ctime), status.st_size)

    def abort(self, upload: Upload) -> None:
        """Delete the file."""
        path = self._root / INCOMING / upload.upload_id
        with local_file(path):
            path.unlink(missing_ok=True)

    def store_in_parts(self, key: str, data: bytes) -> None:
        """Store an object; a directory knows no parts."""
        DirectoryStore(self._root).put(key, data)

    def close(self) -> None:
        """Nothing stays open between calls."""
