"""Measure which share of a window a miner's device trains, with steps ahead and without them.

    python -m benchmarks.idle [--quick]

For the presets `150M` and `8B`, at their true sizes: how long a window takes to be decided after its close is measured
on a simulated network with the preset's windows, also with one miner of five that withholds its reveals. Transfers at
500 and 110 Mbit/s from 20 peers, compression, outer step and copies are arithmetic, from speeds that were measured
(`templar.training.design`). The device is busy when it takes inner steps.

The last line is JSON, of the preset that is less busy; `holds` says that a device trains at least 0.985 of a window
with steps ahead, and is idle at most 0.05 without them. Steps ahead need one rank: several wait as before.
"""

import logging
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.command import figures_table, measured
from lab.simulate.run import run_nodes, world_for
from templar.hparams import HParams, load_hparams
from templar.neuron.ahead import AHEAD_SHARE
from templar.training.design import COMBINE_SECONDS, DISK_BYTES_PER_SECOND, FINISH_BYTES, bits_per_parameter
from templar.training.device import num_parameters

PRESETS = ("150M", "8B")
PEERS, DOWN, UP = 20, 500e6, 110e6  # miners, and bits per second of a link
COPY_BYTES, COPY_BYTES_PER_SECOND = 24, 10e9  # per parameter: parameters and moments, from the device and back
WINDOWS, HONEST, WITHHOLDING = 4, ("honest",) * 5, ("honest",) * 4 + ("silent",)
LEAST_BUSY, MOST_IDLE = 0.985, 0.05


@dataclass(frozen=True)
class Phases:
    """Seconds of one window of a miner."""

    window: float
    finish: float  # from the last inner step to the payload on the disk
    margins: float  # from then to the close
    decided: float  # from the close to the decision, the transfers included
    withheld: float  # the same, with a miner that withholds its reveal
    applied: float  # the outer step
    copies: float  # what steps ahead cost

    @property
    def idle(self) -> float:
        """The share of the window without inner steps, if the device waits."""
        return (self.finish + self.margins + self.decided + self.applied) / self.window

    @property
    def idle_withholding(self) -> float:
        """The same, with a miner that withholds its reveal."""
        return self.idle + (self.withheld - self.decided) / self.window

    @property
    def idle_ahead(self) -> float:
        """The share without inner steps, if the next ones are taken meanwhile: they are a tenth of all at most."""
        most = AHEAD_SHARE * (1 - self.idle) * self.window
        left = max(0.0, self.margins + self.decided + self.applied - most)
        return (self.finish + self.copies + left) / self.window


def phases(hparams: HParams, windows: int) -> Phases:
    """The phases of a preset's window."""
    rules, count = hparams.windows, num_parameters(hparams.model)
    length, k = hparams.gradient.target_chunk**2, hparams.gradient.topk_compression
    payload = count * bits_per_parameter(length, k) / 8
    late = max(0.0, 8 * payload / UP + 8 * PEERS * payload / DOWN - rules.settle_delay_seconds)
    return Phases(
        window=rules.seconds,
        finish=FINISH_BYTES * count / DISK_BYTES_PER_SECOND,
        margins=rules.train_margin_seconds + rules.commit_guard_seconds,
        decided=late + decided_after(hparams, HONEST, windows),
        withheld=late + decided_after(hparams, WITHHOLDING, windows),
        applied=4 * count / DISK_BYTES_PER_SECOND + COMBINE_SECONDS * k / length * count * PEERS,
        copies=COPY_BYTES * count / COPY_BYTES_PER_SECOND,
    )


def decided_after(hparams: HParams, actors: tuple[str, ...], windows: int) -> float:
    """Seconds from the close of a window to its decision, the mean on a simulated network with a small model."""
    logging.disable(logging.WARNING)  # of what the withholding miner does not publish
    small = load_hparams("simulation", overrides={"windows": hparams.windows.model_dump()})
    seconds: list[float] = []
    with world_for(small, windows, seed=1, actors=actors, training=False) as world:
        nodes = run_nodes(
            world,
            windows,
            lambda node, window: seconds.append(world.clock.now() - node.exchange.times(window).closed),
        )
        for node in nodes.values():
            node.stop()
    return sum(seconds) / len(seconds)


def run(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    found = {name: phases(load_hparams(name), 2 if quick else WINDOWS) for name in PRESETS}
    columns = ("preset", "window, s", "close to decision, s", "with a withholder, s", "idle", "busy", "busy, ahead")
    table = figures_table("a miner's window", *columns)
    for name, each in found.items():
        shares = (f"{share:.4f}" for share in (each.idle, 1 - each.idle, 1 - each.idle_ahead))
        table.add_row(name, f"{each.window:.0f}", f"{each.decided:.1f}", f"{each.withheld:.1f}", *shares)
    Console(width=120).print(table)
    busy, idle = 1 - max(each.idle_ahead for each in found.values()), max(each.idle for each in found.values())
    withholding = max(each.idle_withholding for each in found.values())
    return {
        "busy_fraction": round(busy, 4),
        "idle_fraction": round(idle, 4),
        "idle_fraction_one_withholding": round(withholding, 4),
        "holds": busy >= LEAST_BUSY and idle <= MOST_IDLE,
    }


if __name__ == "__main__":
    sys.exit(measured("idle", __doc__, run, quick="two windows"))
