"""The members of a network on an endpoint: who is honest, who attacks how, and how the attackers' buckets answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.adversary.judge import Cast, Scenario
from lab.gauntlet.endpoints import EndpointName
from lab.gauntlet.gate import Ask, Treatment
from lab.gauntlet.stage import S3Stage
from lab.gauntlet.subset import BUCKET_RULES, ONE_HOTKEY
from lab.simulate.world import START_WINDOW, Member, Weather, World
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectStore

HONEST = 3  # honest miners by default: few, since all nodes share this machine
NO_MINERS = ("burn", "aggregator", "validator")
PRESET = "simulation"
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "windows": {
        "blocks_per_window": 50,
        "time_window_delta_seconds": 10,
        "read_margin_seconds": 1,
        "roster_slot_seconds": 6,
        "roster_ranks": 2,
    },
    # A payload of 4 to 6 KB: at 1 KB per second it takes longer than a reader waits.
    "model": {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64},
    "peers": {"gather_peer_count": 64, "reserve_peer_count": 0},
}
"""A small model, and the shortest windows in which two processors can run every node and the endpoint."""


@dataclass(frozen=True)
class Order:
    """The choice of what to run."""

    scenarios: tuple[str, ...] = ()  # names; by default the subset
    miners: int | None = None  # attackers included; by default three honest ones beside the attackers
    attackers: int = 1  # of each scenario
    windows: int | None = None  # at least; by default as many as the scenarios need
    seed: int = 1  # keys, blocks and assignments follow from it
    endpoint: EndpointName = "moto"


@dataclass(frozen=True)
class Parts:
    """The scenarios of a network, and the part of each of its miners in uid order."""

    scenarios: tuple[Scenario, ...]
    of_miners: tuple[Scenario | None, ...]  # None for an honest miner

    @classmethod
    def of(cls, scenarios: Sequence[Scenario], order: Order) -> "Parts":
        """Honest miners first, then the attackers of each scenario.

        Raises:
            PermanentError: `bad_parameters`; the attackers leave no honest miner.
        """
        attacking = [each for each in scenarios if each.name != ONE_HOTKEY for _ in range(order.attackers)]
        honest = HONEST if order.miners is None else order.miners - len(attacking)
        if honest < 1:
            raise PermanentError(
                Reason.BAD_PARAMETERS,
                f"miners: {order.miners} are too few for {len(attacking)} attackers and an honest one: "
                "ask for more miners, or for fewer scenarios or attackers",
            )
        return cls(tuple(scenarios), (*[None] * honest, *attacking))

    @property
    def actors(self) -> list[str]:
        """The miners' actors, by the names that `World` takes."""
        return ["honest" if part is None else part.actor for part in self.of_miners]

    @property
    def num_buckets(self) -> int:
        """One bucket for each miner, the aggregator, the validator and the dataset."""
        return len(self.of_miners) + 3


@dataclass
class Casting:
    """The parts and, once the world is built, the members that have them."""

    parts: Parts
    members: dict[str, Member] = field(default_factory=dict)  # account -> member
    by_account: dict[str, Scenario] = field(default_factory=dict)  # account of an attacker -> what it does
    _world: World | None = None

    def fill(self, world: World) -> None:
        """Give the members of a world their parts."""
        miners = [member for member in world.members if member.role not in NO_MINERS]
        self._world = world
        self.members = {member.account_id: member for member in world.members if member.role != "burn"}
        self.by_account = {
            member.account_id: part
            for member, part in zip(miners, self.parts.of_miners, strict=True)
            if part is not None
        }

    def rule(self, ask: Ask) -> Treatment | None:
        """Return what the gates do with a request for a member's bucket; None to pass it on."""
        scenario = self.by_account.get(ask.bucket)
        rule = None if scenario is None else BUCKET_RULES.get(scenario.name)
        if scenario is None or rule is None or ask.at < self._attacks_from(START_WINDOW + scenario.quiet):
            return None
        return rule(ask, self.members.get(ask.who))

    def _attacks_from(self, window: int) -> float:
        """When the reveals of the window before are read by nobody any more, in seconds since the epoch."""
        assert self._world is not None  # noqa: S101 - `fill` comes first
        return self._world.opens(window) + self._world.hparams.windows.reserved_seconds

    def weather(self, stage: S3Stage) -> Weather:
        """Every reader has a gate of its own; faults that a gate cannot play wrap the store."""

        def reader(observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
            if observer is None or owner is None:
                return store
            through_gate = stage.open_reader_of(observer.account_id, stage.address_of(owner))
            scenario = self.by_account.get(owner.account_id)
            if scenario is None or scenario.bucket is None:
                return through_gate
            return scenario.bucket(through_gate, stage.clock, observer)

        return Weather(reader=reader)

    @property
    def first_honest(self) -> Member:
        """The honest miner with the lowest uid."""
        miners = (member for member in self.members.values() if member.role not in NO_MINERS)
        return next(member for member in miners if member.account_id not in self.by_account)

    def is_hostile(self, member: Member) -> bool:
        """Whether a member runs other code than an honest one, so that its failures count for nothing."""
        scenario = self.by_account.get(member.account_id)
        return scenario is not None and scenario.is_hostile

    def cast(self, scenario: Scenario) -> Cast:
        """The members of the network as the judge of one scenario sees them."""
        miners = {
            member.uid: (member.name, self.by_account.get(account))
            for account, member in self.members.items()
            if member.role not in NO_MINERS
        }
        return Cast(
            attackers={uid: name for uid, (name, part) in miners.items() if part is scenario},
            honest={uid: name for uid, (name, part) in miners.items() if part is None},
            sound=[uid for uid, (_, part) in miners.items() if part is None or not part.is_hostile],
            healthy=[member.name for account, member in self.members.items() if account not in self.by_account],
            affected=[name for name, part in miners.values() if part is scenario and not scenario.is_hostile],
            num_miners=len(miners),
        )


def overrides(scenarios: Sequence[Scenario]) -> dict[str, dict[str, Any]]:
    """Changes to the preset: those of every network on an endpoint, and those that the scenarios need."""
    merged = {section: dict(values) for section, values in OVERRIDES.items()}
    for scenario in scenarios:
        for section, values in scenario.overrides.items():
            merged.setdefault(section, {}).update(values)
    return merged
