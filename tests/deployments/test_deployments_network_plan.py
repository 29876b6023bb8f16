"""`templar network plan`: what an owner sees, drafts and proposes, and what is refused before anybody signs."""

import json
from dataclasses import replace

import pytest

from deployments import network_plan
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork

OWNER, RATE = "aggregator", "training.adamw.learning_rate=0.0005"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return PreparedNetwork(tmp_path_factory.mktemp("planned"))


@pytest.fixture
def call(network, tmp_path, run_main, monkeypatch):
    """No window of this network is decided: what is known is set."""
    real = network_plan.published_plan

    def known(*arguments):
        found = real(*arguments)
        return replace(found, known_to=found.current - main.behind)

    monkeypatch.setattr(network_plan, "published_plan", known)

    def main(command, *options, name=OWNER):
        variables = network.environment(name) | {"TEMPLAR_HOME": str(tmp_path / "home")}
        file = write_env(tmp_path / f"{name}.env", variables)
        return run_main(network_plan.main, command, *options, "--env-file", file)

    main.behind = 1
    return main


def test_an_owner_drafts_and_proposes_and_everybody_sees_it(network, call, tmp_path):
    file = tmp_path / "plan.json"
    status, out, err = call("show")
    assert (status, err) == (0, "")
    assert "all settings are those of the genesis" in out
    assert "proposes nothing" in out
    status, out, err = call("draft", "--set", RATE, "--set", "training.optimizer=muon", "--file", file)
    assert (status, err) == (0, "")
    assert 'training.adamw.learning_rate = 0.0005, training.optimizer = "muon"' in out
    assert "has the learning rate 0.0005 instead of 0.004" in out
    assert "1 of 1 owners publish this file" in out
    entry = json.loads(file.read_text())
    assert (entry["number"], entry["changes"]["training.optimizer"]) == (1, "muon")

    # It is proposed in the owner's bucket, where the neurons of others find it.
    status, out, err = call("publish", file)
    assert (status, err) == (0, "")
    assert "proposes entry 1" in out
    assert "1 of 1 owners do" in out
    status, out, err = call("show", "--json", name="validator")
    (proposal,) = json.loads(out)["proposals"]
    assert (status, proposal["problem"], proposal["uid"]) == (0, "", 1)
    status, out, err = call("show")
    assert "the next roster may adopt it" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "model.hidden_size=16"], "[plan_unknown] model.hidden_size: this release changes no such setting"),
        (["--set", "training.rate=1"], "training.rate: this release changes no such setting"),
        (["--set", "training.adamw.beta3=1"], "training.adamw.beta3: unknown key, remove it"),
        (["--set", "training.inner_steps=0"], "training.inner_steps: Input should be greater than or equal to 1"),
        (["--set", "training.batch_size=6"], "batch_size is not a multiple of micro_batch_size"),
        (["--set", "training.inner_steps"], "[plan_invalid] training.inner_steps: write the setting and its value as"),
        (["--set", "Training=1"], "[plan_invalid] changes.Training"),
        (["--set", f"data.other_dataset={'e' * 64}"], "[dataset_missing]"),
        (["--set", "weights.burn_rate=0.5"], "these settings have these values already"),
        (["--set", RATE, "--first-window", "1"], "entry 1 begins at window 1: with the notice, it may be"),
    ],
)
def test_a_draft_that_nobody_could_take_writes_nothing(call, tmp_path, options, words):
    status, out, err = call("draft", *options, "--file", tmp_path / "plan.json")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert words in err
    assert not (tmp_path / "plan.json").exists()


def test_nothing_is_drafted_or_proposed_on_an_old_plan(call, tmp_path):
    file = tmp_path / "plan.json"
    call("draft", "--set", RATE, "--file", file)
    call.behind = 3
    for command in (("draft", "--set", RATE, "--file", tmp_path / "other.json"), ("publish", file)):
        status, out, err = call(*command)
        assert (status, out) == (1, "")
        assert "[decision_missing] the plan is known up to window" in err


def test_only_owners_propose_and_only_entries(call, tmp_path):
    file = tmp_path / "plan.json"
    call("draft", "--set", RATE, "--file", file)
    status, _, err = call("publish", file, name="lazy")
    assert status == 1
    assert "does not own this network: its owners are" in err
    for text, words in (("[", "it is not an entry that `draft` wrote"), ('{"number": 1}', "previous: Field required")):
        file.write_text(text)
        status, _, err = call("publish", file)
        assert status == 1
        assert words in err
