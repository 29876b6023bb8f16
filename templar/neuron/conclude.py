"""From measurements to score cards, weights and evidence: what a validator concludes from one window."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from templar.chain.base import NeuronInfo
from templar.errors import Reason
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.neuron.evaluate import Evaluation
from templar.neuron.node import Node
from templar.neuron.settlement import Settlement
from templar.scoring.evidence import Evidence, MinerRecord, SlashRecord, WeightRecord
from templar.scoring.scores import ScoreCard, WindowScore, score_measurement, update_cards
from templar.scoring.slashing import Slash, slash_for_outcome
from templar.scoring.sync import sync_score
from templar.scoring.weights import compute_weights

_UNKNOWN = frozenset(
    {
        Reason.STORE_UNREACHABLE,
        Reason.STORE_BUSY,
        Reason.TOO_SLOW,
        Reason.CHAIN_UNREACHABLE,
        Reason.CHAIN_RATE_LIMITED,
    }
)
"""Outcomes that may be this node's own fault; only a roster of others can turn them into a verdict."""


@dataclass
class _Window:
    """What is known of a window while it is concluded."""

    report: GatherReport
    evaluation: Evaluation
    settlement: Settlement
    slashes: list[Slash] = field(default_factory=list)


def conclude(
    node: Node, before: Mapping[str, ScoreCard], report: GatherReport, evaluation: Evaluation, settlement: Settlement
) -> tuple[dict[str, ScoreCard], Evidence]:
    """The score cards after a window, by hotkey, and the evidence for them.

    Args:
        node: The validator.
        before: The cards before, by hotkey, for every miner of the window.
        report: The own gather.
        evaluation: What was measured.
        settlement: What was decided.
    """
    number, scoring = evaluation.window, node.hparams.scoring
    window = _Window(report, evaluation, settlement)
    miners = {neuron.uid: neuron for neuron in node.exchange.miners(number)}
    cards = {uid: before[neuron.hotkey] for uid, neuron in miners.items()}
    scored = {
        uid: score_measurement(measurement, _sync(evaluation, cards[uid], uid))
        for uid, measurement in evaluation.measurements.items()
        if uid in miners
    }
    idle = {uid: _idle(card, number, uid in scored) for uid, card in cards.items()}
    resets = {uid for uid, windows in idle.items() if windows > scoring.reset_inactivity_windows}
    window.slashes = [slash for uid in sorted(miners) for slash in _slashes(node, uid, cards[uid], window)]
    after = update_cards(cards, scored, window.slashes, resets, window=number, scoring=scoring)
    finals = {uid: card.final for uid, card in after.items()}
    weights = compute_weights(finals, node.hparams.weights, node.hparams.peers)
    evidence = Evidence(
        **node.exchange.author(number),
        window=number,
        roster=settlement.digest,
        root_before=node.state.root,
        seed_block=evaluation.seed_block,
        loss=evaluation.loss,
        miners=tuple(
            _record(neuron, cards[uid], after[uid], score=scored.get(uid), window=window)
            for uid, neuron in sorted(miners.items())
        ),
        weights=tuple(WeightRecord(uid=uid, weight=weight) for uid, weight in weights.items()),
    )
    return {miners[uid].hotkey: card for uid, card in after.items()}, evidence


def _slashes(node: Node, uid: int, card: ScoreCard, window: _Window) -> list[Slash]:
    """The penalties of one miner in one window."""
    table, evaluation = node.hparams.scoring.slashing, window.evaluation
    slashes = []
    outcome = window.report.outcome(uid)
    waits = node.workload.digest(evaluation.window, uid) is None  # for a slot: it has nothing to publish
    if outcome is not None and not waits and _is_to_blame(outcome, window):
        slashes.append(slash_for_outcome(uid, outcome.reason or Reason.PAYLOAD_MISSING, table))
    if evaluation.behind.get(uid, 0) > node.hparams.scoring.sync_max_steps_behind:
        slashes.append(Slash(uid, Reason.DESYNC, table.desync))
    if not waits and _idle(card, evaluation.window, uid in evaluation.measurements) > node.hparams.peers.recent_windows:
        slashes.append(Slash(uid, Reason.INACTIVE, table.inactivity))
    return slashes


def _is_to_blame(outcome: PeerOutcome, window: _Window) -> bool:
    """Whether a miner of the gather tier failed. One that the network has a payload of did not."""
    if outcome.tier != Tier.GATHER or outcome.uid in window.evaluation.payloads:
        return False
    return outcome.reason not in _UNKNOWN or window.settlement.roster is not None


def _sync(evaluation: Evaluation, card: ScoreCard, uid: int) -> float:
    """The sync score; that of the last time if it cannot be told now."""
    return sync_score(evaluation.behind[uid]) if uid in evaluation.behind else card.sync


def _idle(card: ScoreCard, window: int, revealed: bool) -> int:
    """Windows since a miner that once revealed did so last."""
    return 0 if revealed or card.last_reveal is None else window - card.last_reveal


def _record(
    neuron: NeuronInfo, before: ScoreCard, after: ScoreCard, *, score: WindowScore | None, window: _Window
) -> MinerRecord:
    uid, evaluation, outcome = neuron.uid, window.evaluation, window.report.outcome(neuron.uid)
    return MinerRecord(
        uid=uid,
        hotkey=neuron.hotkey,
        tier=outcome.tier if outcome is not None else Tier.OTHER,
        payload_sha256=evaluation.payloads.get(uid),
        reason=None if uid in evaluation.payloads or outcome is None else outcome.reason,
        measurement=evaluation.measurements.get(uid),
        gradient_score=None if score is None else score.gradient_score,
        indicator=None if score is None else score.indicator,
        windows_behind=evaluation.behind.get(uid),
        mu_before=before.rating.mu,
        sigma_before=before.rating.sigma,
        mu=after.rating.mu,
        sigma=after.rating.sigma,
        binary_average=after.binary_average,
        sync=after.sync,
        final=after.final,
        slashes=tuple(
            SlashRecord(reason=slash.reason, factor=slash.factor) for slash in window.slashes if slash.uid == uid
        ),
    )
