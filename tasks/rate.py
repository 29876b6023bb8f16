"""Step: rate the miners, slash, and enter the window into the score book, once."""

from prefect import task

from tasks.artifacts import table
from tasks.host import hosted
from templar.exchange.gather import GatherReport
from templar.neuron.evaluate import Evaluation
from templar.neuron.settlement import Settlement
from templar.neuron.validator import Validator
from templar.scoring.evidence import Evidence


@task(task_run_name="rate {settlement.window}")
def rate(neuron: str, report: GatherReport, evaluation: Evaluation | None, settlement: Settlement) -> Evidence | None:
    """See `templar.neuron.validator.Validator.rate`. The score card of each miner is a table artifact."""
    evidence = hosted(neuron, Validator).rate(report, evaluation, settlement)
    if evidence is not None:
        table(f"scores-{neuron}", score_rows(evidence), f"Window {evidence.window}: scores and what they amount to.")
    return evidence


def score_rows(evidence: Evidence) -> list[dict[str, object]]:
    """One row per miner: what an operator asks first."""
    weights = {record.uid: record.weight for record in evidence.weights}
    return [
        {
            "uid": miner.uid,
            "own loss": _arrow(miner.measurement.own_before, miner.measurement.own_after) if miner.measurement else "",
            "random loss": _arrow(miner.measurement.random_before, miner.measurement.random_after)
            if miner.measurement
            else "",
            "rating": f"{miner.mu:.2f} ± {miner.sigma:.2f}",
            "indicator": round(miner.binary_average, 4),
            "sync": round(miner.sync, 4),
            "final": round(miner.final, 4),
            "slashes": ", ".join(slash.reason.value for slash in miner.slashes),
            "reason": miner.reason.value if miner.reason else "",
            "weight": round(weights.get(miner.uid, 0.0), 4),
        }
        for miner in evidence.miners
    ]


def _arrow(before: float | None, after: float | None) -> str:
    return " → ".join("not finite" if loss is None else f"{loss:.4f}" for loss in (before, after))
