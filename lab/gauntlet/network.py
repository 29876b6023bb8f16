"""One network on a real endpoint, from the first bucket to the last verdict; every node lives in a thread."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lab.adversary.gauntlet import NetworkRun
from lab.adversary.judge import Verdict
from lab.gauntlet.casting import PRESET, EndpointCasting, Order, lineup_of, overrides
from lab.gauntlet.endpoints import endpoint
from lab.gauntlet.gate import Ask, Gates
from lab.gauntlet.judging import Judging
from lab.gauntlet.second import SecondProcess, Start, try_to_start
from lab.gauntlet.stage import S3Stage
from lab.gauntlet.subset import ONE_HOTKEY, chosen
from lab.simulate.world import START_WINDOW, Member, World, hotkey_seed
from templar.chain.base import NeuronInfo
from templar.errors import Reason, TransientError
from templar.exchange.gather import Gatherer, GatherReport
from templar.exchange.reveal import RevealRules
from templar.hparams import load_hparams
from templar.neuron.node import Node
from templar.store.s3_protocol import S3Settings
from templar.window import Action, drive_window

ATTEMPTS = 3  # the most times that a node begins a window: after a transient error it takes it up again
SETTINGS = S3Settings(read_timeout_seconds=2.0, max_attempts=2)
"""On this machine a silence of two seconds is a fault; the gather itself retries."""
START_SECONDS = 45.0  # time before the first window, for the dataset, the genesis and the start of every node

Say = Callable[[str, float], None]  # reports an event to the operator, with the share of the whole that is done


class Blind(Gatherer):
    """Gathers nothing, to spare this machine: an attacker takes the payloads from the aggregate."""

    def gather(self, peers: Sequence[NeuronInfo], rules: RevealRules, **_: object) -> GatherReport:
        """An empty report."""
        return GatherReport(rules.window, ())


@dataclass(kw_only=True)
class LiveNetwork(NetworkRun):
    """A network whose world is built, ready to run to its last window."""

    casting: EndpointCasting
    stage: S3Stage
    gates: Gates
    log: list[Ask]
    seed: int
    say: Say
    second: Start | None = None
    _num_windows_done: int = 0

    def run(self) -> tuple[Verdict, ...]:
        """Start every node, run its windows, judge, and stop every node.

        Raises:
            TransientError: `process_not_ready`; the machine is too slow for these windows.
            StoppedError: A stop was asked for.
        """
        lives: list[Callable[[], None]] = [partial(self.live, member) for member in self.casting.members]
        if any(scenario.name == ONE_HOTKEY for scenario in self.casting.lineup.scenarios):
            lives.append(self._run_second)
        try:
            with self.watch.logs():
                self.stage.run(lives)
                judging = Judging(self.casting, self.world, self.watch, self.log, self.second, self.last)
                questions = judging.ask_why(self.nodes)
                self.say(questions.summary, 1.0)
                return judging.verdicts(self.nodes, questions)
        finally:
            for node in self.nodes.values():
                node.stop()

    def live(self, member: Member) -> None:
        """As on simulated time; say how a node that failed has ended."""
        super().live(member)
        if member.name in self.watch.crashes:
            self.say(f"{member.name} ended: {self.watch.crashes[member.name]}", self._share)

    def ready(self, node: Node, member: Member) -> None:
        """Refuse a machine that is too slow to have each node ready for the first window."""
        if self.casting.part(member) is not None:
            node.gatherer = Blind(node.gatherer.buckets, node.gatherer.cache, node.gatherer.clock)
        late = self.stage.clock.now() - self.world.opens(START_WINDOW)
        if late > 0:
            raise TransientError(
                Reason.PROCESS_NOT_READY,
                f"{member.name} was ready {late:.1f} s after window {START_WINDOW} opened: the machine is too busy for "
                "this network; ask for fewer miners or scenarios, or try again later",
            )

    def drive(self, node: Node, window: int, *, is_hostile: bool) -> None:
        """Take the steps of a window; after a transient error, again."""
        opening = drive_window(node, window)
        for _ in range(ATTEMPTS - 1):
            if opening.action is Action.CATCHING_UP:
                opening = drive_window(node, window)
        self._num_windows_done += 1
        self.say(f"{node.name}: window {window}: {opening.detail or f'root {node.state.root[:12]}'}", self._share)
        if opening.action is not Action.RUN and not is_hostile:
            self.watch.crashes[node.name] = f"window {window}: {opening.action}: {opening.detail}"

    @property
    def _share(self) -> float:
        return self._num_windows_done / (len(self.casting.members) * (self.last - START_WINDOW + 1))

    def _run_second(self) -> None:
        """In the second window, start a second process with an honest miner's hotkey."""
        self.stage.clock.sleep_until(self.world.opens(START_WINDOW + 1))
        victim = self.casting.first_honest
        write_key = self.stage.write_key(victim)
        self.second = try_to_start(
            SecondProcess(
                hotkey_seed=hotkey_seed(self.seed, victim.uid),
                ledger=self.world.root / "ledger.sqlite",
                home=self.world.root / "nodes" / "second",
                hparams=self.world.hparams,
                endpoint_url=self.gates.url("second", writes=True),
                address=self.stage.address_of(victim),
                write_key=(write_key.access_key_id, write_key.secret_access_key),
            )
        )
        self.say(f"a second process of {victim.name}: {self.second.message}", self._share)


def run_network(order: Order, folder: Path, say: Say) -> tuple[Verdict, ...]:
    """Bring an endpoint and a network up in an empty folder, run it, and always take everything down.

    Raises:
        PermanentError: `bad_parameters`, `bad_environment`, `process_died`.
        TransientError: `process_not_ready`.
        StoppedError: A stop was asked for.
    """
    scenarios = chosen(order.scenarios)
    lineup = lineup_of(scenarios, order)
    casting, log = EndpointCasting(lineup), list[Ask]()
    hparams = load_hparams(PRESET, overrides=overrides(scenarios))
    say(f"starting {order.endpoint} and preparing {lineup.miners} miners", 0.0)
    num_buckets = lineup.miners + 3  # besides: aggregator, validator, dataset
    with (
        endpoint(order.endpoint, folder / "endpoint", num_buckets=num_buckets) as serving,
        closing(Gates(serving.reading, serving.writing, casting.rule, log)) as gates,
    ):
        stage = S3Stage(serving, gates, SETTINGS, genesis_seconds_ago=hparams.windows.seconds - START_SECONDS)
        actors, weather = lineup.actors, casting.weather_on(stage)
        world = World(folder / "world", hparams, seed=order.seed, actors=actors, stage=stage, weather=weather)
        casting.fill(world)
        last = START_WINDOW + max(order.windows or 0, lineup.windows) - 1
        network = LiveNetwork(
            world=world, casting=casting, last=last, stage=stage, gates=gates, log=log, seed=order.seed, say=say
        )
        return network.run()
