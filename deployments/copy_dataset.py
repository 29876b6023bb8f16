"""Copy the dataset into a bucket or a folder of your own, and check the copy.

    templar dataset copy --from-env --env-file .env --to-account ACCOUNT [--to-bucket BUCKET] [--verify]
    templar dataset copy --from dataset --env-file .env --to-account ACCOUNT
    templar dataset copy --from-env --env-file .env --to /srv/dataset

The source is the dataset that the environment names, or a folder. Keys come from the environment alone; those of the
target are R2_DATASET_WRITE_ACCESS_KEY_ID and R2_DATASET_WRITE_SECRET_ACCESS_KEY. After a failure, run it again.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from blocks.environment import Hosting, hosting_from_environment
from blocks.storage import StorageEndpoint
from deployments.register import read_environment
from templar.arguments import account_id, folder_path, whole_number
from templar.datasets.copying import Check, CopiedObject, CopyOutcome, CopyReport, copy_dataset
from templar.store.base import ObjectStore
from templar.store.directory import INCOMING, DirectoryStore
from templar.store.files import local_file

RESUMABLE = True


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Copy, and print the report.

    Raises:
        TemplarError: See `copy_dataset`; `bad_environment` before anything is touched.
    """
    reads, writes = arguments.from_folder is None, arguments.to_folder is None
    environment = read_environment(arguments.env_file) if reads or writes else {}
    hosting = hosting_from_environment(environment, reads=reads, writes=writes)
    sources, prefix_from = _sources(hosting, arguments.from_folder)
    target, prefix_to = _target(hosting, arguments)
    progress = Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    try:
        with progress:
            bar = progress.add_task("copy", total=None)
            report = copy_dataset(
                sources,
                target,
                prefix_from,
                prefix_to,
                concurrency=arguments.concurrency,
                verify=arguments.verify,
                on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
            )
    finally:
        if arguments.to_folder is not None:
            with suppress(OSError):  # other writers may use it
                (arguments.to_folder / INCOMING).rmdir()
    show(report, f"{target.name}/{prefix_to}".rstrip("/"), console)


def show(report: CopyReport, where: str, console: Console) -> None:
    """Print a report: a line per folder, and one of all."""
    folders: dict[str, list[CopiedObject]] = defaultdict(list)
    for each in report.objects:
        folders[each.path.rpartition("/")[0] or "."].append(each)
    table = Table()
    table.add_column("folder", overflow="fold", min_width=20)
    for column in ("files", *CopyOutcome, "hash checked", "bytes"):
        table.add_column(column, justify="right")
    for folder, objects in sorted(folders.items()):
        part = CopyReport(tuple(objects))
        counts = (len(objects), *(len(part.having(outcome)) for outcome in CopyOutcome), _num_hashed(part))
        table.add_row(Text(folder), *map(str, counts), decimal(_num_bytes(objects)))
    console.print(table)
    there = report.having(CopyOutcome.ALREADY_THERE)
    written = report.having(CopyOutcome.COPIED)
    hashed, sized = _num_hashed(report), len(report.having(Check.SIZE))
    checks = f"{hashed} checked by hash" + (f", {sized} by size alone (--verify compares hashes)" if sized else "")
    console.print(
        Text(
            f"the dataset is in {where}: {len(report.objects)} objects, {decimal(_num_bytes(report.objects))}; "
            f"{len(written)} written ({decimal(_num_bytes(written))}), {len(there)} already there; {checks}"
        ),
        soft_wrap=True,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and copy; 0 if the dataset is complete at the target."""
    arguments = _arguments(words)
    run(arguments, Console())
    return 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="templar dataset copy", description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-env", action="store_true", help="copy the dataset of R2_DATASET_*")
    source.add_argument("--from", type=folder_path, dest="from_folder", metavar="PATH", help="copy a dataset folder")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to-account", type=account_id, metavar="ID", help="account that owns the target bucket")
    target.add_argument("--to", type=folder_path, dest="to_folder", metavar="PATH", help="a folder; it is made")
    parser.add_argument("--to-bucket", metavar="NAME", help="name of the target bucket; the account's by default")
    parser.add_argument("--to-prefix", metavar="PATH", help="folder in the target bucket; DATASET_BINS_PATH by default")
    parser.add_argument("--to-storage", type=_endpoint, metavar="URL", help="its storage; TEMPLAR_STORAGE by default")
    parser.add_argument("--env-file", type=Path, help="file with the variables of .env.example")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare hashes")
    parser.add_argument("--concurrency", type=whole_number(1), default=4, help="files that are moved at a time (4)")
    arguments = parser.parse_args(words)
    bucket_options = (arguments.to_bucket, arguments.to_prefix, arguments.to_storage)
    if arguments.to_account is None and any(option is not None for option in bucket_options):
        parser.error("--to-bucket, --to-prefix and --to-storage go with --to-account")
    return arguments


def _sources(hosting: Hosting, folder: Path | None) -> tuple[list[ObjectStore], str]:
    if hosting.dataset is not None:
        return hosting.dataset.stores(), hosting.dataset.prefix
    assert folder is not None  # noqa: S101 - one of the two was asked for
    return [DirectoryStore(folder, writable=False)], ""


def _target(hosting: Hosting, arguments: argparse.Namespace) -> tuple[ObjectStore, str]:
    if hosting.write is None:
        folder: Path = arguments.to_folder
        with local_file(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return DirectoryStore(folder, durable=True), ""
    endpoint = hosting.endpoint
    if arguments.to_storage is not None:
        endpoint = endpoint.model_copy(update={"url": arguments.to_storage.url})
    account: str = arguments.to_account
    store = endpoint.open(arguments.to_bucket or account, account, hosting.write, writable=True)
    return store, hosting.prefix if arguments.to_prefix is None else arguments.to_prefix


def _num_bytes(objects: Sequence[CopiedObject]) -> int:
    return sum(each.num_bytes for each in objects)


def _num_hashed(report: CopyReport) -> int:
    return len(report.objects) - len(report.having(Check.SIZE))


def _endpoint(text: str) -> StorageEndpoint:
    try:
        return StorageEndpoint(url=text)
    except ValidationError:  # without the value, which may hold a secret
        raise argparse.ArgumentTypeError("a storage is r2, http(s)://host[:port] or file:///folder") from None
