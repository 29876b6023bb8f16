"""What is ordered of the gauntlet, and what comes back: values that a flow, a process and a command line share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from templar.adversary.judge import Scenario, Verdict
from templar.errors import PermanentError, Reason
from templar.hparams.tree import HPARAMS_FILE

Where = Literal["simulation", "s3"]
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
"""What is run where nothing else is asked for: one scenario for each kind of attack, and all of them in one network."""


def hparams_file() -> Path:
    """The numbers that networks are made from: those of the current folder, or else this project's own.

    A worker runs flows in a folder of its own, where there are none.
    """
    return HPARAMS_FILE if HPARAMS_FILE.exists() else Path(__file__).resolve().parents[2] / HPARAMS_FILE.name


@dataclass(frozen=True)
class Order:
    """What to run.

    Attributes:
        scenarios: Names of scenarios; without any, the named subset.
        miners: Miners of a network, attackers included; None leaves it to the place.
        attackers: Attackers of each scenario.
        windows: Windows at least; None for as many as the scenarios need.
        seed: Keys, blocks and assignments follow from it.
        endpoint: Which S3 endpoint, where there is one.
    """

    scenarios: tuple[str, ...] = ()
    miners: Annotated[int, Field(ge=1, le=64)] | None = None
    attackers: Annotated[int, Field(ge=1, le=16)] = 1
    windows: Annotated[int, Field(ge=1, le=100)] | None = None
    seed: Annotated[int, Field(ge=0)] = 1
    endpoint: EndpointName = "moto"

    def to_json(self) -> str:
        """One line."""
        return _ORDER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.

        Raises:
            PermanentError: `bad_parameters`; the message names the field.
        """
        try:
            order: Self = _ORDER.validate_json(text)  # type: ignore[assignment]
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "order"
            raise PermanentError(Reason.BAD_PARAMETERS, f"{field}: {first['msg']}") from None
        return order


@dataclass(frozen=True)
class Judgement:
    """What came of one scenario, as an operator reads it.

    Attributes:
        scenario: Its name.
        rows: The rows of the catalogue of adversaries that it stands for.
        title: What happens, for people.
        uids: The attackers; empty where the verdict does not say.
        expected: What must come of it, and the reasons for which it must.
        observed: Reason, or `counted`, -> how often a reader said so of an attacker.
        measured: What was measured.
        lost: Payloads of honest miners that were not applied.
        problems: What is not as expected; nothing if all is well.
    """

    scenario: str
    rows: tuple[int, ...]
    title: str
    uids: tuple[int, ...]
    expected: str
    observed: dict[str, int]
    measured: dict[str, float]
    lost: int
    problems: tuple[str, ...]

    @classmethod
    def of(cls, verdict: Verdict, scenario: Scenario, uids: tuple[int, ...] = ()) -> Self:
        """The judgement that a verdict amounts to."""
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
        """For a table."""
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


JUDGEMENTS = TypeAdapter(tuple[Judgement, ...])
_ORDER = TypeAdapter(Order)
