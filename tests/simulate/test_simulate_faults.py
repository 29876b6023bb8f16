"""Networks with faults from a seed: what is drawn, that a seed replays exactly, and that invariants can fail."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulate.__main__ import main
from lab.simulate.fault_plan import (
    CALM_WINDOWS,
    FAULTY_STAKE,
    TRAINED_EVERY,
    Fault,
    FaultKind,
    difficult_plan,
    draw_plan,
)
from lab.simulate.faulty_network import FaultReport, run_plan
from templar.agreement.voter import Settlement
from templar.errors import Reason
from templar.neuron.aggregator import Aggregator
from templar.scoring.slashing import Slash
from templar.scoring.standing import Event
from tests.simulate.conftest import without_times

REORGANISED = 28
"""In window 2 of this seed, the close moves by a slot 24 seconds after it; see `test_a_close_that_moves_late`."""


@given(st.integers(), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_members_with_faults_are_minorities(seed, windows):
    plan = draw_plan(seed, windows)
    assert plan == draw_plan(seed, windows)
    validators = range(1, plan.num_validators + 2)
    miners = range(plan.num_validators + 2, plan.num_validators + 2 + len(plan.actors))
    assert plan.faulty <= {*validators, *miners}
    for stakes in plan.stakes:
        held = sum(stake for uid, stake in zip(validators, stakes, strict=True) if uid in plan.faulty)
        assert held <= FAULTY_STAKE * sum(stakes) + 0.01
    assert 2 * len(plan.faulty & {*miners}) < len(miners)
    for uid, actor in zip(miners, plan.actors, strict=True):
        assert actor == "honest" or uid in plan.faulty
    for fault in plan.faults:
        assert 1 <= fault.first <= fault.last <= windows
        lasting = fault.kind in (FaultKind.CLOCK, FaultKind.PAYLOAD)
        assert lasting or fault.last <= max(1, windows - CALM_WINDOWS)


def test_a_power_cut_ends_all_members_with_faults_in_one_window():
    cuts = 0
    for seed in range(60):
        plan = draw_plan(seed, 30)
        power = [fault for fault in plan.faults if fault.name == "power"]
        assert {fault.uid for fault in power} in (set(), plan.faulty)
        assert len({(fault.first, fault.last, fault.amount) for fault in power}) <= 1
        cuts += len(power) > 1
    assert cuts > 5


@pytest.mark.parametrize("seed", [14])
def test_a_seed_holds_every_invariant_and_replays_exactly(seed):
    windows: list[int] = []
    report = run_plan(draw_plan(seed, 6), windows.append)
    assert report.violation is None
    assert windows == [1, 2, 3, 4, 5, 6]
    assert without_times(run_plan(draw_plan(seed, 6))) == without_times(report)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 208))  # the first one trains
def test_seeds_hold_every_invariant(seed):
    assert run_plan(draw_plan(seed, 30)).violation is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_difficult_chain_costs_no_honest_miner_anything(seed):
    """For 500 windows: `python -m lab.simulate --difficult --miners 20 --validators 3 --windows 500 --seed 1`."""
    report = run_plan(difficult_plan(seed, 15, num_validators=3, num_miners=20))
    assert (report.violation, report.windows, report.null_windows) == (None, 15, 0)


# Each invariant can fail.


def run_difficult(seed=REORGANISED, windows=3, **changes):
    plan = difficult_plan(seed, windows, num_validators=2, num_miners=2)
    return run_plan(replace(plan, has_outages=False, **changes))


def test_windows_are_counted_where_every_member_has_a_fault():
    faults = tuple(Fault(uid, FaultKind.CLOCK, "wrong", 1, 2, 0.1) for uid in range(1, 6))
    report = run_difficult(windows=2, faults=faults)
    assert (report.violation, report.windows, report.null_windows) == (None, 2, 0)


def pay(monkeypatch, uid):
    monkeypatch.setattr("templar.scoring.conclude.compute_weights", lambda *arguments: {uid: 1.0})
    monkeypatch.setattr("templar.neuron.validator.check_weights", lambda *arguments: None)


def test_a_close_that_moves_late_loses_a_reveal_if_readers_look_once(monkeypatch):
    assert run_difficult().violation is None
    missing = {Reason.COMMIT_MISSING, Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING}
    monkeypatch.setattr("templar.exchange.gather._NOT_YET", missing)
    report = run_difficult()
    assert report.violation == "seed 28, window 2: the roster [] is without honest-4, honest-5"
    assert without_times(run_difficult()) == without_times(report), "a violation replays exactly"


def test_two_roots_are_found(monkeypatch):
    real = Aggregator.apply

    def wrong(node, settlement):
        return real(node, Settlement(2, None) if settlement.window == 2 else settlement)

    monkeypatch.setattr(Aggregator, "apply", wrong)
    assert "window 2: validator-2 has the root" in str(run_difficult().violation)


def test_a_penalty_of_an_honest_miner_is_found(monkeypatch):
    def slashed(card, facts, window, scoring, **more):
        return [Slash(Event.MISSING, Reason.COMMIT_MISSING, scoring.slashing.missing)]

    monkeypatch.setattr("templar.scoring.conclude.late_slashes", slashed)
    assert "window 1: validator-2 penalises uid 4" in str(run_difficult().violation)


@pytest.mark.parametrize("uid", [1, 4])
def test_pay_without_a_payload_or_a_measurement_is_found(monkeypatch, uid):
    """Uid 1 is an aggregator; in a network without training nothing is measured, so no miner may be paid."""
    pay(monkeypatch, uid)
    assert run_difficult().violation == f"seed 28, window 1: validator-2 pays uid {uid} for nothing"


@pytest.mark.long
def test_a_trained_network_in_which_nobody_is_paid_is_found(monkeypatch):
    plan = replace(draw_plan(TRAINED_EVERY, 3), faults=())
    assert plan.is_trained
    monkeypatch.setattr("templar.scoring.conclude.compute_weights", lambda *arguments: {})
    assert "nobody was ever paid by validator-2" in str(run_plan(plan).violation)


def test_a_network_that_stands_still_is_found(monkeypatch):
    def crash(node, settlement):
        raise OSError("no such disk")

    monkeypatch.setattr(Aggregator, "publish_decision", crash)
    assert "window 1: aggregator-1: OSError: no such disk" in str(run_difficult().violation)


@pytest.mark.parametrize("option", [("--faults", "3"), ("--difficult", "--seed", "3", "--miners", "2")])
def test_the_command_prints_the_plan_and_what_came_of_it(monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["python -m lab.simulate", *option, "--windows", "2"])
    assert main() == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert set(report) == set(FaultReport.__dataclass_fields__)
    assert (report["violation"], report["windows"], report["plan"]["seed"]) == (None, 2, 3)
    assert printed.err == "window 1: every invariant holds\nwindow 2: every invariant holds\n"


def test_the_command_fails_where_an_invariant_does_not_hold(monkeypatch, capsys):
    pay(monkeypatch, 1)
    monkeypatch.setattr(sys, "argv", ["python -m lab.simulate", "--difficult", "--miners", "1", "--windows", "2"])
    assert main() == 1
    assert "pays uid 1 for nothing" in json.loads(capsys.readouterr().out)["violation"]
