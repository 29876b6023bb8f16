"""A model's folder as other programs load it: transformers gets the same logits, and stops at the end token."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from templar.agreement.model_folder import INDEX_FILE, WEIGHTS_PATTERN, read_weights, write_model
from templar.agreement.state import parameters_digest
from templar.data.tokenizer import load_tokenizer, train_embedded_tokenizer
from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.tensorfile import header_bytes
from templar.training.model import (
    WEIGHTS_FILE,
    build_model,
    genesis_parameters,
    load_parameters,
    logits,
    parameter_shapes,
)
from tests.support.commands import contents
from tests.support.errors import raising
from tests.support.foreign_bytes import HOSTILE_WEIGHTS, entry, safetensors

MODEL = load_hparams("simulation").model
TEXT = "def add(a, b):\n    return a + b\n"
SMALL = 20_000
"""Most bytes of one file, so that there are several."""


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer([TEXT * 3], MODEL.vocab_size)


def scattered(model):
    """Parameters with large logits, so that every operation matters."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(param.shape, generator=generator) * 0.3 for name, param in genesis_parameters(model).items()
    }


def loaded(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}],
)
@pytest.mark.parametrize("file_bytes", [1 << 30, SMALL])
def test_transformers_gives_the_same_logits(tmp_path, tokenizer, changes, file_bytes):
    model = MODEL.model_copy(update=changes)
    params = scattered(model)
    write_model(tmp_path, params, model, tokenizer, file_bytes=file_bytes)
    assert (len(list(tmp_path.glob(WEIGHTS_PATTERN))) > 1) == (tmp_path / INDEX_FILE).exists() == (file_bytes == SMALL)
    assert parameters_digest(read_weights(tmp_path, model)) == parameters_digest(params)

    theirs, _ = loaded(tmp_path)
    own = build_model(model)
    load_parameters(own, params)
    tokens = torch.arange(62).reshape(2, 31) % model.vocab_size
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=tokens).logits, logits(own, tokens))


def test_other_programs_find_the_networks_tokenizer_and_what_they_look_for(tmp_path, tokenizer):
    write_model(tmp_path, scattered(MODEL), MODEL, tokenizer)
    config, generation = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("config", "generation_config")
    )
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rope_theta"], config["torch_dtype"], config["model_type"]) == (10000.0, "float32", "llama")
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_id
    assert "transformers_version" not in config
    _, theirs = loaded(tmp_path)
    assert theirs(TEXT)["input_ids"] == tokenizer.encode_batch([TEXT])[0].tolist()
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert (theirs.eos_token, theirs.eos_token_id, theirs.bos_token) == (tokenizer.eos_token, tokenizer.eos_id, None)
    assert theirs.model_max_length == MODEL.max_position_embeddings
    assert load_tokenizer(str(tmp_path)).digest == tokenizer.digest


def test_the_same_model_gives_the_same_bytes_and_leaves_no_file_of_another(tmp_path, tokenizer):
    params = scattered(MODEL)
    write_model(tmp_path / "once", params, MODEL, tokenizer, card="# Model\n")
    write_model(tmp_path / "again", params, MODEL, tokenizer, card="# Model\n", file_bytes=SMALL)
    write_model(tmp_path / "again", params, MODEL, tokenizer, card="# Model\n")
    assert contents(tmp_path / "once") == contents(tmp_path / "again")


@pytest.mark.parametrize("damage", ["missing file", "doubled tensor", "not safetensors", "another model"])
def test_damaged_weights_are_refused(tmp_path, tokenizer, damage):
    write_model(tmp_path, scattered(MODEL), MODEL, tokenizer, file_bytes=SMALL)
    first, second = sorted(tmp_path.glob(WEIGHTS_PATTERN))[:2]
    model = MODEL
    if damage == "missing file":
        second.unlink()
    elif damage == "doubled tensor":
        save_file({**load_file(second), next(iter(load_file(first))): torch.zeros(1)}, second)
    elif damage == "not safetensors":
        second.write_bytes(second.read_bytes()[:50])
    else:
        model = MODEL.model_copy(update={"num_hidden_layers": 2})
    with raising(PermanentError, Reason.CHECKPOINT_BROKEN):
        read_weights(tmp_path, model)
    shutil.rmtree(tmp_path)
    with raising(PermanentError, Reason.CHECKPOINT_BROKEN):
        read_weights(tmp_path, model)


@pytest.mark.parametrize("name", HOSTILE_WEIGHTS)
def test_a_file_of_weights_that_somebody_else_made_gives_one_short_error(tmp_path, tokenizer, name):
    """Beside sound files and alone. The library fails in many ways, and some of its errors have the whole header."""
    write_model(tmp_path, genesis_parameters(MODEL), MODEL, tokenizer)
    for beside in (True, False):
        (tmp_path / ("model-x.safetensors" if beside else WEIGHTS_FILE)).write_bytes(HOSTILE_WEIGHTS[name])
        with raising(PermanentError, Reason.CHECKPOINT_BROKEN) as caught:
            read_weights(tmp_path, MODEL)
        assert len(str(caught.value)) < 2000
        assert str(caught.value).isprintable()
        (tmp_path / "model-x.safetensors").unlink(missing_ok=True)


@given(header=st.binary(max_size=200) | st.text(max_size=100).map(str.encode), body=st.binary(max_size=50))
def test_no_bytes_of_weights_raise_anything_else(header, body):
    with TemporaryDirectory() as folder:
        (Path(folder) / WEIGHTS_FILE).write_bytes(safetensors(header, body))
        with raising(PermanentError, Reason.CHECKPOINT_BROKEN):
            read_weights(Path(folder), MODEL)


def test_many_files_share_one_bound_of_their_headers(tmp_path):
    """The library never sees more header than the model's parameters need."""
    shapes = parameter_shapes(MODEL)
    half = safetensors({"\u00e9" * (header_bytes(shapes) // 12): entry([0])})
    for number in range(3):
        (tmp_path / f"model-{number}.safetensors").write_bytes(half.replace(b"u00e9", b"u00e%d" % number))
    with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "header", "bytes, at most"):
        read_weights(tmp_path, MODEL)


@pytest.mark.parametrize("preset", ["simulation", "150M", "1B", "70B"])
def test_the_bound_of_headers_has_room_for_any_division_into_files(preset):
    """One file per tensor, with three times the metadata that writers of others add, takes less than half of it."""
    shapes = parameter_shapes(load_hparams(preset).model)
    written = 0
    for name, shape in shapes.items():
        header = {name: entry(list(shape), 2**53), "__metadata__": {"format": "pt", "total_size": str(2**53)}}
        written += len(safetensors(header))
    assert 2 * written < header_bytes(shapes) < 1200 * len(shapes) + 600 * len(shapes)
