"""The steps that build a dataset as Prefect tasks, the work on each unit of the input in one of its own."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner

from blocks.environment import upload_from_environment
from tasks.artifacts import progress, table
from tasks.policy import HOUSEKEEPING, STORE
from templar.datasets import build_dataset as building
from templar.datasets import page_writer
from templar.datasets.build_dataset import BuiltDataset
from templar.datasets.documents import InputFile
from templar.datasets.page_writer import Uploaded
from templar.datasets.plan import BuildRequest, Plan
from templar.datasets.units import Each, Unit, find_groups, most_threads
from templar.errors import PermanentError, Reason, TransientError, one_line
from templar.store.base import ObjectStore

DASK_ADDRESS = r"(tcp|tls)://[^/\s]+:\d+"  # the form of a scheduler's address

T = TypeVar("T")
R = TypeVar("R")


@task(task_run_name="find dataset", **HOUSEKEEPING)
def find_dataset(request: BuildRequest, workers: int | None) -> BuiltDataset | None:
    """The dataset if an earlier run, perhaps one that was cut off later, has completed it."""
    return building.find_built(request, workers=workers)


@task(task_run_name="list inputs", **HOUSEKEEPING)
def list_inputs(request: BuildRequest) -> list[tuple[InputFile, ...]]:
    """The files of all sources in units of work."""
    return find_groups(request.sources)


@task(task_run_name="plan dataset", cache_policy=NO_CACHE, **HOUSEKEEPING)
def plan_dataset(request: BuildRequest, units: tuple[Unit, ...], workers: int | None) -> Plan:
    """Hold documents out and choose the tokenizer."""
    return building.plan_units(request, units, workers=workers)


@task(task_run_name="build unit {label}", cache_policy=NO_CACHE, **HOUSEKEEPING)
def build_unit(work: Callable[[], R], label: str) -> R:
    """Do the work of a step on one unit, in a thread of this process or on a Dask worker."""
    del label
    return work()


@contextmanager
def unit_tasks(dask: str | None, workers: int | None) -> Iterator[Each]:
    """Calls a function on each unit in a task of its own: in threads, or on the workers of a Dask scheduler.

    Raises:
        PermanentError: `bad_environment`; the extra is missing.
        TransientError: `process_died`; no scheduler answers, or workers die of one unit again and again.
    """
    if dask is None:
        threads: TaskRunner[Any] = ThreadPoolTaskRunner(most_threads(workers))
        with threads:
            yield partial(_in_tasks, threads)
        return
    try:
        from prefect_dask.task_runners import DaskTaskRunner  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise PermanentError(Reason.BAD_ENVIRONMENT, "Dask needs an extra: pip install -e '.[dask]'") from error
    try:
        with DaskTaskRunner(address=dask) as cluster:
            # Tasks that arrive while the scheduler imports this module for the first of them would break the imports.
            cluster.client.run_on_scheduler(import_module, __name__)
            cluster.client.run(import_module, __name__)
            yield partial(_in_tasks, cluster)
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("distributed."):
            raise
        problem = one_line(str(error))
        raise TransientError(
            Reason.PROCESS_DIED, f"Dask at {dask}: {problem}; look at its scheduler and workers"
        ) from error


def _in_tasks(
    runner: TaskRunner[Any],
    work: Callable[[T], R],
    things: Iterable[T],
    on_progress: Callable[[float], None] = lambda percentage: None,
    *,
    size: Callable[[T], int] = lambda thing: 1,
) -> list[R]:
    """As `in_threads`, in tasks; the first error ends what has not begun."""
    step = getattr(work, "func", work).__name__.strip("_").replace("_", " ")
    numbered = list(enumerate(things))
    futures = [
        # Neither Prefect nor Dask looks into a partial, which has every file of a unit.
        runner.submit(build_unit, {"work": partial(work, thing), "label": f"{number}: {step}"})
        for number, thing in numbered
    ]
    total, done = max(1, sum(size(thing) for _, thing in numbered)), 0
    results: list[R] = []
    for future, (_, thing) in zip(futures, numbered, strict=True):
        results.append(future.result())
        done += size(thing)
        on_progress(100 * done / total)
    return results


def read_sources(request: BuildRequest, groups: list[tuple[InputFile, ...]], each: Each) -> tuple[Unit, ...]:
    """Hash or read every unit of the input, with a progress artifact."""
    return building.read_units(request, groups, each, on_progress=_bar(request, "read", "Input that has been read."))


def make_parts(plan: Plan, each: Each) -> None:
    """Tokenise or write every unit, with a progress artifact."""
    building.make_parts(plan, each, on_progress=_bar(plan.request, "parts", "Input that is done."))


@task(task_run_name="assemble dataset", cache_policy=NO_CACHE, **HOUSEKEEPING)
def assemble_dataset(plan: Plan, workers: int | None) -> BuiltDataset:
    """Put the parts together into the dataset's folder; its card is a table artifact."""
    bar = _bar(plan.request, "assemble", "Files of the dataset that are written.")
    built = building.assemble(plan, workers=workers, on_progress=bar)
    description = f"Dataset {built.card.digest}, {built.num_bytes} bytes in {built.root}."
    table(artifact_key(built.root), built.card.rows(), description)
    return built


@task(task_run_name="upload dataset", **STORE)
def upload_dataset(root: Path, account: str, bucket: str | None, prefix: str | None) -> Uploaded:
    """Upload the dataset with the keys of this process; see `upload_target`."""
    store, folder = upload_target(os.environ, account, bucket, prefix)
    return page_writer.upload_dataset(root, store, folder)


def upload_target(
    environment: Mapping[str, str], account: str, bucket: str | None, prefix: str | None
) -> tuple[ObjectStore, str]:
    """The store that takes a dataset, opened for writing, and the folder in it; `bad_environment` names what is wrong.

    The bucket has the name of its account by default, and the folder is DATASET_BINS_PATH.
    """
    endpoint, usual, key = upload_from_environment(environment)
    return endpoint.open(bucket or account, account, key, writable=True), usual if prefix is None else prefix


def artifact_key(root: Path) -> str:
    """The key of a dataset's table; the keys of its progress bars begin with it."""
    return f"built-{re.sub('[^a-z0-9]+', '-', root.name.lower()).strip('-')}"


def _bar(request: BuildRequest, step: str, description: str) -> Callable[[float], None]:
    return progress(f"{artifact_key(request.root)}-{step}", description)
