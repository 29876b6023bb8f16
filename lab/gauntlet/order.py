"""The order of a gauntlet and its judgements: values that the flow, the host process and the command line share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from lab.adversary.judge import Scenario, Verdict
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
"""The scenarios by default: one for each kind of attack, all of them in one network."""


def hparams_file() -> Path:
    """The current folder's hparams.json, or this project's: a worker runs flows in a folder without one."""
    return HPARAMS_FILE if HPARAMS_FILE.exists() else Path(__file__).resolve().parents[2] / HPARAMS_FILE.name


@dataclass(frozen=True)
class Order:
    """What to run; the flow `gauntlet` describes each parameter."""

    scenarios: tuple[str, ...] = ()
    miners: Annotated[int, Field(ge=1, le=64)] | None = None
    attackers: Annotated[int, Field(ge=1, le=16)] = 1
    windows: Annotated[int, Field(ge=1, le=100)] | None = None
    seed: Annotated[int, Field(ge=0)] = 1
    endpoint: EndpointName = "moto"

    def to_json(self) -> str:
        """The order as one line of JSON."""
        return _ORDER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The order that `to_json` wrote.

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


JUDGEMENTS = TypeAdapter(tuple[Judgement, ...])
_ORDER = TypeAdapter(Order)
