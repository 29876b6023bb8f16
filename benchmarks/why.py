"""How well `templar why` explains a network of cheats: answers, agreement with the evidence, and seconds.

    python -m benchmarks.why [--quick]

A simulated network has one miner of each kind of the gauntlet, and honest ones. Then `why` is asked about each miner of
each window, as its operator would ask: from public objects. An answer is complete if the weight is explained: by a
score, by a penalty, or by the reason why no payload counts. The last line is JSON: `pairs` that were asked about,
`answered` of them, `agree` with the validator's score book, `slowest_seconds`, the `reasons` that were given with their
counts, and `holds`: all are answered, all agree, and none took more than `LONGEST_SECONDS`.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from deployments.why import Answer, Point, answers
from templar.adversary.actors import ACTORS
from templar.errors import Reason
from templar.hparams import load_hparams
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.scoring.evidence import Evidence, MinerRecord
from templar.shared_results import sharing
from templar.simulate.run import memory_folder, run_nodes
from templar.simulate.world import START_WINDOW, World

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
            _ask(asking, validator, member.uid, window)
            for window in range(START_WINDOW, START_WINDOW + windows)
            for member in nodes
            if member.role not in ("validator", "aggregator")
        ]
        for node in nodes.values():
            node.stop()
    reasons = Counter(reason for _, _, _, found in asked for reason in found)
    figures: dict[str, Any] = {
        "pairs": len(asked),
        "answered": sum(answered for answered, _, _, _ in asked),
        "agree": sum(agrees for _, agrees, _, _ in asked),
        "slowest_seconds": round(max(seconds for _, _, seconds, _ in asked), 3),
        "reasons": {str(reason): number for reason, number in sorted(reasons.items())},
    }
    _show(figures)
    whole = figures["pairs"] == figures["answered"] == figures["agree"]
    return figures | {"holds": whole and figures["slowest_seconds"] <= LONGEST_SECONDS}


def _ask(asking: Node, validator: Validator, uid: int, window: int) -> tuple[bool, bool, float, list[Reason]]:
    """Ask about one miner in one window: whether it is answered, whether that agrees, the seconds, the reasons."""
    own = validator.exchange.identity(window).uid
    started = time.perf_counter()
    (answer,) = answers(asking.context, uid, window, own)
    seconds = time.perf_counter() - started
    evidence = validator.book.evidence(window)
    return (
        is_answered(answer),
        evidence is not None and not list(differences(answer, evidence, uid)),
        seconds,
        [point.reason for point in answer.points if point.reason is not None],
    )


def is_answered(answer: Answer) -> bool:
    """Whether the answer says what the miner got, and why if that was nothing."""
    points = {point.what: point for point in answer.points}
    if answer.evidence is None or "weight" not in points:
        return any(point.reason is not None for point in answer.points)
    return "score" in points or points["payload"].reason is not None or "penalty" in points


def differences(answer: Answer, evidence: Evidence, uid: int) -> Iterator[str]:
    """Yield what an answer says otherwise than the evidence that the validator keeps."""
    record = next(each for each in evidence.miners if each.uid == uid)
    points = {point.what: point for point in answer.points}
    if answer.evidence != evidence.digest:
        yield "the hash of the evidence"
    weight = next((each.weight for each in evidence.weights if each.uid == uid), 0.0)
    if not points["weight"].found.startswith(f"{weight:.4f}" if weight else "none: "):
        yield "the weight"
    if {point.reason for point in answer.points if point.what == "penalty"} != {each.reason for each in record.slashes}:
        yield "the penalties"
    yield from _payload_differences(points, record)


def _payload_differences(points: Mapping[str, Point], record: MinerRecord) -> Iterator[str]:
    facts = record.facts
    if facts.payload_sha256 is None:
        if facts.reason is not None and points["payload"].reason is not facts.reason:
            yield "why no payload counts"
    elif points["roster"].found.startswith("applied") is not facts.applied:
        yield "whether the payload was applied"
    elif points["score"].reason is not record.discount:
        yield "the discount"


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
