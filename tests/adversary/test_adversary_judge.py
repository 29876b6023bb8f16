"""A verdict is red for each thing that must not happen, and says which."""

from dataclasses import replace
from typing import Any

import pytest

from templar.adversary.judge import Cast, Expect, History, Scenario, Sighting, Verdict, judge
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


def sightings(reason: Reason | None) -> tuple[Sighting, ...]:
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


def verdict(scenario: Scenario = SCENARIO, cast: Cast = CAST, **changes: Any) -> Verdict:
    return judge(scenario, cast, replace(GOOD, **changes), HPARAMS, LAYOUT)


def test_what_is_as_expected_has_no_problems() -> None:
    found = verdict()
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
        ({"crashes": {"honest-5": "KeyError: 3"}}, "honest-5 crashed: KeyError: 3"),
        ({"traces": ("nodes/somebody",)}, "something of a peer's was run: nodes/somebody"),
        ({"unprintable": ("\\x1b[2J",)}, "a line of a log can forge others: \\x1b[2J"),
        ({"deleted": ("honest-5/proof-2",)}, "honest-5/proof-2 was deleted before its time"),
        ({"roots": {**GOOD.roots, "honest-6": {1: "a", 2: "c"}}}, "hold different states"),
        ({"roots": {**GOOD.roots, "honest-6": {1: "a"}}}, "hold different states"),
    ],
)
def test_each_thing_that_must_not_happen_is_named(changes: dict[str, Any], problem: str) -> None:
    found = verdict(**changes)
    assert not found.passed
    assert problem in "\n".join(found.problems)


def test_an_attackers_own_state_is_its_own_affair() -> None:
    assert verdict(roots={**GOOD.roots, "late-7": {1: "x"}}).passed


def test_windows_in_which_an_attacker_does_nothing_yet_do_not_count() -> None:
    quiet = replace(SCENARIO, quiet=1)
    early = tuple(replace(each, reason=None) if (each.window, each.uid) == (1, 7) else each for each in GOOD.sightings)
    rosters = {1: (5, 6, 7), 2: (5, 6)}
    found = verdict(quiet, sightings=early, rosters=rosters)
    assert (found.problems, found.observed, found.applied) == ((), {"reveal_late": 3}, 0)
    assert not verdict(sightings=early, rosters=rosters).passed


def test_those_to_whom_something_happened_must_come_to_the_others_state() -> None:
    cast = replace(CAST, affected=["late-7"])
    assert verdict(FAULT, cast, sightings=sightings(Reason.COMMIT_MISSING)).passed
    found = verdict(
        FAULT,
        cast,
        sightings=sightings(None),
        roots={**GOOD.roots, "late-7": {1: "a"}},
        rosters={1: (5, 6), 2: (5, 6, 7)},
    )
    assert found.problems == ("a node to which something happened did not come to the others' state",)


def test_a_clean_up_that_deletes_nothing_proves_nothing() -> None:
    cleaning = replace(FAULT, cleans=True)
    assert verdict(cleaning, sightings=sightings(None)).problems == ("no clean-up deleted anything",)
    assert verdict(cleaning, sightings=sightings(None), swept=1).passed


def test_a_bound_on_what_is_not_applied_proves_nothing() -> None:
    bound = replace(SCENARIO, expect=Expect.BOUND, reasons=frozenset())
    found = verdict(bound, sightings=sightings(None))
    assert "window 1: the payload of attacker 7 is not applied, so there is nothing to bound" in found.problems


@pytest.mark.parametrize(("sound", "problems"), [([5, 6, 8, 9], 0), ([5, 6], 1)])
def test_what_a_miner_does_to_whom_something_happens_is_honest_work(sound: list[int], problems: int) -> None:
    """The median is theirs, and larger than what the others have; nobody raised it."""
    bound = replace(SCENARIO, expect=Expect.BOUND, reasons=frozenset(), actor="huge")
    payloads = {uid: random_payload(LAYOUT, 1, size=4.0 if uid in (7, 8, 9) else 1.0) for uid in (5, 6, 7, 8, 9)}
    found = verdict(
        bound,
        replace(CAST, sound=sound),
        sightings=sightings(None),
        rosters={1: tuple(payloads), 2: tuple(payloads)},
        payloads={1: payloads, 2: payloads},
    )
    assert len([problem for problem in found.problems if problem.startswith("median is")]) == problems
