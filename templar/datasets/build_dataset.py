"""Build a dataset of either layout from files on the disk, in parallel and with bounded memory.

    plan = prepare(request)     # hash and read every input file once, hold documents out, train the tokenizer
    make_parts(plan)            # every input file by itself: tokens, or Parquet files
    built = assemble(plan)      # the dataset's folder

Finished work lies in `{root}.work` until the dataset is complete, so a build that was killed resumes. The bytes depend
on the input and the settings alone, not on the number of threads or of kills. An input file that changes in between is
read again.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from templar.data.shards.shard_writer import require_absent
from templar.data.tokenizer import EMBEDDED, load_tokenizer
from templar.datasets.card import CARD_FILE, Card, files_of, read_card, write_card
from templar.datasets.page_writer import assemble_pages, make_page_part
from templar.datasets.plan import BuildRequest, DatasetLayout, Plan, plan_build
from templar.datasets.token_parts import assemble_shards, drop_other_merges, make_token_part
from templar.datasets.units import Unit, find_groups, identify, in_threads
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, sync

LOCK_FILE = ".lock"

Progress = Callable[[float], None]
"""Called with the part that is done, 0 to 100."""


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

    There are `workers` threads, by default one per processor. `on_progress` is called with the name of a step and the
    part of it that is done, 0 to 100.

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
    plan = prepare(request, workers=workers, on_progress=lambda done: on_progress("read", done))
    make_parts(plan, workers=workers, on_progress=lambda done: on_progress("parts", done))
    return assemble(plan, workers=workers, on_progress=lambda done: on_progress("assemble", done))


def _silent(percentage: float) -> None:
    del percentage


def find_built(request: BuildRequest, *, workers: int | None = None) -> BuiltDataset | None:
    """The dataset that an earlier call with the same settings, input and tokenizer completed; None if there is none.

    Raises:
        TransientError, PermanentError: As in `build`.
    """
    settings = request.settings
    if not (request.root / CARD_FILE).exists():
        return None
    units = in_threads(identify, find_groups(request.sources), workers)
    own = None if settings.tokenizer == EMBEDDED else load_tokenizer(settings.tokenizer).digest
    return built_before(request, units, own)


def built_before(request: BuildRequest, units: Sequence[Unit], tokenizer_digest: str | None) -> BuiltDataset | None:
    """The dataset in the folder, if its card has these settings, units and tokenizer (None: an embedded one).

    Raises:
        TransientError, PermanentError: As in `read_card`.
    """
    if not (request.root / CARD_FILE).exists():
        return None
    card = read_card(request.root)
    same = (
        card.settings == request.settings.described()
        and [source.name for source in card.sources] == sorted({unit.source for unit in units})
        and [file for source in card.sources for file in source.files] == list(files_of(units))
        and tokenizer_digest == (None if card.tokenizer["embedded"] else card.tokenizer["digest"])
    )
    if not same:
        return None
    # An earlier call may have been killed after its last step.
    if request.work.exists():
        with alone(request.work):
            remove_work(request.work)
    return BuiltDataset(request.root, card, _num_bytes(request.root))


def prepare(request: BuildRequest, *, workers: int | None = None, on_progress: Progress = _silent) -> Plan:
    """Read the input and plan the build; errors as in `build`."""
    require_absent(request.root)
    with alone(request.work):
        return plan_build(request, workers, on_progress)


def make_parts(plan: Plan, *, workers: int | None = None, on_progress: Progress = _silent) -> None:
    """Make every part that is not there yet; errors as in `build`."""
    tokenizer = plan.tokenizer()
    shards = plan.request.settings.layout is DatasetLayout.SHARDS
    masks = {} if shards else dict(zip(plan.units, plan.held_out(), strict=True))

    def work(unit: Unit) -> None:
        if shards:
            make_token_part(plan, unit, tokenizer)
        else:
            make_page_part(plan, unit, masks[unit], tokenizer)

    with alone(plan.request.work):
        in_threads(work, plan.units, workers, on_progress, size=lambda unit: unit.num_bytes)


def assemble(plan: Plan, *, workers: int | None = None, on_progress: Progress = _silent) -> BuiltDataset:
    """Put the parts together and give the folder its name; errors as in `build`."""
    root, work = plan.request.root, plan.request.work
    with alone(work), local_file(root):
        require_absent(root)
        drop_other_merges(plan)
        partial = work / plan.partial_name
        partial.mkdir(exist_ok=True)
        assembled = assemble_shards if plan.request.settings.layout is DatasetLayout.SHARDS else assemble_pages
        card = assembled(plan, partial, workers, on_progress)
        write_card(card, partial)
        num_bytes = _num_bytes(partial)
        partial.rename(root)
        sync(root.parent)
        remove_work(work)
    return BuiltDataset(root, card, num_bytes)


def _num_bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*") if file.is_file())


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
