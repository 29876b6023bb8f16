"""Rotation of the sharded dataset: the shards that are trained on and the next one lie on the disk, within a budget.

Which shards these are follows from the network's state alone, so every node computes it alike (PROTOCOL 20). Rotating
twice changes nothing, two rotations at a time are one, and one that is killed leaves nothing that the next cannot use.
Miners and validators need not wait for it: what they read before it is there they fetch block by block, into the same
files.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from templar.data.assignment import Epochs, lasting
from templar.data.shards.block_file import PARTIAL_SUFFIX, names_of
from templar.data.shards.manifest import manifest_file, sample_ids_file, tokens_file
from templar.data.shards.shard_dataset import ShardedDataset
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, locked

LOCK_FILE = ".rotation.lock"


_OURS = re.compile(rf"(train|sample_ids)_(\d{{6}})\.(npy|bin|json)({re.escape(PARTIAL_SUFFIX)})?")


@dataclass(frozen=True)
class RotationReport:
    """What a rotation did.

    Attributes:
        current: Shards that the next windows train on.
        upcoming: The shard after them; None if the dataset has no other one.
        on_disk: Shards that are on the disk as a whole now.
        fetched: Those of them that were not before.
        deleted: Files that were deleted.
        left_out: The next shard, if the budget has no room for it.
        num_bytes: Bytes of shards on the disk.
        skipped: Why nothing was done; None if something was.
    """

    current: tuple[int, ...] = ()
    upcoming: int | None = None
    on_disk: tuple[int, ...] = ()
    fetched: tuple[int, ...] = ()
    deleted: tuple[str, ...] = ()
    left_out: int | None = None
    num_bytes: int = 0
    skipped: Reason | None = None


@dataclass(frozen=True)
class Wanted:
    """Shards by how much they are wanted; each once.

    Attributes:
        current: Those that the windows train on that the state knows of; two around a swap.
        upcoming: The one after them; None if the dataset has no other one.
        kept: Those before them that may stay, the newest first.
    """

    current: tuple[int, ...]
    upcoming: int | None
    kept: tuple[int, ...]


def wanted_shards(epochs: Epochs, state_window: int, num_shards: int, keep: int) -> Wanted:
    """Which shards belong on the disk.

    Args:
        epochs: What the network's state says; see `templar.data.epochs`.
        state_window: The window of that state.
        num_shards: Shards of the dataset; after the last one comes the first.
        keep: Shards that stay after they were trained on.
    """
    ahead = [epoch.position for epoch in lasting(epochs, state_window + 1)]
    current = tuple(dict.fromkeys(position % num_shards for position in ahead))
    upcoming = (ahead[-1] + 1) % num_shards
    before = [position % num_shards for position in range(ahead[0] - 1, ahead[0] - 1 - keep, -1) if position >= 0]
    kept = tuple(number for number in dict.fromkeys(before) if number not in {*current, upcoming})
    return Wanted(current, None if upcoming in current else upcoming, kept)


def rotate(
    dataset: ShardedDataset,
    wanted: Wanted,
    *,
    budget_bytes: int | None = None,
    on_progress: Callable[[float], None] = lambda percentage: None,
) -> RotationReport:
    """Delete what is not wanted, then bring the current shards and the next one to the disk.

    Args:
        dataset: The training split; its folder is the one that is kept.
        wanted: What belongs there.
        budget_bytes: Most bytes of shards on the disk; None takes what the disk has.
        on_progress: Called with the percentage of the wanted bytes that are there and right.

    Raises:
        StoppedError: The host asked the process to stop; a later call goes on.
        TransientError: The stores failed; a later call goes on.
        PermanentError: `disk_full`, before anything is fetched; `object_missing`, ....
    """
    folder = dataset.folder
    with ExitStack() as held:
        with local_file(folder):
            folder.mkdir(parents=True, exist_ok=True)
            alone = held.enter_context(locked(folder / LOCK_FILE, wait=False))
        if not alone:
            return RotationReport(wanted.current, wanted.upcoming, skipped=Reason.ALREADY_RUNNING)
        fits, deleted = _Room(dataset, budget_bytes), list[str]()
        for _ in range(2):  # what was deleted may still take its room, as long as a reader has it open
            chosen, left_out, kept = fits.choose(wanted)
            deleted += _delete_others(folder, {*chosen, *kept})
        fits.require(chosen)
        before = {number for number in chosen if is_whole(dataset, number)}
        total, done = sum(map(fits.size, chosen)), 0
        for number in chosen:

            def show(num_bytes: int, _: int, done: int = done) -> None:
                on_progress(100 * (done + num_bytes) / total)

            if number not in before:
                dataset.shard(number).download(show)
            done += fits.size(number)
            on_progress(100 * done / total)
        whole = tuple(sorted(number for number in (*chosen, *kept) if is_whole(dataset, number)))
        return RotationReport(
            current=wanted.current,
            upcoming=wanted.upcoming,
            on_disk=whole,
            fetched=tuple(number for number in chosen if number not in before),
            deleted=tuple(deleted),
            left_out=left_out,
            num_bytes=sum(map(_allocated, _files(folder))),
        )


def is_whole(dataset: ShardedDataset, number: int) -> bool:
    """Whether a shard's files have their final names, which they get when every block was right.

    Raises:
        TemplarError: As in `ShardedDataset.manifest`, which is needed if the files are there.
    """
    paths = (dataset.folder / tokens_file("train", number), dataset.folder / sample_ids_file(number))
    if not all(path.exists() for path in paths):
        return False
    files = dataset.manifest(number).files  # files that another manifest described lose their names by that
    try:
        return all((dataset.folder / file.name).stat().st_size == file.size for file in files)
    except FileNotFoundError:
        return False


class _Room:
    """What fits on the disk."""

    def __init__(self, dataset: ShardedDataset, budget_bytes: int | None) -> None:
        self._dataset = dataset
        self._folder = dataset.folder
        self._budget = budget_bytes

    def size(self, number: int) -> int:
        """Bytes of a shard's files."""
        return self._dataset.index.splits[self._dataset.split][number].num_bytes

    def choose(self, wanted: Wanted) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
        """The shards to have, the next one if it has no room, and the kept ones that still fit."""
        room = self._limit() - sum(map(self.size, wanted.current))
        chosen, left_out = wanted.current, None
        if wanted.upcoming is not None and self.size(wanted.upcoming) <= room:
            chosen = (*chosen, wanted.upcoming)
            room -= self.size(wanted.upcoming)
        else:
            left_out = wanted.upcoming
        kept: list[int] = []
        for number in wanted.kept:
            room -= self.size(number)
            if room < 0:
                break
            kept.append(number)
        return chosen, left_out, tuple(kept)

    def require(self, numbers: Sequence[int]) -> None:
        """Refuse shards that have no room.

        Raises:
            PermanentError: `disk_full`.
        """
        needed, limit = sum(map(self.size, numbers)), self._limit()
        if needed > limit:
            allowed = "storage.shard_budget_gib allows" if limit == self._budget else "there is room for"
            raise PermanentError(
                Reason.DISK_FULL,
                f"{self._folder}: shards {', '.join(map(str, numbers))} take {needed / 2**30:.2f} GiB and {allowed} "
                f"{limit / 2**30:.2f} GiB; raise the budget, or give the neuron's home a larger disk",
            )

    def _limit(self) -> int:
        """Bytes that shards may take: of the budget, and of what is free or theirs already."""
        theirs = sum(map(_allocated, _files(self._folder)))
        available = theirs + shutil.disk_usage(self._folder).free
        return available if self._budget is None else min(available, self._budget)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _OURS.fullmatch(path.name))


def _allocated(path: Path) -> int:
    """Bytes that a file takes; holes take none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # another process has just completed it
        return 0


def _delete_others(folder: Path, numbers: set[int]) -> tuple[str, ...]:
    """Delete the files of every shard but these."""
    prefixes = tuple(
        name.rsplit(".", 1)[0]
        for number in numbers
        for name in (tokens_file("train", number), sample_ids_file(number), manifest_file("train", number))
    )
    with local_file(folder), names_of(folder):
        others = [path for path in _files(folder) if not path.name.startswith(prefixes)]
        for path in others:
            path.unlink(missing_ok=True)
    return tuple(path.name for path in others)
