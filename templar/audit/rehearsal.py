"""Rehearse a miner: what a payload of this machine would earn, by the evidence of a window that is over.

The window's data are trained on again and compressed as a miner does it. The payload then passes every check of a
reader, from the signed commitment to the decoded coefficients, is measured beside the payloads that the window had, and
is rated on what the validator with the most stake remembered. Nothing is published. A miner whose payload of that
window counts is measured by that payload instead.
"""

import time
from dataclasses import dataclass, replace

import torch

from templar.audit.evidence_audit import Auditor
from templar.audit.hindsight import Hindsight, look_back
from templar.canonical import sha256_hex
from templar.chain.base import NeuronInfo
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.reveal import Submission, fetch_reveal
from templar.exchange.signed import seal
from templar.gradient.codec.wire import Header, Payload, encode
from templar.gradient.compress import compress_each
from templar.neuron.evaluate import evaluate
from templar.neuron.node import Node
from templar.neuron.private_state import PrivateState, feedback_rule
from templar.reports.history import first_published
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence
from templar.scoring.evidence_chain import find_standing
from templar.store.directory import DirectoryStore
from templar.training.cluster import ClusterTrainer
from templar.training.train import Trainer


@dataclass(frozen=True)
class Trained:
    """The training of the rehearsal; losses are means of an inner step in nats per token."""

    num_steps: int
    num_sequences: int
    first_loss: float
    last_loss: float
    tokens_per_second: float
    payload_bytes: int
    seconds: float  # of training and compressing


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal."""

    window: int
    uid: int
    validator: int  # uid of the validator on whose memory the miner was rated
    missed: Reason | None  # why the own bucket has no payload of the window that counts; None if it has one
    trained: Trained | None  # None if the published payload was taken
    refused: RejectedError | None  # why no reader would take the payload
    evidence: Evidence | None  # the window with the payload in it; None if it was refused
    place: tuple[int, int] | None  # among the scored payloads by score: its place from 1, and their number


def rehearse(auditor: Auditor, trainer: Trainer | ClusterTrainer, signer: Signer, seconds: float) -> Rehearsal:
    """Rehearse on the newest final window that a validator published evidence of.

    The state and the cache of the auditor's node change; what the signer signs stays in the node's folder. The trainer
    takes so many seconds at most, and no more than a miner has in the window.

    PermanentError: `not_registered`; the hotkey was no miner in that window. `no_assignment`; all slots were taken.
    `evidence_missing`; there is none yet. As `Trainer.learn`. TransientError: Chain, dataset or stores failed.
    """
    # 1. The window, the miner in it, and a validator's memory of the windows before.
    node, window = auditor.node, auditor.newest_window()
    neuron = _miner(node, window, signer.address)
    published = first_published(node.exchange, range(window, window + 1))
    if published is None:
        raise PermanentError(Reason.EVIDENCE_MISSING, f"no evidence of window {window} can be read: try again later")
    (evidence,) = published.evidences
    standing, _ = find_standing(node.exchange, evidence)
    if standing is None:
        raise PermanentError(
            Reason.EVIDENCE_MISSING, f"uid {evidence.uid} shows no evidence of before window {window}: try again later"
        )

    # 2. The state before the window, and what the miners revealed in it.
    auditor.bring_to(window - 1)
    seen = look_back(node, window)
    shown = seen.outcome(neuron.uid)
    rehearsal = Rehearsal(window, neuron.uid, evidence.uid, None, None, None, None, None)
    if shown is None or shown.submission is None:
        # 3. Train, compress, and let a reader look at it.
        trained, data = _train(node, trainer, seen, neuron, seconds)
        missed = Reason.COMMIT_MISSING if shown is None else shown.reason
        rehearsal = replace(rehearsal, missed=missed, trained=trained)
        try:
            submission = _revealed(node, seen, neuron, signer, data=data, trained=trained)
        except RejectedError as error:
            return replace(rehearsal, refused=error)
        seen = replace(seen, report=_with(seen.report, neuron.uid, shown, submission))

    # 4. Measure and rate as a validator does.
    facts = evaluate(node, auditor.model, standing, seen.report, seen.settlement, meter=auditor.meter)
    if rehearsal.trained is not None:  # it was trained on the right state, which only a running miner proves
        synced = {"windows_behind": 0}
        miners = (each.model_copy(update=synced if each.uid == neuron.uid else {}) for each in facts.miners)
        facts = replace(facts, miners=tuple(miners))
    author = {name: getattr(evidence, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    try:
        concluded = conclude(facts, standing, node.hparams, author)
    except (ValueError, ArithmeticError) as error:
        problem = f"the ratings in the evidence of uid {evidence.uid} cannot be right: {error}"
        raise PermanentError(Reason.EVIDENCE_DIFFERS, problem) from error
    return replace(rehearsal, evidence=concluded, place=_place(concluded, neuron.uid))


def _miner(node: Node, window: int, address: str) -> NeuronInfo:
    for neuron in node.exchange.miners(window):
        if neuron.hotkey == address:
            return neuron
    raise PermanentError(
        Reason.NOT_REGISTERED,
        f"{address} was no miner when window {window} opened: register it and announce the role "
        "(`templar neuron start`), and rehearse two windows later",
    )


def _train(
    node: Node, trainer: Trainer | ClusterTrainer, seen: Hindsight, neuron: NeuronInfo, seconds: float
) -> tuple[Trained, bytes]:
    """Train on the window's data with a fresh private state; return the figures and the payload's bytes."""
    # 1. As many inner steps as there is time for.
    hparams, times, window, started = node.hparams, seen.rules.times, seen.window, time.monotonic()
    assignment = node.workload.assignment(window, neuron.uid)
    if not assignment.units:
        raise PermanentError(
            Reason.NO_ASSIGNMENT, f"uid {neuron.uid} had no data in window {window}: all slots were taken"
        )
    private = PrivateState.fresh(node.layout)
    limit = started + min(seconds, times.train_until - times.opened)

    def seconds_left() -> float:
        return limit - time.monotonic()

    result = trainer.learn(
        node.state.params,
        torch.from_numpy(node.workload.sequences(assignment)),
        training=hparams.training,
        outer_steps=node.state.outer_steps,
        optimizer=private.optimizer,
        keep_going=lambda: seconds_left() > 0,
        seconds_left=seconds_left,
    )
    # 2. Compress.
    rule = feedback_rule(hparams, node.state.outer_steps)
    compressed = compress_each(private.feedback, result.update, layout=node.layout, rule=rule)
    tensors = {name: coefficients for name, coefficients, _ in compressed}
    header = Header(node.layout.recipe, window, neuron.uid, neuron.hotkey, node.layout.digest)
    data = encode(Payload.of(header, tensors, node.layout), node.layout)
    speed, seconds = 0.0 if result.figures is None else result.figures.tokens_per_second, time.monotonic() - started
    steps, losses = (result.num_steps, result.num_sequences), (result.first_loss, result.last_loss)
    return Trained(*steps, *losses, speed, len(data), seconds), data


def _revealed(
    node: Node, seen: Hindsight, neuron: NeuronInfo, signer: Signer, *, data: bytes, trained: Trained
) -> Submission:
    """Store commitment, manifest and payload in a folder, at times that count, and read them as everybody would."""
    times, window = seen.rules.times, seen.window
    folder = node.home / "rehearsed"
    folder.mkdir(parents=True, exist_ok=True)
    stamp = [times.commit_interval.last]
    store = DirectoryStore(folder, clock=lambda: float(stamp[0]))
    manifest = Manifest(
        netuid=node.exchange.network.netuid,
        genesis=node.exchange.network.genesis,
        uid=neuron.uid,
        hotkey=neuron.hotkey,
        window=window,
        payload_sha256=sha256_hex(data),
        payload_bytes=len(data),
        assignment=node.workload.assignment(window, neuron.uid).digest,
        root_before=node.state.root,
        steps=trained.num_steps,
        tokens=trained.num_sequences * node.hparams.data.sequence_length,
    )
    store.put(window_key(Kind.COMMIT, window, neuron.uid), seal(manifest.commit, signer).encode())
    stamp[0] = times.reveal_interval.first
    store.put(window_key(Kind.MANIFEST, window, neuron.uid), seal(manifest, signer).encode())
    store.put(window_key(Kind.GRADIENT, window, neuron.uid), data)
    return fetch_reveal(neuron, store, seen.rules, node.cache)


def _with(report: GatherReport, uid: int, shown: PeerOutcome | None, submission: Submission) -> GatherReport:
    """Return the report in which the miner's payload counts."""
    tier = Tier.OTHER if shown is None else shown.tier
    own = PeerOutcome(uid, tier, submission, None, "", 0.0)
    others = (each for each in report.outcomes if each.uid != uid)
    return replace(report, outcomes=tuple(sorted((*others, own), key=lambda each: each.uid)))


def _place(evidence: Evidence, uid: int) -> tuple[int, int] | None:
    scores = {record.uid: record.gradient_score for record in evidence.miners if record.gradient_score is not None}
    if uid not in scores:
        return None
    return 1 + sum(score > scores[uid] for score in scores.values()), len(scores)
