"""`templar network init`: everything is checked before anything is written, twice is once, and `--from` a model."""

import copy as copies
import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from deployments import model as model_command
from deployments import network as command
from deployments.first_parameters import first_parameters
from deployments.hub import MODEL_FILES
from templar.agreement import genesis
from templar.agreement.genesis import find_birth
from templar.agreement.model_folder import read_weights
from templar.agreement.state import genesis_root, parameters_digest
from templar.chain.base import SubnetRules
from templar.chain.ledger import Ledger
from templar.data.tokenizer import save_tokenizer, train_embedded_tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.object_keys import START_WINDOW_KEY
from templar.hparams import Model, load_hparams
from templar.store.directory import DirectoryStore
from templar.training.model import WEIGHTS_FILE, build_model, genesis_parameters, load_parameters, logits
from tests.support.audited import run_alone
from tests.support.commands import write_env
from tests.support.prepared import PRESET, PreparedNetwork

FOUNDER = "aggregator"
Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model of a network with other first parameters, as `templar model export` writes it."""
    folder = tmp_path_factory.mktemp("earlier")
    network = PreparedNetwork(folder, model={"initializer_seed": 7})
    variables = network.environment(FOUNDER) | {"TEMPLAR_HOME": str(folder / "home")}
    file = write_env(folder / "reader.env", variables)
    assert model_command.main(["export", "--env-file", str(file), str(folder / "exported")]) == 0
    return folder / "exported"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A subnet with members, and no network yet."""
    return PreparedNetwork(tmp_path_factory.mktemp("founded")).forget(FOUNDER)


@pytest.fixture
def call(network, tmp_path, run_main):
    def main(*options, name=FOUNDER, **changes):
        variables = network.environment(name) | {"TEMPLAR_HOME": str(tmp_path / "home")} | changes
        return run_main(command.main, "--env-file", write_env(tmp_path / ".env", variables), *options)

    return main


def keys(network):
    """What the founder has published, and when."""
    return {info.key: info.last_modified for info in DirectoryStore(network.bucket(FOUNDER)).list()}


def found_birth(network):
    block = network.block("lazy")
    chain = block.subnet.open(None)
    return find_birth(chain, Buckets(chain, block.bucket.endpoint.open_reader), network.hparams)


@pytest.fixture
def copy(exported, tmp_path):
    """A copy of the model to change."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


# There is no network yet.


def test_a_dry_run_says_what_would_start_and_writes_nothing(network, call):
    status, out, err = call("--dry-run")
    assert (status, err) == (0, "")
    assert "uid 1 would start a network on subnet 1: first window " in out
    assert out.endswith("nothing was written\n")
    assert keys(network) == {}


def test_a_subnet_with_room_for_one_validator_is_refused(network, call, monkeypatch):
    monkeypatch.setattr(Ledger, "rules", lambda _: SubnetRules(435, "Null", True, True, False, 0, 50, 65535))
    status, out, err = call("--dry-run")
    assert (status, out) == (1, "")
    assert "pays by Null consensus" in err


def with_config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(work):
    def change(folder):
        tensors = load_file(folder / WEIGHTS_FILE)
        work(tensors)
        save_file(tensors, folder / WEIGHTS_FILE)

    return change


def with_norm(work):
    return with_tensors(lambda tensors: tensors.update({NORM: work(tensors[NORM])}))


def with_another_tokenizer(folder):
    save_tokenizer(train_embedded_tokenizer(["other words " * 9], 260), folder)


NORM = "model.norm.weight"
REFUSALS: dict[str, tuple[Change, str, str]] = {
    "no folder": (shutil.rmtree, "bad_parameters", "no such folder"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "checkpoint_broken", "no config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS_FILE).unlink(), "checkpoint_broken", "convert the weights"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer_missing", "point to a folder"),
    "unreadable": (lambda folder: (folder / "config.json").write_text("["), "checkpoint_broken", "restore the file"),
    "another family": (with_config(model_type="gpt2"), "bad_hparams", "not one of llama, qwen3; name a model"),
    "another width": (with_config(hidden_size=48), "bad_hparams", "hidden_size is 48, the preset's is "),
    "another rotation": (
        with_config(rope_theta=5e5, rope_parameters=None),
        "bad_hparams",
        "rope_theta is 500000.0, the preset's is 10000.0; ",
    ),
    "a rotation that we do not have": (
        with_config(rope_parameters={"rope_type": "linear", "factor": 2.0}),
        "bad_hparams",
        "rope_type is linear, and no preset has that",
    ),
    "another activation": (with_config(hidden_act="gelu"), "bad_hparams", "hidden_act is gelu, and no preset has that"),
    "no such tensor": (with_tensors(lambda all_: all_.pop(NORM)), "checkpoint_broken", f"{NORM} is missing; restore"),
    "a tensor too many": (with_tensors(lambda all_: all_.update(x=torch.zeros(1))), "bad_hparams", "it is not there"),
    "another shape": (with_norm(lambda _: torch.zeros(3)), "bad_hparams", "has the shape (3,), in the preset's model "),
    "whole numbers": (with_norm(lambda norm: norm.to(torch.int8)), "checkpoint_broken", "int8; store it as float32"),
    "not finite": (with_norm(lambda norm: norm * float("nan")), "checkpoint_broken", "not finite"),
    "another tokenizer": (with_another_tokenizer, "tokenizer_missing", "is not the network's: it has "),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_model_that_does_not_fit_is_one_line_and_nothing_is_written(network, call, copy, name):
    change, reason, words = REFUSALS[name]
    change(copy)
    status, out, err = call("--from", copy)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"[{reason}] ")
    assert words in err
    assert str(copy) in err
    assert keys(network) == {}


def narrow(family, heads, groups, **settings):
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": heads, "num_key_value_heads": groups}
    return {"model_type": family, **sizes, **heads, "max_position_embeddings": 131072, **settings}


LONG = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
TIED = {"tie_word_embeddings": True}
PUBLISHED = {
    "Llama 2": narrow("llama", 4, 4, rms_norm_eps=1e-5, rope_scaling=None),
    "Llama 3.2": narrow(
        "llama",
        8,
        2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling={"rope_type": "llama3", **LONG},
        **TIED,
    ),
    "Qwen 3": narrow("qwen3", 4, 2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1_000_000, **TIED),
    "biases": narrow("llama", 4, 2, attention_bias=True),
}
"""Configurations in the words of the published ones, with their numbers for the rotation; the layers are narrow."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_preset_takes_the_settings_that_the_refusal_names_and_then_computes_what_transformers_does(tmp_path, family):
    config = PUBLISHED[family]
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copies.deepcopy(config)))
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(0, 0.2)
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = train_embedded_tokenizer(["some words " * 9], 260)
    save_tokenizer(tokenizer, tmp_path)
    preset = load_hparams("simulation").model
    with pytest.raises(PermanentError) as caught:
        first_parameters(str(tmp_path), preset, tokenizer)
    settings = json.loads(str(caught.value).partition("in hparams.json its `model` has ")[2])
    model = Model.model_validate(preset.model_dump() | settings)
    params = first_parameters(str(tmp_path), model, tokenizer)
    net, tokens = build_model(model), torch.arange(24).reshape(2, 12)
    load_parameters(net, params)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa")
    assert torch.equal(logits(net, tokens), theirs(input_ids=tokens).logits)


def test_a_repository_without_a_network_is_one_line(call, monkeypatch):
    def fail(*arguments, **options):
        raise LocalEntryNotFoundError("no connection, and nothing in the cache")

    monkeypatch.setattr("deployments.hub.snapshot_download", fail)
    status, _, err = call("--from", "someone/model", "--dry-run")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("[store_unreachable] Hugging Face repository someone/model: cannot be reached")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_two_bytes_become_float32(call, copy, dtype):
    stored = {name: tensor.to(dtype) for name, tensor in load_file(copy / WEIGHTS_FILE).items()}
    save_file(stored | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, copy / WEIGHTS_FILE)
    status, out, err = call("--from", copy, "--dry-run", "--json")
    assert (status, err) == (0, "")
    params = {name: tensor.to(torch.float32) for name, tensor in stored.items()}
    assert json.loads(out)["root"] == genesis_root(1, parameters_digest(params))


def test_a_repository_is_downloaded_by_the_hubs_client(call, exported, monkeypatch):
    asked = []
    arguments = inspect.signature(huggingface_hub.snapshot_download)

    def download(*given, **named):
        asked.append(arguments.bind(*given, **named).arguments)
        return str(exported)

    monkeypatch.setattr("deployments.hub.snapshot_download", download)
    status, out, _ = call("--from", "someone/model@v2", "--dry-run", HF_TOKEN="hf_x")
    assert (status, "would start a network" in out) == (0, True)
    patterns = list(MODEL_FILES)
    assert asked == [{"repo_id": "someone/model", "revision": "v2", "token": "hf_x", "allow_patterns": patterns}]


# The network; from here on it is there.


def test_a_failure_on_the_way_is_gone_on_with_and_a_node_joins_the_network_of_the_model(
    network, call, exported, monkeypatch
):
    def fail(*arguments, **more):
        raise TransientError(Reason.STORE_UNREACHABLE, "the bucket does not answer")

    model = network.hparams.model
    wanted = read_weights(exported, model)
    root = genesis_root(1, parameters_digest(wanted))
    assert root != genesis_root(1, parameters_digest(genesis_parameters(model)))

    # 1. A dry run says what would start; then it starts, at the second try.
    status, out, _ = call("--from", exported, "--dry-run")
    assert (status, f"root {root[:12]}" in out, keys(network)) == (0, True, {})
    with monkeypatch.context() as broken:
        broken.setattr(genesis, "publish_body", fail)
        status, _, err = call("--from", exported, "--opens-in", "5")
    assert (status, f"[{Reason.STORE_UNREACHABLE}]" in err) == (1, True)
    assert START_WINDOW_KEY not in keys(network)
    status, out, err = call("--from", exported, "--opens-in", "5", "--json")
    assert (status, err) == (0, "")
    started = json.loads(out)
    assert (started["uid"], started["root"], started["is_new"], started["written"]) == (1, root, True, True)
    birth = found_birth(network)
    assert (birth.network.genesis, birth.start.start_window) == (started["genesis"], started["start_window"])
    assert started["opens_at"] > network.block("lazy").subnet.open(None).clock.now()

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


def test_a_network_is_started_once_and_other_parameters_are_another_one(network, call, exported, copy):
    before = keys(network)
    status, out, err = call("--from", exported)
    assert (status, "uid 1 has started a network" in out, err) == (0, True, "")
    with_norm(lambda norm: norm + 1)(copy)
    for options in (("--from", copy), ()):
        status, _, err = call(*options)
        assert (status, err.startswith("[object_differs] ")) == (1, True)
        assert "first parameters (--from)" in err
    assert keys(network) == before
    assert found_birth(network).start.root == genesis_root(
        1, parameters_digest(read_weights(exported, network.hparams.model))
    )


def test_other_numbers_are_another_network(network, call, exported, tmp_path):
    presets = json.loads(network.plan.hparams_path.read_text())
    presets[PRESET]["training"] = {"outer_learning_rate": 0.5}
    (tmp_path / "hparams.json").write_text(json.dumps(presets))
    assert load_hparams(PRESET, path=tmp_path / "hparams.json").digest != network.hparams.digest
    assert call("--from", exported)[0] == 0, "the network is there, or begins"
    status, _, err = call("--from", exported, TEMPLAR_HPARAMS=str(tmp_path / "hparams.json"))
    assert status == 1
    assert "with other hyper-parameters, text, tokenizer, owners or first parameters" in err


def test_nobody_else_starts_a_second_network(network, call):
    status, _, err = call(name="validator")
    assert status == 1
    assert "uid 1 has started the network " in err
    assert "join it with `templar neuron start`" in err
    assert START_WINDOW_KEY not in [info.key for info in DirectoryStore(network.bucket("validator")).list()]


def test_a_hotkey_without_permit_starts_nothing(call):
    status, _, err = call(name="lazy")
    assert (status, "has no validator permit" in err) == (1, True)


def test_a_bucket_that_cannot_be_read_may_hold_a_network(call, monkeypatch):
    def fail(*arguments):
        raise TransientError(Reason.STORE_UNREACHABLE, "it does not answer")

    monkeypatch.setattr(command, "read_start", fail)
    status, _, err = call(name="validator")
    assert (status, "whether uid 1 has started a network cannot be read now" in err) == (1, True)
