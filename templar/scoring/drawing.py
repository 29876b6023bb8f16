"""The leaderboard as a picture: the loss, the final scores with their penalties, and the weights, by window."""

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from templar.errors import PermanentError, Reason
from templar.scoring.leaderboard import Leaderboard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Literal["svg", "png"]
FORMS: dict[str, Form] = {".svg": "svg", ".png": "png"}
"""Ending of a file's name -> form."""

NAMED = 10
"""The best miners have lines and names, as many as the palette has colours; all others are within a grey band."""
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "templar",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 2.5,
}


def draw(board: Leaderboard, *, form: Form = "svg") -> bytes:
    """Draw a leaderboard; the same one gives the same bytes. Gaps are gaps in the lines.

    Args:
        board: The leaderboard.
        form: SVG, or PNG.

    Raises:
        PermanentError: `bad_environment`; matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise PermanentError(
            Reason.BAD_ENVIRONMENT,
            "matplotlib is not installed, and it draws the plot: install the extra `plot`, `pip install -e '.[plot]'`",
        )
    import matplotlib as mpl  # noqa: PLC0415 - a second of start-up, only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 7), layout="constrained")
        loss, finals, weights = figure.subplots(3, 1, sharex=True, height_ratios=(2, 4, 3))
        _line(loss, board.losses, color="black")
        loss.set(title=f"loss of the evaluation batch, as uid {board.newest.uid} measured it (nats per token)")
        _draw_miners(finals, board, board.finals)
        finals.set(title="final score; grey: all others; a cross is a penalty")
        _mark_slashes(finals, board)
        _draw_miners(weights, board, board.weights)
        weights.set(title="weight", xlabel="window", ylim=(0, None))
        weights.xaxis.get_major_locator().set_params(integer=True)
        names = finals.get_legend_handles_labels()
        figure.legend(*names, loc="outside right upper", frameon=False, fontsize=8)
        target = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
        figure.savefig(target, format=form, metadata=metadata)
    return target.getvalue()


def _draw_miners(axes: "Axes", board: Leaderboard, table: pd.DataFrame) -> None:
    """One line for each of the best, the very best uppermost, over the band of all others."""
    others = table.iloc[:, NAMED:]
    if others.shape[1]:
        axes.fill_between(table.index, others.min(axis=1), others.max(axis=1), color="0.88", linewidth=0)
    for place, (uid, hotkey) in enumerate(zip(board.standings["uid"], table.columns[:NAMED], strict=False)):
        _line(axes, table[hotkey], color=f"C{place}", label=f"uid {uid}", zorder=3 - place / NAMED)


def _line(axes: "Axes", values: "pd.Series[float]", **style: Any) -> None:
    """A line with gaps; a window between two gaps, of which no line could be seen, is a point."""
    known = values.notna()
    alone = known & ~known.shift(1, fill_value=False) & ~known.shift(-1, fill_value=False)
    axes.plot(values.index, values, marker="o", markevery=alone.to_numpy(), **style)


def _mark_slashes(axes: "Axes", board: Leaderboard) -> None:
    """A cross on the line of each of the best, in every window in which it was punished."""
    history, named = board.history, board.finals.columns[:NAMED]
    marked = history[history["hotkey"].isin(named) & (history["slashes"] != "")]
    crosses: dict[str, Any] = {"color": "black", "linestyle": "none", "marker": "x", "markersize": 4, "zorder": 4}
    axes.plot(marked["window"], marked["final"], **crosses)
