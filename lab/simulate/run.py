"""Run a simulated network for some windows and say what came of it."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lab.simulate.world import START_WINDOW, Member, World
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import unseal
from templar.gradient.aggregate import compile_kernels
from templar.gradient.kernels import forced
from templar.gradient.layout import Layout
from templar.hparams import HParams
from templar.neuron.evaluate import measure_held_out
from templar.neuron.node import Node
from templar.scoring.evidence import Evidence
from templar.shared_results import sharing
from templar.store.base import ObjectStore
from templar.store.files import memory_folder
from templar.timeline import first_block
from templar.training.model import parameter_shapes
from templar.window import drive_window

HELD_OUT_SEQUENCES = 128
KERNEL_WINDOWS = 20  # from this many windows on a run is worth loading the kernels, which takes seconds


@dataclass(frozen=True)
class SimulationReport:
    """The result of a simulation; everything but `seconds` and what follows from it depends on the seed alone."""

    windows: int
    root: str  # state root after the last window, of every node if `roots_agree`
    roots_agree: bool
    loss_genesis: float  # held-out loss, in nats per token
    loss_last: float
    unigram: float  # unigram entropy of the held-out tokens
    weights: dict[int, float]  # uid -> weight as the first validator set it last
    scores: dict[int, float]  # uid -> final score in the first validator's last evidence
    losses: list[float | None]  # of each window's evaluation batch before its step, from the evidence
    roles: dict[int, str]  # by uid
    seconds: float  # wall seconds of the windows, without the set-up
    windows_per_second: float


def simulate(
    hparams: HParams,
    *,
    windows: int,
    seed: int,
    actors: Sequence[str],
    num_validators: int = 1,
    threads: int = 1,
    training: bool = True,
    share: bool = True,
    folder: Path | None = None,
    on_window: Callable[[int, float | None], None] = lambda window, loss: None,
) -> SimulationReport:
    """Run a network on simulated time; arguments as for `World`. The same seed gives the same bytes.

    With `share` nodes share the results of pure functions (`templar.shared_results`). The folder is a temporary one by
    default, in memory where the machine has one. `on_window` is called with each window that the first validator has
    done, and the loss before its step.
    """
    with world_for(
        hparams,
        windows,
        folder=folder,
        share=share,
        seed=seed,
        actors=actors,
        num_validators=num_validators,
        threads=threads,
        training=training,
    ) as world:
        started = time.perf_counter()
        nodes = run_nodes(world, windows, lambda validator, window: on_window(window, _loss(validator, window)))
        seconds = time.perf_counter() - started
        report = _report(world, nodes, windows, seconds)
        for node in nodes.values():
            node.stop()
        return report


@contextmanager
def world_for(
    hparams: HParams, windows: int, *, folder: Path | None = None, share: bool = True, **members: Any
) -> Iterator[World]:
    """A world for a run of so many windows, with the kernels and shared results that make it fast; as in `simulate`."""
    # Kernels give the same bits, and pay for their loading in a long run.
    kernels = forced("numba") if windows >= KERNEL_WINDOWS else nullcontext()
    with kernels, sharing(share), tempfile.TemporaryDirectory(prefix="templar-", dir=memory_folder()) as temporary:
        world = World(folder or Path(temporary), hparams, **members)
        compile_kernels(Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe))
        yield world


def run_nodes(
    world: World,
    windows: int,
    on_window: Callable[[Node, int], None] = lambda validator, window: None,
    start: Callable[[Member], int] = lambda member: START_WINDOW,
) -> dict[Member, Node]:
    """Start every member's node and drive it through the windows, on simulated time; the nodes, which still run.

    `on_window` is called with the first validator after each of its windows. `start` gives the window in which a
    member's node starts; a later one than the first catches up.
    """
    members = world.running
    observed = next((member for member in members if member.role == "validator"), None)
    nodes: dict[Member, Node] = {}

    def live(member: Member) -> None:
        first = start(member)
        if first > START_WINDOW:
            world.chain.wait_for_block(first_block(first, world.hparams.windows))
        node = nodes[member] = world.node(member)
        for window in range(first, START_WINDOW + windows):
            node.chain.wait_for_block(first_block(window, world.hparams.windows))
            drive_window(node, window)
            if member is observed:
                on_window(node, window)

    world.stage.run([partial(live, member) for member in members])
    return {member: nodes[member] for member in members}


def _loss(validator: Node, window: int) -> float | None:
    evidence = own_evidence(validator, window)
    return None if evidence is None else evidence.loss


def _report(world: World, nodes: dict[Member, Node], windows: int, seconds: float) -> SimulationReport:
    roots = {node.state.root for node in nodes.values()}
    validator = next(member for member in nodes if member.role == "validator")
    evidence = [own_evidence(nodes[validator], window) for window in range(START_WINDOW, START_WINDOW + windows)]
    held_out = measure_held_out(nodes[validator], world.held_out(nodes[validator], HELD_OUT_SEQUENCES))
    measured = [each for each in evidence if each is not None]
    return SimulationReport(
        windows=windows,
        root=nodes[validator].state.root,
        roots_agree=len(roots) == 1,
        loss_genesis=held_out.loss_genesis,
        loss_last=held_out.loss_last,
        unigram=held_out.unigram,
        weights=world.chain.weights().get(validator.uid, {}),
        scores={} if not measured else {record.uid: record.final for record in measured[-1].miners},
        losses=[None if each is None else each.loss for each in evidence],
        roles={member.uid: member.role for member in world.members},
        seconds=round(seconds, 3),
        windows_per_second=round(windows / seconds, 3),
    )


def own_evidence(node: Node, window: int) -> Evidence | None:
    """The evidence that a validator published of a window; None if it published none."""
    return evidence_in(node.buckets.own, node.exchange.identity(window).uid, window)


def evidence_in(store: ObjectStore, uid: int, window: int) -> Evidence | None:
    """The evidence of a window in a validator's bucket; None if there is none."""
    key = window_key(Kind.EVIDENCE, window, uid)
    return None if store.head(key) is None else unseal(store.get(key, max_bytes=Evidence.max_bytes), Evidence).body
