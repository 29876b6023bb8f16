"""The model: its genesis, parameters by name, and computing with given tensors."""

import math
import subprocess
import sys
import weakref

import pytest
import torch
from torch.nn import functional
from training_cases import tokens

from templar.agreement.state import parameters_digest
from templar.hparams import RopeScaling, load_hparams
from templar.training.loss import micro_batch_losses, sequence_losses
from templar.training.model import (
    bind_parameters,
    build_model,
    genesis_parameters,
    load_parameters,
    logits,
    parameter_shapes,
    parameters_of,
)

HPARAMS = load_hparams("simulation")
MODEL = HPARAMS.model
OTHER = MODEL.model_copy(update={"initializer_seed": 7})
STRETCHED = RopeScaling(
    rope_type="llama3",
    **{"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
)


def losses(net):
    return sequence_losses(net, tokens(3), micro_batch_size=2)


@pytest.fixture
def net():
    return build_model(MODEL)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_hidden_layers": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3},
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48, "vocab_size": 333},
        {"attention_bias": True, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "rope_scaling": STRETCHED},
        {"query_key_norm": True, "head_dim": 16, "num_key_value_heads": 1},
    ],
)
@pytest.mark.parametrize("shape", [(4, 31), (3, 1), (16, 24)])
def test_logits_and_gradients_are_those_of_transformers(changes, shape):
    model = MODEL.model_copy(update=changes)
    generator, found = torch.Generator().manual_seed(sum(shape)), []
    params = {name: torch.randn(each, generator=generator) * 0.3 for name, each in parameter_shapes(model).items()}
    places = torch.randint(0, model.vocab_size, shape, generator=generator)
    for forward in (lambda net: net(input_ids=places).logits, lambda net: logits(net, places)):
        net = build_model(model)
        load_parameters(net, params)
        output = forward(net)
        functional.cross_entropy(output.transpose(1, 2), places).backward()
        with torch.no_grad():
            found.append([output.detach(), forward(net), *(param.grad for param in net.parameters())])
    assert len(found[0]) == 2 + len(params)
    assert all(torch.equal(theirs, own) for theirs, own in zip(*found, strict=True))


def test_genesis_comes_from_the_seed_alone():
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = genesis_parameters(HPARAMS.model)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert parameters_digest(genesis_parameters(HPARAMS.model)) == parameters_digest(first)
    other = HPARAMS.model.model_copy(update={"initializer_seed": 43})
    assert parameters_digest(genesis_parameters(other)) != parameters_digest(first)
    assert all(tensor.dtype is torch.float32 for tensor in first.values())


def test_shapes_without_allocating():
    state = torch.random.get_rng_state()
    shapes = parameter_shapes(HPARAMS.model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert shapes == {name: tuple(param.shape) for name, param in genesis_parameters(HPARAMS.model).items()}
    assert list(shapes) == sorted(shapes)
    assert sum(math.prod(shape) for shape in parameter_shapes(load_hparams("templar-2.1.3").model).values()) > 70e9


def test_tied_weights_appear_once():
    tied = MODEL.model_copy(update={"tie_word_embeddings": True})
    assert set(parameter_shapes(HPARAMS.model)) - set(parameter_shapes(tied)) == {"lm_head.weight"}
    for put in (load_parameters, bind_parameters):
        net = build_model(tied)
        put(net, {name: torch.full_like(param, 0.5) for name, param in parameters_of(net).items()})
        assert (net.get_output_embeddings().weight == 0.5).all()


@pytest.mark.parametrize("put", [load_parameters, bind_parameters])
@pytest.mark.parametrize("wrong", ["missing", "unknown", "shape"])
def test_parameters_that_do_not_fit_change_nothing(net, wrong, put):
    params = genesis_parameters(OTHER)
    if wrong == "missing":
        del params["lm_head.weight"]
    else:
        params["lm_head.weight" if wrong == "shape" else "more"] = torch.zeros(3)
    before = parameters_digest(parameters_of(net))
    with pytest.raises(ValueError, match="more" if wrong == "unknown" else "lm_head"):
        put(net, params)
    assert parameters_digest(parameters_of(net)) == before


def test_a_model_computes_with_these_very_tensors(net):
    params = genesis_parameters(OTHER)
    loaded = build_model(MODEL)
    load_parameters(loaded, params)
    assert parameters_digest(parameters_of(loaded)) == parameters_digest(params)
    bind_parameters(net, params)
    assert torch.equal(losses(net), losses(loaded))
    assert {name: tensor.data_ptr() for name, tensor in parameters_of(net).items()} == {
        name: tensor.data_ptr() for name, tensor in params.items()
    }
    params["lm_head.weight"].mul_(2)
    assert not torch.equal(losses(net), losses(loaded)), "it holds no copy"
    first = genesis_parameters(MODEL)
    bind_parameters(net, first)
    assert torch.equal(losses(net), losses(build_model(MODEL)))
    assert parameters_digest(first) == parameters_digest(genesis_parameters(MODEL)), "nothing is written"


def test_tensors_bound_before_are_released(net):
    gone = genesis_parameters(OTHER)
    bind_parameters(net, gone)
    watched = [weakref.ref(tensor) for tensor in gone.values()]
    storages = [tensor.untyped_storage().data_ptr() for tensor in gone.values()]
    bind_parameters(net, genesis_parameters(MODEL))
    del gone
    assert all(each() is None for each in watched)
    assert not set(storages) & {tensor.untyped_storage().data_ptr() for tensor in parameters_of(net).values()}


def test_gradients_go_to_the_model_and_not_to_the_tensors(net):
    params = genesis_parameters(OTHER)
    before = parameters_digest(params)
    bind_parameters(net, params)
    next(micro_batch_losses(net, tokens(2), micro_batch_size=2)).sum().backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in net.parameters())
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in params.values())
    assert parameters_digest(params) == before


def test_importing_the_training_does_not_import_transformers():
    """Importing it takes seconds."""
    modules = "templar.training.train, templar.training.loss, templar.training.model, templar.gradient.aggregate"
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
