"""The verdicts on a network that ran on an endpoint: those of `templar.adversary.judge`, and what no object shows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from deployments.gauntlet.casting import Casting
from deployments.gauntlet.gate import Log
from deployments.gauntlet.second import Start
from deployments.gauntlet.storm import measure_storm
from deployments.gauntlet.subset import LISTED, ONE_HOTKEY, RETRY_STORM, telling_reasons
from tasks.gauntlet_order import Judgement
from templar.adversary.judge import COUNTED, Cast, Expect, History, Scenario, Verdict, judge
from templar.adversary.observe import Watch, history_of
from templar.gradient.layout import Layout
from templar.hparams import HParams
from templar.neuron.node import Node
from templar.simulate.world import START_WINDOW, World
from templar.training.model import genesis_parameters


@dataclass(frozen=True)
class Judging:
    """What is known of a network that ran.

    Attributes:
        casting: Who had which part.
        world: The world.
        watch: What was written down.
        log: What was asked of the endpoint.
        second: What came of the second process, if there was one.
        last: The last window.
    """

    casting: Casting
    world: World
    watch: Watch
    log: Log
    second: Start | None
    last: int

    def judgements(self, nodes: Mapping[str, Node]) -> tuple[Judgement, ...]:
        """One for each scenario, in their order; the nodes still run.

        Args:
            nodes: The nodes, by name.

        Raises:
            TransientError: Nobody can say what was decided on a window.
        """
        windows, genesis = range(START_WINDOW, self.last + 1), genesis_parameters(self.world.hparams.model)
        witness = next(node for name, node in nodes.items() if name.startswith("aggregator"))
        history = history_of(self.watch, nodes, witness, windows, folder=self.world.root, genesis=genesis)
        judgements = []
        for scenario in self.casting.parts.scenarios:
            cast = self.casting.cast(scenario)
            verdict = judge_scenario(scenario, cast, history, self.world.hparams, witness.layout)
            if scenario.name == ONE_HOTKEY:
                verdict = self.with_second(scenario, verdict)
            elif scenario.expect is Expect.REJECT:
                verdict = with_silence(scenario, verdict)
            if scenario.name == RETRY_STORM:
                verdict = self._with_storm(scenario, verdict, witness)
            judgements.append(Judgement.of(verdict, LISTED[scenario.name], tuple(sorted(cast.attackers))))
        return tuple(judgements)

    def _with_storm(self, scenario: Scenario, verdict: Verdict, witness: Node) -> Verdict:
        accounts = self.casting.by_account
        storm = measure_storm(
            self.log.asks(),
            [witness.exchange.times(window) for window in range(START_WINDOW, self.last + 1)],
            num_calm=scenario.quiet,
            healthy=self.casting.members.keys() - accounts.keys(),
            failing={account for account, part in accounts.items() if part is scenario},
        )
        return replace(verdict, measured=storm.measured, problems=(*verdict.problems, *storm.problems))

    def with_second(self, scenario: Scenario, verdict: Verdict) -> Verdict:
        """The verdict, with what came of the second process."""
        second = self.second or Start("", "it never came to its start")
        legal = {reason.value for reason in scenario.reasons}
        problems = () if second.reason in legal else (f"the second process was not refused: {second.message}",)
        observed = {second.reason or COUNTED: 1}
        return replace(verdict, observed=observed, problems=(*verdict.problems, *problems))


def judge_scenario(scenario: Scenario, cast: Cast, history: History, hparams: HParams, layout: Layout) -> Verdict:
    """A bound shows in the windows in which the attackers were in time; a busy machine may prevent that once."""
    if scenario.expect is not Expect.BOUND:
        return judge(scenario, cast, history, hparams, layout)
    windows = [window for window in history.windows if cast.attackers.keys() <= set(history.rosters[window])]
    if windows:
        return judge(scenario, cast, replace(history, windows=tuple(windows)), hparams, layout)
    verdict = judge(replace(scenario, expect=Expect.CONTINUE), cast, history, hparams, layout)
    problem = "the attackers' payloads were never applied, so there is nothing to bound"
    return replace(verdict, expect=scenario.expect.value, problems=(*verdict.problems, problem))


def with_silence(scenario: Scenario, verdict: Verdict) -> Verdict:
    """An attack that nobody noticed was none."""
    wanted = {reason.value for reason in telling_reasons(scenario.name)}
    if wanted & verdict.observed.keys():
        return verdict
    return replace(verdict, problems=(*verdict.problems, f"nobody ever said {' or '.join(sorted(wanted))}"))
