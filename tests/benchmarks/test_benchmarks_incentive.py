"""The experiment on the incentive runs, judges by its bars, and its last line holds the figures."""

import json
from dataclasses import replace

import pytest

from benchmarks import incentive, speeds
from benchmarks.incentive import COMPUTE_PAY, LOSS_TOLERANCE, Check, Trial, judge, judge_model, pay_over_value
from benchmarks.incentive_population import (
    FEW,
    MAIN,
    IncentiveReport,
    PayloadValue,
    Penalised,
    honest_alone,
    incentive_hparams,
    populations,
    run_population,
)
from tests.support.network import tiny


@pytest.mark.slow
def test_it_runs_a_population_its_honest_miners_alone_and_itself_again(monkeypatch, capfd):
    monkeypatch.setattr(incentive, "incentive_hparams", lambda: tiny("simulation"))
    monkeypatch.setattr(
        "sys.argv", ["incentive", "--population", "zero", "--windows", "2", "--miners", "4", "--jobs", "1"]
    )
    code = incentive.main()
    said = capfd.readouterr()
    figures = json.loads(said.out.splitlines()[-1])
    (found,) = figures["populations"].values()
    (population,) = found["seeds"].values()
    assert (figures["windows"], figures["seeds"]) == (2, [incentive.SEED])
    assert population["final"].keys() == population["pay"].keys() == {"honest", "zero"}
    checks = {check["name"]: check["holds"] for check in (*population["checks"], found["model"])}
    assert checks["the same seed gives the same weights"]
    assert checks["all nodes hold one state"]
    assert figures["holds"] == all(checks.values()) == (code == 0)
    progress = [line.split(":")[0] for line in said.err.splitlines() if ": window 2 of 2: " in line]
    assert progress == ["zero", "zero", "zero, honest alone"]


def test_honest_miners_alone_have_the_same_slots_of_the_same_text():
    hparams, population = incentive_hparams(), populations(8)[MAIN]
    alone, numbers = honest_alone(population, hparams)
    assert alone.actors == ("honest",) * 8
    slots = [len(each.actors) + spare.data.spare_slots for each, spare in ((population, hparams), (alone, numbers))]
    assert slots[0] == slots[1]
    assert numbers.model_copy(update={"data": hparams.data}) == hparams


REPORT = IncentiveReport(
    windows=4,
    roles={3: "honest", 4: "honest", 5: "honest", 6: "half", 7: "lazy", 8: "sybil", 9: "sybil"},
    finals={3: 4.0, 4: 6.0, 5: 8.0, 6: 5.0, 7: 0.0, 8: 3.0, 9: 3.0},
    weights={2: {3: 1.0}, 4: {3: 0.2, 4: 0.2, 5: 0.3, 6: 0.1, 8: 0.1, 9: 0.1}},
    penalties=(Penalised(2, 7, "malformed"),),
    loss=3.0,
    root="ab",
    roots_agree=True,
    seconds=1.0,
    values=tuple(
        PayloadValue(4, uid, fall, applied)
        for applied in (False, True)
        for uid, fall in {3: 0.2, 4: 0.2, 5: 0.3, 6: 0.1, 7: -0.5, 8: 0.1, 9: 0.1}.items()
        if not applied or uid != 9
    ),
)


OF_VALUE = "honest miners' share of pay is that of value, of payloads "


def failing(report, **others):
    """The names of the checks that fail, without those of pay over value."""
    names = [check.name.split(":")[0] for check in judge(Trial(1, report, **others)) if not check.holds]
    return [name for name in names if not name.startswith(OF_VALUE)]


def failing_of_value(report):
    """Of which payloads the honest miners' pay is not in proportion to the value."""
    names = [check.name for check in judge(Trial(1, report)) if not check.holds]
    return [name.removeprefix(OF_VALUE) for name in names if name.startswith(OF_VALUE)]


def test_a_population_that_keeps_every_bar():
    trial = Trial(1, REPORT, alone=REPORT, again=REPORT)
    checks = [*judge(trial), judge_model([trial])]
    assert all(isinstance(check, Check) and check.holds and check.detail for check in checks)
    assert len(checks) == len({check.name for check in checks}) == 3 + 4 + 2
    assert REPORT.pay(3) == REPORT.weight(3) == 0.2  # the mean of the second half
    assert (REPORT.pay(7), REPORT.weight(7)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("weights", "fails"),
    [
        ({7: 0.19}, []),
        ({7: 0.2}, ["lazy"]),
        ({6: 0.23}, []),
        ({6: 0.24}, ["half"]),
        ({8: 0.15}, []),
        ({8: 0.17}, ["sybil"]),
        ({3: 0.05, 7: 0.06}, ["lazy"]),
    ],
)
def test_each_kind_has_its_bar(weights, fails):
    assert COMPUTE_PAY == 1.1
    report = replace(REPORT, weights={**REPORT.weights, 4: {**REPORT.weights[4], **weights}})
    assert failing(report) == fails


@pytest.mark.parametrize(
    ("kind", "pay", "holds"),
    [
        ("split", 0.26, True),
        ("split", 0.27, False),
        ("pool", 0.79, True),
        ("pool", 0.8, False),
        ("fifth", 0.1, True),
        ("fifth", 0.11, False),
    ],
)
def test_a_trainer_is_paid_for_its_compute(kind, pay, holds):
    """Three uids of one run are paid as one miner, one uid with three miners' compute as three."""
    uids = (8, 9, 10)[: FEW.get(kind, 2)]
    roles = {3: "honest", 4: "honest", 5: "honest"} | dict.fromkeys(uids, kind)
    weights = {4: {3: 0.2, 4: 0.24, 5: 0.28} | dict.fromkeys(uids, pay / len(uids))}
    report = replace(REPORT, roles=roles, weights=weights, finals=dict.fromkeys(roles, 1.0), penalties=())
    assert (failing(report) == []) is holds


def test_honest_miners_are_not_penalised():
    penalised = replace(REPORT, penalties=(*REPORT.penalties, Penalised(3, 4, "inactive")))
    assert failing(penalised) == ["no honest miner is penalised"]
    assert failing(replace(REPORT, roots_agree=False)) == ["all nodes hold one state"]
    other = replace(REPORT, weights={4: {3: 1.0}})
    assert failing(REPORT, again=other) == ["the same seed gives the same weights"]
    assert failing(REPORT, again=replace(REPORT, seconds=2.0)) == []


def test_the_model_does_not_suffer_in_the_mean_over_the_seeds():
    def holds(*losses):
        check = judge_model([Trial(seed, replace(REPORT, loss=loss), alone=REPORT) for seed, loss in enumerate(losses)])
        assert check is not None
        assert check.detail.count("%") == 1 + len(losses)
        return check.holds

    limit = REPORT.loss * (1 + LOSS_TOLERANCE)
    assert [holds(limit - 1e-6), holds(limit + 1e-6)] == [True, False]
    assert [holds(limit + 0.02, REPORT.loss), holds(limit, limit, limit + 1e-3)] == [True, False]
    assert judge_model([Trial(1, REPORT)]) is None


def test_pay_is_compared_with_the_value_on_held_out_text():
    """A payload that raises the loss counts as 0; payloads that no roster has count in the first quotient only.

    A miner that is penalised in the second half has no part in either.
    """
    assert [REPORT.value(uid, applied_only=False) for uid in (3, 7, 9)] == [0.2, 0.0, 0.1]
    assert REPORT.value(9, applied_only=True) == 0.0
    assert pay_over_value(REPORT, applied_only=False) == pytest.approx(0.7 / 1.0 / (0.7 / 1.0))
    assert pay_over_value(REPORT, applied_only=True) == pytest.approx(0.7 / 1.0 / (0.7 / 0.9))
    penalised = replace(REPORT, penalties=(Penalised(4, 9, "oversized"),))
    assert pay_over_value(penalised, applied_only=True) == pytest.approx(1.0)
    assert pay_over_value(replace(REPORT, values=()), applied_only=False) is None
    assert failing_of_value(REPORT) == []
    assert failing_of_value(replace(REPORT, values=())) == ["that count", "in rosters"]


def test_each_payload_is_valued_in_the_step_of_all_and_in_that_of_the_roster():
    found = run_population(tiny("simulation"), populations(4)["zero"], windows=2, seed=1)
    miners = found.uids("honest") + found.uids("zero")
    of_all = [(each.window, each.uid) for each in found.values if not each.applied]
    assert of_all == [(2, uid) for uid in miners]
    assert {(each.window, each.uid) for each in found.values if each.applied} <= set(of_all)
    assert max(found.value(uid, applied_only=True) for uid in found.uids("honest")) > 0
    assert all(found.value(uid, applied_only=False) == 0 for uid in found.uids("zero"))
    assert max(found.value(uid, applied_only=False) for uid in found.uids("honest")) > 0


@pytest.mark.parametrize(
    ("pay", "loss", "penalised", "holds"),
    [(0.5, 3.0, 0, True), (0.3, 3.0, 0, False), (0.5, 3.2, 0, False), (0.5, 3.0, 1, False)],
)
def test_a_fast_miner_must_help_the_network_and_earn_more(pay, loss, penalised, holds):
    def report(loss, weights, penalties=()):
        roles = dict.fromkeys(weights, "slow") | {1: "honest" if pay in weights.values() else "slow"}
        return IncentiveReport(1, roles, {}, {1: weights}, penalties, loss, "", True, 1.0)

    mixed = report(loss, {1: pay, 2: 0.25, 3: 0.25}, (Penalised(1, 1, "large"),) * penalised)
    figures = speeds.figures_of([mixed], [report(3.1, {1: 0.3, 2: 0.3, 3: 0.3})])
    assert (figures["pay_ratio"], figures["holds"]) == (pay / 0.25, holds)


def test_a_slow_miner_without_pay_has_no_ratio():
    alone = IncentiveReport(1, {1: "honest", 2: "slow"}, {}, {1: {1: 1.0}}, (), 3.0, "", True, 1.0)
    assert speeds.figures_of([alone], [alone])["pay_ratio"] is None, "JSON has no infinity"


@pytest.mark.slow
def test_it_runs_a_network_of_unequal_speeds(measure, monkeypatch):
    monkeypatch.setattr(speeds, "QUICK_WINDOWS", 2)
    status, _, figures = measure(speeds.main, "--quick", "--jobs", "1")
    assert (status, figures["windows"], figures["penalties"]) == (0, speeds.QUICK_WINDOWS, 0)
    assert figures["loss_with_fast"] > figures["loss_of_slow"] > 0, "it has had fewer windows"
