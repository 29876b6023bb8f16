"""Every attack and fault of the catalogue against a network of eleven miners; and what a verdict is worth."""

import json
import logging
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from deployments.command import exit_status
from lab.adversary import observe
from lab.adversary.__main__ import main
from lab.adversary.casting import Lineup
from lab.adversary.catalogue import SCENARIOS
from lab.adversary.gauntlet import lineups, run_lineup
from lab.adversary.judge import Expect
from lab.adversary.mutations import MUTATIONS
from templar.exchange import payload_cache, signed
from templar.exchange.object_keys import Kind, parse_current_key
from templar.gradient import aggregate
from templar.housekeeping.bucket_cleanup import CleanupReport
from tests.support.network import tiny

MINERS = 11
FIXED = tuple(name for name, scenario in SCENARIOS.items() if scenario.honest is not None or scenario.publisher)
"""Scenarios whose number of attackers is part of what they are."""


QUICK = {(1, "forging_publisher"), (1, "one_good"), (1, "all_bad"), (5, "colluding")}
"""Scenarios that need a network of their own, and of which the default run has one."""


def is_quick(attackers, names):
    """Networks with several attacks at once show the most for their time; one is enough for bytes that no codec reads.

    tests/adversary/test_adversary_mutations.py shows all of these to a reader.
    """
    if len(names) == 1:
        return (attackers, names[0]) in QUICK
    return attackers == 1 and len(names) >= 3 and ("pickle" in names or not set(names) <= set(MUTATIONS))


def networks():
    for attackers in (1, 2, 5):
        names = [name for name in SCENARIOS if attackers == 1 or name not in FIXED]
        for lineup in lineups(names, miners=MINERS, attackers=attackers):
            members = [scenario.name for scenario in lineup.scenarios]
            marks = [] if is_quick(attackers, members) else [pytest.mark.long]
            yield pytest.param(lineup, id=f"{attackers}-{'-'.join(members)}", marks=marks)


def run(lineup, *, seed=1):
    overrides = {key: value for each in lineup.scenarios for key, value in each.overrides.items()}
    return {each.scenario: each for each in run_lineup(lineup, tiny("simulation", **overrides), seed=seed)}


OBSERVED = {"bucket_flaky": {"counted"}, "two_faced": {"counted", "wrong_hash"}}
"""A fault that a retry overcomes costs nobody anything; who is shown other bytes takes what the roster says."""


@pytest.mark.parametrize("lineup", list(networks()))
def test_the_network_withstands(lineup):
    verdicts = run(lineup)
    assert set(verdicts) == {scenario.name for scenario in lineup.scenarios}
    for scenario in lineup.scenarios:
        verdict = verdicts[scenario.name]
        assert verdict.problems == ()
        omits = scenario.publisher is not None and scenario.publisher.omits
        turns, rest = divmod(verdict.lost, 2)  # whose turn it is to publish a roster is drawn
        assert (rest, turns > 0, verdict.roots_agree) == (0, omits, True)
        assert verdict.attackers == (1 if scenario.publisher else lineup.places(scenario))
        assert verdict.miners == (0 if scenario.name == "nobody" else MINERS)
        if scenario.expect is Expect.REJECT:
            assert verdict.observed
            assert set(verdict.observed) <= {reason.value for reason in scenario.reasons}
            assert verdict.applied == 0
        if scenario.expect is Expect.BOUND:
            assert verdict.applied == verdict.attackers * verdict.windows
        if scenario.name in OBSERVED and lineup.attackers == 1:
            assert set(verdict.observed) == OBSERVED[scenario.name]
        if scenario.name == "all_bad":
            assert verdict.null_windows == verdict.windows


# What a verdict is worth: without the defence it is red.


def problems(name, *, attackers=1, miners=4):
    return "\n".join(run(Lineup((SCENARIOS[name],), attackers, miners))[name].problems)


@pytest.mark.parametrize(
    ("defence", "scenario", "problem"),
    [
        ("payload_cache._check_author", "other_uid", "the payload of attacker 6 is applied"),
        ("signed.verify", "manifest_forged_signature", "accepts attacker 6"),
    ],
)
def test_an_attack_is_found_out_without_the_check_that_stops_it(monkeypatch, defence, scenario, problem):
    monkeypatch.setattr(f"templar.exchange.{defence}", lambda *arguments, **named: True)
    assert problem in problems(scenario)


def test_a_check_that_is_missing_ends_the_command_with_1(monkeypatch, capsys):
    monkeypatch.setattr("templar.exchange.reveal.check_stored_at", lambda *arguments: None)
    assert command(monkeypatch, "--scenario", "late", "--miners", "4") == 1
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not result["passed"]
    assert "accepts attacker" in " ".join(result["verdicts"][0]["problems"])


def test_without_the_clip_a_huge_update_is_found_out(monkeypatch):
    monkeypatch.setattr(
        aggregate, "magnitudes", lambda section, *norms_and_recipe: aggregate._code_quanta(section.top).astype(np.int64)
    )
    found = problems("huge")
    assert "contribution is" in found
    assert "moved is" in found


def test_a_reader_that_unpickles_is_found_out(monkeypatch):
    real = payload_cache.decode

    def careless(data, layout):
        if data.startswith(b"cos\n"):
            pickle.loads(data)
        return real(data, layout)

    monkeypatch.setattr(payload_cache, "decode", careless)
    assert "something of a peer's was run: nodes/pickle-6/somebody-ran" in problems("pickle")


def test_a_clean_up_of_what_is_needed_is_found_out(monkeypatch):
    def greedy(config, *, dry_run):
        keys = [info.key for info in config.buckets.own.list("proof-")]
        assert all((key := parse_current_key(each)) and key.kind is Kind.PROOF for each in keys)
        config.buckets.own.delete(keys)
        return CleanupReport(0, (), ())

    monkeypatch.setattr(observe, "clean_bucket", greedy)
    assert "was deleted before its time" in problems("clean_up")


def test_a_node_that_dies_is_found_out(monkeypatch):
    def explode(self, window):
        raise ZeroDivisionError("for a test")

    monkeypatch.setattr("lab.adversary.cheats.IdleMiner.fetch_pages", explode)
    found = problems("late")
    assert "honest-3 crashed: ZeroDivisionError: for a test" in found
    assert "the payload of honest uid 3 is not applied" in found
    assert "late-6 crashed" not in found, "the network does not answer for an attacker's code"


def test_without_an_audit_a_bad_publisher_is_found_out(monkeypatch):
    monkeypatch.setattr("templar.agreement.conflicts.find_conflicts", lambda *arguments: ((), ()))
    (verdict,) = run(Lineup((SCENARIOS["two_faced_publisher"],), 1, 4)).values()
    assert verdict.roots_agree
    assert verdict.observed == {}
    found = "\n".join(verdict.problems)
    for window in (2, 3):  # those for which it is drawn first
        assert f"window {window}: validator-2 does not report roster_equivocation" in found
        assert f"window {window}: the reports name [], at fault is [1]" in found
    assert "window 1" not in found
    assert "window 4" not in found, "it could be found in the window after, which was not run"


def test_a_log_that_a_peer_can_forge_is_found_out(monkeypatch):
    real = signed.unseal

    def talkative(data, body_type):
        logging.getLogger("templar.test").warning("read %s", data.decode(errors="replace"))
        return real(data, body_type)

    monkeypatch.setattr(signed, "unseal", talkative)
    assert "a line of a log can forge others" in problems("manifest_raw_control_characters")


@pytest.mark.slow
def test_a_majority_of_colluders_raises_the_bound_and_is_found_out():
    """The promise ends at half of the payloads; see the threat model."""
    assert "median is" in problems("colluding", attackers=6, miners=11)


def command(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["python -m lab.adversary", *options])
    return exit_status(main)


OPTIONS = ("--scenario", "silent", "--scenario", "late", "--miners", "4")


def test_the_same_seed_gives_the_same_verdicts(monkeypatch, capsys):
    assert command(monkeypatch, *OPTIONS, "--seed", "3") == 0
    first = capsys.readouterr()
    assert command(monkeypatch, *OPTIONS, "--seed", "3") == 0
    assert capsys.readouterr().out == first.out
    result = json.loads(first.out.splitlines()[-1])
    assert (result["passed"], result["seed"]) == (True, 3)
    assert [verdict["scenario"] for verdict in result["verdicts"]] == ["silent", "late"]
    assert "late: as expected" in first.err
    assert "reveal_late" in first.out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--scenario", "dripping"), "scenario 'dripping': it needs a real endpoint: --where s3\n"),
        (("--miners", "4", "--attackers", "2"), "attackers: 2 of 4 miners; 1 to 1 keep the majority honest\n"),
    ],
)
def test_what_cannot_run_is_explained(monkeypatch, capsys, options, complaint):
    monkeypatch.setattr("lab.adversary.gauntlet.run_lineup", None)
    assert command(monkeypatch, *options) == 2
    assert capsys.readouterr().err == complaint


@pytest.mark.parametrize("miners", [4, 11])
def test_more_than_half_of_the_miners_of_a_network_are_honest(miners):
    names = [name for name in SCENARIOS if name not in FIXED]
    assert all(2 * lineup.parts.count(None) > miners for lineup in lineups(names, miners=miners, attackers=1))


def test_the_threat_model_names_every_scenario_in_its_rows():
    text = (Path(__file__).parents[2] / "docs" / "threat-model.md").read_text(encoding="utf-8")
    table = text.partition("| # | attack or fault |")[2].partition("\n\n")[0]
    rows = {
        int(line.split("|")[1]): line.rpartition("| ")[2] for line in table.splitlines() if line[2:4].strip().isdigit()
    }
    assert set(rows) == set(range(1, 42))
    for number, where in rows.items():
        named = set(where.replace("`", "").rstrip(" |").split(", ")) & set(SCENARIOS)
        assert named == {name for name, scenario in SCENARIOS.items() if number in scenario.rows}
