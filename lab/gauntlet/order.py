"""The order of a gauntlet on an endpoint, and its judgements."""

from dataclasses import dataclass
from typing import Literal, Self

from lab.adversary.judge import Scenario, Verdict

EndpointName = Literal["moto", "rclone"]

SUBSET = (
    "pickle",
    "index_twice",
    "huge",
    "copying",
    "late",
    "late_swapping",
    "old_client",
    "replaying",
    "withheld",
    "dripping",
    "retry_storm",
    "one_hotkey",
)
"""The scenarios by default: one for each kind of attack, all of them in one network."""


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
class Judgement:
    """The verdict on one scenario, as an operator reads it."""

    scenario: str
    rows: tuple[int, ...]  # of the catalogue of adversaries
    title: str
    uids: tuple[int, ...]  # the attackers; empty where the verdict does not name them
    expected: str  # the expected outcome and its legal reasons
    observed: dict[str, int]  # reason, or `counted` -> how many readers reported it of an attacker
    measured: dict[str, float]
    lost: int  # payloads of honest miners that were not applied
    problems: tuple[str, ...]  # empty if everything is as expected

    @classmethod
    def of(cls, verdict: Verdict, scenario: Scenario, uids: tuple[int, ...] = ()) -> Self:
        """The judgement of a verdict."""
        reasons = sorted(reason.value for reason in scenario.reasons)
        return cls(
            scenario=scenario.name,
            rows=scenario.rows,
            title=scenario.title,
            uids=uids,
            expected=": ".join(filter(None, (scenario.expect.name.lower(), ", ".join(reasons)))),
            observed=dict(verdict.observed),
            measured=dict(verdict.measured),
            lost=verdict.lost,
            problems=verdict.problems,
        )

    @property
    def passed(self) -> bool:
        """Whether everything is as expected."""
        return not self.problems

    def row(self) -> dict[str, str]:
        """The judgement as a row of a table."""
        seen = [f"{reason} {count}" for reason, count in self.observed.items()]
        seen += [f"{name} {value:g}" for name, value in self.measured.items()]
        return {
            "scenario": self.scenario,
            "rows": ", ".join(map(str, self.rows)),
            "uid": ", ".join(map(str, self.uids)),
            "what happens": self.title,
            "expected": self.expected,
            "observed": ", ".join(seen),
            "verdict": "passed" if self.passed else "failed: " + "; ".join(self.problems),
        }
