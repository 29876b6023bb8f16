"""Measure how fast a snapshot is written and read, beside `torch.save`.

    python -m benchmarks.checkpoint [--quick]

The state is the parameters of a Llama of 100 million parameters: what a neuron's snapshot writes, since it has the
private state by a hard link. The units are measured in the same run: a *copy* of all tensors in new memory, and a *raw
write* of the same bytes to one file, with a SHA-256 over them and an fsync. Everybody waits for the disk, and every
read is of a warm page cache. The least of several rounds counts, in which all take turns: other work on the machine
only ever adds to a time.

* `blocking_x`: copies in the time that the caller waits. Snapshots go on beside it.
* `write_x`: raw writes in the time until everything is on the disk.
* `load_x`: copies in the time until every page of the tensors was read: a mapped file counts when it is touched.
* `load_verified_x`: the same with the state root, or for `torch.load` with the same hash of its tensors.

Besides, `catch_up_x` says how many outer steps a node needs for each window that it missed. A network on simulated time
lives through some windows; its miners publish noise, so nobody trains. Then a node that has nothing but the genesis
applies the first windows one by one, which is an outer step each: payloads are decoded and aggregated, the parameters
changed and hashed. It catches up with the others, which also reads words, rosters and payloads, and writes the journal
and snapshots. Buckets are folders, so nothing waits for a network.

The last line is JSON; `holds` says whether the bars hold. With `--quick` the model has 10 million parameters, whose
figures fixed costs dominate: then the bars are not applied.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.command import figures_table, measured, seconds
from benchmarks.large_model import MODEL
from lab.simulate.run import run_nodes
from lab.simulate.world import START_WINDOW, World
from templar.agreement.state import StateMark, check_mark, parameters_digest, state_root
from templar.exchange.signed import Network
from templar.hparams import HParams, Model, load_hparams
from templar.neuron.catchup import catch_up, decided_settlement
from templar.neuron.snapshot import Snapshots
from templar.shared_results import sharing
from templar.store.files import sync
from templar.training.model import parameter_shapes

ROUNDS = 5
NUMBERS_PER_PAGE = 1024
BARS = {"blocking_x": 1.5, "write_x": 2.0, "load_verified_x": 8.0, "load_x": 3.0}
CATCH_UP_BAR = 1.5
MINERS = 2
STEPS, MISSED = 3, 5  # windows that are applied one by one, and windows that the node catches up with after them
SMALL = MODEL.model_copy(update={"vocab_size": 4000, "hidden_size": 240, "intermediate_size": 640})
NETWORK, PREVIOUS = Network(1, "a" * 64), "b" * 64
Times = dict[str, float]


def copy(params: Mapping[str, Tensor]) -> None:
    """Copy all tensors; the copies are there at the same time."""
    copies = [tensor.clone() for tensor in params.values()]
    del copies


def touch(params: Mapping[str, Tensor]) -> None:
    """Read one number of every page of all tensors."""
    for tensor in params.values():
        tensor.reshape(-1)[::NUMBERS_PER_PAGE].sum()


def raw_write(params: Mapping[str, Tensor], path: Path) -> None:
    """Write the bytes of all tensors to one file, hash them, and wait for the disk."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for tensor in params.values():
            data = tensor.reshape(-1).numpy().data
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def own(params: Mapping[str, Tensor], model: Model, folder: Path) -> Times:
    """A neuron's snapshots."""
    digest = parameters_digest(params)
    mark = StateMark(1, 1, "", PREVIOUS, null=False)
    mark = replace(mark, root=state_root(mark, digest))
    snapshots = Snapshots(folder, NETWORK, kept=2)
    started = time.perf_counter()
    snapshots.begin(params, mark, None)
    blocking = time.perf_counter() - started
    snapshots.wait()
    return {
        "blocking": blocking,
        "write": time.perf_counter() - started,
        "load": seconds(lambda: touch(snapshots.load(mark, model)[0])),
        "load_verified": seconds(lambda: check_mark(snapshots.load(mark, model)[0], mark, "snapshot")),
    }


def torch_save(params: Mapping[str, Tensor], folder: Path) -> Times:
    """`torch.save` and `torch.load`."""
    path = folder / "file"

    def save() -> None:
        torch.save(dict(params), path)
        sync(path)

    load = partial(torch.load, path, weights_only=True)
    written = seconds(save)
    return {
        "blocking": written,
        "write": written,
        "load": seconds(lambda: touch(load())),
        "load_verified": seconds(lambda: parameters_digest(load())),
    }


def measure(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and give the figures."""
    model, rounds = (SMALL, 3) if quick else (MODEL, ROUNDS)
    torch.set_num_threads(1)  # with more, a copy would wait for cores that other work has
    generator = torch.Generator().manual_seed(1)
    params = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(model).items()}
    ways: dict[str, Callable[[Path], Times]] = {
        "templar": partial(own, params, model),
        "torch": partial(torch_save, params),
    }
    units: dict[str, list[float]] = {"copy": [], "raw_write": []}
    found: dict[str, list[Times]] = {name: [] for name in ways}
    # 1. Everybody's turn, several times.
    for _ in range(rounds):
        for name, way in ways.items():
            with TemporaryDirectory(prefix="templar-checkpoint-") as folder:
                units["copy"].append(seconds(lambda: copy(params)))
                units["raw_write"].append(seconds(lambda: raw_write(params, Path(folder, "raw"))))
                Path(folder, "raw").unlink()
                found[name].append(way(Path(folder)))

    # 2. The least time of each, in units.
    unit = {"blocking": "copy", "write": "raw_write", "load": "copy", "load_verified": "copy"}
    ratios = {
        name: {f"{what}_x": round(min(each[what] for each in times) / min(units[by]), 2) for what, by in unit.items()}
        for name, times in found.items()
    }
    figures: dict[str, Any] = {
        "parameters": sum(tensor.numel() for tensor in params.values()),
        "copy_seconds": round(min(units["copy"]), 4),
        "raw_write_seconds": round(min(units["raw_write"]), 4),
        **ratios["templar"],
        "catch_up_x": round(catch_up_x(quick), 2),
        "torch": ratios["torch"],
    }
    figures["missed"] = [] if quick else _missed(ratios, figures["catch_up_x"])
    figures["holds"] = not figures["missed"]
    _print(ratios, figures)
    return figures


def catch_up_x(quick: bool) -> float:
    """The time of a catch-up in outer steps, per missed window.

    Raises:
        RuntimeError: The node did not catch up, or there was a window without payloads.
    """
    last = START_WINDOW + STEPS + MISSED - 1
    with TemporaryDirectory(prefix="templar-catch-up-") as folder:
        # 1. A network lives through all windows.
        world = World(Path(folder), _hparams(quick), seed=1, actors=["honest"] * MINERS, training=False)
        with sharing():
            for node in run_nodes(world, STEPS + MISSED).values():
                node.stop()

        # 2. A node without anything applies the first windows.
        newcomer, steps = world.observer(), list[float]()
        for window in range(START_WINDOW, START_WINDOW + STEPS):
            settlement = decided_settlement(newcomer, window)
            steps.append(seconds(lambda: newcomer.apply(settlement)))  # noqa: B023 - called at once

        # 3. It catches up with the others.
        started = time.perf_counter()
        reached = catch_up(newcomer, last, deadline=world.clock.now())
        taken = time.perf_counter() - started
        applied = [newcomer.journal.applied(window) for window in range(START_WINDOW, last + 1)]
        newcomer.stop()
    if reached != last or not all(each is not None and each.roster is not None for each in applied):
        raise RuntimeError(f"the node reached window {reached} of {last}, or a window had no payloads")
    return taken / (MISSED * min(steps))


def _hparams(quick: bool) -> HParams:
    """A model of 100 million parameters, or of 8 million, and a small vocabulary; the codec's numbers are `150M`'s."""
    hidden, intermediate, layers = (320, 896, 6) if quick else (1024, 2752, 8)
    model = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return load_hparams(
        "local",
        overrides={
            "model": {**model, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256},
            "gradient": load_hparams("150M").gradient.model_dump(),
            "storage": {"checkpoint_frequency": 50, "snapshot_frequency": 4},
        },
    )


def _missed(ratios: Mapping[str, Times], catch_up: float) -> list[str]:
    """The bars that do not hold: the own ones, and being ahead of `torch.save`."""
    mine = ratios["templar"]
    missed = [f"{what} {mine[what]} > {bar}" for what, bar in BARS.items() if mine[what] > bar]
    if catch_up > CATCH_UP_BAR:
        missed.append(f"catch_up_x {catch_up} > {CATCH_UP_BAR}")
    return missed + [f"{what}: torch is ahead" for what in BARS if mine[what] >= ratios["torch"][what]]


def _print(ratios: Mapping[str, Times], figures: Mapping[str, Any]) -> None:
    table = figures_table(f"{figures['parameters'] / 1e6:.0f} million parameters", "", *BARS)
    for name, row in ratios.items():
        table.add_row(name, *(f"{row[what]:.2f}" for what in BARS))
    table.add_row("bar", *(f"{bar:.2f}" for bar in BARS.values()))
    console = Console()
    console.print(table)
    steps = figures["catch_up_x"]
    console.print(f"A node catches up in {steps:.2f} outer steps per missed window; the bar is {CATCH_UP_BAR}.")
    for line in figures["missed"]:
        console.print(f"missed: {line}")


if __name__ == "__main__":
    sys.exit(measured("checkpoint", __doc__, measure, quick="the model of 100 million parameters"))
