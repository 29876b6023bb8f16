"""Run networks with attackers in them on simulated time, and judge what came of it.

If a node fails, the others go on, and the verdict records the failure. The same seed gives the same verdicts.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.adversary.catalogue import SCENARIOS
from lab.adversary.judge import Cast, Scenario, Verdict, judge
from lab.adversary.observe import Watch, history_of, sweep
from lab.adversary.reports import read_accusations
from lab.simulate.world import START_WINDOW, Member, SimulatedStage, Weather, World
from templar.chain.base import Chain, Clock
from templar.errors import TransientError
from templar.hparams import HParams
from templar.neuron.catchup import catch_up
from templar.neuron.node import Node
from templar.shared_results import sharing
from templar.store.base import ObjectStore
from templar.store.files import memory_folder
from templar.training.model import genesis_parameters
from templar.window import drive_window

Overrides = Mapping[str, Mapping[str, object]]  # changes to the hyper-parameters, by section
_VALIDATING = ("aggregator", "validator")


@dataclass(frozen=True)
class Lineup:
    """The miners of one network."""

    scenarios: tuple[Scenario, ...]  # the attackers of one do not disturb those of another
    attackers: int  # of each scenario
    miners: int  # all of them

    @property
    def num_honest(self) -> int:
        """Miners to whom nothing happens."""
        return self.miners - sum(self.places(scenario) for scenario in self.scenarios)

    def places(self, scenario: Scenario) -> int:
        """Return how many miners attack in a scenario."""
        if scenario.name == "nobody" or scenario.publisher is not None:
            return 0
        return self.attackers if scenario.honest is None else self.miners - scenario.honest

    @property
    def parts(self) -> list[Scenario | None]:
        """For each miner in uid order what it does; None for an honest one."""
        attackers = [scenario for scenario in self.scenarios for _ in range(self.places(scenario))]
        return [*[None] * self.num_honest, *attackers] if self.scenarios[0].name != "nobody" else []

    @property
    def windows(self) -> int:
        """Windows that the longest scenario needs."""
        return max(scenario.windows for scenario in self.scenarios)


@dataclass
class _Parts:
    """The scenario of each member of a network; filled in once the members are known."""

    scenarios: tuple[Scenario, ...]
    by_name: dict[str, Scenario] = field(default_factory=dict)

    def weather(self, clock: Clock) -> Weather:
        """The faults of buckets and chains."""
        return Weather(reader=partial(self._reader, clock), chain=self._chain)

    def _reader(self, clock: Clock, observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
        scenario = self.by_name.get(owner.name) if owner is not None else None
        if scenario is None or scenario.bucket is None:
            return store
        return scenario.bucket(store, clock, observer)

    def _chain(self, observer: Member, chain: Chain) -> Chain:
        scenario = self.by_name.get(observer.name)
        return chain if scenario is None or scenario.chain is None else scenario.chain(chain)


def lineups(names: Sequence[str], *, miners: int, attackers: int) -> Iterator[Lineup]:
    """Networks in which every scenario takes place, several in one where they fit.

    More than half of the miners stay honest, and those that need the same kind of network share one.
    """
    room = max(1, (miners // 2) // attackers)
    waiting: dict[tuple[bool, int], list[Scenario]] = {}
    for name in names:
        scenario = SCENARIOS[name]
        if scenario.alone or scenario.training:
            yield Lineup((scenario,), attackers, miners)
            continue
        key = scenario.chain is not None, scenario.windows
        waiting.setdefault(key, []).append(scenario)
    for scenarios in waiting.values():
        for first in range(0, len(scenarios), room):
            yield Lineup(tuple(scenarios[first : first + room]), attackers, miners)


def run_lineup(lineup: Lineup, hparams: HParams, *, seed: int, windows: int | None = None) -> list[Verdict]:
    """Run one simulated network and judge each of its scenarios. The same seed gives the same bytes.

    It runs for at least `windows` windows, and for as many as the scenarios need.

    Raises:
        PermanentError: `bad_hparams`; a scenario's changes do not fit the settings.
    """
    folders = tempfile.TemporaryDirectory(prefix="templar-gauntlet-", dir=memory_folder())
    with sharing(), folders as temporary:
        root, parts = Path(temporary), _Parts(lineup.scenarios)
        stage = SimulatedStage(root / "buckets")
        world = World(
            root,
            hparams,
            seed=seed,
            actors=["honest" if part is None else part.actor for part in lineup.parts],
            training=any(scenario.training for scenario in lineup.scenarios),
            stage=stage,
            weather=parts.weather(stage.clock),
            kinds={role: kind for each in lineup.scenarios for role, kind in each.kinds.items()},
        )
        miners = [member for member in world.members if member.role not in ("burn", *_VALIDATING)]
        for member, part in zip(miners, lineup.parts, strict=True):
            if part is not None:
                parts.by_name[member.name] = part
        parts.by_name |= {
            member.name: each
            for member in world.members
            for each in lineup.scenarios
            if member.role == "aggregator" and (each.publisher_chain or each.publisher)
        }
        last = START_WINDOW + max(lineup.windows, windows or 0) - 1
        watch = Watch()
        with watch.logs():
            nodes = _run(world, parts, watch, last)
        verdicts = _judge(world, nodes, parts, watch, _windows(world, last))
        for node in nodes.values():
            node.stop()
        return verdicts


def check_choice(names: Sequence[str], *, miners: int, attackers: int) -> None:
    """Whether there is such a gauntlet.

    Raises:
        ValueError: A name is no scenario's, or the attackers are more than half of the miners.
    """
    if unknown := sorted(set(names) - set(SCENARIOS)):
        raise ValueError(f"scenario {unknown[0]!r}: there is no such scenario; --list names them all")
    if not 1 <= attackers <= miners // 2:
        raise ValueError(f"attackers: {attackers} of {miners} miners; 1 to {miners // 2} keep the majority honest")


def run_gauntlet(
    names: Sequence[str],
    hparams: Callable[[Overrides], HParams],
    *,
    miners: int = 11,
    attackers: int = 1,
    seed: int = 1,
    windows: int | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run scenarios of the catalogue and judge them; the verdicts are in the catalogue's order.

    Each network has `miners` miners, of which `attackers` attack in each scenario, and runs for at least `windows`
    windows. `hparams` gives its settings from the scenarios' changes.

    Raises:
        ValueError: As in `check_choice`.
    """
    check_choice(names, miners=miners, attackers=attackers)
    verdicts = []
    for lineup in lineups(names, miners=miners, attackers=attackers):
        overrides = {key: value for each in lineup.scenarios for key, value in each.overrides.items()}
        for verdict in run_lineup(lineup, hparams(overrides), seed=seed, windows=windows):
            verdicts.append(verdict)
            on_verdict(verdict)
    return sorted(verdicts, key=lambda verdict: list(SCENARIOS).index(verdict.scenario))


def _run(world: World, parts: _Parts, watch: Watch, last: int) -> dict[str, Node]:
    """Start every node and drive it through the windows; one that fell behind catches up at the end."""
    members = [member for member in world.members if member.role != "burn"]
    nodes: dict[str, Node] = {}

    def live(member: Member) -> None:
        name = member.name
        try:
            node = nodes[name] = world.node(member)
            watch.follow(node)
            for window in range(START_WINDOW, last + 1):
                node.chain.clock.sleep_until(world.opens(window))
                _drive(node, window, is_hostile=_is_hostile(parts, name))
            if not _is_hostile(parts, name):
                arrive(world, node, last)
        except Exception as error:  # noqa: BLE001 - however a node ends, it is the verdict's to say so
            if not _is_hostile(parts, name):
                watch.crashes[name] = f"{type(error).__name__}: {error}"

    participants = [partial(live, member) for member in members]
    if any(scenario.cleans for scenario in parts.by_name.values()):
        participants.append(partial(sweep, world, watch, last))
    world.stage.run(participants)
    return {member.name: nodes[member.name] for member in members if member.name in nodes}


def _drive(node: Node, window: int, *, is_hostile: bool) -> None:
    try:
        drive_window(node, window)
    except TransientError:
        return  # before the window was opened: the next one begins with catching up
    except Exception:
        if not is_hostile:
            raise  # an attacker that trips over itself attacks again


def arrive(world: World, node: Node, last: int) -> None:
    """Let a node that fell behind come to the others' state; it has as long as a window."""
    if node.state.window < last:
        catch_up(node, last, deadline=world.opens(last + 3))


def _windows(world: World, last: int) -> range:
    """The windows whose objects no clean-up may have deleted."""
    return range(max(START_WINDOW, last + 1 - world.hparams.storage.retention_windows), last + 1)


def _is_hostile(parts: _Parts, name: str) -> bool:
    """Whether the network does not answer for what a node does."""
    scenario = parts.by_name.get(name)
    return scenario is not None and scenario.is_hostile


def _judge(world: World, nodes: Mapping[str, Node], parts: _Parts, watch: Watch, windows: range) -> list[Verdict]:
    validating = [member.name for member in world.members if member.role in _VALIDATING]
    witness = next(nodes[name] for name in validating if name not in parts.by_name)
    genesis = genesis_parameters(world.hparams.model)
    names = {member.hotkey.address: member.name for member in world.members}
    accusations = read_accusations(world.observer(), windows, names)
    history = history_of(watch, nodes, witness, windows, folder=world.root, genesis=genesis, accusations=accusations)
    miners = {member.uid: member.name for member in world.members if member.role not in ("burn", *_VALIDATING)}
    healthy = [name for name in nodes if name not in parts.by_name]
    honest = {uid: name for uid, name in miners.items() if name not in parts.by_name}
    sound = [uid for uid, name in miners.items() if not _is_hostile(parts, name)]
    verdicts = []
    for scenario in parts.scenarios:
        cast_in = {member.uid: member.name for member in world.members if parts.by_name.get(member.name) is scenario}
        attackers = {uid: name for uid, name in cast_in.items() if uid in miners or scenario.publisher}
        affected = [name for name in nodes if parts.by_name.get(name) is scenario and not _is_hostile(parts, name)]
        cast = Cast(attackers, honest, sound, healthy, affected, len(miners))
        verdicts.append(judge(scenario, cast, history, world.hparams, witness.layout))
    return verdicts
