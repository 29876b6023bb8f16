"""The verdicts on a network that ran on an endpoint.

`lab.adversary.judge` reads the published objects; added here are the request rate at the endpoint, the refusal of a
second process, and whether `templar why` explains each miner of each window as the validator's evidence has it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lab.adversary.judge import COUNTED, Cast, Expect, History, Scenario, Verdict, judge
from lab.adversary.observe import Watch, history_of
from lab.gauntlet.asking import Questions, ask
from lab.gauntlet.casting import EndpointCasting
from lab.gauntlet.gate import Ask
from lab.gauntlet.second import Start
from lab.gauntlet.subset import ONE_HOTKEY, RETRY_STORM, telling_reasons
from lab.simulate.world import START_WINDOW, World
from templar.gradient.layout import Layout
from templar.hparams import HParams
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.timeline import WindowTimes

MOST = 2.0  # legal ratio of requests per second while a bucket fails to those in a window without a failure (row 33)


@dataclass(frozen=True)
class Judging:
    """A network that ran, as its judge sees it."""

    casting: EndpointCasting
    world: World
    watch: Watch
    log: list[Ask]
    second: Start | None  # the start of the second process, if there was one
    last: int  # the last window

    def ask_why(self, nodes: Mapping[str, Node]) -> Questions:
        """Ask `templar why` about each miner in each window, as an honest one would, while the nodes still run."""
        asking = nodes[self.casting.first_honest.name].config
        validator = next(node for node in nodes.values() if isinstance(node, Validator))
        windows, miners = range(START_WINDOW, self.last + 1), self.casting.miners
        return Questions(tuple(ask(asking, validator, each.uid, window) for window in windows for each in miners))

    def verdicts(self, nodes: Mapping[str, Node], questions: Questions) -> tuple[Verdict, ...]:
        """One verdict on each scenario, in their order, while the nodes still run.

        A wrong answer of `templar why` about an honest miner is a problem of each scenario.

        Raises:
            TransientError: The decision on a window is not known.
        """
        witness = next(nodes[member.name] for member in self.casting.members if member.role == "aggregator")
        history = history_of(self.watch, self.world, nodes, witness, range(START_WINDOW, self.last + 1))
        verdicts = []
        for scenario in self.casting.lineup.scenarios:
            cast = self.casting.cast(scenario)
            verdict = judge_scenario(scenario, cast, history, self.world.hparams, witness.layout)
            if scenario.name == ONE_HOTKEY:
                verdict = self.with_second(scenario, verdict)
            elif scenario.expect is Expect.REJECT:
                verdict = with_silence(scenario, verdict)
            if scenario.name == RETRY_STORM:
                verdict = self._with_storm(scenario, verdict, witness)
            wrong = questions.problems([*cast.attackers, *cast.honest])
            verdicts.append(replace(verdict, problems=(*verdict.problems, *wrong)))
        return tuple(verdicts)

    def _with_storm(self, scenario: Scenario, verdict: Verdict, witness: Node) -> Verdict:
        accounts = self.casting.by_account
        storm = measure_storm(
            self.log,
            [witness.exchange.times(window) for window in range(START_WINDOW, self.last + 1)],
            num_calm=scenario.quiet,
            healthy={member.account_id for member in self.casting.healthy},
            failing={account for account, part in accounts.items() if part is scenario},
        )
        return replace(verdict, measured=storm.measured, problems=(*verdict.problems, *storm.problems))

    def with_second(self, scenario: Scenario, verdict: Verdict) -> Verdict:
        """The verdict, with the refusal of the second process or the lack of one."""
        second = self.second or Start("", "it never came to its start")
        legal = {reason.value for reason in scenario.reasons}
        problems = () if second.reason in legal else (f"the second process was not refused: {second.message}",)
        observed = {second.reason or COUNTED: 1}
        return replace(verdict, observed=observed, problems=(*verdict.problems, *problems))


def judge_scenario(scenario: Scenario, cast: Cast, history: History, hparams: HParams, layout: Layout) -> Verdict:
    """The verdict on a scenario; a bound is judged in the windows in which all its attackers were in time."""
    if scenario.expect is not Expect.BOUND:
        return judge(scenario, cast, history, hparams, layout)
    windows = [window for window in history.windows if cast.attackers.keys() <= set(history.rosters[window])]
    if windows:
        return judge(scenario, cast, replace(history, windows=tuple(windows)), hparams, layout)
    verdict = judge(replace(scenario, expect=Expect.CONTINUE), cast, history, hparams, layout)
    problem = "the attackers' payloads were never applied, so there is nothing to bound"
    return replace(verdict, expect=scenario.expect.value, problems=(*verdict.problems, problem))


def with_silence(scenario: Scenario, verdict: Verdict) -> Verdict:
    """The verdict; a rejection that no reader reported for its own reason is a problem."""
    wanted = {reason.value for reason in telling_reasons(scenario.name)}
    if wanted & verdict.observed.keys():
        return verdict
    return replace(verdict, problems=(*verdict.problems, f"nobody ever said {' or '.join(sorted(wanted))}"))


@dataclass(frozen=True)
class Storm:
    """Requests of the healthy nodes at the edges of windows, in windows without a failing bucket and with one."""

    calm: int  # most requests in one second of a window without
    failing: int  # most requests in one second of a window with
    asked_calm: int  # most requests in a window for the bucket, before it fails
    asked_failing: int  # most requests in a window for the bucket, while it fails

    @property
    def ratio(self) -> float:
        """Requests per second while a bucket fails, over those while none does."""
        return self.failing / max(1, self.calm)

    @property
    def measured(self) -> dict[str, float]:
        """The figures for the verdict."""
        return {
            "requests_per_second_calm": self.calm,
            "requests_per_second_failing": self.failing,
            "requests_of_the_bucket_calm": self.asked_calm,
            "requests_of_the_bucket_failing": self.asked_failing,
        }

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why the figures do not pass; empty if they do."""
        if not self.asked_calm or not self.asked_failing:
            return ("nobody asked for the bucket that fails, so nothing was measured",)
        if self.ratio > MOST:
            return (
                f"{self.failing} requests in one second while a bucket fails, {self.ratio:.1f} times the {self.calm} "
                f"of a window in which none does; {MOST:g} times are legal",
            )
        return ()


def measure_storm(
    asks: Iterable[Ask],
    edges: Sequence[WindowTimes],
    *,
    num_calm: int,
    healthy: Collection[str],
    failing: Collection[str],
) -> Storm:
    """Count the requests of the healthy nodes from the close of each window to the end of its first roster slot.

    The first `num_calm` windows have no failing bucket. `healthy` are the accounts of the nodes that no scenario
    touches, `failing` those of the buckets that fail.
    """
    own = [ask for ask in asks if ask.who in healthy]
    seconds, buckets = [], []
    for times in edges:
        at_the_edge = [ask for ask in own if times.close < ask.at <= times.roster_slot(0).last]
        seconds.append(max(Counter(int(ask.at) for ask in at_the_edge).values(), default=0))
        buckets.append(sum(ask.bucket in failing for ask in at_the_edge))
    return Storm(
        calm=max(seconds[:num_calm], default=0),
        failing=max(seconds[num_calm:], default=0),
        asked_calm=max(buckets[:num_calm], default=0),
        asked_failing=max(buckets[num_calm:], default=0),
    )
