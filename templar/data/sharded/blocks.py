"""A file of a dataset on the local disk, of which every block is verified before it is read.

The local file has its final length from the start and holes where nothing has been fetched. A block counts only when
this process has seen that its bytes have the SHA-256 that the manifest gives: what was there before - from a download
that was killed, from another process, from a failing disk - is hashed on its first use and fetched again if it is
wrong. So there is no record of progress that could be false, and reading a few samples of a shard and downloading all
of it are the same operation.

A file has its final name from the moment when every block was right until somebody finds one that is not.
"""

import errno
import hashlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from templar.data.sharded.local import disk_file, names_of, partial_of
from templar.data.sharded.manifest import BlockedFile
from templar.errors import Reason, TransientError
from templar.interrupt import check_stop
from templar.store.files import local_file, sync_folder


class Fetch(Protocol):
    """Reads a range of an object from wherever it lies."""

    def __call__(self, name: str, start: int, length: int, *, check: Callable[[bytes], str | None]) -> bytes:
        """`length` bytes from offset `start`, of which `check` finds nothing to complain about."""
        ...


@dataclass(frozen=True)
class Transfer:
    """How files are fetched.

    Attributes:
        part_bytes: Most bytes of one request; None chooses. A block is never split, so a part is one block at least.
        workers: Requests at the same time; None chooses. Memory holds `workers` parts at most.
    """

    part_bytes: int | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        if (self.part_bytes is not None and self.part_bytes < 1) or (self.workers is not None and self.workers < 1):
            raise ValueError(f"part_bytes and workers must be at least 1: {self}")

    @property
    def part(self) -> int:
        """Most bytes of one request."""
        return self.part_bytes or 8 << 20

    @property
    def threads(self) -> int:
        """Requests at the same time."""
        return self.workers or min(16, 4 * (os.cpu_count() or 1))


class BlockFile:
    """One file, partly or wholly on the disk. Safe under threads, and beside other processes with the same file.

    Args:
        described: What its blocks must be.
        folder: Where it lies; it is made if it is not there.
        fetch: Gives what is missing.
        transfer: How that is fetched.

    Raises:
        TemplarError: `local_file`, `disk_full`.
    """

    def __init__(self, described: BlockedFile, folder: Path, fetch: Fetch, transfer: Transfer) -> None:
        self.described = described
        self.path = folder / described.name
        self.partial = partial_of(self.path)
        self._fetch = fetch
        self._transfer = transfer
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._verified: NDArray[np.bool_] = np.zeros(len(described.blocks), dtype=np.bool_)
        with disk_file(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._open()
            self._close = weakref.finalize(self, os.close, self._file)

    @property
    def num_verified(self) -> int:
        """Bytes of the blocks that are known to be right."""
        described = self.described
        missing = len(described.blocks) * described.block_bytes - described.size  # what the last block lacks
        return int(self._verified.sum()) * described.block_bytes - missing * int(self._verified[-1])

    @property
    def is_gone(self) -> bool:
        """Whether it was closed, or the file has no name any more: what it holds is lost when it is closed."""
        with local_file(self.path):
            return not self._close.alive or os.fstat(self._file).st_nlink == 0

    def require(self, blocks: NDArray[np.integer], on_progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """See that some blocks are on the disk and right.

        On failure the blocks that are right stay; a later call goes on with the others.

        Args:
            blocks: Their numbers, rising, each once.
            on_progress: Called with the bytes of each part when it is right; by several threads.

        Raises:
            StoppedError: The host asked the process to stop.
            TransientError: `disk_full`; no store could be read; or `dataset_malformed`, all have other bytes there.
            PermanentError: `object_missing`, `access_denied`, ....
        """
        while (wanted := blocks[~self._verified[blocks]]).size:
            with self._changed:
                mine = [int(block) for block in wanted if not self._verified[block] and int(block) not in self._busy]
                self._busy.update(mine)
                if not mine:  # others are at it; if they fail, these are taken up here
                    self._changed.wait_for(lambda: not self._busy.intersection(wanted.tolist()))
                    continue
            try:
                self._bring(mine, on_progress)
            finally:
                with self._changed:
                    self._busy.difference_update(mine)
                    self._changed.notify_all()

    def finish(self) -> None:
        """Give the file its final name once every block has been verified; again, nothing changes.

        Raises:
            TransientError: `local_file`; the file was deleted meanwhile.
        """
        if not self._verified.all():
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
            sync_folder(str(self.path.parent))

    def map(self) -> mmap.mmap:
        """The file as memory, for reading what was required; it outlives `close`, the final name and deletion."""
        with local_file(self.path):
            return mmap.mmap(self._file, self.described.size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file; otherwise it is closed when nobody uses this object any more."""
        self._close()
        self._file = -1  # its number will be that of another file

    def _open(self) -> int:
        with names_of(self.path.parent):
            try:
                file = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                file = os.open(self.partial, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(file).st_size != self.described.size:
                    if self.path.exists():  # it is not what its name says
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

    def _take_final_name(self) -> None:
        """Nothing is under its final name that is known to be wrong."""
        with local_file(self.path), names_of(self.path.parent):
            if self._is_at(self.path):
                self.path.replace(self.partial)

    def _bring(self, blocks: list[int], on_progress: Callable[[int], None]) -> None:
        parts = list(self._parts(blocks))
        if len(parts) == 1:
            self._bring_part(parts[0], on_progress)
            return
        pool = ThreadPoolExecutor(min(self._transfer.threads, len(parts)), thread_name_prefix="blocks")
        try:
            for _ in pool.map(lambda part: self._bring_part(part, on_progress), parts):
                pass
        finally:
            pool.shutdown(cancel_futures=True)

    def _parts(self, blocks: list[int]) -> Iterator[range]:
        """Runs of neighbouring blocks, none longer than a request may be; what may be on the disk apart."""
        longest = max(1, self._transfer.part // self.described.block_bytes)
        start = previous = blocks[0]
        written = self._has_data(range(start, start + 1))
        for block in blocks[1:]:
            found = self._has_data(range(block, block + 1))
            if block != previous + 1 or block - start >= longest or found != written:
                yield range(start, previous + 1)
                start, written = block, found
            previous = block
        yield range(start, previous + 1)

    def _bring_part(self, part: range, on_progress: Callable[[int], None]) -> None:
        check_stop()
        start, end = self._bounds(part)
        right = False
        if self._has_data(part):  # since when, and from whom, does not matter
            right = self._differs(self._stored(start, end), part) is None
            if not right:
                self._take_final_name()
        if not right:
            data = self._fetch(
                self.described.name, start, end - start, check=lambda answer: self._differs(answer, part)
            )
            self._write(data, start)
        self._verified[part.start : part.stop] = True
        on_progress(end - start)

    def _has_data(self, part: range) -> bool:
        """Whether something of some neighbouring blocks is on the disk, and not a hole."""
        start, end = self._bounds(part)
        try:
            return os.lseek(self._file, start, os.SEEK_DATA) < end
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return False
            with local_file(self.path):
                raise

    def _stored(self, start: int, end: int) -> bytes:
        with local_file(self.path):
            try:
                return os.pread(self._file, end - start, start)
            except OSError as error:
                if error.errno == errno.EIO:  # the disk has lost it
                    return b""
                raise

    def _bounds(self, part: range) -> tuple[int, int]:
        step = self.described.block_bytes
        return part.start * step, min(part.stop * step, self.described.size)

    def _differs(self, data: bytes, part: range) -> str | None:
        """What is wrong with the bytes of some neighbouring blocks; None if nothing is."""
        view, step = memoryview(data), self.described.block_bytes
        for number, block in enumerate(part):
            if hashlib.sha256(view[number * step : (number + 1) * step]).hexdigest() != self.described.blocks[block]:
                return f"block {block} of {self.described.name} has other bytes than the manifest says"
        return None

    def _write(self, data: bytes, start: int) -> None:
        rest = memoryview(data)
        with disk_file(self.path):
            while rest:
                written = os.pwrite(self._file, rest, start)
                rest, start = rest[written:], start + written


def wrong_block(path: Path, described: BlockedFile) -> int | None:
    """The first block of a whole file that is not what it must be; None if all are.

    Raises:
        TemplarError: `local_file`.
    """
    with local_file(path), path.open("rb") as file:
        for number, wanted in enumerate(described.blocks):
            if hashlib.sha256(file.read(described.block_bytes)).hexdigest() != wanted:
                return number
    return None
