"""Step: put a validator's evidence of many windows side by side."""

from dataclasses import dataclass

from prefect import task

from tasks.artifacts import picture, table
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.errors import PermanentError, Reason
from templar.housekeeping.published_scores import Published, read_recent
from templar.scoring.leaderboard import Leaderboard, draw, leaderboard


@dataclass(frozen=True)
class Standings:
    """What was shown.

    Attributes:
        summary: In a line.
        skipped: Why nothing was; None if something was.
    """

    summary: str
    skipped: Reason | None = None


@task(task_run_name="show leaderboard", **HOUSEKEEPING)
def show_leaderboard(neuron: str, windows: int, validator: int | None) -> Standings:
    """See `templar.neuron.leaderboard.read_recent`. The standings are a table artifact, their curves a picture."""
    published = _read(neuron, windows, validator)
    if isinstance(published, Standings):
        return published
    board = leaderboard(published.evidences)
    table(f"leaderboard-{neuron}", board.cells(), f"{published.summary}: {board.summary}")
    return Standings(f"{published.summary}: {board.summary}{_show_plot(neuron, board, published)}")


def _read(neuron: str, windows: int, validator: int | None) -> Published | Standings:
    """The evidence, or why there is none to show."""
    premises = load_block(neuron).premises()
    try:
        published = read_recent(premises, windows, uid=validator)
    except PermanentError as error:
        if error.reason is not Reason.EVIDENCE_MISSING:
            raise
        return Standings(error.message, error.reason)
    finally:
        premises.buckets.close()
    return published if published.evidences else Standings(published.summary, published.left_out[-1].reason)


def _show_plot(neuron: str, board: Leaderboard, published: Published) -> str:
    """Show the plot; why there is none, for the end of a line."""
    try:
        picture(f"leaderboard-plot-{neuron}", draw(board), published.summary)
    except PermanentError as error:
        return f"; no plot: {error}"
    return ""
