"""What a validator sees and measures in one window: the facts that everything else follows from."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason
from templar.exchange.buckets import bucket_digest
from templar.exchange.gather import GatherReport, Tier
from templar.gradient.aggregate import median_norms
from templar.gradient.payload import Payload
from templar.model.schedule import outer_learning_rate
from templar.neuron.node import Node
from templar.neuron.settlement import Settlement
from templar.neuron.synchrony import find_behind
from templar.scoring.cards import Standing
from templar.scoring.evidence import Estimate, Likeness, Measurement, MinerFacts, WindowFacts
from templar.scoring.likeness import find_likenesses, norm_ratios
from templar.scoring.measure import Evaluator
from templar.scoring.plan import SPARE, Candidate, EvaluationPlan, draw_plan

log = logging.getLogger(__name__)

MAX_UNMEASURED = 50
"""Windows without an exact measurement that count: however new they are, newcomers must not take every place."""


@dataclass(frozen=True)
class _Measured:
    """What was measured of the payloads of a window, by uid."""

    loss: float | None
    estimates: Mapping[int, Estimate]
    measurements: Mapping[int, Measurement]
    norms: Mapping[int, float]
    overlaps: Mapping[int, Likeness]
    repeats: Mapping[int, Likeness]


_NOTHING = _Measured(None, {}, {}, {}, {}, {})


def evaluate(
    node: Node, model: nn.Module | None, standing: Standing, report: GatherReport, settlement: Settlement
) -> WindowFacts:
    """Measure every payload of the roster, and every other one that counts, on the state before the window.

    Args:
        node: A node whose agreed state is that of the window before: a validator, or whoever checks one.
        model: A model of the network's shape; it computes with the node's own parameters, which are only read. None to
            see and not to measure.
        standing: What was remembered before the window: who is banned, and when each miner was measured exactly.
        report: The own gather, of all miners.
        settlement: What was decided; where it differs from the own gather, it holds.

    Raises:
        TransientError: Chain or dataset could not be reached; a later call starts over and gives the same.
    """
    window = settlement.window
    miners = {neuron.uid: neuron for neuron in node.exchange.miners(window)}
    buckets = {uid: bucket_of(node, neuron) for uid, neuron in miners.items()}
    banned = {uid for uid, neuron in miners.items() if standing.is_banned(window, neuron.hotkey, buckets[uid])}
    digests = {each.uid: each.manifest.payload_sha256 for each in report.contributions}
    if settlement.roster is not None:
        digests |= {entry.uid: entry.payload_sha256 for entry in settlement.roster.entries}
    digests = {uid: digests[uid] for uid in sorted(digests) if uid in miners and uid not in banned}
    payloads = {uid: node.cache.payload(window, digest) for uid, digest in digests.items()}
    block = node.exchange.settling_block(node.exchange.times(window))
    measured = _NOTHING
    if model is not None and payloads:
        sequences = _read_sequences(node, list(payloads), window)
        hotkeys = {uid: miners[uid].hotkey for uid in payloads}
        plan = _draw(node, standing, sequences, hotkeys, window=window, block_hash=node.chain.block_hash(block))
        segments = {uid: sequences[uid][list(places)] for uid, places in plan.segments.items()}
        measured = _measure(node, model, standing, plan, segments, payloads=payloads, settlement=settlement)
    behind = {uid: find_behind(node, miners[uid], report, window) for uid in payloads}
    return WindowFacts(
        window=window,
        roster=settlement.digest,
        root_before=node.state.root,
        outer_steps=node.state.outer_steps,
        seed_block=block,
        loss=measured.loss,
        miners=tuple(
            _facts(
                neuron,
                report,
                measured,
                bucket=buckets[uid],
                assigned=node.workload.digest(window, uid) is not None,
                payload=digests.get(uid),
                applied=uid in settlement.uids,
                banned=uid in banned,
                behind=behind.get(uid),
            )
            for uid, neuron in miners.items()
        ),
    )


def bucket_of(node: Node, neuron: NeuronInfo) -> str | None:
    """What a ban knows a neuron's bucket by; None if the chain names none."""
    account = node.buckets.account(neuron)
    return None if account is None else bucket_digest(account)


def _read_sequences(node: Node, uids: Sequence[int], window: int) -> dict[int, NDArray[np.int32]]:
    """Uid -> the sequences that it was assigned; with less than two miners, also those that nobody was."""
    sequences = {uid: node.workload.sequences(node.workload.assignment(window, uid)) for uid in uids}
    return sequences if len(uids) > 1 else {**sequences, SPARE: node.workload.spare_sequences(window)}


def _draw(
    node: Node,
    standing: Standing,
    sequences: Mapping[int, NDArray[np.int32]],
    hotkeys: Mapping[int, str],
    *,
    window: int,
    block_hash: str,
) -> EvaluationPlan:
    scoring, training = node.hparams.scoring, node.hparams.training
    candidates = {}
    for uid, hotkey in hotkeys.items():
        last = standing.card(hotkey).last_exact
        unmeasured = min(MAX_UNMEASURED, window if last is None else max(1, window - last))
        candidates[uid] = Candidate(hotkey, len(sequences[uid]), unmeasured)
    return draw_plan(
        candidates,
        num_spare=len(sequences.get(SPARE, ())),
        num_sequences=scoring.eval_sequences,
        trained_first=training.inner_steps * training.batch_size,
        exact_miners=scoring.exact_miners,
        exact_segments=scoring.exact_segments,
        block_hash=block_hash,
    )


def _measure(
    node: Node,
    model: nn.Module,
    standing: Standing,
    plan: EvaluationPlan,
    segments: Mapping[int, NDArray[np.int32]],
    *,
    payloads: Mapping[int, Payload],
    settlement: Settlement,
) -> _Measured:
    """Each payload alone, clipped to the roster's median norm; without a roster, to that of all payloads."""
    window, scoring = settlement.window, node.hparams.scoring
    rostered = [payloads[uid] for uid in settlement.uids if uid in payloads]
    evaluator = Evaluator(
        model,
        node.state.params,
        segments,
        payloads,
        layout=node.layout,
        medians=median_norms(rostered or list(payloads.values()), node.layout),
        factor=outer_learning_rate(node.hparams.training, node.state.outer_steps) * scoring.eval_lr_factor,
        micro_batch_size=scoring.eval_micro_batch_size,
    )

    def compute() -> _Measured:
        estimates = evaluator.estimate(list(plan.exact))
        measurements = {uid: evaluator.measure(uid, others) for uid, others in plan.exact.items()}
        overlaps, repeats = find_likenesses(
            payloads,
            _earlier(node, standing, window),
            standing.applied,
            node.layout,
            threshold=scoring.overlap_levels[0],
        )
        norms = norm_ratios(payloads, node.layout, settlement.uids)
        return _Measured(evaluator.loss, estimates, measurements, norms, overlaps, repeats)

    return node.chain.clock.compute(compute)


def _earlier(node: Node, standing: Standing, window: int) -> dict[int, Payload]:
    """The payloads of the window before, as far as that was measured and they are here."""
    found = {}
    for uid, digest in standing.payloads.items() if standing.window == window - 1 else ():
        try:
            found[uid] = node.cache.payload(window - 1, digest)
        except PermanentError as error:
            log.warning("window %d: nothing is compared with uid %d's payload before: %s", window, uid, error)
    return found


def _facts(
    neuron: NeuronInfo,
    report: GatherReport,
    measured: _Measured,
    *,
    bucket: str | None,
    assigned: bool,
    payload: str | None,
    applied: bool,
    banned: bool,
    behind: int | None,
) -> MinerFacts:
    uid, outcome = neuron.uid, report.outcome(neuron.uid)
    reason = None if payload is not None or outcome is None else outcome.reason
    return MinerFacts(
        uid=uid,
        hotkey=neuron.hotkey,
        bucket=bucket,
        tier=outcome.tier if outcome is not None else Tier.OTHER,
        assigned=assigned,
        payload_sha256=payload,
        applied=applied,
        reason=Reason.BANNED if banned else reason,
        windows_behind=behind,
        estimate=measured.estimates.get(uid),
        measurement=measured.measurements.get(uid),
        norm_ratio=measured.norms.get(uid),
        overlap=measured.overlaps.get(uid),
        repeat=measured.repeats.get(uid),
    )
