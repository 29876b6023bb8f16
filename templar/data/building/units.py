"""The input of a dataset in pieces of work: one file of rows, or a run of text files, with the SHA-256 of each.

What is found out about a piece is kept in the build's folder under its key, a hash of names and contents: a build that
was killed goes on, and no name or time decides whether a result may be used again.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.building.sources import InputFile, TextSource, find_inputs, read_texts
from templar.data.holding_out import held_out_key
from templar.data.sharded.tokens import order_key
from templar.errors import PermanentError, Reason
from templar.interrupt import check_stop
from templar.store.files import local_file, replacing

MOST_TEXT_BYTES = 2**25
MOST_TEXT_FILES = 4096
"""Text files are put together up to these limits: a part for each of them would be mostly overhead."""
MOST_WORKERS = 16
_FORMAT = 1


@dataclass(frozen=True)
class Unit:
    """One piece of work.

    Attributes:
        source: The source that its files belong to.
        files: The files, in order.
        sha256: The hash of each.
        key: A hash of all that its documents follow from.
    """

    source: str
    files: tuple[InputFile, ...]
    sha256: tuple[str, ...]
    key: str

    def texts(self) -> Iterator[tuple[str, str]]:
        """Its documents in order, as name and text; errors as in `read_texts`."""
        for file in self.files:
            yield from read_texts(file)

    @property
    def num_bytes(self) -> int:
        """Length of its files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Census:
    """The documents of a unit, in order: all that is known of them before they are tokenised.

    Attributes:
        held_out_keys: uint64 of shape (n,), see `held_out_key`.
        order_keys: uint64 of shape (n,), see `order_key`.
        num_chars: int64 of shape (n,).
    """

    held_out_keys: NDArray[np.uint64]
    order_keys: NDArray[np.uint64]
    num_chars: NDArray[np.int64]


def find_groups(sources: Sequence[TextSource]) -> list[tuple[InputFile, ...]]:
    """The files of all sources in groups that are worked on as one, by names of sources and files.

    Raises:
        ValueError: Two sources have one name.
        PermanentError: As in `find_inputs`.
    """
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"two sources have one name: {', '.join(sorted(names))}; write NAME=PATH")
    groups: list[tuple[InputFile, ...]] = []
    for source in sorted(sources, key=lambda source: source.name):
        waiting: list[InputFile] = []
        for file in find_inputs(source):
            alone = file.column is not None
            full = sum(each.size for each in waiting) + file.size > MOST_TEXT_BYTES or len(waiting) >= MOST_TEXT_FILES
            if waiting and (alone or full):
                groups.append(tuple(waiting))
                waiting = []
            if alone:
                groups.append((file,))
            else:
                waiting.append(file)
        if waiting:
            groups.append(tuple(waiting))
    return groups


def identify(files: tuple[InputFile, ...]) -> Unit:
    """Hash the files of a group.

    Raises:
        TransientError, PermanentError: `local_file`.
    """
    hashes: list[str] = []
    for file in files:
        with local_file(file.path):
            hashes.append(file_sha256(file.path))
    content = [[file.name, file.column, sha256] for file, sha256 in zip(files, hashes, strict=True)]
    key = sha256_hex(canonical_json({"format": _FORMAT, "source": files[0].source, "files": content}))
    return Unit(files[0].source, files, tuple(hashes), key)


def take_census(unit: Unit, folder: Path) -> None:
    """Read a unit once and write down what documents it has, unless that was done before.

    Raises:
        TransientError, PermanentError: As in `read_texts`.
    """
    path = _census_file(unit, folder)
    if path.exists():
        return
    rows = [(held_out_key(name), order_key(unit.source, name), len(text)) for name, text in unit.texts()]
    with replaced(path) as file:
        np.save(file, np.array(rows, dtype="<u8").reshape(-1, 3).T)


def read_census(unit: Unit, folder: Path) -> Census:
    """What `take_census` wrote down."""
    path = _census_file(unit, folder)
    with local_file(path):
        held_out_keys, order_keys, num_chars = np.load(path)
    return Census(held_out_keys, order_keys, num_chars.astype(np.int64))


def checked_texts(unit: Unit, census: Census) -> Iterator[str]:
    """The texts of a unit, as long as they are what the census says.

    Raises:
        PermanentError: `object_differs`; a file has changed since. Otherwise as in `read_texts`.
    """
    number = 0
    for _, text in unit.texts():
        if number >= len(census.num_chars) or len(text) != census.num_chars[number]:
            raise _changed(unit)
        yield text
        number += 1
    if number < len(census.num_chars):
        raise _changed(unit)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """As `replacing`, and on the disk before it has its name; the folder is made."""
    with local_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    work: Callable[[T], R], things: Iterable[T], workers: int | None, on_done: Callable[[T], None] = lambda _: None
) -> list[R]:
    """Work on things in parallel; the results in their order. After an error, or a stop, no further thing begins.

    Threads suffice: tokenising, hashing and Parquet do their work without Python's lock.

    Args:
        work: What to do with each.
        things: The things.
        workers: Threads; None: one per processor that this process may use, `MOST_WORKERS` at most.
        on_done: Called with each thing that is done, from this thread.

    Raises:
        StoppedError: The host asked the process to stop.
    """
    number = workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    results: dict[int, R] = {}
    waiting = list(enumerate(things))[::-1]
    items = dict(waiting)
    with ThreadPoolExecutor(number, thread_name_prefix="build") as pool:
        running: dict[Future[R], int] = {}
        while waiting or running:
            check_stop()
            while waiting and len(running) < number:
                index, thing = waiting.pop()
                running[pool.submit(work, thing)] = index
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                index = running.pop(future)
                results[index] = future.result()
                on_done(items[index])
    return [results[index] for index in range(len(results))]


def _census_file(unit: Unit, folder: Path) -> Path:
    return folder / "census" / f"{unit.key}.npy"


def _changed(unit: Unit) -> PermanentError:
    names = f"{unit.files[0].path}" + (f" or one of {len(unit.files) - 1} files after it" if unit.files[1:] else "")
    return PermanentError(Reason.OBJECT_DIFFERS, f"{names} changed while the dataset was built; build it again")
