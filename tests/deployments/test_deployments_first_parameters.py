"""Which files of a foreign model count: those that its index names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deployments.first_parameters import first_parameters
from templar.agreement.model_folder import INDEX_FILE, WEIGHTS_PATTERN, write_model
from templar.data.tokenizer import train_embedded_tokenizer
from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.training.model import WEIGHTS_FILE, genesis_parameters
from tests.support.errors import raising

MODEL = load_hparams("simulation").model
Params = dict[str, Tensor]


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer(["some words " * 9], MODEL.vocab_size)


@pytest.fixture(scope="module")
def params():
    return {name: param.clone() for name, param in genesis_parameters(MODEL).items()}


@pytest.fixture
def folder(tmp_path, params, tokenizer):
    """A model in several files, with an index."""
    write_model(tmp_path, params, MODEL, tokenizer, file_bytes=20_000)
    assert (tmp_path / INDEX_FILE).exists()
    return tmp_path


def other(params):
    return {name: param + 1 for name, param in params.items()}


LEFTOVERS: dict[str, Callable[[Path, Params], object]] = {
    "a single file": lambda folder, params: save_file(other(params), folder / WEIGHTS_FILE),
    "shards of another count": lambda folder, params: save_file(
        other(params), folder / "model-00001-of-00002.safetensors"
    ),
    "averaged weights": lambda folder, params: save_file(other(params), folder / "model_ema.safetensors"),
    "a file that is none": lambda folder, params: (folder / "model.fp16.safetensors").write_bytes(b"version"),
}


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_files_that_the_index_does_not_name_do_not_count(folder, params, tokenizer, leftover):
    LEFTOVERS[leftover](folder, params)
    found = first_parameters(str(folder), MODEL, tokenizer)
    assert found.keys() == params.keys()
    assert all(torch.equal(found[name], params[name]) for name in params)


def test_a_tensor_counts_where_the_index_places_it(folder, params, tokenizer):
    index = json.loads((folder / INDEX_FILE).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    own = {name: param for name, param in params.items() if index["weight_map"][name] == first}
    save_file({**other(params), **own}, folder / first)
    assert all(
        torch.equal(each, params[name]) for name, each in first_parameters(str(folder), MODEL, tokenizer).items()
    )


def test_without_an_index_the_single_file_counts(tmp_path, params, tokenizer):
    write_model(tmp_path, params, MODEL, tokenizer)
    LEFTOVERS["averaged weights"](tmp_path, params)
    found = first_parameters(str(tmp_path), MODEL, tokenizer)
    assert all(torch.equal(found[name], params[name]) for name in params)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"weight_map": [1]}', "cannot be read"),
        ('{"weight_map": {"x": "../model.safetensors"}}', "no such safetensors file"),
        ('{"weight_map": {"x": "pytorch_model.bin"}}', "no such safetensors file"),
        ('{"weight_map": {"x": "model-9.safetensors"}}', "'model-9.safetensors'"),
        ('{"weight_map": {"x": 7}}', "'7'"),
        ('{"weight_map": {}}', "convert the weights"),
    ],
)
def test_an_index_that_cannot_decide_is_named(folder, tokenizer, content, words):
    (folder / INDEX_FILE).write_text(content)
    with raising(PermanentError, Reason.CHECKPOINT_BROKEN, words):
        first_parameters(str(folder), MODEL, tokenizer)


def test_several_uploads_without_an_index_are_refused_with_a_remedy(folder, params, tokenizer):
    (folder / INDEX_FILE).unlink()
    assert len(list(folder.glob(WEIGHTS_PATTERN))) > 1
    first_parameters(str(folder), MODEL, tokenizer)
    LEFTOVERS["averaged weights"](folder, params)
    with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "keep the files of one upload"):
        first_parameters(str(folder), MODEL, tokenizer)
