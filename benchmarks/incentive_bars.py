"""What must hold of a population's pay: how little each kind of cheat may earn, and what honest miners are promised."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.incentive_population import HONEST, IncentiveReport

FAMILY_PAY = 1.1
"""Most that a family of uids may earn together, in mean pays of an honest miner."""


LOSS_TOLERANCE = 0.02
"""How much worse than without cheats the model may be at the end, as a part of the loss."""


class Bar(StrEnum):
    """How little a kind of cheat must earn."""

    BELOW_EVERY = "less than every honest miner"
    BELOW_MEAN = "less than the mean honest miner"
    ONE_PAY = "together no more than one honest miner"


BARS: Mapping[str, Bar] = {
    "half": Bar.BELOW_MEAN,
    "overfitting": Bar.BELOW_MEAN,
    "sybil": Bar.ONE_PAY,
}
"""The bar of each kind of cheat; `BELOW_EVERY` for one that is missing. Who works, but less or worse, may earn less."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: What.
        holds: Whether it does.
        detail: The numbers, for people.
    """

    name: str
    holds: bool
    detail: str


def judge(
    report: IncentiveReport,
    *,
    pay: bool = True,
    alone: IncentiveReport | None = None,
    again: IncentiveReport | None = None,
) -> tuple[Check, ...]:
    """What must hold of a population, and whether it does.

    Args:
        report: What came of it.
        pay: Whether what cheats earn is judged; after few windows it says little.
        alone: What came of its honest miners alone; None leaves out how much worse the model may be.
        again: What came of it with the same seed once more; None leaves out whether that is the same.
    """
    kinds = [kind for kind in dict.fromkeys(report.roles.values()) if kind != HONEST]
    honest = set(report.uids(HONEST))
    penalised = [
        f"uid {each.uid} in window {each.window}: {each.reason}" for each in report.penalties if each.uid in honest
    ]
    checks = [_pay(report, kind) for kind in kinds if pay]
    checks.append(Check("no honest miner is penalised", not penalised, "; ".join(penalised[:5]) or "none"))
    checks.append(Check("all nodes hold one state", report.roots_agree, report.root[:12]))
    if alone is not None:
        worse = report.loss / alone.loss - 1
        detail = f"{report.loss:.4f}, alone {alone.loss:.4f}: {worse:+.2%}"
        checks.append(Check("the model is as good as without cheats", worse <= LOSS_TOLERANCE, detail))
    if again is not None:
        same = (report.weights, report.root) == (again.weights, again.root)
        checks.append(Check("the same seed gives the same weights", same, report.root[:12]))
    return tuple(checks)


def _pay(report: IncentiveReport, kind: str) -> Check:
    """Whether a kind of cheat earns as little as it must."""
    bar = BARS.get(kind, Bar.BELOW_EVERY)
    uids, honest = report.uids(kind), report.uids(HONEST)
    if bar is Bar.ONE_PAY:
        family, one = sum(map(report.pay, uids)), _mean([report.pay(uid) for uid in honest])
        detail = f"{family:.4f} of {len(uids)} uids, {one:.4f} of an honest one"
        return Check(f"{kind}: {bar}", family <= FAMILY_PAY * one, detail)
    limit = min if bar is Bar.BELOW_EVERY else _mean
    finals, weights = ([measure(uid) for uid in uids] for measure in (report.finals.__getitem__, report.weight))
    final_limit = limit([report.finals[uid] for uid in honest])
    weight_limit = limit([report.weight(uid) for uid in honest])
    holds = max(finals) < final_limit and max(weights) < weight_limit
    detail = (
        f"final {max(finals):.3f} at most, limit {final_limit:.3f}; "
        f"weight {max(weights):.4f} at most, limit {weight_limit:.4f}"
    )
    return Check(f"{kind}: {bar}", holds, detail)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
