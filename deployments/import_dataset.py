"""Make a dataset of a folder in one of the reference's layouts: files are linked, what is missing is written.

    templar dataset import tokenized --tokenizer google/gemma-3-270m --out dataset
    templar dataset import fineweb-edu-score-2 --out dataset

The folder holds `train_000000.npy` and so on, flat tokens without manifests, or a folder of Parquet files per config,
with or without a `_shard_sizes.json` whose paths begin with a bucket. It is not changed. After a failure, run it again.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from deployments.build_dataset import step_bars
from deployments.options import command_parser
from templar.arguments import folder_path, whole_number
from templar.data.tokenizer import load_tokenizer
from templar.datasets.importing import import_dataset

RESUMABLE = True


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, import, and print the result; 0 if the dataset is complete."""
    parser, arguments = _arguments(words)
    try:
        tokenizer = None if arguments.tokenizer is None else load_tokenizer(arguments.tokenizer)
        with step_bars({"read": "reading the files"}) as on_progress:
            imported = import_dataset(
                arguments.folder,
                arguments.out,
                tokenizer=tokenizer,
                dtype=arguments.dtype,
                sequence_length=arguments.sequence_length,
                held_out_samples=arguments.held_out_samples,
                workers=arguments.workers,
                on_progress=lambda done: on_progress("read", done),
            )
    except ValueError as error:
        parser.error(str(error))
    linked = imported.num_files - imported.num_copied
    text = f"{imported.layout} dataset in {imported.root}: {linked} files linked, {imported.num_copied} copied"
    Console().print(Text(text), soft_wrap=True)
    return 0


def _arguments(words: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = command_parser("templar dataset import", __doc__)
    parser.add_argument("folder", type=folder_path, metavar="FOLDER", help="the folder to import")
    parser.add_argument("--out", type=folder_path, required=True, metavar="FOLDER", help="the folder to make")
    parser.add_argument("--tokenizer", metavar="NAME", help="a folder or a Hugging Face id; shards need it")
    parser.add_argument(
        "--dtype", choices=("uint16", "uint32"), default="uint32", help="shards without NumPy header: a token (uint32)"
    )
    parser.add_argument(
        "--sequence-length", type=whole_number(1), default=2048, metavar="N", help="shards: tokens per sample (2048)"
    )
    held_out = "shards: samples of the last one to hold out (5 %% of it, 65536 at most)"
    parser.add_argument("--held-out-samples", type=whole_number(1), metavar="N", help=held_out)
    parser.add_argument("--workers", type=whole_number(1), metavar="N", help="threads; one per processor by default")
    arguments = parser.parse_args(words)
    if arguments.out.is_relative_to(arguments.folder) or arguments.folder.is_relative_to(arguments.out):
        parser.error(f"--out {arguments.out} and {arguments.folder} lie in one another: name another folder")
    return parser, arguments
