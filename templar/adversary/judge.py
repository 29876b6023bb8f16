"""The verdict on a scenario, from what is known of a network that ran; whoever drove it does not matter."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from templar.adversary.scenario import COUNTED, Expect, History, Misconduct, Scenario, Verdict
from templar.exchange.findings import named_by
from templar.gradient.aggregate import aggregate, median_norms, peer_norms, single_update
from templar.gradient.layout import Layout
from templar.gradient.payload import Payload
from templar.gradient.values import QUANTUM
from templar.hparams import HParams

ROUNDING = 1 + 1e-5
"""Norms of float32 tensors are compared with exact ones."""


@dataclass(frozen=True)
class Cast:
    """Who is who.

    Attributes:
        attackers: Uid -> node, of the scenario's attackers: miners, or the aggregator alone.
        honest: Uid -> node, of the miners to whom nothing happens.
        sound: Uids of the miners whose code is that of an honest one, whatever happens to them.
        healthy: The nodes to which nothing happens: honest miners, aggregator and validators.
        affected: The honest nodes to which the scenario's faults happen.
        num_miners: All miners, those of other scenarios included.
    """

    attackers: Mapping[int, str]
    honest: Mapping[int, str]
    sound: Collection[int]
    healthy: Collection[str]
    affected: Collection[str]
    num_miners: int


def judge(scenario: Scenario, cast: Cast, history: History, hparams: HParams, layout: Layout) -> Verdict:
    """Hold what came of a scenario against what was expected.

    Args:
        scenario: The scenario.
        cast: Who is who.
        history: What came of it.
        hparams: The network's numbers.
        layout: The model's tensors and chunks.
    """
    problems = [*_common_problems(scenario, cast, history)]
    measured: dict[str, float] = {}
    if scenario.expect is Expect.REJECT:
        problems += _rejection_problems(scenario, cast, history)
    elif scenario.expect is Expect.BOUND:
        problems += _missing_problems(cast, history)
        measured = measure_influence(cast, history, hparams, layout)
        problems += [
            f"{name} is {value:.6g}, at most 1 is legal" for name, value in measured.items() if value > ROUNDING
        ]
    else:
        problems += _recovery_problems(scenario, cast, history)
    if scenario.publisher is not None:
        problems += _misconduct_problems(scenario, scenario.publisher, cast, history)
    attacked = history.windows[scenario.quiet :]
    seen = [each for each in history.sightings if each.uid in cast.attackers and each.observer in cast.healthy]
    seen = [each for each in seen if each.window in attacked]
    observed = Counter(COUNTED if each.reason is None else each.reason.value for each in seen)
    if scenario.publisher is not None:
        observed.update(each.finding.reason for each in history.accusations if each.reporter in cast.healthy)
    return Verdict(
        scenario=scenario.name,
        expect=scenario.expect.value,
        attackers=len(cast.attackers),
        miners=cast.num_miners,
        windows=len(history.windows),
        legal=tuple(sorted(reason.value for reason in scenario.reasons)),
        observed=dict(sorted(observed.items())),
        applied=sum(uid in history.rosters[window] for window in attacked for uid in cast.attackers),
        lost=len(_lost(cast, history)),
        null_windows=sum(not uids for uids in history.rosters.values()),
        roots_agree=_roots_agree(cast.healthy, history),
        measured={name: round(value, 6) for name, value in measured.items()},
        problems=tuple(problems),
    )


def _common_problems(scenario: Scenario, cast: Cast, history: History) -> list[str]:
    """What must never happen, whatever the attack."""
    problems = [f"{name} crashed: {how}" for name, how in sorted(history.crashes.items())]
    if scenario.publisher is None or not scenario.publisher.omits:
        problems += [
            f"window {window}: the payload of honest uid {uid} is not applied" for window, uid in _lost(cast, history)
        ]
    problems += [f"something of a peer's was run: {trace}" for trace in history.traces]
    problems += [f"a line of a log can forge others: {line}" for line in history.unprintable]
    problems += [f"{key} was deleted before its time" for key in history.deleted]
    if not _roots_agree(cast.healthy, history):
        problems.append("the nodes to which nothing happened hold different states")
    convicted = {(each.finding.window, each.finding.suspects[0].uid) for each in history.accusations if each.is_proven}
    problems += [
        f"window {window}: a proof convicts honest uid {uid}" for window, uid in sorted(convicted) if uid in cast.honest
    ]
    legal = {None, *scenario.reasons}
    for each in history.sightings:
        if each.uid in cast.honest and each.observer in cast.healthy and each.reason is not None:
            problems.append(f"window {each.window}: {each.observer} says {each.reason} of honest uid {each.uid}")
        if each.uid in cast.attackers and each.observer in cast.healthy and each.reason not in legal:
            problems.append(f"window {each.window}: {each.observer} says {each.reason} of attacker {each.uid}")
    return problems


def _rejection_problems(scenario: Scenario, cast: Cast, history: History) -> list[str]:
    problems = []
    for window in history.windows[scenario.quiet :]:
        for uid in sorted(cast.attackers):
            if uid in history.rosters[window]:
                problems.append(f"window {window}: the payload of attacker {uid} is applied")
            seen = [each for each in history.sightings if (each.window, each.uid) == (window, uid)]
            seen = [each for each in seen if each.observer in cast.healthy]
            if not seen:
                problems.append(f"window {window}: nobody looked at attacker {uid}")
            problems += [f"window {window}: {each.observer} accepts attacker {uid}" for each in seen if not each.reason]
    return problems


def _missing_problems(cast: Cast, history: History) -> list[str]:
    """A bound on what is not applied would prove nothing."""
    return [
        f"window {window}: the payload of attacker {uid} is not applied, so there is nothing to bound"
        for window in history.windows
        for uid in sorted(cast.attackers)
        if uid not in history.rosters[window]
    ]


def _recovery_problems(scenario: Scenario, cast: Cast, history: History) -> list[str]:
    """Those to whom it happened must have come to the state of the others, through every window."""
    if scenario.cleans and not history.swept:
        return ["no clean-up deleted anything"]
    if _roots_agree([*cast.healthy, *cast.affected], history):
        return []
    return ["a node to which something happened did not come to the others' state"]


def _misconduct_problems(scenario: Scenario, misconduct: Misconduct, cast: Cast, history: History) -> list[str]:
    """Every healthy node must have applied every window, and reported the aggregator and nothing else.

    Only what healthy nodes report is held against the reasons; all that is public together must name the aggregator.
    """
    problems = [
        f"window {window}: {name} did not apply it"
        for window in history.windows
        for name in sorted(cast.healthy)
        if window not in history.roots.get(name, {})
    ]
    for each in history.accusations:
        if each.reporter in cast.healthy and each.finding.reason not in scenario.reasons:
            problems.append(f"window {each.finding.window}: {each.reporter} reports {each.finding.reason}")
        elif each.reporter in cast.healthy and misconduct.is_provable and not each.is_proven:
            problems.append(f"window {each.finding.window}: what {each.reporter} reports is no proof")
    for window in history.windows[: len(history.windows) - misconduct.delay]:
        found = [each for each in history.accusations if each.finding.window == window]
        said = {(each.reporter, each.finding.reason) for each in found}
        for reason in sorted(scenario.reasons):
            silent = [name for name in sorted(cast.healthy) if (name, reason) not in said]
            problems += [f"window {window}: {name} does not report {reason}" for name in silent]
        if (named := named_by(found, len(cast.healthy) + len(cast.attackers))) != tuple(sorted(cast.attackers)):
            problems.append(f"window {window}: the reports name {list(named)}, at fault is {sorted(cast.attackers)}")
        suspects = {suspect.uid for each in found for suspect in each.finding.suspects}
        lost = [uid for when, uid in _lost(cast, history) if when == window and uid not in suspects]
        problems += [f"window {window}: no report says that the payload of uid {uid} was left out" for uid in lost]
    return problems


def _lost(cast: Cast, history: History) -> list[tuple[int, int]]:
    return [(window, uid) for window, uids in history.rosters.items() for uid in sorted(cast.honest) if uid not in uids]


def _roots_agree(names: Collection[str], history: History) -> bool:
    """Whether these nodes hold one root after the last window, and never held two after an earlier one."""
    last = history.windows[-1]
    roots = [history.roots.get(name, {}) for name in names]
    if len({each.get(last) for each in roots}) != 1 or not all(last in each for each in roots):
        return False
    return all(len({each[window] for each in roots if window in each}) <= 1 for window in history.windows)


def measure_influence(cast: Cast, history: History, hparams: HParams, layout: Layout) -> dict[str, float]:
    """What the attackers' payloads could do, as shares of what is legal: none may be more than 1.

    Returns:
        `contribution`: largest norm that one payload of an attacker contributes to a tensor, over the median.
        `median`: largest median norm of a tensor over the largest norm of a sound miner's payload there: below one
        half of the peers, attackers cannot raise it beyond.
        `moved`: norm of the change of the parameters, over what as many payloads of median norm can do at most.
        `diluted`: 1 plus the share of coefficients that differ if payloads of nothing but zeros are left out.
    """
    contribution, median, reach, diluted = 0.0, 0.0, 0.0, 1.0
    for window in history.windows:
        payloads = history.payloads[window]
        if not payloads:
            continue
        medians = median_norms(list(payloads.values()), layout)
        for uid in cast.attackers:
            contribution = max(contribution, _contribution(payloads[uid], layout, medians))
        sound = peer_norms([payloads[uid] for uid in cast.sound if uid in payloads], layout)
        median = max(median, *(_share(medians[name], max(each[name] for each in sound)) for name in layout.names))
        reach += math.sqrt(sum(len(payloads) * value for value in medians.values())) * QUANTUM
        diluted = max(diluted, 1 + _dilution(payloads, layout))
    moved = history.moved / (hparams.training.outer_learning_rate * reach) if reach else 0.0
    return {"contribution": contribution, "median": median, "moved": moved, "diluted": diluted}


def _contribution(payload: Payload, layout: Layout, medians: Mapping[str, int]) -> float:
    update = single_update(payload, layout, medians)
    shares = [_share(_squared(update[name]) / QUANTUM**2, medians[name]) for name in layout.names]
    return math.sqrt(max(shares))


def _dilution(payloads: Mapping[int, Payload], layout: Layout) -> float:
    """The share of coefficients of the update that payloads of zeros change."""
    norms = peer_norms(list(payloads.values()), layout)
    saying = [payload for payload, norm in zip(payloads.values(), norms, strict=True) if any(norm.values())]
    if not saying or len(saying) == len(payloads):
        return 0.0
    return _differing(aggregate(list(payloads.values()), layout), aggregate(saying, layout), layout.names)


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Sequence[str]) -> float:
    counts = [(int((one[name] != other[name]).sum()), one[name].numel()) for name in names]
    return sum(count for count, _ in counts) / sum(total for _, total in counts)


def _squared(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0
