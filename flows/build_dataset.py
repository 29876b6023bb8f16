"""`build-dataset`: build a training dataset from files on this machine, and upload it if a bucket is named."""

import os
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.utilities.annotations import quote
from pydantic import Field

from blocks.storage import AccountId
from tasks.datasets import (
    DASK_ADDRESS,
    assemble_dataset,
    find_dataset,
    list_inputs,
    make_parts,
    plan_dataset,
    read_sources,
    unit_tasks,
    upload_dataset,
    upload_target,
)
from templar.datasets.documents import TEXT_SUFFIXES, source_from_text
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout


@flow(name="build-dataset", flow_run_name="build {out}")
async def build_dataset(
    sources: list[str],
    out: str,
    *,
    settings: BuildSettings = BuildSettings(DatasetLayout.SHARDS),  # noqa: B008 - frozen
    column: str = "text",
    suffixes: tuple[str, ...] = TEXT_SUFFIXES,
    workers: Annotated[int, Field(ge=1)] | None = None,
    dask: Annotated[str, Field(pattern=f"^{DASK_ADDRESS}$")] | None = None,
    upload_account: AccountId | None = None,
    upload_bucket: str | None = None,
    upload_prefix: str | None = None,
) -> State[None]:
    """Build a dataset; a run that failed or was killed resumes when it is retried.

    Args:
        sources: What to read, as PATH or NAME=PATH: files, folders, or hf:ORG/NAME for a Hugging Face dataset.
        out: The folder to make. If it holds this dataset already, that is used.
        settings: Layout, tokenizer and sizes.
        column: The column, or the key of a line, that holds the text.
        suffixes: Ends of the names of text files.
        workers: Threads; one per processor by default.
        dask: Address of a Dask scheduler, such as `tcp://host:8786`, whose workers do the work on the units of the
            input; they see the same folders and the same Prefect server.
        upload_account: Account that owns the bucket to upload to; no upload by default. The keys are the worker's
            R2_DATASET_WRITE_*. Nothing is written over another dataset.
        upload_bucket: The bucket; the account's name by default.
        upload_prefix: The folder in it; DATASET_BINS_PATH by default.
    """
    if upload_account is not None:
        upload_target(os.environ, upload_account, upload_bucket, upload_prefix)
    read = tuple(source_from_text(source, column=column, suffixes=suffixes) for source in sources)
    request = BuildRequest(read, Path(out).expanduser().resolve(), settings)
    built = find_dataset(request, workers)
    if built is None:
        groups = list_inputs(request)
        with unit_tasks(dask, workers) as each:
            units: Any = quote(read_sources(request, groups, each))  # Prefect would walk through every file of it
            plan: Any = plan_dataset(request, units, workers)
            make_parts(plan, each)
        quoted: Any = quote(plan)
        built = assemble_dataset(quoted, workers)
    message = f"{settings.layout} dataset {built.card.digest[:12]}: {built.num_bytes} bytes in {built.root}"
    if upload_account is not None:
        uploaded = upload_dataset(built.root, upload_account, upload_bucket, upload_prefix)
        message += f", {uploaded.num_objects} objects uploaded, {uploaded.num_already_there} were there already"
    return Completed(message=message)
