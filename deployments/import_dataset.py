"""Make a dataset of a folder in one of the reference's layouts: files are linked, what is missing is written.

    templar dataset import tokenized --tokenizer google/gemma-3-270m --out dataset
    templar dataset import fineweb-edu-score-2 --out dataset
    templar dataset import s3://BUCKET/FOLDER --tokenizer google/gemma-3-270m --prefix anneal --out anneal

The folder holds `train_000000.npy` and so on, flat tokens without manifests, or a folder of Parquet files per config,
with or without a `_shard_sizes.json` whose paths begin with a bucket. It is not changed. After a failure, run it again.
A bucket's folder is fetched first, with the key R2_DATASET_READ_*, to a folder beside the new one.
"""

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from blocks.buckets import open_folder
from blocks.env_file import read_environment
from deployments.build_dataset import step_bars
from deployments.options import command_parser
from templar.arguments import folder_path, whole_number
from templar.data.tokenizer import load_tokenizer
from templar.datasets.importing import PREFIXES, fetch_original, import_dataset

RESUMABLE = True


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, import, and print the result; 0 if the dataset is complete."""
    parser, arguments = _arguments(words)
    try:
        tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
        with step_bars({"fetch": "fetching the files", "read": "reading the files"}) as on_progress:
            folder = _original(arguments, lambda done: on_progress("fetch", done))
            imported = import_dataset(
                folder,
                arguments.out,
                tokenizer=tokenizer,
                dtype=arguments.dtype,
                sequence_length=arguments.sequence_length,
                held_out_samples=arguments.held_out_samples,
                prefix=arguments.prefix,
                workers=arguments.workers,
                on_progress=lambda done: on_progress("read", done),
            )
    except ValueError as error:
        parser.error(str(error))
    if folder != arguments.folder:
        shutil.rmtree(folder)  # its files have a second name in the dataset
    linked = imported.num_files - imported.num_copied
    text = f"{imported.layout} dataset in {imported.root}: {linked} files linked, {imported.num_copied} copied"
    Console().print(Text(text), soft_wrap=True)
    return 0


def _original(arguments: argparse.Namespace, on_progress: Callable[[float], None]) -> Path:
    """The folder to import; of a bucket, a copy beside the new dataset."""
    if isinstance(arguments.folder, Path):
        on_progress(100)
        return arguments.folder
    store, place = open_folder(arguments.folder, read_environment(arguments.env_file), "dataset")
    copy = Path(f"{arguments.out}.fetched")
    fetch_original(store, place, copy, workers=arguments.workers, on_progress=on_progress)
    return copy


def _source(text: str) -> Path | str:
    """A bucket's folder as it was written, or a folder."""
    return text if text.startswith("s3://") else folder_path(text)


def _arguments(words: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command_parser("templar dataset import", __doc__, "--env-file")
    parser.add_argument("folder", type=_source, metavar="FOLDER", help="the folder to import, or s3://BUCKET/FOLDER")
    parser.add_argument("--out", type=folder_path, required=True, metavar="FOLDER", help="the folder to make")
    parser.add_argument("--tokenizer", metavar="NAME", help="a folder or a Hugging Face id; shards need it")
    parser.add_argument(
        "--dtype", choices=("uint16", "uint32"), default="uint32", help="shards without NumPy header: a token (uint32)"
    )
    parser.add_argument(
        "--sequence-length", type=whole_number(1), default=2048, metavar="N", help="shards: tokens per sample (2048)"
    )
    held_out = "shards: samples of the last one to hold out (5 %% of it, 65536 at most)"
    parser.add_argument("--prefix", choices=PREFIXES, default=PREFIXES[0], help="shards: what their names begin with")
    parser.add_argument("--held-out-samples", type=whole_number(1), metavar="N", help=held_out)
    parser.add_argument("--workers", type=whole_number(1), metavar="N", help="threads; one per processor by default")
    arguments = parser.parse_args(words)
    source = arguments.folder
    if isinstance(source, Path) and (arguments.out.is_relative_to(source) or source.is_relative_to(arguments.out)):
        parser.error(f"--out {arguments.out} and {source} lie in one another: name another folder")
    return parser, arguments
