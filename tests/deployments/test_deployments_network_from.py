"""`templar network init --from`: a network begins with the parameters of a model that exists."""

import inspect
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deployments import model as model_command
from deployments import network as command
from deployments.hub import MODEL_FILES
from templar.agreement.genesis import find_birth
from templar.agreement.model_folder import read_weights
from templar.agreement.state import genesis_root, parameters_digest
from templar.data.tokenizer import train_embedded_tokenizer
from templar.exchange.buckets import Buckets
from templar.store.directory import DirectoryStore
from templar.training.model import WEIGHTS_FILE, genesis_parameters
from tests.support.audited import run_alone
from tests.support.commands import Call, write_env
from tests.support.prepared import PreparedNetwork

FOUNDER = "aggregator"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a network with other first parameters, as `templar model export` writes it."""
    folder = tmp_path_factory.mktemp("earlier")
    network = PreparedNetwork(folder, model={"initializer_seed": 7})
    variables = network.environment(FOUNDER) | {"TEMPLAR_HOME": str(folder / "home")}
    file = write_env(folder / "reader.env", variables)
    assert model_command.main(["export", "--env-file", str(file), str(folder / "exported")]) == 0
    return folder / "exported"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    """A subnet with members, and no network yet."""
    return PreparedNetwork(tmp_path_factory.mktemp("continued")).forget(FOUNDER)


@pytest.fixture
def call(network: PreparedNetwork, tmp_path: Path, run_main: Call) -> Callable[..., tuple[int, str, str]]:
    variables = network.environment(FOUNDER) | {"TEMPLAR_HOME": str(tmp_path / "home")}
    return partial(run_main, command.main, "--env-file", write_env(tmp_path / ".env", variables))


def keys(network: PreparedNetwork) -> list[str]:
    return [info.key for info in DirectoryStore(network.bucket(FOUNDER)).list()]


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    """A copy of the model to change."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


# What is refused, while there is no network yet.


def with_config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(work: Callable[[dict[str, Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS_FILE)
        work(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return change


def with_another_tokenizer(folder: Path) -> None:
    train_embedded_tokenizer(["other words " * 9], 260).save(folder)


NORM = "model.norm.weight"
REFUSALS: dict[str, tuple[Change, str, str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "checkpoint_broken", "no config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "checkpoint_broken", "convert the weights"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer_missing", "point to a folder"),
    "unreadable": (lambda folder: (folder / "config.json").write_text("["), "checkpoint_broken", "restore the file"),
    "another family": (with_config(model_type="gpt2"), "bad_hparams", "not 'llama'; name a model"),
    "another width": (with_config(hidden_size=48), "bad_hparams", "hidden_size is 48, the preset's is "),
    "another rotation": (with_config(rope_theta=5e5, rope_parameters=None), "bad_hparams", "rope_parameters is "),
    "no such tensor": (with_tensors(lambda all_: all_.pop(NORM)), "checkpoint_broken", f"{NORM} is missing; restore"),
    "a tensor too many": (with_tensors(lambda all_: all_.update(x=torch.zeros(1))), "bad_hparams", "it is not there"),
    "another shape": (
        with_tensors(lambda all_: all_.update({NORM: torch.zeros(3)})),
        "bad_hparams",
        "has the shape (3,), in the preset's model it is of shape ",
    ),
    "whole numbers": (
        with_tensors(lambda all_: all_.update({NORM: all_[NORM].to(torch.int8)})),
        "checkpoint_broken",
        "stored as torch.int8; store it as float32",
    ),
    "not finite": (
        with_tensors(lambda all_: all_.update({NORM: all_[NORM] * float("nan")})),
        "checkpoint_broken",
        "not finite",
    ),
    "another tokenizer": (with_another_tokenizer, "tokenizer_missing", "is not the network's: it has "),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_does_not_fit_is_one_line_and_nothing_is_written(
    network: PreparedNetwork, call: Any, copy: Path, name: str
) -> None:
    change, reason, words = REFUSALS[name]
    change(copy)
    status, out, err = call("--from", copy)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"[{reason}] ")
    assert words in err
    assert str(copy) in err
    assert keys(network) == []


def test_a_folder_that_is_not_there_is_named(network: PreparedNetwork, call: Any, tmp_path: Path) -> None:
    status, _, err = call("--from", tmp_path / "nothing")
    assert (status, err.startswith("[bad_parameters] "), "no such folder" in err) == (1, True, True)
    assert keys(network) == []


def test_a_repository_without_a_network_is_one_line(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection, and nothing in the cache")

    monkeypatch.setattr("deployments.hub.snapshot_download", fail)
    status, _, err = call("--from", "someone/model", "--dry-run")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("[store_unreachable] Hugging Face repository someone/model: cannot be reached")


# Types and copies that are the same model.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_two_bytes_become_float32(call: Any, copy: Path, dtype: torch.dtype) -> None:
    stored = {name: tensor.to(dtype) for name, tensor in load_file(copy / WEIGHTS_FILE).items()}
    save_file(stored | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, copy / WEIGHTS_FILE)
    status, out, err = call("--from", copy, "--dry-run", "--json")
    assert (status, err) == (0, "")
    params = {name: tensor.to(torch.float32) for name, tensor in stored.items()}
    assert json.loads(out)["root"] == genesis_root(1, parameters_digest(params))


def test_a_repository_is_downloaded_by_the_hubs_client(
    call: Any, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    arguments = inspect.signature(huggingface_hub.snapshot_download)

    def download(*given: Any, **named: Any) -> str:
        asked.append(arguments.bind(*given, **named).arguments)
        return str(exported)

    monkeypatch.setattr("deployments.hub.snapshot_download", download)
    with (tmp_path / ".env").open("a") as file:
        file.write("HF_TOKEN=hf_x\n")
    status, out, _ = call("--from", "someone/model@v2", "--dry-run")
    assert (status, "would start a network" in out) == (0, True)
    patterns = list(MODEL_FILES)
    assert asked == [{"repo_id": "someone/model", "revision": "v2", "token": "hf_x", "allow_patterns": patterns}]


# The network; from here on it is there.


def test_a_network_of_two_nodes_begins_with_the_model_and_a_node_joins_it(
    network: PreparedNetwork, call: Any, exported: Path
) -> None:
    model = network.hparams.model
    wanted = read_weights(exported, model)
    root = genesis_root(1, parameters_digest(wanted))
    assert root != genesis_root(1, parameters_digest(genesis_parameters(model)))

    # 1. A dry run says what would start; then it starts.
    status, out, _ = call("--from", exported, "--dry-run")
    assert (status, f"root {root[:12]}" in out, keys(network)) == (0, True, [])
    status, out, err = call("--from", exported, "--opens-in", "5", "--json")
    assert (status, err) == (0, "")
    started = json.loads(out)
    assert (started["root"], started["is_new"]) == (root, True)

    # 2. Two nodes do its first windows, the second one after the first.
    network.first_window = started["start_window"]
    run_alone(network, 2, name=FOUNDER)
    run_alone(network, 1, name="validator")

    # 3. A node that comes later begins with the model.
    node = network.at("lazy", network.first_window).build("lazy")
    try:
        assert node.state.mark.root == root
        assert all(torch.equal(node.state.params[name], wanted[name]) for name in wanted)
    finally:
        node.stop()


def test_a_second_call_finds_the_network_and_other_parameters_are_another_one(
    network: PreparedNetwork, call: Any, exported: Path, copy: Path
) -> None:
    before = keys(network)
    status, out, _ = call("--from", exported)
    assert (status, "has started a network" in out) == (0, True)
    with_tensors(lambda all_: all_.update({NORM: all_[NORM] + 1}))(copy)
    for options in (("--from", copy), ()):
        status, _, err = call(*options)
        assert (status, err.startswith("[object_differs] ")) == (1, True)
        assert "first parameters (--from)" in err
    assert keys(network) == before
    block = network.block("lazy")
    chain = block.subnet.open(None)
    birth = find_birth(chain, Buckets(chain, block.bucket.endpoint.open_reader), network.hparams)
    assert birth.start.root == genesis_root(1, parameters_digest(read_weights(exported, network.hparams.model)))
