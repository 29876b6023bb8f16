"""Faults of a whole small network, drawn from a seed; `lab.simulate.faulty_network` runs them.

A plan says who is on the network, which chain it has, and which member has which fault in which windows: of its clock,
its bucket, its chain endpoint, its process, or its payload. Members with faults hold less than half of the validators'
stake and are less than half of the miners.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lab.adversary import faults
from lab.adversary.catalogue import SCENARIOS
from lab.adversary.chains import PrunedChain, ReorganisingChain, StaleChain, UnreachableChain
from lab.adversary.judge import BucketFault, Expect
from lab.simulate.world import GENESIS_TIME, START_WINDOW
from templar.canonical import keyed_seed
from templar.chain.base import Chain

EPOCH_WINDOWS = 5  # stake moves once in so many windows
CALM_WINDOWS = 4  # the last windows have no new fault, so that everybody can come back
FAULTY_STAKE = 0.45  # the validators with faults hold at most this share of the stake
TRAINED_EVERY = 10
"""In one seed of so many miners train and validators measure; else miners publish noise and nobody earns anything."""
POWER_EVERY = 3  # in one seed of so many the power fails once
PRUNED_AFTER = 256  # blocks whose state an endpoint keeps, as Substrate does by default


class FaultKind(StrEnum):
    """The place of a fault."""

    CLOCK = "clock"
    BUCKET = "bucket"
    WRITES = "writes"
    CHAIN = "chain"
    PROCESS = "process"
    PAYLOAD = "payload"


@dataclass(frozen=True)
class Fault:
    """One fault of one member, from the opening of a window to the close of another."""

    uid: int
    kind: FaultKind
    name: str  # the view or actor; of a process `killed`, or `power` if it was cut
    first: int
    last: int
    amount: float = 0.0  # seconds that a clock is ahead; calls to chain and stores before a process dies


@dataclass(frozen=True)
class FaultPlan:
    """The events of a network; everything follows from the seed."""

    seed: int
    windows: int
    num_validators: int  # besides the aggregator
    actors: tuple[str, ...]  # of the miners, in uid order
    is_difficult: bool  # whether blocks come late, are final late and are replaced (`difficult_blocks`)
    faults: tuple[Fault, ...]
    stakes: tuple[tuple[float, ...], ...]  # of aggregator and validators, in uid order, by epoch
    has_outages: bool = False  # whether everybody's endpoint is down for seconds again and again, and pruned
    is_trained: bool = False  # whether miners train and validators measure
    has_releases: bool = False  # whether each start of a process is of a release that knows one more setting

    @property
    def faulty(self) -> frozenset[int]:
        """Uids of the members with a fault."""
        return frozenset(fault.uid for fault in self.faults)


BUCKETS: dict[str, BucketFault] = {
    "down": faults.failing(faults.TIMED_OUT),
    "busy": faults.failing(faults.SERVER_ERROR),
    "forbidden": faults.failing(faults.FORBIDDEN),
    # A simulated node asks one bucket after the other, a real one many at once: only here do slow ones add up.
    "hanging": faults.slow(2.0, then=faults.TIMED_OUT),
    "slow": faults.slow(0.5),
    "stale": faults.stale(60.0),
    "truncating": faults.TRUNCATING,
    "corrupting": faults.CORRUPTING,
    "stamped_late": faults.STAMPED_LATE,
    "stamped_early": faults.STAMPED_EARLY,
    "two_faced": faults.TWO_FACED,
    "withheld": faults.WITHHELD,
}
"""The view of a bucket that readers have in its place."""
ENDPOINTS: dict[str, Callable[[Chain], Chain]] = {
    "unreachable": lambda chain: UnreachableChain(chain, since=GENESIS_TIME, seconds=25.0, every=140.0),
    "down": lambda chain: UnreachableChain(chain, since=GENESIS_TIME, seconds=1.0, every=1.0),
    "behind": lambda chain: StaleChain(chain, blocks=2),
    "reorganising": lambda chain: ReorganisingChain(chain, depth=3),
    "pruned": lambda chain: PrunedChain(chain, kept=PRUNED_AFTER),
}
"""The view of the chain that a member has in its place."""
PAYLOADS = tuple(
    each.name
    for each in SCENARIOS.values()
    if each.expect is Expect.REJECT and each.actor == each.name and not each.quiet and "clock" not in each.name
)
"""Actors none of whose payloads counts."""


def draw_plan(seed: int, windows: int) -> FaultPlan:
    """The faults of a seed, in a network that runs for so many windows."""
    draw = random.Random(keyed_seed("templar.faults", seed))
    # 1. Who is on the network, and which of them have faults.
    num_validators, num_miners = draw.randint(2, 4), draw.randint(3, 5)
    validators = range(1, num_validators + 2)
    miners = range(num_validators + 2, num_validators + 2 + num_miners)
    bad_validators = draw.sample(validators, draw.randint(0, num_validators // 2))
    bad_miners = draw.sample(miners, draw.randint(0, (num_miners - 1) // 2))
    # 2. Which faults, and when; a miner may be hostile instead.
    found: list[Fault] = []
    actors = dict.fromkeys(miners, "honest")
    for uid in [*bad_validators, *bad_miners]:
        if uid in actors and draw.random() < 0.3:
            actors[uid] = draw.choice(PAYLOADS)
            found.append(Fault(uid, FaultKind.PAYLOAD, actors[uid], START_WINDOW, windows))
        else:
            found += _faults_of(draw, uid, windows)
    # 3. The power fails where all of these run: they end at once, and come back together.
    power = random.Random(keyed_seed("templar.faults.power", seed))  # the other draws stay as they are
    if power.randrange(POWER_EVERY) == 0:
        first = power.randint(START_WINDOW, max(START_WINDOW, windows - CALM_WINDOWS))
        found = [Fault(uid, FaultKind.PROCESS, "power", first, first) for uid in {each.uid for each in found}] + found
    # 4. Stake moves in every epoch.
    stakes = [_stakes(draw, validators, bad_validators) for _ in range(-(-windows // EPOCH_WINDOWS))]
    is_difficult = draw.random() < 0.7
    return FaultPlan(
        seed,
        windows,
        num_validators,
        tuple(actors.values()),
        is_difficult,
        tuple(found),
        tuple(stakes),
        is_trained=seed % TRAINED_EVERY == 0,
    )


def difficult_plan(seed: int, windows: int, *, num_validators: int, num_miners: int) -> FaultPlan:
    """Nobody has a fault, but the chain is difficult, and everybody's endpoint is pruned and goes down for seconds."""
    draw = random.Random(keyed_seed("templar.difficult", seed))
    stakes = [_stakes(draw, range(1, num_validators + 2), ()) for _ in range(-(-windows // EPOCH_WINDOWS))]
    actors = ("honest",) * num_miners
    return FaultPlan(
        seed, windows, num_validators, actors, is_difficult=True, faults=(), stakes=tuple(stakes), has_outages=True
    )


def _faults_of(draw: random.Random, uid: int, windows: int) -> list[Fault]:
    found: list[Fault] = []
    if draw.random() < 0.2:
        found.append(Fault(uid, FaultKind.CLOCK, "wrong", START_WINDOW, windows, draw.choice((-30, -8, -2, 2, 8, 30))))
    latest = max(START_WINDOW, windows - CALM_WINDOWS)
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice((FaultKind.BUCKET, FaultKind.WRITES, FaultKind.CHAIN, FaultKind.PROCESS, FaultKind.PROCESS))
        first = draw.randint(START_WINDOW, latest)
        last = min(latest, first + draw.choice((0, 0, 1, 2, 4)))
        names = {FaultKind.BUCKET: [*BUCKETS], FaultKind.WRITES: ["down", "busy"], FaultKind.CHAIN: [*ENDPOINTS]}
        name = draw.choice(names.get(kind, ["killed"]))
        found.append(Fault(uid, kind, name, first, last, draw.randrange(250) if kind is FaultKind.PROCESS else 0.0))
    return found


def _stakes(draw: random.Random, validators: Sequence[int], faulty: Sequence[int]) -> tuple[float, ...]:
    """Stakes of one epoch of which the faulty validators hold a minority."""
    stakes = {uid: round(draw.uniform(100, 400), 3) for uid in validators}
    held, others = (sum(stakes[uid] for uid in validators if (uid in faulty) is side) for side in (True, False))
    most = FAULTY_STAKE / (1 - FAULTY_STAKE) * others
    scale = min(1.0, most / held) if held else 1.0
    return tuple(round(stake * (scale if uid in faulty else 1.0), 3) for uid, stake in stakes.items())
