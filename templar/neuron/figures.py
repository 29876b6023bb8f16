"""What came of a window at one node, as numbers: from its gather, its training, its evidence.

Nothing is reported as 0 because it is not known: what there is no number of is left out.
"""

import math
from collections.abc import Iterable

from pydantic import TypeAdapter

from templar.exchange.gather import GatherReport, Tier
from templar.neuron.metrics import Metrics
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.reports import TrainReport
from templar.neuron.settlement import Settlement
from templar.neuron.validator import Validator
from templar.scoring.curvature import relative_gain
from templar.scoring.evidence import Evidence, MinerRecord
from templar.scoring.slashing import Event

_INACTIVITY = (Event.INACTIVITY, Event.INACTIVITY_RESET)


def metrics_of(
    node: Node, report: GatherReport, settlement: Settlement, *, findings: int, seconds: float | None
) -> Metrics:
    """The numbers of a window that a node has applied.

    Args:
        node: The node.
        report: Its gather.
        settlement: What was decided.
        findings: How many findings its audit has.
        seconds: How long the window took so far; None if that is not known.
    """
    window, role = settlement.window, node.role or "observer"
    values = {
        "network/window": window,
        "network/step": node.state.outer_steps,
        "network/applied_uids": len(settlement.uids),
        "network/findings": findings,
        **gather_values(report),
        **({} if seconds is None else {"timing/window_total": seconds}),
    }
    if isinstance(node, Miner):
        known = node.journal.result(window, "train")
        trained = TrainReport(window, None) if known is None else _TRAIN_REPORT.validate_json(known)
        values |= training_values(trained, node.hparams.data.sequence_length)
        hotkeys = {entry.hotkey for entry in settlement.roster.entries} if settlement.roster is not None else set()
        values["applied"] = int(node.exchange.own_signer.address in hotkeys)
    evidence = node.book.evidence(window) if isinstance(node, Validator) else None
    if evidence is None:
        return Metrics(node.settings.name, role, window, values)
    slashes = tuple(
        (record.uid, str(slash.event), str(slash.reason)) for record in evidence.miners for slash in record.slashes
    )
    values |= evidence_values(evidence)
    return Metrics(node.settings.name, role, window, values, miner_values(evidence), slashes)


def gather_values(report: GatherReport) -> dict[str, float]:
    """What every role can say of its gather."""
    tier = [outcome.contribution is not None for outcome in report.outcomes if outcome.tier == Tier.GATHER]
    counted = len(report.contributions)
    return {
        **({"gather/success_rate": sum(tier) / len(tier)} if tier else {}),
        "gather/successful_uids": counted,
        "gather/failed_uids": len(report.outcomes) - counted,
        "timing/gather": report.seconds,
    }


def training_values(report: TrainReport, sequence_length: int) -> dict[str, float]:
    """What a miner can say of its training; only the tokens, 0, if it did not train."""
    values: dict[str, float] = {"batch_tokens": report.num_sequences * sequence_length, "inner_steps": report.num_steps}
    losses = {"loss": report.last_loss, "window_entry_loss": report.first_loss}
    return values | {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}


def evidence_values(evidence: Evidence) -> dict[str, float]:
    """What a validator can say of all miners together; of losses that are finite."""
    records = evidence.miners
    applied = [record for record in records if record.facts.applied]
    means = {
        **_loss_values(records),
        "loss": [] if evidence.loss is None else [evidence.loss],
        "gather/intended_mean_final": [record.final for record in records if record.facts.tier == Tier.GATHER],
        "gather/actual_mean_final": [record.final for record in applied],
    }
    overlaps = [record.facts.overlap.share for record in records if record.facts.overlap is not None]
    return {
        **{name: _mean(numbers) for name, numbers in means.items() if numbers},
        "network/block": evidence.seed_block,
        "network/evaluated_uids": sum(record.facts.estimate is not None for record in records),
        "network/active_miners": sum(record.facts.payload_sha256 is not None for record in records),
        "gather/success_rate": evidence.facts.success_rate,
        "openskill/baseline": evidence.baseline.ordinal,
        "advantage/typical": evidence.typical_advantage,
        "gather/reserve_used": sum(record.facts.tier == Tier.RESERVE for record in applied),
        **({"overlap/max": max(overlaps)} if overlaps else {}),
    }


def miner_values(evidence: Evidence) -> dict[str, dict[int, float]]:
    """What a validator can say of each miner: name -> uid -> number; without those of whom there is none."""
    records, weights = evidence.miners, {record.uid: record.weight for record in evidence.weights}
    values: dict[str, dict[int, float | None]] = {
        "gradient_scores": {record.uid: record.gradient_score for record in records},
        "binary_indicators": {record.uid: record.indicator for record in records},
        "binary_moving_averages": {record.uid: record.after.binary_average for record in records},
        "advantages": {record.uid: record.after.advantage for record in records},
        "final_scores": {record.uid: record.final for record in records},
        "sync_score": {record.uid: record.after.sync for record in records},
        "sync/avg_steps_behind": {record.uid: record.facts.windows_behind for record in records},
        "openskill/mu": {record.uid: record.after.mu for record in records},
        "openskill/sigma": {record.uid: record.after.sigma for record in records},
        "openskill/ordinal": {record.uid: record.after.rating.ordinal for record in records},
        "weights": {record.uid: weights.get(record.uid, 0.0) for record in records},
    }
    punished = [record for record in records if record.slashes]
    inactive = [record for record in punished if any(slash.event in _INACTIVITY for slash in record.slashes)]
    for name, some in (("slash", punished), ("inactivity", inactive)):
        values[f"{name}/score_before"] = {record.uid: record.before.final for record in some}
        values[f"{name}/score_after"] = {record.uid: record.final for record in some}
    known = {
        name: {uid: number for uid, number in numbers.items() if number is not None} for name, numbers in values.items()
    }
    return {name: numbers for name, numbers in known.items() if numbers}


def _mean(numbers: list[float]) -> float:
    """The mean of finite numbers; no sum on the way to it can overflow."""
    return math.fsum(number / len(numbers) for number in numbers)


def _loss_values(records: Iterable[MinerRecord]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for record in records:
        estimate = record.facts.estimate
        for where in ("own", "random") if estimate is not None else ():
            before, gain = getattr(estimate, f"{where}_before"), getattr(estimate, f"{where}_gain")
            if before is None or gain is None or not math.isfinite(before - gain):
                continue
            for name, number in (
                ("before", before),
                ("after", before - gain),
                ("improvement", relative_gain(before, gain)),
            ):
                values.setdefault(f"loss/{where}/{name}", []).append(number)
    return values


_TRAIN_REPORT = TypeAdapter(TrainReport)
