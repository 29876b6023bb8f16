"""Build a training dataset from files on this machine, and upload it if a bucket is named.

    templar dataset build --source books --source edu=hf:ORG/NAME --layout shards --out dataset

Text files, Parquet, Arrow (`datasets.save_to_disk`) and JSON lines are read, and splits of Hugging Face datasets are
streamed; see docs/dataset.md. With `--dask`, the workers of a Dask cluster share the work.
The keys of the bucket come from the environment alone: R2_DATASET_WRITE_ACCESS_KEY_ID and
R2_DATASET_WRITE_SECRET_ACCESS_KEY. After a failure, run it again.
"""

import argparse
import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from blocks.env_file import read_environment
from deployments.neuron.status import folding_table
from deployments.options import command_parser
from deployments.work_pool import require_server
from flows.build_dataset import build_dataset
from tasks.datasets import DASK_ADDRESS, upload_target
from templar.arguments import account_id, folder_path, whole_number
from templar.data.dataset import CARD_FILE
from templar.datasets.build_dataset import BuiltDataset, build, built_at
from templar.datasets.documents import TEXT_SUFFIXES, source_from_text
from templar.datasets.page_writer import upload_dataset
from templar.datasets.plan import CHOICES, BuildRequest, BuildSettings, DatasetLayout

RESUMABLE = True

NUMBERS = {
    "vocab_size": "most ids of an embedded tokenizer",
    "tokenizer_chars": "characters that an embedded tokenizer is trained on, about",
    "sequence_length": "shards: tokens per sample",
    "samples_per_shard": "shards: samples of a shard",
    "block_bytes": "shards: length of the blocks that are hashed",
    "row_chars": "pages: most characters in a row",
    "rows_per_group": "pages: rows in a Parquet row group",
    "shard_rows": "pages: most rows in a file",
}
"""The whole numbers among the settings."""
_STEPS = {"read": "reading the sources", "parts": "making the parts", "assemble": "assembling"}


def main(words: Sequence[str] | None = None) -> int:
    """Build, upload where that was asked for, and print the results; 0 if the dataset is complete."""
    # A wrong environment is refused before anything is touched.
    (request, arguments), console = _arguments(words), Console()
    target = None
    if arguments.to_account is not None:
        environment = read_environment(arguments.env_file)
        target = upload_target(environment, arguments.to_account, arguments.to_bucket, arguments.to_prefix)
    if arguments.dask is None:
        with step_bars(_STEPS) as on_progress:
            built = build(request, workers=arguments.workers, on_progress=on_progress)
    else:
        built = _build_on_dask(request, arguments)
    _show(built, console)
    if target is not None:
        store, prefix = target
        with step_bars({"upload": "uploading"}) as on_progress:
            uploaded = upload_dataset(built.root, store, prefix, on_progress=lambda done: on_progress("upload", done))
        where = f"{store.name}/{prefix}".rstrip("/")
        text = (
            f"uploaded to {where}: {uploaded.num_objects} objects, {decimal(uploaded.num_bytes)}; "
            f"{uploaded.num_already_there} were there already"
        )
        console.print(Text(text), soft_wrap=True)
    return 0


def _build_on_dask(request: BuildRequest, arguments: argparse.Namespace) -> BuiltDataset:
    """Run the flow, which Prefect's server and its log show."""
    require_server()
    flow = build_dataset(
        arguments.source,
        str(request.root),
        settings=request.settings,
        column=arguments.column,
        suffixes=tuple(arguments.suffix or TEXT_SUFFIXES),
        workers=arguments.workers,
        dask=arguments.dask,
    )
    asyncio.run(flow)
    return built_at(request.root)


@contextmanager
def step_bars(steps: Mapping[str, str]) -> Iterator[Callable[[str, float], None]]:
    """Bars for some steps, name -> text; yields what moves a step's bar to a percentage."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {step: progress.add_task(text, total=100) for step, text in steps.items()}
        yield lambda step, percentage: progress.update(bars[step], completed=percentage)


def _show(built: BuiltDataset, console: Console) -> None:
    """Print a dataset's card: a row per source and split, and a summary."""
    rows = built.card.rows()
    numbers = rows[0].keys() - {"source", "split"}
    console.print(folding_table(*rows[0], rows=(row.values() for row in rows), right=numbers))
    size = decimal(built.num_bytes)
    text = f"{built.card.layout} dataset {built.card.digest}, {size}; its card: {built.root / CARD_FILE}"
    console.print(Text(text), soft_wrap=True)


def _arguments(words: Sequence[str] | None) -> tuple[BuildRequest, argparse.Namespace]:
    parser = command_parser("templar dataset build", __doc__, "--env-file")
    defaults = {each.name: each.default for each in fields(BuildSettings)}
    parser.add_argument(
        "--source", action="append", required=True, metavar="PATH", help="file, folder, hf:PATH, or NAME=..."
    )
    parser.add_argument(
        "--layout", type=DatasetLayout, choices=[*DatasetLayout], required=True, help="shards (tokens) or pages (text)"
    )
    parser.add_argument("--out", type=folder_path, required=True, metavar="FOLDER", help="the folder to make")
    parser.add_argument("--column", default="text", help="column, or key of a line, that holds the text (text)")
    parser.add_argument("--suffix", action="append", metavar=".END", help=f"text files ({' '.join(TEXT_SUFFIXES)})")
    parser.add_argument(
        "--tokenizer", default=defaults["tokenizer"], help="embedded, a folder or a Hugging Face id (embedded)"
    )
    parser.add_argument(
        "--held-out-fraction",
        type=float,
        default=defaults["held_out_fraction"],
        metavar="X",
        help=f"part of each source's characters to hold out, in (0, 1) ({defaults['held_out_fraction']})",
    )
    for name, text in NUMBERS.items():
        option = f"--{name.replace('_', '-')}"
        shown = f"{text} ({defaults[name] or 'by size'})"
        parser.add_argument(option, type=whole_number(1), default=defaults[name], metavar="N", help=shown)
    for name, text in (("packing", "how documents fill samples"), ("compression", "how blocks of tokens are stored")):
        shown = f"shards: {text} ({defaults[name]})"
        parser.add_argument(f"--{name}", choices=CHOICES[name], default=defaults[name], help=shown)
    parser.add_argument("--mixture", default="", metavar="NAME=X,...", help="weights of the sources (all their text)")
    parser.add_argument("--license", default="", metavar="ID", help="for the card: of the texts, such as odc-by")
    parser.add_argument("--language", default="", metavar="CODES", help="for the card: of the texts, such as en,de")
    parser.add_argument("--workers", type=whole_number(1), metavar="N", help="threads; one per processor by default")
    parser.add_argument(
        "--dask", type=_dask_address, metavar="ADDRESS", help="a scheduler, tcp://HOST:PORT, whose workers do the work"
    )
    parser.add_argument("--to-account", type=account_id, metavar="ID", help="upload: account that owns the bucket")
    parser.add_argument("--to-bucket", metavar="NAME", help="upload: the bucket; the account's name by default")
    parser.add_argument("--to-prefix", metavar="PATH", help="upload: folder; DATASET_BINS_PATH by default")
    arguments = parser.parse_args(words)
    if arguments.to_account is None and not (arguments.to_bucket is None and arguments.to_prefix is None):
        parser.error("--to-bucket and --to-prefix go with --to-account")
    suffixes, column = arguments.suffix or TEXT_SUFFIXES, arguments.column
    others = {name: getattr(arguments, name) for name in (*NUMBERS, *CHOICES, "mixture", "license", "language")}
    try:
        sources = tuple(source_from_text(text, column=column, suffixes=suffixes) for text in arguments.source)
        settings = BuildSettings(arguments.layout, arguments.held_out_fraction, arguments.tokenizer, **others)
        return BuildRequest(sources, arguments.out, settings), arguments
    except ValueError as error:
        parser.error(str(error))


def _dask_address(text: str) -> str:
    if not re.fullmatch(DASK_ADDRESS, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a scheduler: write tcp://HOST:PORT")
    return text
