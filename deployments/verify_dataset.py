"""Check a dataset in a folder or in the buckets that the environment names: every object, byte by byte.

    templar dataset verify dataset
    templar dataset verify --from-env --env-file .env

A line names each object that is damaged or missing. Keys come from the environment alone (R2_DATASET_*).
"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from blocks.env_file import read_environment
from blocks.environment import dataset_from_environment
from deployments.build_dataset import step_bars
from deployments.options import command_parser
from templar.arguments import folder_path, whole_number
from templar.datasets.verify import WORKERS, CheckedObject, verify_dataset
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore


def main(words: Sequence[str] | None = None) -> int:
    """Check the dataset in every store, and print what is wrong; 0 if every object is right, 1 if one is not."""
    arguments = _arguments(words)
    if arguments.folder is not None:
        stores: list[ObjectStore] = [DirectoryStore(arguments.folder, writable=False)]
        prefix = ""
    else:
        dataset = dataset_from_environment(read_environment(arguments.env_file))
        stores, prefix = dataset.stores(), dataset.prefix
    whole = [_is_whole(store, prefix, arguments.workers, Console()) for store in stores]
    return 0 if all(whole) else 1


def _is_whole(store: ObjectStore, prefix: str, workers: int, console: Console) -> bool:
    where = f"{store.name}/{prefix}".rstrip("/")

    def show(checked: CheckedObject) -> None:
        if checked.problem:
            console.print(Text(f"{where}/{checked.path}: {checked.problem}"), soft_wrap=True)

    with step_bars({"verify": where}) as on_progress:
        found = verify_dataset(
            store, prefix, workers=workers, on_checked=show, on_progress=lambda done: on_progress("verify", done)
        )
    damaged, unhashed = sum(bool(each.problem) for each in found), sum(not each.has_digest for each in found)
    sized = f"; {unhashed} have no SHA-256 in the description, so their length alone was checked" if unhashed else ""
    verdict = f"{damaged} of them damaged or missing: copy these again" if damaged else "all as described"
    text = f"{where}: {len(found)} objects, {decimal(sum(each.size for each in found))}, {verdict}{sized}"
    console.print(Text(text), soft_wrap=True)
    return not damaged


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("templar dataset verify", __doc__, "--env-file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", type=folder_path, nargs="?", metavar="FOLDER", help="the dataset in a folder")
    source.add_argument("--from-env", action="store_true", help="the dataset of R2_DATASET_*, in each of its buckets")
    parser.add_argument(
        "--workers", type=whole_number(1), default=WORKERS, metavar="N", help=f"objects read at a time ({WORKERS})"
    )
    return parser.parse_args(words)
