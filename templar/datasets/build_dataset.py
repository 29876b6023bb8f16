"""Build a dataset of either layout from files on the disk, in parallel and with bounded memory.

    units = read_units(request, find_groups(request.sources))    # hash every input file, or read it once
    plan = plan_units(request, units)                            # hold documents out, train the tokenizer
    make_parts(plan)                                             # every unit by itself: tokens, or Parquet files
    built = assemble(plan)                                       # the dataset's folder

Units are worked on in threads, or where `each` says: on other machines that see the same folders. Finished work lies in
`{root}.work` until the dataset is complete, so a build that was killed resumes. The bytes depend on the input and the
settings alone, not on the number of workers or of kills. An input file that changes in between is read again.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from templar.data.dataset import CARD_FILE
from templar.data.shards.shard_writer import require_absent
from templar.data.tokenizer import EMBEDDED, load_tokenizer
from templar.datasets.card import Card, files_of, read_card, write_card
from templar.datasets.documents import InputFile
from templar.datasets.page_writer import assemble_pages, make_page_part
from templar.datasets.plan import BuildRequest, DatasetLayout, Plan, plan_build
from templar.datasets.token_parts import assemble_shards, drop_other_merges, make_token_part
from templar.datasets.units import UNFINISHED, Each, Unit, find_groups, identify, in_threads, take_census
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, sync

LOCK_FILE = ".lock"

Progress = Callable[[float], None]  # called with the part that is done, 0 to 100


@dataclass(frozen=True)
class BuiltDataset:
    """A complete dataset."""

    root: Path
    card: Card
    num_bytes: int


def build(
    request: BuildRequest,
    *,
    workers: int | None = None,
    on_progress: Callable[[str, float], None] = lambda step, percentage: None,
) -> BuiltDataset:
    """Build a dataset, or resume its build; if it is complete already, nothing is done.

    `on_progress` is called with the name of a step and the part of it that is done, 0 to 100.

    Raises:
        ValueError: A setting is out of range.
        TransientError: `local_file`; the disk is full, for example. Call again to go on.
        PermanentError: `object_exists` if something else is in the folder, `dataset_missing` or `dataset_malformed` if
            a source cannot be read, `dataset_too_small`, `tokenizer_missing`, `already_running`, `object_differs` if an
            input file changed meanwhile, `local_file`.
        StoppedError: The host asked the process to stop.
    """
    found = find_built(request, workers=workers)
    if found is not None:
        return found
    each = partial(in_threads, workers=workers)
    units = read_units(request, find_groups(request.sources), each, on_progress=lambda done: on_progress("read", done))
    plan = plan_units(request, units, workers=workers)
    make_parts(plan, each, on_progress=lambda done: on_progress("parts", done))
    return assemble(plan, workers=workers, on_progress=lambda done: on_progress("assemble", done))


def find_built(request: BuildRequest, *, workers: int | None = None) -> BuiltDataset | None:
    """The dataset that an earlier call with the same settings, input and tokenizer completed; None if there is none."""
    settings = request.settings
    if not (request.root / CARD_FILE).exists():
        return None
    found = built_at(request.root)
    card = found.card
    units = in_threads(identify, find_groups(request.sources), workers=workers)
    own = None if settings.tokenizer == EMBEDDED else load_tokenizer(settings.tokenizer).digest
    same = (
        card.settings == settings.described()
        and [source.name for source in card.sources] == sorted({unit.source for unit in units})
        and [file for source in card.sources for file in source.files] == list(files_of(units))
        and own == (None if card.tokenizer.embedded else card.tokenizer.digest)
    )
    if not same:
        return None
    # An earlier call may have been killed after its last step.
    if request.work.exists():
        with alone(request.work):
            remove_work(request.work)
    return found


def built_at(root: Path) -> BuiltDataset:
    """The complete dataset in a folder; errors as in `read_card`."""
    return BuiltDataset(root, read_card(root), sum(file.stat().st_size for file in root.rglob("*") if file.is_file()))


def read_units(
    request: BuildRequest,
    groups: Sequence[tuple[InputFile, ...]],
    each: Each = in_threads,
    *,
    on_progress: Progress = lambda percentage: None,
) -> tuple[Unit, ...]:
    """Hash the input, and take its census where text has to be known before it is written; errors as in `build`."""
    require_absent(request.root)
    needs_census = request.settings.tokenizer == EMBEDDED or request.settings.layout is DatasetLayout.PAGES
    work = partial(_read_unit, request.work, needs_census)
    with alone(request.work):
        return tuple(each(work, groups, on_progress, size=lambda files: sum(file.size for file in files)))


def _read_unit(folder: Path, needs_census: bool, files: tuple[InputFile, ...]) -> Unit:
    unit = identify(files)
    if needs_census:
        take_census(unit, folder)
    return unit


def plan_units(request: BuildRequest, units: tuple[Unit, ...], *, workers: int | None = None) -> Plan:
    """Choose the tokenizer for an input that was read; errors as in `build`."""
    with alone(request.work):
        return plan_build(request, units, workers)


def make_parts(plan: Plan, each: Each = in_threads, *, on_progress: Progress = lambda percentage: None) -> None:
    """Make every part that is not there yet; errors as in `build`."""
    splits: Sequence[NDArray[np.int8] | None] = [None] * len(plan.units)
    if plan.request.settings.layout is DatasetLayout.PAGES:
        splits = plan.splits()
    things = list(zip(plan.units, splits, strict=True))
    with alone(plan.request.work):
        for unfinished in (plan.request.work / "parts").glob(f"{UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        # A worker needs the request and the tokenizer, and not what the other units are.
        each(partial(_make_part, replace(plan, units=())), things, on_progress, size=lambda thing: thing[0].num_bytes)


def _make_part(plan: Plan, thing: tuple[Unit, NDArray[np.int8] | None]) -> None:
    unit, splits = thing
    if splits is None:
        make_token_part(plan, unit)
    else:
        make_page_part(plan, unit, splits)


def assemble(
    plan: Plan, *, workers: int | None = None, on_progress: Progress = lambda percentage: None
) -> BuiltDataset:
    """Put the parts together and give the folder its name; errors as in `build`."""
    root, work = plan.request.root, plan.request.work
    with alone(work), local_file(root):
        require_absent(root)
        drop_other_merges(plan)
        partial = work / plan.partial_name
        partial.mkdir(exist_ok=True)
        assembled = assemble_shards if plan.request.settings.layout is DatasetLayout.SHARDS else assemble_pages
        write_card(assembled(plan, partial, workers, on_progress), partial)
        partial.rename(root)
        sync(root.parent)
        remove_work(work)
    return built_at(root)


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """Let no other process build in this folder."""
    path = work / LOCK_FILE
    while True:
        with local_file(work):
            work.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PermanentError(
                    Reason.ALREADY_RUNNING, f"{work}: another process builds this dataset; wait for it, or end it"
                ) from None
            if _is_at(file, path):  # otherwise the file was removed before it was locked
                yield
                return


def _is_at(file: TextIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def remove_work(work: Path) -> None:
    """Remove the folder of unfinished work, the lock last; only the holder of the lock may call this."""
    for path in work.iterdir():
        if path.name != LOCK_FILE:
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # the next build may have begun
        (work / LOCK_FILE).unlink()
        work.rmdir()
