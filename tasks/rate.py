"""Step: rate the miners, slash, and enter the window into the score book, once."""

from prefect import task

from tasks.artifacts import table
from tasks.host import hosted
from templar.neuron.validator import Validator
from templar.scoring.evidence import Estimate, Evidence, Measurement, MinerRecord, WindowFacts
from templar.scoring.standing import Rating


@task(task_run_name="rate {window}")
def rate(neuron: str, window: int, facts: WindowFacts | None) -> Evidence | None:
    """See `templar.neuron.validator.Validator.rate`. The score card of each miner is a table artifact."""
    evidence = hosted(neuron, Validator).rate(window, facts)
    if evidence is not None:
        table(f"scores-{neuron}", score_rows(evidence), score_summary(evidence))
    return evidence


def score_summary(evidence: Evidence) -> str:
    """The window in a line."""
    records = evidence.miners
    loss = "nothing was measured" if evidence.loss is None else f"loss {evidence.loss:.4f}"
    measured = sum(record.facts.estimate is not None for record in records)
    earning = sum(record.weight > 0 for record in evidence.weights if record.uid in {each.uid for each in records})
    punished = sum(bool(record.slashes) for record in records)
    counts = f"{measured} of {len(records)} miners measured, {earning} earn, {punished} punished"
    measure = f"The baseline is rated {_rating(evidence.baseline)}, the typical advantage is"
    return f"Window {evidence.window}: {loss}; {counts}. {measure} {evidence.typical_advantage:.6f}."


def score_rows(evidence: Evidence) -> list[dict[str, object]]:
    """One row per miner, the best final score first: what it gets, what that follows from, and why not more."""
    weights = {record.uid: record.weight for record in evidence.weights}
    bans = {ban.subject: ban.last_window for ban in evidence.bans}
    ranked = sorted(evidence.miners, key=lambda record: (-record.final, record.uid))
    return [_row(record, weights.get(record.uid, 0.0), bans) for record in ranked]


def _row(record: MinerRecord, weight: float, bans: dict[str, int]) -> dict[str, object]:
    facts, card = record.facts, record.after
    return {
        "uid": record.uid,
        "weight": round(weight, 4),
        "final": f"{card.final:.4f} ({card.final - record.before.final:+.4f})",
        "rating": _rating(card.rating),
        "advantage": f"{card.advantage:+.6f}",
        "indicator": f"{card.binary_average:.4f}" + _sign(record.indicator),
        "sync": _sync(record),
        "score": "" if record.gradient_score is None else f"{record.gradient_score:+.6f}",
        "own loss": _estimated(facts.estimate, "own"),
        "random loss": _estimated(facts.estimate, "random"),
        "measured exactly": _measured(facts.measurement),
        "slashes": ", ".join(f"{slash.event.value} ({slash.reason.value})" for slash in record.slashes),
        "no payload": _absence(record, bans),
    }


def _rating(rating: Rating) -> str:
    return f"{rating.mu:.2f} ± {rating.sigma:.2f}"


def _absence(record: MinerRecord, bans: dict[str, int]) -> str:
    """Why nothing of it counts in this window, and how long it is banned."""
    facts = record.facts
    if facts.payload_sha256 is not None:
        why = ""
    elif facts.reason is not None:
        why = facts.reason.value
    else:
        why = "not asked" if facts.assigned else "no slot"
    last = max((bans[subject] for subject in (facts.hotkey, facts.bucket) if subject in bans), default=None)
    ban = "" if last is None else f"banned until window {last}"
    return ", ".join(text for text in (why, ban) if text)


def _sign(indicator: int | None) -> str:
    return "" if indicator is None else f" ({indicator:+d})"


def _sync(record: MinerRecord) -> str:
    behind = record.facts.windows_behind
    return f"{record.after.sync:.4f}" + (f" ({behind} behind)" if behind else "")


def _estimated(estimate: Estimate | None, which: str) -> str:
    if estimate is None:
        return ""
    gain = getattr(estimate, f"{which}_gain")
    return _change(getattr(estimate, f"{which}_before"), None if gain is None else -gain)


def _measured(measurement: Measurement | None) -> str:
    if measurement is None:
        return ""
    before, after = measurement.random_before, measurement.random_after
    return _change(before, None if before is None or after is None else after - before)


def _change(before: float | None, change: float | None) -> str:
    """A loss and how it changes; what is not finite says so."""
    if before is None:
        return "not finite"
    return f"{before:.4f} {'not finite' if change is None else f'{change:+.6f}'}"
