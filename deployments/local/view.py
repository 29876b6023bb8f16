"""A read-only view of a local network, and the summary of a run: from its chain and its buckets alone."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from rich.table import Table

from blocks.neuron import Neuron
from deployments.local.plan import LocalNeuron, LocalPlan
from templar.agreement.ballot_box import decided_roster
from templar.agreement.genesis import Birth
from templar.agreement.sync_proof import read_proof
from templar.chain.base import Chain, NeuronInfo
from templar.errors import RejectedError, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import RosterEntry
from templar.exchange.signed import unseal
from templar.neuron.catchup import POLL_SECONDS, replay
from templar.neuron.configuration import NeuronConfig
from templar.neuron.evaluate import HeldOutReport, measure_held_out
from templar.neuron.node import Node
from templar.scoring.evidence import Evidence
from templar.training.model import parameter_shapes

HELD_OUT_SEQUENCES = 256
LOSS_FALL = 0.25  # held-out loss must fall by this fraction from genesis
BELOW_UNIGRAM = 0.12  # and end below the held-out unigram entropy by this fraction
SETTLE_PATIENCE_SECONDS = 40.0


@dataclass(frozen=True)
class WindowRow:
    """One window as its public objects show it."""

    window: int
    loss: float | None  # of the evaluation batch before the window's step, by the validator's evidence
    roster: tuple[int, ...] | None  # the applied uids; None until they are decided
    scores: Mapping[int, float]  # uid -> final score
    weights: Mapping[int, float]  # uid -> weight


class LocalView:
    """A read-only view of a local network; any neuron's `block` says where chain, buckets and text are."""

    def __init__(self, plan: LocalPlan, block: Neuron, birth: Birth) -> None:
        self.plan = plan
        self._block = block
        self.birth = birth
        self.chain: Chain = block.subnet.open(None)
        self.hparams = block.hparams()
        buckets = Buckets(self.chain, block.bucket.endpoint.open_reader)
        self.exchange = NetworkView(self.chain, buckets, birth.network, self.hparams)

    @property
    def names(self) -> dict[str, LocalNeuron]:
        """Hotkey -> member."""
        wallets = self._block.wallet
        return {
            wallets.model_copy(update={"hotkey": neuron.name}).open().address: neuron for neuron in self.plan.neurons
        }

    def row(self, window: int) -> WindowRow | None:
        """A window, once a validator has published its evidence; None before."""
        validator = self.validator()
        store = self.exchange.buckets.reader(validator)
        key = window_key(Kind.EVIDENCE, window, validator.uid)
        if store.head(key) is None:
            return None
        evidence: Evidence = unseal(store.get(key, max_bytes=Evidence.max_bytes), Evidence).body
        try:
            entries = self._entries(window)
        except TransientError:
            entries = None
        return WindowRow(
            window,
            evidence.loss,
            None if entries is None else tuple(entry.uid for entry in entries),
            {record.uid: record.final for record in evidence.miners},
            {record.uid: record.weight for record in evidence.weights},
        )

    def payload_sizes(self, last_window: int) -> list[int]:
        """Bytes of every payload that was applied up to a window."""
        windows = range(self.birth.start.start_window, last_window + 1)
        return [entry.payload_bytes for window in windows for entry in self._entries(window)]

    @property
    def dense_bytes(self) -> int:
        """Bytes of all parameters in float32: what a payload stands for."""
        return 4 * sum(math.prod(shape) for shape in parameter_shapes(self.hparams.model).values())

    def roots(self, window: int) -> dict[str, str]:
        """Name -> state root after a window, of every node whose proof is there; those that joined by hand left out."""
        names, roots = self.names, {}
        for neuron in self.chain.metagraph().neurons:
            member = names.get(neuron.hotkey)
            if member is None or member.role == "burn":
                continue
            try:
                proof = read_proof(self.exchange, neuron, window)
            except (RejectedError, TransientError):
                proof = None
            if proof is not None:
                roots[member.name] = proof.root
        return roots

    @property
    def deadline(self) -> float:
        """The moment until which the nodes may settle a window that is over now, or a store may fail."""
        return time.time() + self.plan.pace * SETTLE_PATIENCE_SECONDS

    def proven(self, last_window: int) -> int:
        """The window whose root is compared: a miner proves one only after its next reveal."""
        return max(last_window - 1, self.birth.start.start_window)

    def wait_until_proven(self, window: int) -> None:
        """Wait until every node has published its state root after a window, but not past the deadline."""
        nodes, deadline = {neuron.name for neuron in self.plan.running}, self.deadline
        while set(self.roots(window)) != nodes and time.time() < deadline:
            time.sleep(POLL_SECONDS)

    def validator(self) -> NeuronInfo:
        """The validator that measures."""
        names = self.names
        members = ((neuron, names.get(neuron.hotkey)) for neuron in self.chain.metagraph().neurons)
        return next(neuron for neuron, member in members if member is not None and member.role == "validator")

    def replay(self, last_window: int, *, deadline: float) -> Node:
        """Replay the network from genesis out of public objects, as an observer; its state after `last_window`.

        Checkpoints are not used, so that every window is held against what all nodes say. A store that fails is asked
        again until the deadline.
        """
        home = self.plan.folder / "observer"
        open_dataset = partial(self._block.dataset.open, self.hparams, home)
        node = Node(NeuronConfig("observer", home, self.hparams, self.chain, self.exchange.buckets, None, open_dataset))
        try:
            while node.state.window < last_window:
                try:
                    replay(node, node.state.window + 1)
                except TransientError:
                    if time.time() > deadline:
                        raise
                    time.sleep(POLL_SECONDS)
        except BaseException:
            node.stop()
            raise
        return node

    def held_out(self, node: Node) -> HeldOutReport:
        """Held-out losses of genesis and of a node's state."""
        dataset, home = self._block.dataset, node.home
        return measure_held_out(node, dataset.held_out(self.hparams, home, node.workload.tokenizer, HELD_OUT_SEQUENCES))

    def _entries(self, window: int) -> tuple[RosterEntry, ...]:
        """The decided roster's; none in a null window."""
        decided = decided_roster(self.exchange, window)
        return () if decided is None else decided[0].entries


def as_table(rows: list[WindowRow], titles: Mapping[int, str]) -> Table:
    """The windows as a live table."""
    legend = ", ".join(f"{uid} {title}" for uid, title in sorted(titles.items()))
    table = Table(title="templar", caption=f"scores and weights by uid; {legend}")
    for column in ("window", "loss", "roster", "scores", "weights"):
        table.add_column(column, justify="right" if column in ("window", "loss") else "left")
    for row in rows:
        roster = "?" if row.roster is None else f"{len(row.roster)}  {list(row.roster)}" if row.roster else "null"
        table.add_row(
            str(row.window),
            "" if row.loss is None else f"{row.loss:.4f}",
            roster,
            "  ".join(f"{uid}:{score:.2f}" for uid, score in sorted(row.scores.items())),
            "  ".join(f"{uid}:{weight:.2f}" for uid, weight in sorted(row.weights.items())),
        )
    return table


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    figures: dict[str, Any]  # the last line of output
    checks: dict[str, bool]  # check -> whether it passed

    def with_scheduled(self, completed: Mapping[str, int], others: Sequence[str]) -> "Summary":
        """This summary with what schedules have made as its last check; a run that did not complete is named."""
        found = ", ".join(f"{flow} {number}" for flow, number in sorted(completed.items())) or "none was due yet"
        check = "; ".join([f"scheduled work has run by itself: {found}", *others])
        return Summary(self.figures | {"scheduled_runs": dict(completed)}, self.checks | {check: not others})


def summarise(view: LocalView, last_window: int, num_windows: int, started: float) -> Summary:
    """Replay all windows that the nodes have settled, and compare; `started` is monotonic time."""
    nodes, proven = {neuron.name for neuron in view.plan.running}, view.proven(last_window)
    observer, roots = view.replay(last_window, deadline=view.deadline), view.roots(proven)
    replayed = observer.journal.roots(proven, proven).get(proven)
    held_out = view.held_out(observer)
    names = view.names
    uids = {neuron.uid: names[neuron.hotkey] for neuron in view.chain.metagraph().neurons}
    weights = view.chain.weights().get(view.validator().uid, {})
    sizes = view.payload_sizes(last_window)
    payload_bytes = fmean(sizes) if sizes else 0.0
    figures = {
        "windows": num_windows,
        "loss_genesis": held_out.loss_genesis,
        "loss_last": held_out.loss_last,
        "unigram": held_out.unigram,
        "state_roots": roots,
        "genesis_root": view.birth.start.root,
        "weights": {str(uid): weights.get(uid, 0.0) for uid in uids},
        "roles": {str(uid): member.title for uid, member in uids.items()},
        "payload_bytes": round(payload_bytes),
        "dense_bytes": view.dense_bytes,
        "compression": round(view.dense_bytes / payload_bytes, 1) if sizes else None,
        "wall_seconds": round(time.monotonic() - started, 1),
    }
    observer.stop()
    honest = [uid for uid, member in uids.items() if member.title == "miner"]
    bad = [uid for uid, member in uids.items() if member.role == "miner" and member.actor != "honest"]
    fell = f"held-out loss fell from {held_out.loss_genesis:.3f} to {held_out.loss_last:.3f} nats"
    checks = {
        f"{fell}, by at least {LOSS_FALL:.0%}": held_out.loss_last <= (1 - LOSS_FALL) * held_out.loss_genesis,
        f"it ended at least {BELOW_UNIGRAM:.0%} below the unigram entropy of {held_out.unigram:.3f}": (
            held_out.loss_last <= (1 - BELOW_UNIGRAM) * held_out.unigram
        ),
        f"all {len(nodes)} nodes and a replay of public objects have one state root": set(roots) == nodes
        and set(roots.values()) == {replayed},
        "it differs from genesis": view.birth.start.root not in roots.values(),
        "every honest miner has a weight": all(weights.get(uid, 0) > 0 for uid in honest),
        "no bad actor has one": all(weights.get(uid, 0) == 0 for uid in bad),
    }
    return Summary(figures, checks)
