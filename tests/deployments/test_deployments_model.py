"""`templar model`: fetch, generate, evaluate, export and verify, with nothing but public variables."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deployments import model
from deployments.local.plan import LOCAL_FOLDER, NETWORK_ENV_FILE
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.reports.model_card import PICTURE_FILE
from tests.support.audited import run_alone
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork
from tests.support.published import evaluate_genesis

NUM_WINDOWS = 2
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    network = PreparedNetwork(tmp_path_factory.mktemp("modelled"), deciding="validator")
    run_alone(network, NUM_WINDOWS)
    publish_newest_checkpoint(network.at("validator", last(network) + 1).config("validator"), preset="test")
    return network


def last(network: PreparedNetwork) -> int:
    return network.first_window + NUM_WINDOWS - 1


@pytest.fixture
def call(network: PreparedNetwork, tmp_path: Path, run_main: Any) -> Call:
    """Calls the command as a reader after the last window; its exit status, output and errors."""
    block = network.at("lazy", last(network) + 2)
    variables = read_env(network.plan.network_env)
    variables |= {"NETWORK": block.subnet.network, "TEMPLAR_HOME": str(tmp_path / "home")}
    file = write_env(tmp_path / "reader.env", variables)

    def main(command: str, *options: str) -> tuple[int, str, str]:
        found: tuple[int, str, str] = run_main(model.main, command, "--env-file", file, *options)
        return found

    return main


def read_env(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def test_a_reader_needs_no_secret_of_a_neuron(network: PreparedNetwork) -> None:
    names = read_env(network.plan.network_env)
    assert not [name for name in names if "WRITE" in name or "WALLET" in name]


def test_the_model_is_fetched_and_exported(call: Call, network: PreparedNetwork, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    status, out, err = call("fetch")
    assert status == 0
    assert f"model of window {last(network)}, 0 outer steps, root " in err
    fetched, exported = Path(out.strip()), tmp_path / "exported"
    assert call("export", str(exported))[:2] == (0, f"{exported}\n")
    names = {path.name for path in exported.iterdir()}
    assert names == {path.name for path in fetched.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "special_tokens_map.json"} < names
    card = (exported / "README.md").read_text()
    assert f"# Model of window {last(network)}" in card
    assert f"| Preset | {network.block('lazy').preset} |" in card
    assert AutoModelForCausalLM.from_pretrained(exported).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(exported).eos_token == "<eos>"
    status, _, err = call("export", str(exported))
    assert (status, "[bad_parameters]" in err) == (2, True)


def test_the_picture_of_the_card_is_drawn_here_from_public_records(call: Call, network: PreparedNetwork) -> None:
    """The publisher's own is not taken: the one of the genesis, which has no card, is drawn as well."""
    evaluate_genesis(network)
    status, out, _ = call("fetch", "--window", str(network.first_window - 1))
    assert status == 0
    picture = Path(out.strip()) / PICTURE_FILE
    assert picture.read_bytes().startswith(b"<svg ")
    assert b"1 checkpoints" in picture.read_bytes()


def test_it_goes_on_with_a_text_the_same_way_every_time(call: Call) -> None:
    status, text, _ = call("generate", "--prompt", "alpha ", "--tokens", "8")
    assert status == 0
    assert text.startswith("alpha ")
    assert call("generate", "--prompt", "alpha ", "--tokens", "8")[1] == text
    assert call("generate", "--prompt", "alpha ", "--tokens", "8", "--temperature", "0")[0] == 0
    assert call("generate", "--prompt", "")[0] == 0
    status, _, err = call("generate", "--prompt", "alpha " * 40)
    assert status == 2
    assert "shorten it" in err


def test_it_is_measured_on_held_out_text(call: Call) -> None:
    status, out, _ = call("evaluate", "--texts", "4")
    assert status == 0
    figures = {line[:15].strip(): line[15:].split()[0] for line in out.splitlines()}
    assert figures.keys() == {"held-out texts", "tokens", "loss", "perplexity", "bits per byte"}
    assert figures["held-out texts"] == "4"


def test_the_replay_agrees_to_the_last_window(call: Call, network: PreparedNetwork, tmp_path: Path) -> None:
    status, out, _ = call("verify")
    *lines, verdict = out.splitlines()
    assert status == 0
    assert [line.partition(":")[0] for line in lines] == [
        f"window {window}" for window in range(network.first_window, last(network) + 1)
    ]
    assert all(line.endswith("as a quorum proved") for line in lines)
    assert verdict == f"verified: from the genesis to window {last(network)}"
    assert not (tmp_path / "home" / "verify").exists()
    status, _, err = call("verify", "--first", str(last(network) - 1))
    assert status == 2
    assert "[object_missing]" in err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("fetch", "--window", "99"), "[object_missing] no validator shows a checkpoint of window 99"),
        (("verify", "--window", "0"), "[bad_parameters] window 0: the replay begins after window "),
        (("generate", "--prompt", "a", "--temperature", "-1"), "'-1'"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(call: Call, options: tuple[str, ...], problem: str) -> None:
    status, _, err = call(*options)
    assert status == 2
    assert problem in err.splitlines()[-1]


def test_another_preset_is_refused(call: Call, tmp_path: Path) -> None:
    variables = read_env(tmp_path / "reader.env") | {"TEMPLAR_PRESET": "local"}
    write_env(tmp_path / "reader.env", variables)
    status, _, err = call("fetch")
    assert status == 2
    assert err.startswith("[bad_hparams] hparams: digest ")


def test_without_an_option_it_is_the_local_network(
    call: Call, run_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOCAL_FOLDER).mkdir(parents=True)
    shutil.copy(tmp_path / "reader.env", tmp_path / LOCAL_FOLDER / NETWORK_ENV_FILE)
    monkeypatch.chdir(tmp_path)
    status, _, err = run_main(model.main, "fetch")
    assert status == 0
    assert err.startswith(f"network: {LOCAL_FOLDER / NETWORK_ENV_FILE}\n")
