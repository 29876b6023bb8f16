"""A verdict is red for each thing that must not happen, and says which; of attackers, then of publishers."""

from dataclasses import replace

import pytest

from lab.adversary.catalogue import SCENARIOS
from lab.adversary.judge import Cast, Expect, History, Scenario, Sighting, judge
from lab.adversary.reports import Accusation
from templar.agreement.findings import Finding, Suspect
from templar.errors import Reason
from templar.gradient.layout import Layout
from templar.training.model import parameter_shapes
from tests.gradient.gradient_cases import random_payload
from tests.support.network import tiny

HPARAMS = tiny("simulation")
LAYOUT = Layout.of(parameter_shapes(HPARAMS.model), HPARAMS.gradient, HPARAMS.training.recipe)
SCENARIO = Scenario("late", (19,), "late", Expect.REJECT, frozenset({Reason.REVEAL_LATE}), actor="late")
FAULT = Scenario("down", (28,), "down", Expect.CONTINUE, frozenset({Reason.COMMIT_MISSING}))
CAST = Cast({7: "late-7"}, {5: "honest-5", 6: "honest-6"}, [5, 6], ["aggregator-1", "honest-5", "honest-6"], [], 3)
HEALTHY = ("aggregator-1", "honest-5", "honest-6")


def sightings(reason):
    """What everybody says of the attacker in both windows, and of the honest ones."""
    of_attacker = [Sighting(window, name, 7, reason) for window in (1, 2) for name in HEALTHY]
    of_honest = [Sighting(window, name, uid, None) for window in (1, 2) for name in HEALTHY for uid in (5, 6)]
    return tuple(of_attacker + of_honest)


GOOD = History(
    windows=(1, 2),
    rosters={1: (5, 6), 2: (5, 6)},
    payloads={1: {}, 2: {}},
    sightings=sightings(Reason.REVEAL_LATE),
    roots={name: {1: "a", 2: "b"} for name in (*HEALTHY, "late-7")},
    crashes={},
)


def verdict(scenario=SCENARIO, cast=CAST, **changes):
    return judge(scenario, cast, replace(GOOD, **changes), HPARAMS, LAYOUT)


BOUND = replace(SCENARIO, expect=Expect.BOUND, reasons=frozenset())


def test_what_is_as_expected_has_no_problems():
    found = verdict(roots={**GOOD.roots, "late-7": {1: "x"}})  # an attacker's own state is its own affair
    assert found.passed
    assert found.problems == ()
    assert found.observed == {"reveal_late": 6}
    assert (found.applied, found.lost, found.null_windows, found.roots_agree) == (0, 0, 0, True)
    assert (found.attackers, found.miners, found.windows, found.legal) == (1, 3, 2, ("reveal_late",))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rosters": {1: (5, 6, 7), 2: (5, 6)}}, "window 1: the payload of attacker 7 is applied"),
        ({"rosters": {1: (5, 6), 2: (6,)}}, "window 2: the payload of honest uid 5 is not applied"),
        ({"sightings": sightings(None)}, "window 1: honest-5 accepts attacker 7"),
        ({"sightings": sightings(Reason.WRONG_HASH)}, "window 1: aggregator-1 says wrong_hash of attacker 7"),
        ({"sightings": ()}, "window 2: nobody looked at attacker 7"),
        (
            {"sightings": (*GOOD.sightings, Sighting(2, "honest-6", 5, Reason.STORE_BUSY))},
            "window 2: honest-6 says store_busy of honest uid 5",
        ),
        ({"roots": {**GOOD.roots, "honest-6": {1: "a", 2: "c"}}}, "hold different states"),
        ({"roots": {**GOOD.roots, "honest-6": {1: "a"}}}, "hold different states"),
    ],
)
def test_each_thing_that_must_not_happen_is_named(changes, problem):
    found = verdict(**changes)
    assert not found.passed
    assert problem in "\n".join(found.problems)


def test_windows_in_which_an_attacker_does_nothing_yet_do_not_count():
    quiet = replace(SCENARIO, quiet=1)
    early = tuple(replace(each, reason=None) if (each.window, each.uid) == (1, 7) else each for each in GOOD.sightings)
    rosters = {1: (5, 6, 7), 2: (5, 6)}
    found = verdict(quiet, sightings=early, rosters=rosters)
    assert (found.problems, found.observed, found.applied) == ((), {"reveal_late": 3}, 0)
    assert not verdict(sightings=early, rosters=rosters).passed


def test_those_to_whom_something_happened_must_come_to_the_others_state():
    cast = replace(CAST, affected=["late-7"])
    assert verdict(FAULT, cast, sightings=sightings(Reason.COMMIT_MISSING)).passed
    away = {"roots": {**GOOD.roots, "late-7": {1: "a"}}, "rosters": {1: (5, 6), 2: (5, 6, 7)}}
    found = verdict(FAULT, cast, sightings=sightings(None), **away)
    assert found.problems == ("a node to which something happened did not come to the others' state",)


@pytest.mark.parametrize(("sound", "problems"), [([5, 6, 8, 9], 0), ([5, 6], 1)])
def test_what_a_miner_does_to_whom_something_happens_is_honest_work(sound, problems):
    """The median is theirs, and larger than what the others have; nobody raised it."""
    payloads = {uid: random_payload(LAYOUT, 1, size=4.0 if uid in (7, 8, 9) else 1.0) for uid in (5, 6, 7, 8, 9)}
    applied = {"rosters": dict.fromkeys((1, 2), tuple(payloads)), "payloads": dict.fromkeys((1, 2), payloads)}
    scenario, cast = replace(BOUND, actor="huge"), replace(CAST, sound=sound)
    found = verdict(scenario, cast, sightings=sightings(None), **applied)
    assert len([problem for problem in found.problems if problem.startswith("median is")]) == problems


def test_an_attacker_that_one_roster_is_without_is_named():
    payloads = {uid: random_payload(LAYOUT, 1) for uid in (5, 6, 7)}
    honest = {uid: payloads[uid] for uid in (5, 6)}
    found = verdict(BOUND, rosters={1: (5, 6, 7), 2: (5, 6)}, payloads={1: payloads, 2: honest}, sightings=())
    assert found.problems == ("window 2: the payload of attacker 7 is not applied, so there is nothing to bound",)


# Aggregators that misbehave: each is named by what the others report.

PUBLISHER = 1
WITNESSES = ("honest-5", "honest-6", "validator-2")
AUDITED = Cast({PUBLISHER: "aggregator-1"}, {5: "honest-5", 6: "honest-6"}, [5, 6], WITNESSES, [], 2)


def accusation(reporter, window, reason, *suspects, is_proven=False):
    named = tuple(Suspect(uid=uid, hotkey="5" * 48) for uid in suspects)
    finding = Finding(window=window, reason=reason.value, suspects=named, detail="", exhibits=())
    return Accusation(reporter, finding, is_proven)


def accusations(reason, *suspects, is_proven=False):
    """What everybody reports of each window."""
    return tuple(
        accusation(name, window, reason, *suspects, is_proven=is_proven) for window in (1, 2, 3) for name in WITNESSES
    )


SILENT = accusations(Reason.ROSTER_MISSING, PUBLISHER)
PROVEN = accusations(Reason.BAD_SIGNATURE, PUBLISHER, is_proven=True)
TWO_FACED = tuple(
    each for each in accusations(Reason.ROSTER_EQUIVOCATION, PUBLISHER, is_proven=True) if each.finding.window < 3
)
OMITS = (*accusations(Reason.ROSTER_OMITS, PUBLISHER, 5), *accusations(Reason.ROSTER_OMITS, PUBLISHER, 6))
NOBODY: dict[int, tuple[int, ...]] = dict.fromkeys((1, 2, 3), ())
REPORTED = History(
    windows=(1, 2, 3),
    rosters=dict.fromkeys((1, 2, 3), (5, 6)),
    payloads={1: {}, 2: {}, 3: {}},
    sightings=tuple(Sighting(window, name, uid, None) for window in (1, 2, 3) for name in WITNESSES for uid in (5, 6)),
    roots={name: {1: "a", 2: "b", 3: "c"} for name in WITNESSES},
    crashes={},
    accusations=SILENT,
)


def verdict_on(name, **changes):
    return judge(SCENARIOS[name], AUDITED, replace(REPORTED, **changes), HPARAMS, LAYOUT)


@pytest.mark.parametrize(
    ("name", "changes", "observed"),
    [
        ("silent_publisher", {}, {"roster_missing": 9}),
        ("forging_publisher", {"accusations": PROVEN}, {"bad_signature": 9}),
        ("two_faced_publisher", {"accusations": TWO_FACED}, {"roster_equivocation": 6}),
        ("omitting_publisher", {"accusations": OMITS, "rosters": NOBODY}, {"roster_omits": 18}),
    ],
)
def test_a_publisher_is_reported_as_expected(name, changes, observed):
    found = verdict_on(name, **changes)
    assert (found.problems, found.observed) == ((), observed)
    assert found.lost == (6 if name == "omitting_publisher" else 0)


def test_a_proof_against_an_honest_miner_is_found_out():
    for proven, problems in ((False, ()), (True, ("window 2: a proof convicts honest uid 5",))):
        each = accusation("validator-2", 2, Reason.MANIFEST_EQUIVOCATION, 5, is_proven=proven)
        history, cast = replace(REPORTED, accusations=(each,)), replace(AUDITED, attackers={})
        assert judge(SCENARIOS["two_faced"], cast, history, HPARAMS, LAYOUT).problems == problems


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
            {"roots": {**REPORTED.roots, "honest-6": {2: "b", 3: "c"}}},
            "window 1: honest-6 did not apply it",
        ),
    ],
)
def test_each_report_that_is_missing_or_wrong_is_named(name, changes, problem):
    found = verdict_on(name, **changes)
    assert not found.passed
    assert problem in "\n".join(found.problems)
