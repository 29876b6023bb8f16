"""Rotation of the sharded dataset: keep the current shards and the next one on the disk, within a budget.

The network's state alone determines which shards these are, so every node computes the same (docs/protocol.md 13). A
second rotation changes nothing, two rotations at a time are one, and a later rotation uses all that a killed one left.
Miners and validators need not wait for it: samples that they read earlier they fetch block by block, into the same
files.
"""

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from templar.data.assignment import Epochs, lasting
from templar.data.shards.block_file import PARTIAL_SUFFIX, allocated, names_of
from templar.data.shards.manifest import manifest_file, sample_ids_file, tokens_file
from templar.data.shards.shard_dataset import ShardedDataset
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, locked

LOCK_FILE = ".rotation.lock"
_SHARD_FILE = re.compile(rf"(train|sample_ids)_(\d{{6}})\.(npy|bin|json)({re.escape(PARTIAL_SUFFIX)})?")


@dataclass(frozen=True)
class RotationReport:
    """The result of a rotation: numbers of shards and names of files."""

    current: tuple[int, ...] = ()  # the next windows train on them
    upcoming: int | None = None  # the shard after them; None if the dataset has no other one
    on_disk: tuple[int, ...] = ()  # whole shards
    fetched: tuple[int, ...] = ()  # those of them that this rotation completed
    deleted: tuple[str, ...] = ()  # files
    left_out: int | None = None  # the next shard, if the budget has no room for it
    num_bytes: int = 0  # of shards on the disk
    skipped: Reason | None = None  # why nothing was done


@dataclass(frozen=True)
class ShardPlan:
    """The shards that belong on the disk, each once."""

    current: tuple[int, ...]  # of the windows that the state knows; two around a swap
    upcoming: int | None  # the one after them; None if the dataset has no other one
    kept: tuple[int, ...]  # earlier ones that may stay, the newest first


def plan_shards(epochs: Epochs, state_window: int, num_shards: int, keep: int) -> ShardPlan:
    """The shards that belong on the disk by the state of `state_window`; `keep` of them stay after their windows."""
    ahead = [epoch.position for epoch in lasting(epochs, state_window + 1)]
    current = tuple(dict.fromkeys(position % num_shards for position in ahead))
    upcoming = (ahead[-1] + 1) % num_shards
    before = [position % num_shards for position in range(ahead[0] - 1, ahead[0] - 1 - keep, -1) if position >= 0]
    kept = tuple(number for number in dict.fromkeys(before) if number not in {*current, upcoming})
    return ShardPlan(current, None if upcoming in current else upcoming, kept)


def rotate(
    dataset: ShardedDataset,
    plan: ShardPlan,
    *,
    budget_bytes: int | None = None,
    on_progress: Callable[[float], None] = lambda percentage: None,
) -> RotationReport:
    """Delete other shards, then download the current ones and the next one to the folder of the training split.

    Shards take `budget_bytes` at most; None means the free space of the disk. `on_progress` is called with the
    percentage of the wanted bytes that are there and right.

    Raises:
        StoppedError: The host asked the process to stop; a later call resumes.
        TransientError: The stores failed; a later call resumes.
        PermanentError: `disk_full`, before anything is fetched; `object_missing`, ....
    """
    folder = dataset.folder
    with ExitStack() as held:
        with local_file(folder):
            folder.mkdir(parents=True, exist_ok=True)
            alone = held.enter_context(locked(folder / LOCK_FILE, wait=False))
        if not alone:
            return RotationReport(plan.current, plan.upcoming, skipped=Reason.ALREADY_RUNNING)
        budget, deleted = _DiskBudget(dataset, budget_bytes), list[str]()
        # 1. Delete other shards. Space of a deleted file is not free while a reader has it open: choose twice.
        for _ in range(2):
            chosen, left_out, kept = budget.choose(plan)
            deleted += _delete_others(folder, {*chosen, *kept})
        budget.require(chosen)
        # 2. Download the shards that are not whole.
        before = {number for number in chosen if is_whole(dataset, number)}
        total, done = sum(map(budget.size, chosen)), 0
        for number in chosen:

            def show(num_bytes: int, _: int, done: int = done) -> None:
                on_progress(100 * (done + num_bytes) / total)

            if number not in before:
                dataset.shard(number).download(show)
            done += budget.size(number)
            on_progress(100 * done / total)
        whole = tuple(sorted(number for number in (*chosen, *kept) if is_whole(dataset, number)))
        return RotationReport(
            current=plan.current,
            upcoming=plan.upcoming,
            on_disk=whole,
            fetched=tuple(number for number in chosen if number not in before),
            deleted=tuple(deleted),
            left_out=left_out,
            num_bytes=sum(map(allocated, _files(folder))),
        )


def is_whole(dataset: ShardedDataset, number: int) -> bool:
    """Whether a shard's files have their final names, which they get when every block was right.

    TemplarError: As in `ShardedDataset.manifest`, which is needed if the files are there.
    """
    paths = (dataset.folder / tokens_file("train", number), dataset.folder / sample_ids_file(number))
    if not all(path.exists() for path in paths):
        return False
    files = dataset.manifest(number).files  # a new manifest takes the final names from files of another one
    try:
        return all((dataset.folder / file.name).stat().st_size == file.size for file in files)
    except FileNotFoundError:
        return False


class _DiskBudget:
    """The bytes that shards may take on the disk."""

    def __init__(self, dataset: ShardedDataset, budget_bytes: int | None) -> None:
        self._dataset = dataset
        self._folder = dataset.folder
        self._budget = budget_bytes

    def size(self, number: int) -> int:
        """Bytes of a shard's files."""
        return self._dataset.index.splits[self._dataset.split][number].num_bytes

    def choose(self, plan: ShardPlan) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
        """The shards to download, the next one if it does not fit, and the kept ones that still fit."""
        left = self._limit() - sum(map(self.size, plan.current))
        chosen, left_out = plan.current, None
        if plan.upcoming is not None and self.size(plan.upcoming) <= left:
            chosen = (*chosen, plan.upcoming)
            left -= self.size(plan.upcoming)
        else:
            left_out = plan.upcoming
        kept: list[int] = []
        for number in plan.kept:
            left -= self.size(number)
            if left < 0:
                break
            kept.append(number)
        return chosen, left_out, tuple(kept)

    def require(self, numbers: Sequence[int]) -> None:
        """Raise PermanentError `disk_full` if these shards do not fit."""
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
        theirs = sum(map(allocated, _files(self._folder)))
        available = theirs + shutil.disk_usage(self._folder).free
        return available if self._budget is None else min(available, self._budget)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _SHARD_FILE.fullmatch(path.name))


def _delete_others(folder: Path, numbers: set[int]) -> tuple[str, ...]:
    """Delete the files of all other shards; their names."""
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
