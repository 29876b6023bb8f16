"""Who is who in a network with attackers: the scenario of each miner, and what its faults put in others' way."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from lab.adversary.judge import Cast, Scenario
from lab.simulate.world import VALIDATING, Member, Weather, World
from templar.chain.base import Chain, Clock
from templar.store.base import ObjectStore


@dataclass(frozen=True)
class Lineup:
    """The miners of one network."""

    scenarios: tuple[Scenario, ...]  # the attackers of one do not disturb those of another
    attackers: int  # of each scenario
    miners: int  # all of them

    def places(self, scenario: Scenario) -> int:
        """Return how many miners attack in a scenario."""
        if scenario.is_outside or scenario.publisher is not None:
            return 0
        return self.attackers if scenario.honest is None else self.miners - scenario.honest

    @property
    def parts(self) -> list[Scenario | None]:
        """For each miner in uid order what it does; None for an honest one."""
        attackers = [scenario for scenario in self.scenarios for _ in range(self.places(scenario))]
        return [*[None] * (self.miners - len(attackers)), *attackers]

    @property
    def actors(self) -> list[str]:
        """The miners' actors, by the names that `World` takes."""
        return ["honest" if part is None else part.actor for part in self.parts]

    @property
    def windows(self) -> int:
        """Windows that the longest scenario needs."""
        return max(scenario.windows for scenario in self.scenarios)


@dataclass
class Casting:
    """A line-up and, once the world is built, the members that play in it."""

    lineup: Lineup
    members: list[Member] = field(default_factory=list)  # all that have a node
    by_account: dict[str, Scenario] = field(default_factory=dict)  # account of a member -> what it takes part in

    def fill(self, world: World) -> None:
        """Give the members of a world their parts."""
        self.members = world.running
        parts = zip(self.miners, self.lineup.parts, strict=True)
        self.by_account = {member.account_id: part for member, part in parts if part is not None}
        for scenario in self.lineup.scenarios:
            if scenario.publisher_chain or scenario.publisher is not None:
                aggregator = next(member for member in self.members if member.role == "aggregator")
                self.by_account[aggregator.account_id] = scenario

    @property
    def miners(self) -> list[Member]:
        """The miners, in uid order."""
        return [member for member in self.members if member.role not in VALIDATING]

    @property
    def healthy(self) -> list[Member]:
        """The members to whom nothing happens, in uid order."""
        return [member for member in self.members if self.part(member) is None]

    def part(self, member: Member) -> Scenario | None:
        """The scenario that a member takes part in; None for one to whom nothing happens."""
        return self.by_account.get(member.account_id)

    def is_hostile(self, member: Member) -> bool:
        """Whether a member runs other code than an honest one, so that its failures count for nothing."""
        scenario = self.part(member)
        return scenario is not None and scenario.is_hostile

    def weather(self, clock: Clock) -> Weather:
        """The faults of the attackers' buckets and chains."""
        return Weather(reader=partial(self.seen, clock), chain=self._chain)

    def seen(self, clock: Clock, observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
        """What an observer reads in place of a member's bucket."""
        scenario = None if owner is None else self.part(owner)
        return store if scenario is None or scenario.bucket is None else scenario.bucket(store, clock, observer)

    def _chain(self, observer: Member, chain: Chain) -> Chain:
        scenario = self.part(observer)
        return chain if scenario is None or scenario.chain is None else scenario.chain(chain)

    def cast(self, scenario: Scenario) -> Cast:
        """The members of the network as the judge of one scenario sees them."""
        taking_part = [member for member in self.members if self.part(member) is scenario]
        return Cast(
            attackers=_names(each for each in taking_part if each.role not in VALIDATING or scenario.publisher),
            honest=_names(each for each in self.miners if self.part(each) is None),
            sound=[each.uid for each in self.miners if not self.is_hostile(each)],
            healthy=[each.name for each in self.healthy],
            affected=[each.name for each in taking_part if not scenario.is_hostile],
            num_miners=len(self.miners),
        )


def _names(members: Iterable[Member]) -> dict[int, str]:
    return {member.uid: member.name for member in members}
