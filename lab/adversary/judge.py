"""Scenarios, and the verdict on one from what is known of a network that ran.

The driver of a network and the judge share the values of this module, so the verdict does not depend on the driver.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lab.adversary.reports import Accusation, named_by
from lab.simulate.world import Member
from templar.chain.base import Chain, Clock
from templar.errors import Reason
from templar.gradient.aggregate import aggregate, peer_norms, single_update, target_norms
from templar.gradient.codec.values import QUANTUM
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.hparams import HParams
from templar.neuron.aggregator import Aggregator
from templar.neuron.node import Node
from templar.store.base import ObjectStore

COUNTED = "counted"  # name of an observation without a reason: the payload counts
ROUNDING = 1 + 1e-5  # norms of float32 tensors are compared with exact ones


class Expect(StrEnum):
    """The result that an attack or fault must have."""

    REJECT = "R"
    """No payload of an attacker is applied; every reader says why with one of the legal reasons."""
    BOUND = "B"
    """The attackers' payloads are applied, and what they can do is bounded."""
    CONTINUE = "C"
    """The network goes on: the payloads of those it happens to may count or not, and they end on the same state."""


BucketFault = Callable[[ObjectStore, Clock, Member | None], ObjectStore]
"""From the bucket of an attacker, the time and the observer (None without a hotkey) to what the observer reads."""
ChainFault = Callable[[Chain], Chain]  # from the chain of a member to what it sees of it


@dataclass(frozen=True)
class Misconduct:
    """The misbehaviour of an aggregator, and what the public reports must come to."""

    kind: type[Aggregator]  # takes the honest one's place
    is_provable: bool = False  # whether every finding convicts it, from any reporter
    # Whether it leaves out payloads of honest miners: what it decided is applied, and each loss is reported.
    omits: bool = False
    delay: int = 0  # windows until a node can find it
    needs_turn: bool = True  # whether it misbehaves only where it is the first publisher


@dataclass(frozen=True)
class Scenario:
    """An attack or a fault, and what is expected."""

    name: str
    rows: tuple[int, ...]  # of the table in docs/threat-model.md
    title: str  # what happens, for people
    expect: Expect
    # What a reader may say of the attackers' objects, if it does not accept them. Of a bad aggregator: what the reports
    # must say in each window.
    reasons: frozenset[Reason] = frozenset()
    actor: str = "honest"  # the attackers' entry in `lab.adversary.actors.ACTORS`
    bucket: BucketFault | None = None  # what others read in place of the attackers' buckets
    chain: ChainFault | None = None  # what the attackers see in place of the chain
    publisher_chain: bool = False  # whether the aggregator sees this chain as well
    publisher: Misconduct | None = None  # of the aggregator, which is then the only attacker
    quiet: int = 0  # windows at the beginning in which an attacker does nothing yet
    windows: int = 2  # windows that it runs for
    honest: int | None = None  # honest miners, if not the requested number
    alone: bool = False  # whether it needs a network of its own
    is_outside: bool = False  # whether the attacker is no member of the network
    cleans: bool = False  # whether every bucket is cleaned in every window, by wrong clocks
    training: bool = False  # whether its numbers matter, so that miners must train
    overrides: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # changes to the hyper-parameters

    @property
    def is_hostile(self) -> bool:
        """Whether those to whom it happens run other than the honest code, so that their state does not count."""
        return self.actor != "honest" or self.publisher is not None

    @property
    def kinds(self) -> dict[str, type[Node]]:
        """Role -> the class of the nodes that take it."""
        return {} if self.publisher is None else {"aggregator": self.publisher.kind}


@dataclass(frozen=True)
class Sighting:
    """The finding of one node about one miner in one window."""

    window: int
    observer: str  # name of the node
    uid: int  # of the miner
    reason: Reason | None  # why its payload does not count; None if it does
    detail: str = ""


@dataclass(frozen=True)
class History:
    """The knowledge of a network that ran, from its public objects, its gather reports and its journals."""

    windows: tuple[int, ...]  # as far back as objects are kept
    rosters: Mapping[int, tuple[int, ...]]  # window -> uids that were applied; none in a null window
    payloads: Mapping[int, Mapping[int, Payload]]  # window -> uid -> the payload that was applied, from the aggregate
    sightings: tuple[Sighting, ...]  # from the gather reports
    roots: Mapping[str, Mapping[int, str]]  # node -> window -> state root
    crashes: Mapping[str, str]  # node -> how it ended, of those that did not reach the end
    traces: tuple[str, ...] = ()  # files which prove that content of a peer was run
    unprintable: tuple[str, ...] = ()  # lines of logs that are too long or have characters that are not printable
    moved: float = 0.0  # norm of the change of all parameters since genesis
    deleted: tuple[str, ...] = ()  # keys that a clean-up deleted before their time
    swept: int = 0  # number of keys that it deleted in their time
    accusations: tuple[Accusation, ...] = ()  # the findings of the public reports
    first: Mapping[int, int] = field(default_factory=dict)  # window -> uid of the publisher that was drawn first


@dataclass(frozen=True)
class Verdict:
    """The result of one scenario."""

    scenario: str
    expect: str  # R, B or C
    attackers: int  # a bad aggregator included
    miners: int  # attackers included
    windows: int
    legal: tuple[str, ...]  # the legal reasons
    observed: Mapping[str, int]  # reason, or `counted` -> how often readers, or reports, said so of an attacker
    applied: int  # payloads of attackers that were applied
    lost: int  # payloads of honest miners that were not applied
    null_windows: int  # windows in which nothing was applied
    roots_agree: bool  # whether all nodes ended on one state root
    measured: Mapping[str, float]  # for bounds
    problems: tuple[str, ...]  # what is not as expected

    @property
    def passed(self) -> bool:
        """Whether everything is as expected."""
        return not self.problems


@dataclass(frozen=True)
class Cast:
    """The parts in one scenario."""

    attackers: Mapping[int, str]  # uid -> node: miners, or the aggregator alone
    honest: Mapping[int, str]  # uid -> node, of the miners to whom nothing happens
    sound: Collection[int]  # uids of the miners that run honest code, even if faults happen to them
    healthy: Collection[str]  # nodes to which nothing happens: honest miners, aggregator and validators
    affected: Collection[str]  # honest nodes to which the scenario's faults happen
    num_miners: int  # those of other scenarios included


def judge(scenario: Scenario, cast: Cast, history: History, hparams: HParams, layout: Layout) -> Verdict:
    """Compare the history of a network with what one of its scenarios expects."""
    problems = _common_problems(scenario, cast, history)
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
    observed = Counter(
        COUNTED if each.reason is None else each.reason.value
        for each in history.sightings
        if each.uid in cast.attackers and each.observer in cast.healthy and each.window in attacked
    )
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
    """List what must never happen under any attack."""
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
        if misconduct.needs_turn and history.first.get(window, min(cast.attackers)) not in cast.attackers:
            continue
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
    """Return what the attackers' payloads could do, as shares of what is legal: none may be more than 1.

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
        medians = target_norms(list(payloads.values()), layout)
        for uid in cast.attackers.keys() & payloads.keys():
            contribution = max(contribution, _contribution(payloads[uid], layout, medians))
        sound = peer_norms([payloads[uid] for uid in cast.sound if uid in payloads], layout)
        median = max(median, *(_share(medians[name], max(each[name] for each in sound)) for name in layout.names))
        reach += math.sqrt(sum(len(payloads) * value for value in medians.values())) * QUANTUM
        diluted = max(diluted, 1 + _dilution(payloads, layout))
    moved = history.moved / (hparams.training.outer_learning_rate * reach) if reach else 0.0
    return {"contribution": contribution, "median": median, "moved": moved, "diluted": diluted}


def _contribution(payload: Payload, layout: Layout, medians: Mapping[str, int]) -> float:
    update = single_update(payload, layout, medians)
    norms = {name: float(update[name].double().square().sum()) / QUANTUM**2 for name in layout.names}
    return math.sqrt(max(_share(norm, medians[name]) for name, norm in norms.items()))


def _dilution(payloads: Mapping[int, Payload], layout: Layout) -> float:
    """The share of coefficients of the update that payloads of zeros change."""
    norms = peer_norms(list(payloads.values()), layout)
    saying = [payload for payload, norm in zip(payloads.values(), norms, strict=True) if any(norm.values())]
    if not saying or len(saying) == len(payloads):
        return 0.0
    one, other = aggregate(list(payloads.values()), layout), aggregate(saying, layout)
    num_changed = sum(int((one[name] != other[name]).sum()) for name in layout.names)
    return num_changed / sum(one[name].numel() for name in layout.names)


def _share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0
