"""Measure which share of a window a miner's device trains, with its training begun ahead and without that.

    python -m benchmarks.idle [--quick]

For the presets `150M` and `8B`, at their true sizes: when a miner has found all reveals, and when it is done with a
window, is measured on a simulated network with the preset's windows, also with one miner of five that withholds its
reveals. Transfers at 500 and 110 Mbit/s from 20 peers, compression and outer step are arithmetic, from speeds that were
measured (`templar.training.design`). The device is busy when it takes inner steps.

The last line is JSON, of the preset that is less busy; `holds` says that a device trains at least 0.985 of a window
with its training begun ahead, and is idle at most 0.05 without that. A commitment is taken to need a second.
"""

import logging
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.command import figures_table, measured
from lab.simulate.run import run_nodes, world_for
from templar.exchange.gather import GatherReport
from templar.hparams import HParams, load_hparams
from templar.neuron.miner import Miner
from templar.training.design import COMBINE_SECONDS, LEARNED_MARGIN_SECONDS, bits_per_parameter
from templar.training.device import COPIED_BYTES_PER_SECOND, finish_seconds, num_parameters

PRESETS = ("150M", "8B")
PEERS, DOWN, UP = 20, 500e6, 110e6  # miners, and bits per second of a link
WINDOWS, HONEST, WITHHOLDING = 4, ("honest",) * 5, ("honest",) * 4 + ("silent",)
LEAST_BUSY, MOST_IDLE = 0.985, 0.05


@dataclass(frozen=True)
class Phases:
    """Seconds of one window of a miner."""

    window: float
    finish: float  # from the last inner step to the payload on the disk
    margins: float  # from then to the close
    found: float  # from the close until all reveals are here, the transfers included
    decided: float  # from the close until the window is decided and applied
    withheld: float  # as `found`, with a miner that withholds its reveal
    applied: float  # the outer step

    def idle(self, begins: float) -> float:
        """The share of a window without inner steps, if training begins so long after the close, and the step."""
        return (self.finish + self.margins + begins + self.applied) / self.window


def phases(hparams: HParams, windows: int) -> Phases:
    """The phases of a preset's window."""
    rules, count = hparams.windows, num_parameters(hparams.model)
    length, k = hparams.gradient.target_chunk**2, hparams.gradient.topk_compression
    payload = count * bits_per_parameter(length, k) / 8
    transfers = 8 * payload / UP + 8 * PEERS * payload / DOWN
    late = max(0.0, transfers - rules.settle_delay_seconds)
    (found, early), (withheld, settled) = (moments(hparams, actors, windows) for actors in (HONEST, WITHHOLDING))
    return Phases(
        window=rules.seconds,
        finish=finish_seconds(hparams.model, hparams.training.optimizer),
        margins=LEARNED_MARGIN_SECONDS + rules.commit_guard_seconds,
        found=found + transfers,
        decided=min(early + transfers, settled + late),
        withheld=max(withheld, found + transfers),
        applied=4 * count / COPIED_BYTES_PER_SECOND + COMBINE_SECONDS * k / length * count * PEERS,
    )


def moments(hparams: HParams, actors: tuple[str, ...], windows: int) -> tuple[float, float]:
    """When miners have found what there is, and when they are done: seconds after the close, without transfers.

    They are means on a simulated network with a small model.
    """
    small = load_hparams("simulation", overrides={"windows": hparams.windows.model_dump()})
    with world_for(small, windows, seed=1, actors=actors, training=False) as world, noted("foresee") as found:
        with noted("close_window") as done:
            nodes = run_nodes(world, windows)
        for node in nodes.values():
            node.stop()
    return statistics.fmean(found), statistics.fmean(done)


@contextmanager
def noted(step: str) -> Iterator[list[float]]:
    """When miners take a step that gets a report, in seconds after the close, as a list that grows."""
    moments_of, real = list[float](), getattr(Miner, step)

    def noting(node: Miner, report: GatherReport, *args: Any) -> Any:
        moments_of.append(node.chain.clock.now() - node.exchange.times(report.window).closed)
        return real(node, report, *args)

    setattr(Miner, step, noting)
    try:
        yield moments_of
    finally:
        setattr(Miner, step, real)


def run(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    found = {name: phases(load_hparams(name), 2 if quick else WINDOWS) for name in PRESETS}
    columns = ("preset", "window, s", "found, s", "with a withholder, s", "done, s", "busy", "busy, begun ahead")
    table = figures_table("a miner's window, in seconds after its close", *columns)
    for name, each in found.items():
        moments_of = (f"{value:.1f}" for value in (each.found, each.withheld, each.decided))
        shares = (f"{1 - each.idle(begins):.4f}" for begins in (each.decided, each.found))
        table.add_row(name, f"{each.window:.0f}", *moments_of, *shares)
    Console(width=120).print(table)
    busy = 1 - max(each.idle(each.found) for each in found.values())
    idle = max(each.idle(each.decided) for each in found.values())
    withholding = max(each.idle(each.withheld) for each in found.values())
    return {
        "busy_fraction": round(busy, 4),
        "idle_fraction": round(idle, 4),
        "idle_fraction_one_withholding": round(withholding, 4),
        "holds": busy >= LEAST_BUSY and idle <= MOST_IDLE,
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # the nodes warn of what is done to them
    sys.exit(measured("idle", __doc__, run, quick="two windows"))
