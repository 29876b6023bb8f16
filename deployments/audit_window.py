"""Rebuild windows from public objects, and say whether rosters and evidence are what follows from them.

    templar audit [--first 10 --last 19] [--validator 2] [--tolerance 1e-4]

The network is that of `--env-file`, of the block `--neuron`, or the local one; no wallet or bucket is needed. Without
a window it is the newest final one that there is evidence of. The exit status is 0 if everything was verified, 1 if
something differs, 2 if something could not be audited.
"""

import argparse
import math
from collections.abc import Sequence

from deployments.options import command_parser
from deployments.reading import open_network
from tasks.observing import auditing
from templar.arguments import whole_number
from templar.audit.evidence_audit import Auditor
from templar.errors import Reason, TemplarError

VERIFIED, DIFFERS, FAILED = 0, 1, 2


def audit(auditor: Auditor, window: int, validator: int | None) -> int:
    """Audit a window and print a line for each part, difference and note; the exit status that it makes."""
    try:
        found = auditor.audit(window, validator)
    except TemplarError as error:
        if error.reason is Reason.STOPPED:
            raise
        print(f"window {window}: not audited {error}")
        return FAILED
    for part in found.parts:
        print(f"window {window}: {part.summary}, {part.seconds:.1f} s")
        for difference in part.differences[1:]:
            print(f"  {difference}")
        for note in part.notes:
            print(f"  note: {note}")
    if found.verified:
        return VERIFIED
    return FAILED if found.differing is None else DIFFERS


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and audit all that is asked for; the exit status."""
    parser = command_parser("templar audit", __doc__, "--neuron", "--env-file", "--validator")
    parser.add_argument("--first", type=whole_number(0), metavar="W", help="the first window")
    parser.add_argument("--last", type=whole_number(0), metavar="W", help="the last window")
    parser.add_argument(
        "--tolerance", type=_tolerance, metavar="X", help="of measured numbers, relative; as stated in docs by default"
    )
    arguments = parser.parse_args(words)
    if None not in (arguments.first, arguments.last) and arguments.first > arguments.last:
        parser.error(f"--first {arguments.first} comes after --last {arguments.last}")
    with auditing(open_network(arguments).config, arguments.tolerance) as auditor:
        last = arguments.last
        if last is None:
            last = max(auditor.newest_window(arguments.validator), arguments.first or 0)
        first = arguments.first if arguments.first is not None else last
        statuses = [audit(auditor, window, arguments.validator) for window in range(first, last + 1)]
    return DIFFERS if DIFFERS in statuses else max(statuses, default=FAILED)


def _tolerance(text: str) -> float:
    try:
        tolerance = float(text)
    except ValueError:
        tolerance = math.nan
    if not 0 <= tolerance < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up to 1")
    return tolerance
