"""Measure whether a network learns as well with our wire code as with the reference's of more than twice the bytes.

    python -m benchmarks.codec_quality [--quick] [--plot PATH]

Four workers train a small model on real text (`pseudo_gradients`), twice from the same parameters on the same data,
once for each code: ours with a sign and one scale per chunk, and the reference's with four levels per tensor. The last
line is JSON; losses are those of held-out text after the last window, in nats per token, means over the seeds. It exits
with 1 if ours is more than half a percent above the reference's.
"""

import operator
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import command_line, finish
from benchmarks.pseudo_gradients import Codec, Setup, embedded_text, ours, reference, train
from templar.training.model import build_model

NUM_WORKERS = 4
WINDOWS_PER_EVALUATION = 5
LARGEST_RATIO = 1.005  # the bar: held-out loss with our code over that with the reference's


@dataclass(frozen=True)
class Kind:
    """One of the compared codes."""

    name: str  # in the last line
    label: str  # in tables and pictures
    codec: Codec
    colour: str


OURS = Kind("ours", "sign and scale (ours)", ours, "#0b6e99")
REFERENCE = Kind("reference", "four levels per tensor (reference)", reference, "#d9730d")
KINDS = (OURS, REFERENCE)


@dataclass(frozen=True)
class Curve:
    """The losses of one code over the windows."""

    windows: tuple[int, ...]  # outer steps before each evaluation, the first one 0
    losses: tuple[tuple[float, ...], ...]  # held-out, by seed and evaluation
    payload_bytes: float  # mean of all payloads

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean loss over the seeds, by evaluation."""
        return tuple(map(statistics.fmean, zip(*self.losses, strict=True)))

    @property
    def final(self) -> float:
        """Mean loss over the seeds after the last window."""
        return self.mean[-1]

    def over(self, other: "Curve") -> list[float]:
        """This code's final loss over another's, by seed."""
        return [mine[-1] / theirs[-1] for mine, theirs in zip(self.losses, other.losses, strict=True)]


def measure(setups: Sequence[Setup], kind: Kind) -> Curve:
    """Train with one code, once per seed."""
    losses: list[tuple[float, ...]] = []
    num_bytes: list[int] = []
    windows: list[int] = []
    for setup in setups:
        windows, one = [0], [setup.held_out_loss(build_model(setup.hparams.model))]
        last = len(setup.sequences)
        for window in train(setup, kind.codec):
            num_bytes += window.exchange.num_bytes
            done = window.learnt.window + 1
            if done % WINDOWS_PER_EVALUATION == 0 or done == last:
                windows.append(done)
                one.append(setup.held_out_loss(window.net))
        losses.append(tuple(one))
    return Curve(tuple(windows), tuple(losses), statistics.fmean(num_bytes))


def run(windows: int, seeds: int, plot: Path | None = None) -> dict[str, Any]:
    """Measure both codes, print the table, and return the figures."""
    with embedded_text() as text:
        setups = [Setup.of(text, seed=seed, workers=NUM_WORKERS, windows=windows) for seed in range(seeds)]
        curves = {kind.name: measure(setups, kind) for kind in KINDS}
    _print(curves)
    ratio = curves[OURS.name].final / curves[REFERENCE.name].final
    verdict = "holds" if ratio <= LARGEST_RATIO else "does NOT hold"
    print(f"the bar {verdict}: with our code the loss is {ratio:.4f} of the reference's, at most {LARGEST_RATIO}")
    if plot is not None:
        draw(curves, plot)
    return {
        **{f"loss_{name}": round(curve.final, 4) for name, curve in curves.items()},
        "ratio": round(ratio, 5),
        **{f"bytes_{name}": round(curve.payload_bytes) for name, curve in curves.items()},
        "windows": windows,
        "seeds": seeds,
        "parameters": setups[0].layout.num_elements,
        "holds": ratio <= LARGEST_RATIO,
    }


def _print(curves: dict[str, Curve]) -> None:
    base = curves[REFERENCE.name]
    last = len(base.windows) - 1
    places = sorted({-(-last * quarter // 4) for quarter in (1, 2, 3, 4)})
    table = Table(title=f"held-out loss of {NUM_WORKERS} workers, mean of {len(base.losses)} seeds")
    table.add_column("code")
    columns = ["bytes", *(f"window {base.windows[place]}" for place in places)]
    for column in (*columns, "last / reference's, by seed"):
        table.add_column(column, justify="right")
    for kind in KINDS:
        curve = curves[kind.name]
        losses = [f"{curve.mean[place]:.4f}" for place in places]
        ratios = " ".join(f"{ratio:.4f}" for ratio in curve.over(base))
        table.add_row(kind.label, f"{curve.payload_bytes:.0f}", *losses, ratios)
    Console(width=140).print(table)


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Write the curves, and their differences from the reference's, as an SVG whose bytes follow from the figures."""
    import matplotlib as mpl  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    style: dict[Any, Any] = {"svg.hashsalt": "templar", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}
    bare: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.4}
    with mpl.rc_context(style | bare):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        losses, differences = figure.subplots(1, 2)
        base = curves[REFERENCE.name]
        for kind in KINDS:
            curve = curves[kind.name]
            label = f"{kind.label}: {curve.payload_bytes:,.0f} bytes"
            losses.plot(curve.windows, curve.mean, color=kind.colour, label=label)
            gaps = [list(map(operator.sub, *pair)) for pair in zip(curve.losses, base.losses, strict=True)]
            differences.plot(curve.windows, list(map(statistics.fmean, zip(*gaps, strict=True))), color=kind.colour)
            for gap in gaps if kind is not REFERENCE else ():
                differences.plot(curve.windows, gap, color=kind.colour, linewidth=0.6, alpha=0.45)
        bar = [(LARGEST_RATIO - 1) * loss for loss in base.mean]
        differences.plot(base.windows, bar, color=REFERENCE.colour, linewidth=0.8, linestyle=":")
        losses.set(title=f"held-out loss, nats per token, mean of {len(base.losses)} seeds", xlabel="window")
        losses.legend(frameon=False, fontsize=7, loc="upper right")
        differences.set(title="above the reference's; thin: each seed; dotted: the bar", xlabel="window")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main() -> int:
    """Parse the command line, measure, print."""
    parser = command_line("codec_quality", __doc__, quick="few windows of one seed, within a minute")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the curves as an SVG")
    arguments = parser.parse_args()
    return finish(run(10, 1, arguments.plot) if arguments.quick else run(60, 3, arguments.plot))


if __name__ == "__main__":
    sys.exit(main())
