"""Aggregators that misbehave: each is named by what the others report, and a verdict without that is red."""

from dataclasses import replace
from typing import Any

import pytest

from templar.adversary.actors import PUBLISHERS
from templar.adversary.catalogue import SCENARIOS
from templar.adversary.gauntlet import Lineup, run_lineup
from templar.adversary.judge import Cast, History, Sighting, Verdict, judge
from templar.audit.findings import Accusation, Finding, Suspect
from templar.errors import Reason
from templar.gradient.layout import Layout
from templar.training.model import parameter_shapes
from tests.support.network import tiny

HPARAMS = tiny("simulation")
LAYOUT = Layout.of(parameter_shapes(HPARAMS.model), HPARAMS.gradient, HPARAMS.training.recipe)
PUBLISHER = 1
HEALTHY = ("honest-5", "honest-6", "validator-2")
CAST = Cast({PUBLISHER: "aggregator-1"}, {5: "honest-5", 6: "honest-6"}, [5, 6], HEALTHY, [], 2)


# Whole networks; tests/adversary/test_adversary_gauntlet.py runs every one of them among eleven miners.


def test_every_kind_of_publisher_is_a_scenario_of_its_own() -> None:
    scenarios = {name: scenario for name, scenario in SCENARIOS.items() if scenario.publisher}
    assert {name: each.publisher.kind for name, each in scenarios.items() if each.publisher} == PUBLISHERS
    assert all(each.alone and each.is_hostile and each.reasons for each in scenarios.values())
    assert [name for name, each in scenarios.items() if each.publisher and each.publisher.omits] == [
        "omitting_publisher"
    ]


def test_without_an_audit_a_bad_publisher_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("templar.audit.roster_audit.find_conflicts", lambda *arguments: ((), ()))
    (verdict,) = run_lineup(Lineup((SCENARIOS["two_faced_publisher"],), 1, 4), HPARAMS, seed=1)
    assert verdict.roots_agree
    assert verdict.observed == {}
    found = "\n".join(verdict.problems)
    for window in (1, 2):
        assert f"window {window}: validator-2 does not report roster_equivocation" in found
        assert f"window {window}: the reports name [], at fault is [1]" in found
    assert "window 3" not in found, "it could be found in the window after, which was not run"


# The verdict on what is known.


def accusation(reporter: str, window: int, reason: Reason, *suspects: int, is_proven: bool = False) -> Accusation:
    named = tuple(Suspect(uid=uid, hotkey="5" * 48) for uid in suspects)
    finding = Finding(window=window, reason=reason.value, suspects=named, detail="", exhibits=())
    return Accusation(reporter, finding, is_proven)


def accusations(reason: Reason, *suspects: int, is_proven: bool = False) -> tuple[Accusation, ...]:
    """What everybody reports of each window."""
    return tuple(
        accusation(name, window, reason, *suspects, is_proven=is_proven) for window in (1, 2, 3) for name in HEALTHY
    )


SILENT = accusations(Reason.ROSTER_MISSING, PUBLISHER)
PROVEN = accusations(Reason.BAD_SIGNATURE, PUBLISHER, is_proven=True)
TWO_FACED = tuple(
    each for each in accusations(Reason.ROSTER_EQUIVOCATION, PUBLISHER, is_proven=True) if each.finding.window < 3
)
OMITS = (*accusations(Reason.ROSTER_OMITS, PUBLISHER, 5), *accusations(Reason.ROSTER_OMITS, PUBLISHER, 6))
NOBODY: dict[int, tuple[int, ...]] = dict.fromkeys((1, 2, 3), ())
GOOD = History(
    windows=(1, 2, 3),
    rosters=dict.fromkeys((1, 2, 3), (5, 6)),
    payloads={1: {}, 2: {}, 3: {}},
    sightings=tuple(Sighting(window, name, uid, None) for window in (1, 2, 3) for name in HEALTHY for uid in (5, 6)),
    roots={name: {1: "a", 2: "b", 3: "c"} for name in HEALTHY},
    crashes={},
    accusations=SILENT,
)


def verdict_on(name: str, **changes: Any) -> Verdict:
    return judge(SCENARIOS[name], CAST, replace(GOOD, **changes), HPARAMS, LAYOUT)


@pytest.mark.parametrize(
    ("name", "changes", "observed"),
    [
        ("silent_publisher", {}, {"roster_missing": 9}),
        ("forging_publisher", {"accusations": PROVEN}, {"bad_signature": 9}),
        ("two_faced_publisher", {"accusations": TWO_FACED}, {"roster_equivocation": 6}),
        ("omitting_publisher", {"accusations": OMITS, "rosters": NOBODY}, {"roster_omits": 18}),
    ],
)
def test_what_is_as_expected_has_no_problems(name: str, changes: dict[str, Any], observed: dict[str, int]) -> None:
    found = verdict_on(name, **changes)
    assert (found.problems, found.observed) == ((), observed)
    assert found.lost == (6 if name == "omitting_publisher" else 0)


def test_a_proof_against_an_honest_miner_is_found_out() -> None:
    """Whatever the scenario; somebody's word is none."""
    word, proof = (
        accusation("validator-2", 2, Reason.MANIFEST_EQUIVOCATION, 5, is_proven=proven) for proven in (False, True)
    )
    network = replace(CAST, attackers={})
    found = [
        judge(SCENARIOS["two_faced"], network, replace(GOOD, accusations=(each,)), HPARAMS, LAYOUT)
        for each in (word, proof)
    ]
    assert [each.problems for each in found] == [(), ("window 2: a proof convicts honest uid 5",)]


def test_what_the_attacker_reports_and_holds_is_its_own_affair() -> None:
    of_itself = accusation("aggregator-1", 1, Reason.ROSTER_INCLUDES, PUBLISHER, 5)
    roots = {**GOOD.roots, "aggregator-1": {1: "x"}}
    assert verdict_on("silent_publisher", accusations=(*SILENT, of_itself), roots=roots).passed


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("silent_publisher", {"accusations": ()}, "window 1: the reports name [], at fault is [1]"),
        ("silent_publisher", {"accusations": SILENT[1:]}, "window 1: honest-5 does not report roster_missing"),
        (
            "silent_publisher",
            {"accusations": (*SILENT, accusation("honest-5", 3, Reason.ROSTER_LATE, PUBLISHER))},
            "window 3: honest-5 reports roster_late",
        ),
        (
            "silent_publisher",
            {"accusations": (*SILENT, *accusations(Reason.ROSTER_MISSING, 2))},
            "window 2: the reports name [1, 2], at fault is [1]",
        ),
        (
            "forging_publisher",
            {"accusations": (replace(PROVEN[0], is_proven=False), *PROVEN[1:])},
            "window 1: what honest-5 reports is no proof",
        ),
        ("two_faced_publisher", {"accusations": TWO_FACED[:-1]}, "window 2: validator-2 does not report"),
        (
            "omitting_publisher",
            {"accusations": OMITS[:9], "rosters": NOBODY},
            "window 1: no report says that the payload of uid 6 was left out",
        ),
        (
            "silent_publisher",
            {"roots": {**GOOD.roots, "honest-6": {2: "b", 3: "c"}}},
            "window 1: honest-6 did not apply it",
        ),
    ],
)
def test_each_thing_that_must_not_happen_is_named(name: str, changes: dict[str, Any], problem: str) -> None:
    found = verdict_on(name, **changes)
    assert not found.passed
    assert problem in "\n".join(found.problems)
