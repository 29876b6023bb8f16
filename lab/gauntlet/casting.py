"""The members of a network on an endpoint: who is honest, who attacks how, and how the attackers' buckets answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.adversary.casting import Casting, Lineup
from lab.adversary.judge import Scenario
from lab.gauntlet.endpoints import EndpointName
from lab.gauntlet.gate import Ask, Treatment
from lab.gauntlet.stage import S3Stage
from lab.gauntlet.subset import BUCKET_RULES
from lab.simulate.world import START_WINDOW, Member, Weather, World
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectStore

HONEST = 3  # honest miners by default: few, since all nodes share this machine
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


def lineup_of(scenarios: Sequence[Scenario], order: Order) -> Lineup:
    """Honest miners first, then the attackers of each scenario.

    Raises:
        PermanentError: `bad_parameters`; the attackers leave no honest miner.
    """
    num_attackers = order.attackers * sum(not scenario.is_outside for scenario in scenarios)
    miners = HONEST + num_attackers if order.miners is None else order.miners
    if miners <= num_attackers:
        raise PermanentError(
            Reason.BAD_PARAMETERS,
            f"miners: {order.miners} are too few for {num_attackers} attackers and an honest one: "
            "ask for more miners, or for fewer scenarios or attackers",
        )
    return Lineup(tuple(scenarios), order.attackers, miners)


@dataclass
class EndpointCasting(Casting):
    """The casting of a network on an endpoint, where the attackers' buckets misbehave at the gates."""

    _world: World | None = None

    def fill(self, world: World) -> None:
        """Give the members of a world their parts."""
        super().fill(world)
        self._world = world

    def rule(self, ask: Ask) -> Treatment | None:
        """Return what the gates do with a request for a member's bucket; None to pass it on."""
        scenario = self.by_account.get(ask.bucket)
        rule = None if scenario is None else BUCKET_RULES.get(scenario.name)
        if scenario is None or rule is None or ask.at < self._attacks_from(START_WINDOW + scenario.quiet):
            return None
        return rule(ask, next((member for member in self.members if member.account_id == ask.who), None))

    def _attacks_from(self, window: int) -> float:
        """When the reveals of the window before are read by nobody any more, in seconds since the epoch."""
        assert self._world is not None  # noqa: S101 - `fill` comes first
        return self._world.opens(window) + self._world.hparams.windows.reserved_seconds

    def weather_on(self, stage: S3Stage) -> Weather:
        """Every reader has a gate of its own; faults that a gate cannot play wrap the store."""

        def reader(observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
            if observer is None or owner is None:
                return store
            through_gate = stage.open_reader_of(observer.account_id, stage.address_of(owner))
            return self.seen(stage.clock, observer, owner, through_gate)

        return Weather(reader=reader)

    @property
    def first_honest(self) -> Member:
        """The honest miner with the lowest uid."""
        return next(member for member in self.miners if self.part(member) is None)


def overrides(scenarios: Sequence[Scenario]) -> dict[str, dict[str, Any]]:
    """Changes to the preset: those of every network on an endpoint, and those that the scenarios need."""
    merged = {section: dict(values) for section, values in OVERRIDES.items()}
    for scenario in scenarios:
        for section, values in scenario.overrides.items():
            merged.setdefault(section, {}).update(values)
    return merged
