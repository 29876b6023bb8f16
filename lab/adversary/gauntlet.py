"""Run networks with attackers in them on simulated time, and judge what came of it.

If a node fails, the others go on, and the verdict records the failure. The same seed gives the same verdicts.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lab.adversary.casting import Casting, Lineup
from lab.adversary.catalogue import SCENARIOS
from lab.adversary.judge import Scenario, Verdict, judge
from lab.adversary.observe import Watch, history_of, sweep
from lab.adversary.reports import read_accusations
from lab.simulate.world import START_WINDOW, VALIDATING, Member, SimulatedStage, World
from templar.errors import Reason, TransientError
from templar.hparams import HParams
from templar.neuron.catchup import catch_up
from templar.neuron.node import Node
from templar.shared_results import sharing
from templar.store.files import memory_folder
from templar.window import drive_window

Overrides = Mapping[str, Mapping[str, object]]  # changes to the hyper-parameters, by section


def most_attackers(miners: int) -> int:
    """Return how many of the miners may attack so that more than half of them are honest."""
    return (miners - 1) // 2


def lineups(names: Sequence[str], *, miners: int, attackers: int) -> Iterator[Lineup]:
    """Networks in which every scenario takes place, several in one where they fit.

    More than half of the miners stay honest, but where a scenario says itself how many do. Scenarios that need the same
    kind of network share one.
    """
    room = max(1, most_attackers(miners) // attackers)
    waiting: dict[tuple[bool, int], list[Scenario]] = {}
    for name in names:
        scenario = SCENARIOS[name]
        if scenario.alone or scenario.training:
            yield Lineup((scenario,), attackers, 0 if name == "nobody" else miners)
            continue
        key = scenario.chain is not None, scenario.windows
        waiting.setdefault(key, []).append(scenario)
    for scenarios in waiting.values():
        for first in range(0, len(scenarios), room):
            yield Lineup(tuple(scenarios[first : first + room]), attackers, miners)


@dataclass
class NetworkRun:
    """The nodes of a network, which live through its windows up to `last`."""

    world: World
    casting: Casting
    last: int
    nodes: dict[str, Node] = field(default_factory=dict)  # by name, from their start on
    watch: Watch = field(default_factory=Watch)

    def live(self, member: Member) -> None:
        """Start a member's node and drive it through the windows; one that fell behind catches up at the end.

        However a node ends, the others go on; what the network answers for is a crash in the verdicts.

        Raises:
            TransientError: `process_not_ready`.
        """
        is_hostile = self.casting.is_hostile(member)
        try:
            node = self.nodes[member.name] = self.world.node(member)
            self.watch.follow(node)
            self.ready(node, member)
            for window in range(START_WINDOW, self.last + 1):
                node.chain.clock.sleep_until(self.world.opens(window))
                self.drive(node, window, is_hostile=is_hostile)
            if node.state.window < self.last and not is_hostile:
                catch_up(node, self.last, deadline=self.world.opens(self.last + 3))  # it has as long as a window
        except Exception as error:
            if isinstance(error, TransientError) and error.reason is Reason.PROCESS_NOT_READY:
                raise
            if not is_hostile:
                self.watch.crashes[member.name] = f"{type(error).__name__}: {error}"

    def ready(self, node: Node, member: Member) -> None:
        """Called with each node that has started, before its first window."""

    def drive(self, node: Node, window: int, *, is_hostile: bool) -> None:
        """Take the steps of a window."""
        try:
            drive_window(node, window)
        except TransientError:
            return  # before the window was opened: the next one begins with catching up
        except Exception:
            if not is_hostile:
                raise  # an attacker that trips over itself attacks again


def run_lineup(lineup: Lineup, hparams: HParams, *, seed: int, windows: int | None = None) -> list[Verdict]:
    """Run one simulated network and judge each of its scenarios. The same seed gives the same bytes.

    It runs for at least `windows` windows, and for as many as the scenarios need.

    Raises:
        PermanentError: `bad_hparams`; a scenario's changes do not fit the settings.
    """
    folders = tempfile.TemporaryDirectory(prefix="templar-gauntlet-", dir=memory_folder())
    with sharing(), folders as temporary:
        root, casting = Path(temporary), Casting(lineup)
        stage = SimulatedStage(root / "buckets")
        world = World(
            root,
            hparams,
            seed=seed,
            actors=lineup.actors,
            training=any(scenario.training for scenario in lineup.scenarios),
            stage=stage,
            weather=casting.weather(stage.clock),
            kinds={role: kind for each in lineup.scenarios for role, kind in each.kinds.items()},
        )
        casting.fill(world)
        run = NetworkRun(world, casting, START_WINDOW + max(lineup.windows, windows or 0) - 1)
        participants: list[Callable[[], None]] = [partial(run.live, member) for member in casting.members]
        if any(scenario.cleans for scenario in lineup.scenarios):
            participants.append(partial(sweep, world, run.watch, run.last))
        with run.watch.logs():
            stage.run(participants)
        verdicts = _judge(run)
        for node in run.nodes.values():
            node.stop()
        return verdicts


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
        ValueError: A name is that of no scenario on simulated time, or the attackers are half of the miners or more.
    """
    if unknown := sorted(set(names) - set(SCENARIOS)):
        raise ValueError(f"scenario {unknown[0]!r}: it needs a real endpoint: --where s3")
    if not 1 <= attackers <= (most := most_attackers(miners)):
        raise ValueError(f"attackers: {attackers} of {miners} miners; 1 to {most} keep the majority honest")
    verdicts = []
    for lineup in lineups(names, miners=miners, attackers=attackers):
        overrides = {key: value for each in lineup.scenarios for key, value in each.overrides.items()}
        for verdict in run_lineup(lineup, hparams(overrides), seed=seed, windows=windows):
            verdicts.append(verdict)
            on_verdict(verdict)
    return sorted(verdicts, key=lambda verdict: list(SCENARIOS).index(verdict.scenario))


def _judge(run: NetworkRun) -> list[Verdict]:
    world, casting = run.world, run.casting
    # The windows whose objects no clean-up may have deleted.
    windows = range(max(START_WINDOW, run.last + 1 - world.hparams.storage.retention_windows), run.last + 1)
    witness = next(run.nodes[member.name] for member in casting.healthy if member.role in VALIDATING)
    names = {member.hotkey.address: member.name for member in world.members}
    accusations = read_accusations(world.observer(), windows, names)
    history = history_of(run.watch, world, run.nodes, witness, windows, accusations=accusations)
    return [
        judge(scenario, casting.cast(scenario), history, world.hparams, witness.layout)
        for scenario in casting.lineup.scenarios
    ]
