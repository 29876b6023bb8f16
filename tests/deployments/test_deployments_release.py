"""`templar upgrade --check`: what a release says about a neuron, and the reason of each no."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from uuid import uuid4

import pytest

from deployments.neuron import release
from deployments.neuron.release import changes
from templar import PROTOCOL_VERSION
from templar.agreement.settings_plan import PROTOCOL
from templar.errors import PermanentError, Reason
from templar.exchange.objects import PlanEntry
from templar.neuron.configuration import GENESIS_FILE
from templar.neuron.journal import Applied, Journal
from templar.neuron.lock import LastRun
from tests.support.commands import write_env
from tests.support.errors import raising
from tests.support.prepared import PreparedNetwork


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return PreparedNetwork(tmp_path_factory.mktemp("release"))


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def check(network, home, tmp_path, run_main):
    """Asks this release about the network's lazy miner with changed variables; reason and text by topic."""

    def call(**changed):
        file = write_env(tmp_path / ".env", network.environment("lazy") | {"TEMPLAR_HOME": str(home)} | changed)
        options = ("--check", "--name", f"never-{uuid4().hex[:8]}", "--env-file", file)
        status, out, err = run_main(release.main, *options, "--json")
        points = {each["topic"]: (each["reason"], each["text"]) for each in json.loads(out)}
        assert (err, status) == ("", int(any(reason for reason, _ in points.values())))
        lines = run_main(release.main, *options)[1].splitlines()
        assert [line.partition(":")[0] for line in lines] == list(points)
        return points

    return call


@pytest.fixture
def planned(monkeypatch):
    """Lets the network's plan have an entry that holds from a window on."""

    def plan(first_window, **changed):
        def known(*arguments):
            found = real(*arguments)
            names = {name.replace("__", "."): value for name, value in changed.items()}
            entry = PlanEntry(number=1, previous="0" * 64, first_window=first_window, changes=names)
            return replace(found, plan=found.plan.after(entry))

        monkeypatch.setattr(release, "published_plan", known)

    real = release.published_plan
    return plan


def test_a_release_that_fits_says_what_it_changes(check, home):
    LastRun(7, "a" * 64, 1.0, release="0.0.9").save(home)
    with closing(Journal(home / "journal.sqlite")) as journal:
        journal.enter_applied(Applied(7, None, "a" * 64))
    found = check()
    assert {reason for reason, _ in found.values()} == {None}
    assert "0.0.9 ran in its folder last" in found["release"][1]
    assert f"the network {PROTOCOL_VERSION} in window " in found["network"][1]
    assert found["journal"][1] == "it can be read, and has 1 applied windows"
    assert found["changes"][1].endswith("its own step has room for inner steps.")


@pytest.mark.parametrize(
    ("changed", "topic", "words"),
    [
        ({"TEMPLAR_COLOUR": "blue"}, "variables", "TEMPLAR_COLOUR: this release reads no such variable"),
        ({"R2_GRADIENTS_ACCOUNT_ID": ""}, "settings", "R2_GRADIENTS_ACCOUNT_ID is missing"),
    ],
)
def test_an_unknown_and_a_missing_variable(check, changed, topic, words):
    reason, text = check(**changed)[topic]
    assert (reason, words in text) == ("bad_environment", True)


def test_a_release_of_another_protocol(check, home, monkeypatch):
    assert check()["network"][0] is None
    LastRun(7, "a" * 64, 1.0).save(home)
    monkeypatch.setattr(release, "PROTOCOL_VERSION", "next")
    found = check()["network"], check(TEMPLAR_GENESIS="f" * 64)["network"]
    assert [reason for reason, _ in found] == ["wrong_version"] * 2
    for (_, text), words in zip(found, ("the network {} in window ", "the one before it {}: "), strict=True):
        assert "speaks protocol next, " + words.format(PROTOCOL_VERSION) in text


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        ({"protocol__version": "next"}, "wrong_version", ", next from window 900 on: take the release"),
        ({"training__colour": 3}, "plan_unknown", "training.colour: this release changes no such setting"),
    ],
)
def test_a_plan_that_the_release_cannot_follow(check, planned, changed, reason, words):
    assert PROTOCOL == "protocol.version"
    planned(900, **changed)
    found = check()["network"]
    assert (found[0], words in found[1]) == (reason, True)


def test_files_that_the_release_cannot_read(check, home):
    Journal(home / "journal.sqlite").close()
    with closing(sqlite3.connect(home / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version=999")
    for file in ("snapshots/7/mark.json", f"private/7-{'a' * 64}.safetensors"):
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text("{}")
    (home / GENESIS_FILE).write_text("e" * 64)
    found = check()
    assert [found[topic][0] for topic in ("journal", "snapshots", "private state")] == ["bad_state_file"] * 3
    assert "schema 999 is not this release's" in found["journal"][1]


def test_the_changes_are_those_above_the_section_of_the_release_that_ran():
    text = "# Changes\n\nWords.\n\n## Unreleased\n\n* One\n  more.\n## 0.2.0\n\n* Two.\n* Three.\n## 0.1.0\n* Four.\n"
    assert changes(text, "0.1.0") == ["One more.", "Two.", "Three."]
    assert changes(text, "0.2.0") == ["One more."]
    assert len(changes(text, None)) == 4


def test_a_folder_without_a_checkout_is_refused(network, tmp_path, run_main):
    status, _, err = run_main(release.main, "--check", "--to", tmp_path)
    assert (status, f"[bad_parameters] --to {tmp_path}: there is no checkout" in err) == (1, True)


def test_a_release_that_cannot_be_asked_or_says_what_this_one_does_not_know(tmp_path, monkeypatch):
    python, code = tmp_path / ".venv/bin/python", tmp_path / "deployments/command.py"
    for file in (python, code):
        file.parent.mkdir(parents=True)
    answer = json.dumps([{"topic": "plan", "text": "no", "reason": "of_the_future"}])
    python.write_text(f"#!/bin/sh\necho '{answer}'\nexit 1\n")
    python.chmod(0o700)
    code.touch()
    (tmp_path / "Makefile").write_text(".PHONY: .venv\n.venv:\n")
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, "of_the_future"):
        release.ask(tmp_path, [], {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, "No such file or directory: 'make'"):
        release.ask(tmp_path, [], {})
