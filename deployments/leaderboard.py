"""Show the standings of the miners and the newest checkpoints on held-out text, from what validators have published.

    templar leaderboard [--validator 2] [--windows 100] [--csv history.csv] [--plot leaderboard.svg]

The network is that of `--env-file`, of the block `--neuron`, or the local one; no file is written but those that are
asked for. By default the validator is the one with the most stake that has evidence.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.neuron.status import folding_table
from deployments.options import command_parser
from deployments.reading import open_network
from tasks.evidence import evaluations_of
from templar.arguments import whole_number
from templar.errors import PermanentError
from templar.reports.checkpoint_evaluation import HeldOut
from templar.reports.history import Published, read_recent
from templar.reports.leaderboard import Leaderboard, draw
from templar.reports.training_curve import newest_evaluations
from templar.store.files import replacing

LEAST_WIDTH = 185  # least characters of a line, also in narrower terminals: a table that is cut off is of no use
HOTKEY_WIDTH = 12  # characters of a hotkey in the terminal; a CSV file has all of them


def show(published: Published, board: Leaderboard, held_out: HeldOut, console: Console) -> None:
    """Print what was read, the standings and what they come to, and the newest evaluations of checkpoints."""
    console.print(Text(published.summary), soft_wrap=True)
    rows = board.cells()
    table = Table()
    for column in rows[0] if rows else ():
        is_text = column in ("hotkey", "trend", "slashes")
        table.add_column(
            column,
            justify="left" if is_text else "right",
            max_width=HOTKEY_WIDTH if column == "hotkey" else None,
            no_wrap=column != "slashes",
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row.values()))
    console.print(table)
    console.print(Text(board.summary), soft_wrap=True)
    if rows := newest_evaluations(held_out.points):
        console.print(Text(f"held-out text: the newest {len(rows)} of {len(held_out.points)} measured checkpoints"))
        console.print(folding_table(*rows[0], rows=(row.values() for row in rows)))
    for error in held_out.left_out.values():
        console.print(Text(f"left out: {error}"), soft_wrap=True)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line; 0 if there was something to show."""
    parser = command_parser("templar leaderboard", __doc__, "--neuron", "--env-file", "--validator")
    parser.add_argument("--windows", type=whole_number(1), default=100, metavar="N", help="the last N closed windows")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one row per window and miner")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draw the curves; ends with .svg")
    arguments, console = parser.parse_args(words), Console()
    # 1. Read.
    config = open_network(arguments).config
    with closing(config.buckets):
        published, held_out = read_recent(config, arguments.windows, uid=arguments.validator), evaluations_of(config)
    if not published.evidences:
        raise PermanentError(published.left_out[-1][1].reason, published.summary)
    # 2. Print.
    board, is_narrow = Leaderboard(published.evidences), console.width < LEAST_WIDTH
    show(published, board, held_out, Console(width=LEAST_WIDTH) if is_narrow else console)
    # 3. Write the files that are asked for, whole or not at all.
    if arguments.csv is not None:
        with replacing(arguments.csv) as file:
            file.write(board.history.to_csv(index=False).encode())
    if arguments.plot is not None:
        with replacing(arguments.plot) as file:
            file.write(draw(board))
    return 0


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"{text!r} is not an SVG file: let it end with .svg")
    return path
