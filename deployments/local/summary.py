"""The result of a local network: figures and checks, read back from the chain and the buckets."""

import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from deployments.local.view import LocalView
from deployments.schedules import Ran

LOSS_FALL = 0.25  # held-out loss must fall by this fraction from genesis
BELOW_UNIGRAM = 0.12  # and end below the held-out unigram entropy by this fraction
SETTLE_PATIENCE_SECONDS = 40.0


@dataclass(frozen=True)
class Summary:
    """Result of a run."""

    figures: dict[str, Any]  # the last line of output
    checks: dict[str, bool]  # check -> whether it passed

    def with_scheduled(self, ran: Ran) -> "Summary":
        """This summary with what schedules have made as its last check; a run that did not complete is named."""
        check = "; ".join([ran.line, *ran.not_completed])
        return Summary(
            self.figures | {"scheduled_runs": dict(ran.completed)}, self.checks | {check: not ran.not_completed}
        )


def summarise(view: LocalView, last_window: int, num_windows: int, started: float) -> Summary:
    """Wait until every node has settled the last window, replay it all, and compare; `started` is monotonic time."""
    nodes = {neuron.name for neuron in view.plan.running}
    deadline = time.time() + view.plan.pace * SETTLE_PATIENCE_SECONDS
    while set(roots := view.roots(last_window)) != nodes and time.time() < deadline:
        time.sleep(1.0)
    observer = view.replay(last_window, deadline=deadline)
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
        and set(roots.values()) == {observer.state.root},
        "it differs from genesis": view.birth.start.root not in roots.values(),
        "every honest miner has a weight": all(weights.get(uid, 0) > 0 for uid in honest),
        "no bad actor has one": all(weights.get(uid, 0) == 0 for uid in bad),
    }
    return Summary(figures, checks)
