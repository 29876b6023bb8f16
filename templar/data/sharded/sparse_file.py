"""A file of a dataset on the local disk: of its final length from the start, with holes where nothing is yet.

It lies under a partial name until somebody calls it whole, and goes back to that name when it is found wrong.
"""

import errno
import mmap
import os
import weakref
from pathlib import Path

from templar.data.sharded.local import disk_file, names_of, partial_of
from templar.errors import Reason, TransientError
from templar.store.files import local_file, sync

PAGE = mmap.PAGESIZE


class SparseFile:
    """An open file; safe under threads, and beside other processes with the same file.

    Args:
        path: Its final name; the folder is made if it is not there.
        size: Its length in bytes.

    Raises:
        TemplarError: `local_file`, `disk_full`.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.partial = partial_of(path)
        with disk_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._close = weakref.finalize(self, os.close, self._file)
        self._direct = _open_direct(self._file)
        self._close_direct = weakref.finalize(self, os.close, self._direct) if self._direct is not None else None

    @property
    def is_gone(self) -> bool:
        """Whether it was closed, or the file has no name any more: what it holds is lost when it is closed."""
        with local_file(self.path):
            return not self._close.alive or os.fstat(self._file).st_nlink == 0

    def has_data(self, start: int, end: int) -> bool:
        """Whether anything of a range is on the disk, and not a hole."""
        try:
            return os.lseek(self._file, start, os.SEEK_DATA) < end
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return False
            with local_file(self.path):
                raise

    def read_into(self, buffer: memoryview, start: int) -> bool:
        """Fill a buffer from an offset on; False if the disk has lost what was there."""
        with local_file(self.path):
            try:
                return os.preadv(self._file, [buffer], start) == len(buffer)
            except OSError as error:
                if error.errno == errno.EIO:
                    return False
                raise

    def write(self, data: memoryview, start: int, *, past_cache: bool) -> bool:
        """Write at an offset.

        Args:
            data: What; in memory that begins with a page, if it is to go past the cache.
            start: Where.
            past_cache: Let it go to the disk without a copy in the kernel's memory, if the disk can do that: a
                download that is larger than the memory would push out what is in use.

        Returns:
            Whether some of it went past the cache.
        """
        whole = len(data) // PAGE * PAGE if past_cache and start % PAGE == 0 else 0
        with disk_file(self.path):
            if whole and self._direct is not None:
                try:
                    _write_all(self._direct, data[:whole], start)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # it wants another alignment than pages
                        raise
                    whole = 0
            else:
                whole = 0
            _write_all(self._file, data[whole:], start + whole)
        return whole > 0

    def finish(self) -> None:
        """Make all that was written durable and give the file its final name; again, nothing changes.

        Raises:
            TransientError: `local_file`; the file was deleted meanwhile.
        """
        with disk_file(self.path):
            if self._is_at(self.path):
                return
            os.fsync(self._file)
            with names_of(self.path.parent):
                if self._is_at(self.partial):
                    self.partial.replace(self.path)
                elif not self._is_at(self.path):  # another process may have been faster
                    raise TransientError(
                        Reason.LOCAL_FILE, f"local file {self.path} was deleted while it was fetched; try again"
                    )
            sync(self.path.parent)

    def take_final_name(self) -> None:
        """Go back to the partial name: something in the file is known to be wrong or missing."""
        with local_file(self.path):
            if not self._is_at(self.path):
                return
            with names_of(self.path.parent):
                if self._is_at(self.path):
                    self.path.replace(self.partial)

    def map(self) -> mmap.mmap:
        """The file as memory; it outlives `close`, the final name and deletion."""
        with local_file(self.path):
            return mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file; otherwise it is closed when nobody uses this object any more."""
        self._close()
        if self._close_direct is not None:
            self._close_direct()
        self._file, self._direct = -1, None  # its number will be that of another file

    def _open(self) -> int:
        with names_of(self.path.parent):
            try:
                file = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                file = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(file).st_size != self.size:
                    if self.path.exists():  # it is not what its name says
                        self.path.replace(self.partial)
                    os.ftruncate(file, self.size)
            except OSError:
                os.close(file)
                raise
        return file

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return False


def _open_direct(file: int) -> int | None:
    """Another descriptor of an open file, for writing past the cache; None where that is not possible."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def _write_all(file: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written
