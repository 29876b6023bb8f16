"""Measure how well `templar why` explains a network of cheats: answers, agreement with the evidence, and seconds.

    python -m benchmarks.why [--quick]

A simulated network has one miner of each kind of the gauntlet, and honest ones. Then `why` is asked about each miner of
each window, as its operator would ask: from public objects. An answer is complete if the weight is explained: by a
score, by a penalty, or by the reason why no payload counts. The last line is JSON: `pairs` that were asked about,
`answered` of them, `agree` with the validator's score book, `slowest_seconds`, the `reasons` that were given with their
counts, and `holds`: all are answered, all agree, and none took more than `LONGEST_SECONDS`.
"""

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from lab.adversary.actors import ACTORS
from lab.gauntlet.asking import ask
from lab.simulate.run import run_nodes
from lab.simulate.world import START_WINDOW, World
from templar.hparams import load_hparams
from templar.neuron.validator import Validator
from templar.shared_results import sharing
from templar.store.files import memory_folder

LONGEST_SECONDS = 5.0
"""For one answer."""
WINDOWS, QUICK_WINDOWS = 6, 3
NUM_HONEST, QUICK_NUM_HONEST = 12, 5
QUICK_ACTORS = ("lazy", "silent", "hasty", "copying", "huge", "wrong_hash", "truncated", "manifest_forged_signature")
SMALL: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    "training": {"inner_steps": 2},
    "scoring": {"eval_sequences": 8},
}
"""Changes to the preset `local`: what is measured here is the answering, not the training."""


def run(quick: bool) -> dict[str, Any]:
    """Simulate, ask, print a table of the reasons, and return the figures."""
    logging.disable(logging.WARNING)  # nodes warn of every illegal object
    cheats = QUICK_ACTORS if quick else tuple(name for name in ACTORS if name != "honest")
    actors = [*["honest"] * (QUICK_NUM_HONEST if quick else NUM_HONEST), *cheats]
    windows = QUICK_WINDOWS if quick else WINDOWS
    hparams = load_hparams("local", overrides=SMALL)
    with sharing(True), TemporaryDirectory(prefix="templar-why-", dir=memory_folder()) as folder:
        world = World(Path(folder), hparams, seed=1, actors=actors)
        nodes = run_nodes(world, windows)
        asking = next(node for member, node in nodes.items() if member.role == "honest")
        validator = next(node for node in nodes.values() if isinstance(node, Validator))
        asked = [
            ask(asking.config, validator, member.uid, window)
            for window in range(START_WINDOW, START_WINDOW + windows)
            for member in nodes
            if member.role not in ("validator", "aggregator")
        ]
        for node in nodes.values():
            node.stop()
    reasons = Counter(reason for each in asked for reason in each.reasons)
    figures: dict[str, Any] = {
        "pairs": len(asked),
        "answered": sum(each.answered for each in asked),
        "agree": sum(not each.differences for each in asked),
        "slowest_seconds": round(max(each.seconds for each in asked), 3),
        "reasons": {str(reason): number for reason, number in sorted(reasons.items())},
    }
    _show(figures)
    whole = figures["pairs"] == figures["answered"] == figures["agree"]
    return figures | {"holds": whole and figures["slowest_seconds"] <= LONGEST_SECONDS}


def _show(figures: Mapping[str, Any]) -> None:
    table = Table(title=f"{figures['answered']} of {figures['pairs']} questions answered")
    table.add_column("reason")
    table.add_column("answers that give it", justify="right")
    for reason, number in figures["reasons"].items():
        table.add_row(reason, str(number))
    Console().print(table)


def main() -> int:
    """Measure and print."""
    return measured("why", __doc__, run, quick="few kinds of cheats and few windows")


if __name__ == "__main__":
    sys.exit(main())
