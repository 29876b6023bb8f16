"""A file of a dataset on the local disk, of which every block is verified before it is read.

A block counts only when this process has seen that its bytes have the SHA-256 that the manifest gives: bytes that were
there before (from a download that was killed, from another process, from a failing disk) are hashed on their first use
and fetched again if they are wrong. So no record of progress can be false, and reading a few samples of a shard and
downloading all of it are nearly the same operation. The difference: a download writes past the kernel's page cache, so
such a block is hashed once more, as a reader sees it, before it is read.

A file has its final length from the start, with holes where nothing is yet. It lies under a partial name until every
block was right, and goes back to that name when a block is found wrong. Names change under a lock on the folder, so
that processes that open, complete and delete one file at the same time never put a new, empty one in the place of a
complete one.
"""

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from templar.data.shards.manifest import BlockedFile
from templar.errors import Reason, TransientError
from templar.interrupt import check_stop
from templar.store.deadline import in_parallel
from templar.store.files import NO_SPACE, local_file, locked, sync, write_at

PARTIAL_SUFFIX = ".partial"
NAMES_LOCK = ".names.lock"
PAGE = mmap.PAGESIZE


# Fills a buffer from an offset of an object of that name with bytes in which the last argument finds no problem.
Fetch = Callable[[str, int, memoryview, Callable[[], str | None]], None]


@dataclass(frozen=True)
class Transfer:
    """The settings by which files are fetched and read."""

    part_bytes: int = 8 << 20  # most bytes of one request; blocks are not split: at least one block
    workers: int = min(16, 4 * (os.cpu_count() or 1))  # requests at the same time, one part of memory each
    mapped_bytes: int = 4 << 30  # approximate bytes of a shard that stay mapped after they were read

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"part_bytes, workers and mapped_bytes must be at least 1: {self}")


class BlockFile:
    """One file, partly or wholly on the disk, whose blocks come from `fetch` where they are missing.

    Safe under threads, and beside other processes with the same file. The folder is made if it is not there.

    TemplarError: `local_file`, `disk_full`.
    """

    def __init__(self, described: BlockedFile, folder: Path, fetch: Fetch, transfer: Transfer) -> None:
        self.path = folder / described.name
        self.partial = partial_of(self.path)
        self.described = described
        self._fetch = fetch
        self._transfer = transfer
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._stored: NDArray[np.bool_] = np.zeros(len(described.blocks), dtype=np.bool_)
        self._readable = self._stored.copy()
        with disk_file(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._close = weakref.finalize(self, os.close, self._file)
        self._direct = _open_direct(self._file)
        self._close_direct = weakref.finalize(self, os.close, self._direct) if self._direct is not None else None

    @property
    def is_gone(self) -> bool:
        """Whether it was closed, or the file was deleted: then its content is lost when it is closed."""
        with local_file(self.path):
            return not self._close.alive or os.fstat(self._file).st_nlink == 0

    def _has_data(self, part: range) -> bool:
        """Whether neighbouring blocks hold data on the disk, and are not all hole."""
        start = part.start * self.described.block_bytes
        try:
            return os.lseek(self._file, start, os.SEEK_DATA) < start + self.described.length(part)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return False
            with local_file(self.path):
                raise

    def read_into(self, buffer: memoryview, start: int) -> bool:
        """Fill a buffer from an offset on; False if the disk has lost the bytes."""
        with local_file(self.path):
            try:
                return os.preadv(self._file, [buffer], start) == len(buffer)
            except OSError as error:
                if error.errno == errno.EIO:
                    return False
                raise

    def write(self, data: memoryview, start: int, *, past_cache: bool) -> bool:
        """Write at an offset, past the page cache if asked and the disk can; returns whether some bytes went past it.

        A download that is larger than the memory would push other files out of the cache. Bytes that are to go past
        it must lie in memory that begins with a page.
        """
        whole = len(data) // PAGE * PAGE if past_cache and start % PAGE == 0 else 0
        with disk_file(self.path):
            if whole and self._direct is not None:
                try:
                    write_at(self._direct, data[:whole], start)
                except OSError as error:
                    if error.errno != errno.EINVAL:  # the disk needs another alignment than pages
                        raise
                    whole = 0
            else:
                whole = 0
            write_at(self._file, data[whole:], start + whole)
        return whole > 0

    @contextmanager
    def held(self, start: int, length: int) -> Iterator[None]:
        """Hold a range of the file against other processes that do, but not against this one's threads.

        On a disk without locks it is not held, nor is a file that was closed: two processes may do the same work then.
        """
        with suppress(OSError, ValueError):
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, start, length))
        try:
            yield
        finally:
            with suppress(OSError, ValueError):
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))

    def finish(self) -> None:
        """Make the file durable and give it its final name, once every block is right; a second call changes nothing.

        TransientError: `local_file`; the file was deleted meanwhile.
        """
        if not self._stored.all():
            raise ValueError(f"{self.path.name}: it is not complete")
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

    def revert_to_partial(self) -> None:
        """Give the file its partial name again: a block is known to be wrong or missing."""
        with local_file(self.path):
            if not self._is_at(self.path):
                return
            with names_of(self.path.parent):
                if self._is_at(self.path):
                    self.path.replace(self.partial)

    def map(self) -> mmap.mmap:
        """The file as memory; it outlives `close`, the final name and deletion."""
        with local_file(self.path):
            return mmap.mmap(self._file, self.described.size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file; otherwise it is closed when the last reference to this object goes."""
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
                if os.fstat(file).st_size != self.described.size:
                    if self.path.exists():  # it is not the whole file
                        self.path.replace(self.partial)
                    os.ftruncate(file, self.described.size)
            except OSError:
                os.close(file)
                raise
        return file

    def _is_at(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return False

    @property
    def num_stored(self) -> int:
        """Bytes of the blocks on the disk that are known to be right."""
        described = self.described
        missing = len(described.blocks) * described.block_bytes - described.size  # the last block may be shorter
        return int(self._stored.sum()) * described.block_bytes - missing * int(self._stored[-1])

    def require(self, blocks: NDArray[np.integer]) -> None:
        """Fetch those of some blocks that are missing or wrong, so that the file's memory (`map`) can be read.

        `blocks` are rising numbers, each once. On failure the blocks that are right stay; a later call resumes.

        Raises:
            StoppedError: The host asked the process to stop.
            TransientError: `disk_full`; no store could be read; or `dataset_malformed`, all have other bytes there.
            PermanentError: `object_missing`, `access_denied`, ....
        """
        self._ensure(blocks, self._readable, lambda num_bytes: None)

    def store(self, on_progress: Callable[[int], None]) -> None:
        """Fetch every block that is missing or wrong; errors as in `require`, and a later call resumes.

        Several threads call `on_progress`, with the bytes of each part when it is right.
        """
        self._ensure(np.arange(len(self.described.blocks)), self._stored, on_progress)

    def _ensure(
        self, blocks: NDArray[np.integer], known: NDArray[np.bool_], on_progress: Callable[[int], None]
    ) -> None:
        """Fetch those of some blocks that are not known to be right; no two threads fetch the same one."""
        while (wanted := blocks[~known[blocks]]).size:
            with self._changed:
                mine = [int(block) for block in wanted if not known[block] and int(block) not in self._busy]
                self._busy.update(mine)
                if not mine:  # other threads fetch them; if they fail, this one does
                    self._changed.wait_for(lambda: not self._busy.intersection(wanted.tolist()))
                    continue
            try:
                self._fetch_blocks(mine, on_progress, past_cache=known is self._stored)
            finally:
                with self._changed:
                    self._busy.difference_update(mine)
                    self._changed.notify_all()

    def _fetch_blocks(self, blocks: list[int], on_progress: Callable[[int], None], *, past_cache: bool) -> None:
        runs = list(self._runs(blocks))
        buffers, longest = threading.local(), max(map(len, runs)) * self.described.block_bytes

        def fetch(run: range) -> None:
            check_stop()
            if not hasattr(buffers, "buffer"):
                buffers.buffer = memoryview(mmap.mmap(-1, longest))  # it begins with a page
            with self.held(run.start * self.described.block_bytes, self.described.length(run)):
                for part in self._parts(run):  # what other processes have brought meanwhile is not fetched again
                    self._fetch_part(part, buffers.buffer, past_cache=past_cache)
            on_progress(self.described.length(run))

        in_parallel(fetch, runs, min(self._transfer.workers, len(runs)))

    def _runs(self, blocks: list[int]) -> Iterator[range]:
        """Runs of neighbouring blocks, none longer than a request."""
        longest = max(1, self._transfer.part_bytes // self.described.block_bytes)
        start = previous = blocks[0]
        for block in blocks[1:]:
            if block != previous + 1 or block - start >= longest:
                yield range(start, previous + 1)
                start = block
            previous = block
        yield range(start, previous + 1)

    def _parts(self, run: range) -> Iterator[range]:
        """Cut a run so that the blocks of each part are either all on the disk or all holes."""
        for _, part in itertools.groupby(run, lambda block: self._has_data(range(block, block + 1))):
            blocks = list(part)
            yield range(blocks[0], blocks[-1] + 1)

    def _fetch_part(self, part: range, memory: memoryview, *, past_cache: bool) -> None:
        start, buffer = part.start * self.described.block_bytes, memory[: self.described.length(part)]
        passed_cache = False
        # 1. Use bytes that are on the disk already; otherwise fetch them, checked, and write them.
        if not self._is_right(part, buffer):
            self._fetch(self.described.name, start, buffer, lambda: self._problem(part, buffer))
            passed_cache = self.write(buffer, start, past_cache=past_cache)
        # 2. Bytes that went past the page cache are hashed once more before they are read.
        self._stored[part.start : part.stop] = True
        self._readable[part.start : part.stop] = not passed_cache

    def _is_right(self, part: range, buffer: memoryview) -> bool:
        """Whether neighbouring blocks are on the disk and right; otherwise the file gets its partial name."""
        start = part.start * self.described.block_bytes
        if self._has_data(part) and self.read_into(buffer, start) and not self._problem(part, buffer):
            return True
        self.revert_to_partial()
        return False

    def _problem(self, part: range, buffer: memoryview) -> str | None:
        """The first of some neighbouring blocks whose bytes are wrong, as a message; None if all are right."""
        step = self.described.block_bytes
        for number, block in enumerate(part):
            if hashlib.sha256(buffer[number * step : (number + 1) * step]).hexdigest() != self.described.blocks[block]:
                return f"block {block} of {self.described.name} has other bytes than the manifest says"
        return None


def _flock(kind: int, start: int, length: int) -> bytes:
    """The argument of Linux for a lock of a range that belongs to an open file, not to a process."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


def _open_direct(file: int) -> int | None:
    """Another descriptor of an open file, for writing past the cache; None where that is not possible."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return None


def partial_of(path: Path) -> Path:
    """The name that a file has until it is known to be whole."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def allocated(path: Path) -> int:
    """Bytes that a file takes; holes take none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # another process has just completed or deleted it
        return 0


@contextmanager
def disk_file(path: Path) -> Iterator[None]:
    """As `local_file`, but a full disk has a reason code of its own. TemplarError: `local_file`, `disk_full`."""
    with local_file(path):
        try:
            yield
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise TransientError(
                Reason.DISK_FULL,
                f"{path}: no space is left for the dataset's shards; free some, or give the neuron's home a larger "
                "disk",
            ) from error


@contextmanager
def names_of(folder: Path) -> Iterator[None]:
    """Hold the lock under which names in the folder change, against other threads and processes."""
    with locked(folder / NAMES_LOCK, wait=True):  # not every disk can lock a folder itself
        yield


def keep_manifest(path: Path, data: bytes, described: Iterable[str]) -> None:
    """Put a manifest on the disk where there was another one, or none; errors as in `disk_file`.

    A final name means whole by the manifest beside the file, so the files that this one describes lose theirs.
    """
    with disk_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with names_of(path.parent):
            for file in map(path.with_name, described):
                with suppress(FileNotFoundError):
                    file.replace(partial_of(file))
            partial_of(path).write_bytes(data)
            partial_of(path).replace(path)
