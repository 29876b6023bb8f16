"""The steps that build a dataset as Prefect tasks: read the sources, make the parts, assemble the folder, upload it."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from blocks.environment import hosting_from_environment
from tasks.artifacts import progress, table
from tasks.policy import HOUSEKEEPING, STORE
from templar.datasets import build_dataset as building
from templar.datasets import page_writer
from templar.datasets.build_dataset import BuiltDataset
from templar.datasets.page_writer import Uploaded
from templar.datasets.plan import BuildRequest, Plan
from templar.store.base import ObjectStore


@task(task_run_name="find dataset", **HOUSEKEEPING)
def find_dataset(request: BuildRequest, workers: int | None) -> BuiltDataset | None:
    """The dataset if an earlier run, perhaps one that was cut off later, has completed it."""
    return building.find_built(request, workers=workers)


@task(task_run_name="read sources", cache_policy=NO_CACHE, **HOUSEKEEPING)
def read_sources(request: BuildRequest, workers: int | None) -> Plan:
    """Read the sources and plan the dataset, with a progress artifact."""
    return building.prepare(request, workers=workers, on_progress=_bar(request, "read", "Input that has been read."))


@task(task_run_name="make parts", cache_policy=NO_CACHE, **HOUSEKEEPING)
def make_parts(plan: Plan, workers: int | None) -> None:
    """Tokenise or write every part, with a progress artifact."""
    building.make_parts(plan, workers=workers, on_progress=_bar(plan.request, "parts", "Input that is done."))


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
    """The store that takes a dataset, opened for writing, and the folder in it.

    The bucket has the name of its account by default, and the folder is DATASET_BINS_PATH.

    Raises:
        PermanentError: `bad_environment`; the message names every variable that is missing or malformed.
    """
    hosting = hosting_from_environment(environment, reads=False, writes=True)
    assert hosting.write is not None  # noqa: S101 - write keys were asked for
    store = hosting.endpoint.open(bucket or account, account, hosting.write, writable=True)
    return store, hosting.prefix if prefix is None else prefix


def artifact_key(root: Path) -> str:
    """The key of a dataset's table; the keys of its progress bars begin with it."""
    return f"built-{re.sub('[^a-z0-9]+', '-', root.name.lower()).strip('-')}"


def _bar(request: BuildRequest, step: str, description: str) -> Callable[[float], None]:
    return progress(f"{artifact_key(request.root)}-{step}", description)
