"""The evaluation of one window by a validator: the facts from which scores, ratings and weights follow."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from templar.agreement.genesis import load_genesis
from templar.agreement.sync_proof import read_proofs, state_proof
from templar.agreement.voter import Settlement
from templar.canonical import keyed_seed
from templar.chain.base import NeuronInfo
from templar.data.sampling import unigram_entropy
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.buckets import bucket_digest
from templar.exchange.gather import GatherReport, Tier
from templar.exchange.objects import Manifest, Roster, RosterEntry
from templar.gradient.aggregate import aggregate, target_norms
from templar.gradient.codec.wire import Payload
from templar.neuron.node import Node
from templar.scoring.evaluation_plan import SPARE, Candidate, draw, draw_plan
from templar.scoring.evidence import Estimate, Likeness, MeasuredOn, Measurement, MinerFacts, WindowFacts
from templar.scoring.measure import Evaluator, find_likenesses, moved_along, norm_ratios, step_losses
from templar.scoring.meter import Meter
from templar.scoring.score import MAX_BEHIND, windows_behind
from templar.scoring.standing import Standing
from templar.timeline import closing_block
from templar.training.loss import sequence_losses
from templar.training.model import build_model, load_parameters
from templar.training.schedule import outer_learning_rate

log = logging.getLogger(__name__)

MOST_RISE = 0.1  # nats per token by which a roster's step may raise the loss of a validator's own batch
MAX_UNMEASURED = 50
"""Windows without an exact measurement that count at most: newcomers must not take every place in a plan."""
_GUARD_DOMAIN = "templar.agreement.guard"


@dataclass(frozen=True)
class _Measured:
    """Measurements of a window's payloads, by uid."""

    on: MeasuredOn | None
    loss: float | None
    estimates: Mapping[int, Estimate]
    measurements: Mapping[int, Measurement]
    sequences: Mapping[int, int]
    norms: Mapping[int, float]
    overlaps: Mapping[int, Likeness]
    repeats: Mapping[int, Likeness]

    def of(self, uid: int) -> dict[str, Any]:
        """The measured fields of a miner's facts."""
        return {
            "estimate": self.estimates.get(uid),
            "measurement": self.measurements.get(uid),
            "sequences": self.sequences.get(uid),
            "norm_ratio": self.norms.get(uid),
            "overlap": self.overlaps.get(uid),
            "repeat": self.repeats.get(uid),
        }


_NOTHING = _Measured(None, None, {}, {}, {}, {}, {}, {})


def evaluate(
    node: Node,
    model: nn.Module | None,
    standing: Standing,
    report: GatherReport,
    settlement: Settlement,
    *,
    meter: Meter | None = None,
) -> WindowFacts:
    """Measure every payload of the roster, and every other one that counts (docs/protocol.md 14).

    Args:
        node: A node whose agreed state is that of the window before: a validator, or an auditor of one.
        model: A working model; it is loaded with the node's parameters. None measures nothing.
        standing: The standing before the window: bans, and when each miner was measured exactly.
        report: The own gather, of all miners.
        settlement: The decided roster; where it differs from the own gather, the roster holds.
        meter: What computes the losses; by default the repeatable way.

    Raises:
        TransientError: Chain, dataset or device (`trainer_failed`) failed; a later call gives the same.
        PermanentError: `out_of_memory`.
    """
    # 1. Which payloads count: those of the roster and of the own gather, by miners that are not banned.
    window = settlement.window
    miners = {neuron.uid: neuron for neuron in node.exchange.miners(window)}
    buckets = {uid: bucket_digest(neuron) for uid, neuron in miners.items()}
    banned = {uid for uid, neuron in miners.items() if standing.is_banned(window, neuron.hotkey, buckets[uid])}
    shown = {uid: each for uid, each in _shown(report, settlement) if uid in miners and uid not in banned}

    # 2. Draw which sequences each payload is measured on, and measure.
    measured = _NOTHING
    if model is not None and shown:
        measured = _measure(node, model, meter or Meter(), standing, settlement, miners=miners, shown=shown)

    # 3. The facts; besides, whose state was behind: its proof of the window before says so.
    behind = find_behind(node, {uid: miners[uid] for uid in shown}, report, window)
    tiers = {each.uid: each.tier for each in report.outcomes}
    reasons = {each.uid: each.reason for each in report.outcomes} | dict.fromkeys(shown)
    reasons |= dict.fromkeys(banned, Reason.BANNED)
    return WindowFacts(
        *(window, settlement.digest, node.state.root, node.state.outer_steps, _seed_block(node, window), measured.loss),
        measured_on=measured.on,
        miners=tuple(
            MinerFacts(
                uid=uid,
                hotkey=neuron.hotkey,
                registered_at=neuron.registered_at,
                bucket=buckets[uid],
                tier=tiers.get(uid, Tier.OTHER),
                assigned=node.workload.digest(window, uid) is not None,
                payload_sha256=shown[uid].payload_sha256 if uid in shown else None,
                applied=uid in settlement.uids,
                reason=reasons.get(uid),
                windows_behind=behind.get(uid),
                **measured.of(uid),
            )
            for uid, neuron in miners.items()
        ),
    )


def check_effect(node: Node, model: nn.Module, roster: Roster, *, is_early: bool = False, meter: Meter) -> None:
    """Check on the own batch that a roster's step does no harm (docs/protocol.md 8).

    The batch is of a miner that the settling block, early the closing one, and the own hotkey draw: nobody else knows
    it before the payloads are fixed. What this node cannot measure never counts against a roster.

    Raises:
        RejectedError: `roster_harmful`; the loss is not finite after the step, or rises by more than `MOST_RISE`.
    """
    # 1. The batch.
    window, hparams, author = roster.window, node.hparams, node.exchange.author(roster.window)["hotkey"]
    block = closing_block(window, hparams.windows) if is_early else _seed_block(node, window)
    seed = node.chain.block_hash(block)
    uids = [each.uid for each in node.exchange.miners(window) if node.workload.digest(window, each.uid) is not None]
    if not uids:
        return
    uid = uids[keyed_seed(_GUARD_DOMAIN, seed, author) % len(uids)]
    batch = node.workload.reader(node.workload.assignment(window, uid))
    places = draw(range(batch.count), hparams.scoring.eval_sequences, _GUARD_DOMAIN, seed, author)
    sequences = batch.read(places)

    # 2. The step that everybody would take, and the loss before and after it.
    payloads = [node.cache.payload(window, entry.payload_sha256) for entry in roster.entries]
    before, after = node.chain.clock.compute(
        lambda: step_losses(
            model,
            node.state.params,
            sequences,
            partial(aggregate, payloads, node.layout, node.state.limit),
            factor=outer_learning_rate(hparams.training, node.state.outer_steps),
            micro_batch_size=hparams.scoring.eval_micro_batch_size,
            meter=meter,
        )
    )
    if before is not None and (after is None or after > before + MOST_RISE):
        text = "is not finite" if after is None else f"rises from {before:.3f} to {after:.3f}"
        raise RejectedError(Reason.ROSTER_HARMFUL, f"with its payloads the loss of uid {uid}'s sequences {text}")


def _shown(report: GatherReport, settlement: Settlement) -> list[tuple[int, Manifest | RosterEntry]]:
    """By uid, the payload that the roster names, or else that of the own gather."""
    gathered = {each.uid: each.manifest for each in report.submissions}
    entries = () if settlement.roster is None else settlement.roster.entries
    return sorted((gathered | {entry.uid: entry for entry in entries}).items(), key=itemgetter(0))


def _seed_block(node: Node, window: int) -> int:
    return node.exchange.settling_block(node.exchange.times(window))


def _measure(
    node: Node,
    model: nn.Module,
    meter: Meter,
    standing: Standing,
    settlement: Settlement,
    *,
    miners: Mapping[int, NeuronInfo],
    shown: Mapping[int, Manifest | RosterEntry],
) -> _Measured:
    """Measure each payload alone, clipped to the median norm of the roster, or of all payloads without a roster."""
    window, scoring, workload = settlement.window, node.hparams.scoring, node.workload
    payloads = {uid: node.cache.payload(window, each.payload_sha256) for uid, each in shown.items()}
    readers = {uid: workload.reader(workload.assignment(window, uid)) for uid in payloads}
    if len(readers) < 2:  # nobody else's data is there to measure a payload on
        readers[SPARE] = workload.reader(workload.spare_assignment(window))
    length, candidates, sequences = node.hparams.data.sequence_length, {}, {}
    for uid, each in shown.items():
        hotkey, sequences[uid] = miners[uid].hotkey, min(readers[uid].count, max(1, each.tokens // length))
        last = standing.card(hotkey).last_exact
        unmeasured = min(MAX_UNMEASURED, window if last is None else max(1, window - last))
        candidates[uid] = Candidate(hotkey, sequences[uid], unmeasured)
    plan = draw_plan(
        candidates,
        num_spare=readers[SPARE].count if SPARE in readers else 0,
        num_sequences=scoring.eval_sequences,
        exact_miners=scoring.exact_miners,
        exact_segments=scoring.exact_segments,
        block_hash=node.chain.block_hash(_seed_block(node, window)),
    )
    segments = {uid: readers[uid].read(places) for uid, places in plan.segments.items()}
    rostered = [payloads[uid] for uid in settlement.uids if uid in payloads]
    evaluator = Evaluator(
        model,
        _measured_params(node, rostered),
        segments,
        payloads,
        layout=node.layout,
        targets=target_norms(rostered or list(payloads.values()), node.layout, node.state.limit),
        factor=outer_learning_rate(node.hparams.training, node.state.outer_steps) * scoring.eval_lr_factor,
        micro_batch_size=scoring.eval_micro_batch_size,
        meter=meter,
    )

    def compute() -> _Measured:
        estimates = evaluator.estimate(list(plan.exact))
        measurements = evaluator.measure(plan.exact)
        overlaps, repeats = find_likenesses(
            payloads, _earlier(node, standing, window), standing.applied, node.layout, threshold=scoring.overlap_level
        )
        norms = norm_ratios(payloads, node.layout, settlement.uids)
        found = estimates, measurements, sequences, norms, overlaps, repeats
        return _Measured(meter.measured_on, evaluator.loss, *found)

    return node.chain.clock.compute(compute)


def _measured_params(node: Node, rostered: Sequence[Payload]) -> Mapping[str, Tensor]:
    """The parameters that payloads are measured on: the agreed ones after a share of the window's own step."""
    params, share = node.state.params, node.hparams.scoring.eval_step_share
    if not share or not rostered:
        return params
    factor = share * outer_learning_rate(node.hparams.training, node.state.outer_steps)
    return moved_along(aggregate(rostered, node.layout, node.state.limit), params, factor)


def _earlier(node: Node, standing: Standing, window: int) -> dict[int, Payload]:
    """The payloads of the window before that were measured and are still on this disk."""
    found = {}
    for uid, digest in standing.payloads.items() if standing.window == window - 1 else ():
        try:
            found[uid] = node.cache.payload(window - 1, digest)
        except PermanentError as error:
            log.warning("window %d: uid %d's payload of the window before is not compared: %s", window, uid, error)
    return found


def find_behind(
    node: Node, miners: Mapping[int, NeuronInfo], report: GatherReport, window: int
) -> Mapping[int, int | None]:
    """By uid, the windows that a miner's state was behind in a scored window; None if its store fails twice.

    The proof of the window before says so, which nobody can copy; in the first window, which has none, the manifest of
    the own gather does. The node's state is that of the window before.
    """
    start, before, concurrency = node.birth.mark, window - 1, node.config.gather_concurrency
    if before == start.window:
        claimed = {each.uid: each.manifest.root_before for each in report.submissions}
        return {uid: windows_behind(claimed.get(uid, start.root), {before: start.root}, before) for uid in miners}
    _seed_block(node, window)  # waits until reveals are over: a miner proves its state after its next reveal
    roots, found = node.journal.roots(before - MAX_BEHIND, before), dict[int, int | None]()
    for uid, proof in read_proofs(node.exchange, miners, before, concurrency=concurrency).items():
        if isinstance(proof, TemplarError):
            log.warning("window %d: the proof of uid %d is left out: %s", before, uid, proof)
            found[uid] = None if isinstance(proof, TransientError) else MAX_BEHIND
            continue
        found[uid] = MAX_BEHIND if proof is None else windows_behind(proof.root, roots, before)
        if proof is not None and found[uid] == 0:
            params, block_hash = node.state.params, node.chain.block_hash(_seed_block(node, before))
            expected = state_proof(params, window=before, block_hash=block_hash, hotkey=miners[uid].hotkey)
            found[uid] = 0 if proof.proof == expected else MAX_BEHIND
    return found


@dataclass(frozen=True)
class HeldOutReport:
    """Mean losses on held-out text, in nats per token."""

    loss_genesis: float
    loss_last: float
    unigram: float
    """Entropy of the tokens' unigram distribution: the loss that a model without context can reach."""


def measure_held_out(node: Node, tokens: NDArray[np.int32]) -> HeldOutReport:
    """Measure genesis and the node's state on the same held-out sequences of shape (n, L)."""
    hparams = node.hparams
    genesis = load_genesis(node.birth, node.buckets, hparams.model, node.home / "genesis")
    return HeldOutReport(
        loss_genesis=mean_loss(node, genesis, tokens),
        loss_last=mean_loss(node, node.state.params, tokens),
        unigram=unigram_entropy(tokens, hparams.model.vocab_size),
    )


def mean_loss(node: Node, params: Mapping[str, Tensor], tokens: NDArray[np.int32]) -> float:
    """Mean loss of these parameters on sequences of shape (n, L), in nats per token."""
    model = build_model(node.hparams.model)
    load_parameters(model, params)
    sequences = torch.from_numpy(tokens)
    losses = sequence_losses(model, sequences, micro_batch_size=node.hparams.scoring.eval_micro_batch_size)
    return math.fsum(losses.tolist()) / len(losses)
