"""Look into a bucket, delete from it, and check its keys, without a Prefect server: `templar bucket ls|purge|access`.

    templar bucket ls --prefix gradient- --env-file .env
    templar bucket purge --older-than 48 --bucket gradients --delete
    templar bucket access

Keys come from the environment alone: those of R2_GRADIENTS_*, R2_AGGREGATOR_*, R2_DATASET_* or R2_PAGE_*, by its kind.
A purge counts first; with `--delete` it deletes, once the bucket's name was typed or given as `--confirm`. All but
`--wipe` keep what a live network needs; in the dataset's own bucket nothing of the dataset is kept. The flows
`bucket-purge` and `temporary-cleanup` do the same.

`access` writes a few small objects with keys of their own, `access-check-...`, and removes them. The exit status is 0
if all is well, 1 if a key is not as it should be or an object could not be deleted, 2 if the command line is wrong.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import get_args

from rich.console import Console
from rich.text import Text

from blocks.buckets import BucketChoice, BucketRequest, credentials_of, open_for_reading, open_target
from blocks.env_file import read_environment
from blocks.environment import DATASET_VARIABLES, PAGE_VARIABLES, STORAGE_VARIABLES, neuron_from_environment
from deployments.neuron.status import folding_table
from deployments.options import add_shared, command_parser
from tasks.artifacts import cleanup_rows
from templar.errors import PermanentError, Reason, one_line
from templar.housekeeping import maintenance
from templar.housekeeping.access import check_access
from templar.housekeeping.bucket_cleanup import CleanupReport, Criterion, Mode

MAX_KEY = 1024  # characters of a key, the most that S3 has
COLUMNS = ("bucket", "key", "right", "should", "does", "answer", "problem")
SELECTIONS: Mapping[str, tuple[Mode, str]] = {
    "older_than": (Mode.OLDER_THAN, "hours"),
    "prefix": (Mode.PREFIX, "prefix"),
    "suffix": (Mode.SUFFIX, "suffix"),
    "version": (Mode.VERSION, "version"),
    "aggregates": (Mode.AGGREGATES, "version"),
}
"""Options of a purge -> the mode of its criterion, and the field that has the option's value."""


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says; 0 if all is well, 1 if not."""
    arguments = _parser().parse_args(words)
    environment = read_environment(arguments.env_file)
    commands: Mapping[str, Callable[[argparse.Namespace, Mapping[str, str]], int]]
    commands = {"ls": list_objects, "purge": purge, "access": access}
    return commands[arguments.command](arguments, environment)


def list_objects(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print size, time and key of each object, and at last their number and sum."""
    store = open_for_reading(arguments.bucket, _elsewhere(arguments, environment))
    count, total = 0, 0
    for each in store.list(arguments.prefix):
        stamp = datetime.fromtimestamp(each.last_modified, UTC)
        print(f"{each.size:>15,}  {stamp:%Y-%m-%d %H:%M:%S}  {one_line(each.key, MAX_KEY)}")
        count, total = count + 1, total + each.size
    print(f"{count:,} objects, {total:,} bytes in bucket {store.name}", file=sys.stderr)
    return 0


def purge(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Count what is selected, and with `--delete` delete it; 1 if something could not be deleted."""
    # 1. The bucket, and what to do with it.
    environment = _elsewhere(arguments, environment)
    block = neuron_from_environment(environment)
    target = open_target(block, BucketRequest(arguments.bucket), environment)
    chain, hparams = block.subnet.open(None), block.hparams()
    run: Callable[..., CleanupReport]
    if arguments.temporary is not None:
        run = partial(maintenance.clean_temporary, target, chain, hparams, hours=arguments.temporary)
    else:
        run = partial(maintenance.purge_bucket, target, chain, hparams, _criterion(arguments))

    # 2. Count.
    found = run(dry_run=True, confirm_bucket="")
    show_counts(found)
    meant = found.total("found") - found.total("kept")
    print(f"{meant:,} objects of bucket {target.store.name} would go; {found.total('kept'):,} stay for the network")
    if arguments.bucket == "dataset":
        print("this bucket is the dataset's: nothing of the dataset is kept")
    if not (arguments.delete and meant):
        return 0

    # 3. Delete what is confirmed.
    name = arguments.confirm
    if name is None:
        if not sys.stdin.isatty():
            raise PermanentError(Reason.NOT_CONFIRMED, "--confirm: repeat the bucket's name there, or use a terminal")
        try:
            name = input("type the bucket's name to delete them: ")
        except EOFError:
            name = ""
    target.require_confirmed(name)
    report = run(dry_run=False, confirm_bucket=name)
    show_counts(report)
    print(f"{report.total('deleted'):,} objects were deleted, {report.total('failed'):,} could not be")
    return 1 if report.failed else 0


def access(_: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Find out what each key of an environment can do, and whether it should; a row per right of each key."""
    report = check_access(credentials_of(neuron_from_environment(environment), environment))
    console = Console()
    console.print(folding_table(*COLUMNS, rows=([row.cells[column] for column in COLUMNS] for row in report.rows)))
    console.print(Text(report.summary), soft_wrap=True)
    return 1 if report.problems else 0


def show_counts(report: CleanupReport) -> None:
    """Print a row per kind of object, and one per object that could not be deleted."""
    rows = cleanup_rows(report)
    if rows:
        Console().print(folding_table(*rows[0], rows=(row.values() for row in rows)))
    if report.unseen:
        print(f"[{report.unseen}] unfinished uploads cannot be listed")


def _elsewhere(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment with the storage that the command line names, if it does."""
    if arguments.endpoint_url is None:
        return environment
    own = {"dataset": DATASET_VARIABLES, "page": PAGE_VARIABLES}
    name, *_ = own.get(arguments.bucket, STORAGE_VARIABLES)
    return {**environment, name: arguments.endpoint_url}


def _criterion(arguments: argparse.Namespace) -> Criterion:
    """What the one option of a selection says."""
    for option, (mode, field) in SELECTIONS.items():
        if (value := getattr(arguments, option)) is not None:
            return Criterion(mode, **{field: value})
    return Criterion(Mode.WIPE)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("templar bucket", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    choices = [choice for choice in get_args(BucketChoice) if choice != "account"]
    for name, text in (
        ("ls", "list objects"),
        ("purge", "count what is selected, and delete it"),
        ("access", "what each bucket key of an .env can do, and should"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        add_shared(command, "--env-file")
        if name != "access":
            command.add_argument("--bucket", choices=choices, default="neuron", help="whose variables name it")
            command.add_argument(
                "--endpoint-url", type=_url, metavar="URL", help="in place of the environment's storage"
            )
        if name == "ls":
            command.add_argument("--prefix", default="", help="what keys begin with")
        if name == "purge":
            _add_selections(command)
    return parser


def _url(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: name the storage, or leave the option out")
    return text


def _add_selections(command: argparse.ArgumentParser) -> None:
    one = command.add_mutually_exclusive_group(required=True)
    one.add_argument("--older-than", type=float, metavar="HOURS", help="by age")
    one.add_argument("--prefix", help="by what keys begin with")
    one.add_argument("--suffix", help="by what keys end with")
    one.add_argument("--version", metavar="V", help="by the version in their keys, as in gradient-1-2-v0.2.8")
    one.add_argument("--aggregates", metavar="V", help="aggregates of this version")
    one.add_argument("--temporary", type=float, metavar="HOURS", help="what processes that died left so long ago")
    one.add_argument("--wipe", action="store_true", help="everything, also what a live network needs")
    command.add_argument("--delete", action="store_true", help="delete, once the bucket's name was typed")
    command.add_argument("--confirm", metavar="BUCKET", help="the bucket's name, in place of typing it")
