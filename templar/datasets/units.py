"""The input of a dataset in units of work: one file of rows, or several text files, with the SHA-256 of each.

Results of a unit are kept in the build's folder under its key, a hash of names and contents: a build that was killed
resumes, and no name or time decides whether a result may be used again.
"""

import hashlib
import secrets
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from templar.canonical import canonical_json, sha256_hex
from templar.data.corpus import held_out_key
from templar.data.tokenizer import order_key
from templar.datasets.documents import InputFile, TextSource, find_inputs, read_texts
from templar.errors import PermanentError, Reason
from templar.interrupt import StoppedError, check_stop
from templar.resources import given_threads
from templar.store.files import local_file, replacing, sync

MOST_TEXT_BYTES = 2**25
MOST_TEXT_FILES = 4096
"""Text files are put together up to these limits: a part for each of them would be mostly overhead."""

MOST_WORKERS = 16
UNFINISHED = "."  # beginning of the names of folders of results that are being written, or were when a process died
_FORMAT = 1
_HASHED_BYTES = 2**22
_parsing = Lock()
_ended: ContextVar[Event | None] = ContextVar("ended", default=None)

Stamp = tuple[int, int, int]  # length, time of the last change in ns, and inode of a file

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Unit:
    """Files of one source that are worked on as one."""

    source: str
    files: tuple[InputFile, ...]
    sha256: tuple[str, ...]  # of each file
    key: str  # a hash of all that its documents follow from
    stamps: tuple[Stamp, ...]  # of each file before it was hashed; not kept, and no part of the key

    def texts(self) -> Iterator[tuple[str, str]]:
        """Its documents in order, as name and text. After the last one, they are known to be those of the hashes.

        `object_differs` if a file has changed since it was hashed; otherwise errors as in `read_texts`.
        """
        for file, stamp in zip(self.files, self.stamps, strict=True):
            for document in read_texts(file):
                check_ended()
                yield document
            if _stamp(file) != stamp:
                raise _changed(self.files)

    @property
    def num_bytes(self) -> int:
        """Length of its files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Census:
    """The figures of a unit's n documents, in order, before they are tokenised; each has shape (n,)."""

    held_out_keys: NDArray[np.uint64]  # see `held_out_key`
    order_keys: NDArray[np.uint64]  # see `order_key`
    num_chars: NDArray[np.int64]


def find_groups(sources: Sequence[TextSource]) -> list[tuple[InputFile, ...]]:
    """The files of all sources in groups that are worked on as one, by name; errors as in `find_inputs`."""
    groups: list[tuple[InputFile, ...]] = []
    for source in sorted(sources, key=lambda source: source.name):
        texts: list[InputFile] = []
        for file in find_inputs(source):
            alone = file.column is not None
            full = sum(each.size for each in texts) + file.size > MOST_TEXT_BYTES or len(texts) >= MOST_TEXT_FILES
            if texts and (alone or full):
                groups.append(tuple(texts))
                texts = []
            if alone:
                groups.append((file,))
            else:
                texts.append(file)
        if texts:
            groups.append(tuple(texts))
    return groups


def identify(files: tuple[InputFile, ...]) -> Unit:
    """Hash the files of a group; `object_differs` if one changes meanwhile, `local_file`, StoppedError."""
    hashes: list[str] = []
    stamps: list[Stamp] = []
    for file in files:
        stamp = _stamp(file)
        hashes.append(_sha256(file.path) if file.shard is None else file.shard.sha256)
        if stamp[0] != file.size or _stamp(file) != stamp:
            raise _changed(files)
        stamps.append(stamp)
    content = [[file.name, file.column, sha256] for file, sha256 in zip(files, hashes, strict=True)]
    key = sha256_hex(canonical_json({"format": _FORMAT, "source": files[0].source, "files": content}))
    return Unit(files[0].source, files, tuple(hashes), key, tuple(stamps))


def _stamp(file: InputFile) -> Stamp:
    path = file.path if file.shard is None else file.shard.file
    if path is None:  # a stream of the version that was resolved when it was opened
        return file.size, 0, 0
    with local_file(path):
        stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with local_file(path), path.open("rb") as file:
        while data := file.read(_HASHED_BYTES):
            check_ended()
            digest.update(data)
    return digest.hexdigest()


class CensusTaker:
    """Reads a unit once and takes its census on the way; its rows are in memory, 24 bytes per document."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._columns = [array("Q") for _ in range(3)]

    def texts(self) -> Iterator[str]:
        """The texts of the unit; errors as in `Unit.texts`."""
        for name, text in self._unit.texts():
            figures = (held_out_key(name), order_key(self._unit.source, name), len(text))
            for column, figure in zip(self._columns, figures, strict=True):
                column.append(figure)
            yield text

    def order_keys(self, first: int, stop: int) -> NDArray[np.uint64]:
        """The order keys of some documents that `texts` has yielded."""
        return np.array(self._columns[1][first:stop], dtype=np.uint64)

    def store(self, folder: Path) -> None:
        """Store the census after the last text, or compare it with the one that is there.

        `object_differs` if the unit has changed since that one was taken; `local_file`.
        """
        path = census_file(self._unit, folder)
        census = np.array(self._columns, dtype="<u8").reshape(3, -1)
        if path.exists():
            with local_file(path):
                same = np.array_equal(load_array(path), census)
            if not same:
                raise _changed(self._unit.files)
            return
        with replacing(path, durable=True) as file:
            np.save(file, census)


def take_census(unit: Unit, folder: Path) -> None:
    """Read a unit once and store its census, unless that was done before; errors as in `read_texts`."""
    if census_file(unit, folder).exists():
        return
    taker = CensusTaker(unit)
    for _ in taker.texts():
        pass
    taker.store(folder)


def read_census(unit: Unit, folder: Path) -> Census:
    """The census that `take_census` stored."""
    path = census_file(unit, folder)
    with local_file(path):
        held_out_keys, order_keys, num_chars = load_array(path)
    return Census(held_out_keys, order_keys, num_chars.astype(np.int64))


def census_file(unit: Unit, folder: Path) -> Path:
    """The path of a unit's census."""
    return folder / "census" / f"{unit.key}.npy"


def load_array(path: Path) -> NDArray[Any]:
    """Load an array that `np.save` wrote, in one thread at a time; OSError, EOFError or ValueError if there is none.

    A header is Python source, and CPython 3.11 may fail with `SystemError` when two threads parse at once.
    """
    with _parsing:
        array: NDArray[Any] = np.load(path)
    return array


@contextmanager
def written_once(folder: Path, is_whole: Callable[[], bool]) -> Iterator[Path]:
    """A new folder that becomes `folder` when the block succeeds, unless another process made that one meanwhile."""
    unfinished = folder.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    with local_file(folder):
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if not is_whole():
            with local_file(folder):
                shutil.rmtree(folder, ignore_errors=True)
                unfinished.rename(folder)
                sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def checked_texts(unit: Unit, census: Census) -> Iterator[str]:
    """The texts of a unit, compared with the census; `object_differs` if a file has changed since."""
    number = 0
    for _, text in unit.texts():
        if number >= len(census.num_chars) or len(text) != census.num_chars[number]:
            raise _changed(unit.files)
        yield text
        number += 1
    if number < len(census.num_chars):
        raise _changed(unit.files)


def _changed(files: Sequence[InputFile]) -> PermanentError:
    names = f"{files[0].path}" + (f" or one of {len(files) - 1} files after it" if files[1:] else "")
    return PermanentError(Reason.OBJECT_DIFFERS, f"{names} changed while the dataset was built; build it again")


class Each(Protocol):
    """Calls a function on each of some things in parallel: `in_threads`, or tasks on several machines."""

    def __call__(
        self,
        work: Callable[[T], R],
        things: Iterable[T],
        on_progress: Callable[[float], None] = ...,
        *,
        size: Callable[[T], int] = ...,
    ) -> list[R]:
        """Return the results in the order of the things; `on_progress` gets the part that is done, 0 to 100."""


def most_threads(workers: int | None) -> int:
    """The number of threads: by default one per processor that this process may use, `MOST_WORKERS` at most."""
    return workers or min(MOST_WORKERS, given_threads())


def in_threads(
    work: Callable[[T], R],
    things: Iterable[T],
    on_progress: Callable[[float], None] = lambda percentage: None,
    *,
    workers: int | None = None,
    size: Callable[[T], int] = lambda thing: 1,
) -> list[R]:
    """Call `work` on each of some things in parallel; the results in their order.

    After an error, an interrupt or a stop, no further call begins, and running ones end where they call `check_ended`.

    Threads (see `most_threads`) suffice: tokenising, hashing and Parquet do their work without Python's lock. This
    thread calls `on_progress` with the part that is done, 0 to 100, by the sizes of the things; all are alike unless
    `size` tells them apart.

    StoppedError: The host asked the process to stop.
    """
    number = most_threads(workers)
    results: dict[int, R] = {}
    waiting = list(enumerate(things))[::-1]
    sizes = {index: size(thing) for index, thing in waiting}
    total, finished = max(1, sum(sizes.values())), 0
    ended = Event()
    with ThreadPoolExecutor(number, "build", initializer=_ended.set, initargs=(ended,)) as pool:
        running: dict[Future[R], int] = {}
        try:
            while waiting or running:
                check_stop()
                while waiting and len(running) < number:
                    index, thing = waiting.pop()
                    running[pool.submit(work, thing)] = index
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    index = running.pop(future)
                    results[index] = future.result()
                    finished += sizes[index]
                    on_progress(100 * finished / total)
        except BaseException:
            ended.set()
            raise
    return [results[index] for index in range(len(results))]


def check_ended() -> None:
    """Raise StoppedError in a thread of `in_threads` that has to end; long work calls it often."""
    check_stop()
    ended = _ended.get()
    if ended is not None and ended.is_set():
        raise StoppedError("another thread of the build has failed, or it was interrupted")
