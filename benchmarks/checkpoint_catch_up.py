"""Measure how long a node takes to catch up, in outer steps: part of `python -m benchmarks.checkpoint`.

A network on simulated time lives through some windows; its miners publish noise, so nobody trains. Then a node that
has nothing but the genesis applies the first windows one by one, which is an outer step each: payloads are decoded and
aggregated, the parameters changed and hashed. It catches up with the others, which also reads words, rosters and
payloads, and writes the journal and snapshots. Buckets are folders, so nothing waits for a network.
"""

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.neuron_memory import live
from lab.simulate.world import START_WINDOW, World
from templar.hparams import HParams, load_hparams
from templar.neuron.catchup import catch_up, decided_settlement
from templar.shared_results import sharing

MINERS = 2
STEPS, MISSED = 3, 5  # windows that are applied one by one, and windows that the node catches up with after them


def catch_up_x(quick: bool) -> float:
    """The time of a catch-up in outer steps, per missed window.

    Raises:
        RuntimeError: The node did not catch up, or there was a window without payloads.
    """
    last = START_WINDOW + STEPS + MISSED - 1
    with TemporaryDirectory(prefix="templar-catch-up-") as folder:
        # 1. A network lives through all windows.
        world = World(Path(folder), _hparams(quick), seed=1, actors=["honest"] * MINERS, training=False)
        members = [member for member in world.members if member.role != "burn"]
        with sharing():
            world.stage.run([partial(live, world, member, STEPS + MISSED) for member in members])

        # 2. A node without anything applies the first windows.
        node, steps = world.observer(), list[float]()
        for window in range(START_WINDOW, START_WINDOW + STEPS):
            settlement = decided_settlement(node, window)
            started = time.perf_counter()
            node.apply(settlement)
            steps.append(time.perf_counter() - started)

        # 3. It catches up with the others.
        started = time.perf_counter()
        reached = catch_up(node, last, deadline=world.clock.now())
        seconds = time.perf_counter() - started
        applied = [node.journal.applied(window) for window in range(START_WINDOW, last + 1)]
        node.stop()
    if reached != last or not all(each is not None and each.roster is not None for each in applied):
        raise RuntimeError(f"the node reached window {reached} of {last}, or a window had no payloads")
    return seconds / (MISSED * min(steps))


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
