"""Merge the shares of a dataset that several machines built, and upload it if a bucket is named.

    templar dataset merge share-1 share-2 share-3 share-4 --out dataset
    templar dataset merge share-* --out dataset --env-file .env --to-account ACCOUNT

Each share is a folder that `templar dataset build --share I/N` made. The shares are checked and left as they are. The
dataset is that of one machine that builds all, byte by byte. After a failure, run it again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from deployments.build_dataset import add_upload_options, parse, show_and_upload, step_bars, target_of
from templar.arguments import folder_path
from templar.datasets.shares import merge_shares

RESUMABLE = True

_STEPS = {"read": "checking the shares", "assemble": "assembling"}


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Merge, upload, and print the results.

    Raises:
        TemplarError: See `merge_shares` and `upload_built`; `bad_environment` before anything is touched.
    """
    target = target_of(arguments)
    with step_bars(_STEPS) as on_progress:
        built = merge_shares(arguments.shares, arguments.out, workers=arguments.workers, on_progress=on_progress)
    show_and_upload(built, target, console)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and merge; 0 if the dataset is complete, and uploaded where that was asked for."""
    arguments = _arguments(words)
    run(arguments, Console())
    return 0


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="templar dataset merge", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shares", nargs="+", type=folder_path, metavar="SHARE", help="the folder of every share")
    parser.add_argument("--out", type=folder_path, required=True, metavar="FOLDER", help="the folder to make")
    add_upload_options(parser)
    arguments = parse(parser, words)
    shares: list[Path] = arguments.shares
    for share in shares:
        if arguments.out.is_relative_to(share) or share.is_relative_to(arguments.out):
            parser.error(f"--out {arguments.out} and share {share} lie in one another: name another folder")
    return arguments
