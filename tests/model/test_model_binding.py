"""A model that computes with somebody's own tensors, and its losses a forward pass at a time."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from templar import interrupt
from templar.agreement.state import parameters_digest
from templar.hparams import load_hparams
from templar.training.loss import micro_batch_losses, sequence_losses, single_threaded
from templar.training.model import bind_parameters, build_model, genesis_parameters, load_parameters, parameters_of

HPARAMS = load_hparams("simulation")
MODEL = HPARAMS.model
OTHER = MODEL.model_copy(update={"initializer_seed": 7})
TIED = MODEL.model_copy(update={"tie_word_embeddings": True})


def tokens(num_sequences: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MODEL.vocab_size, (num_sequences, 16), generator=generator, dtype=torch.int32)


def losses(net: nn.Module) -> Tensor:
    return sequence_losses(net, tokens(3), micro_batch_size=2)


@pytest.fixture
def net() -> nn.Module:
    return build_model(MODEL)


# Binding.


def test_a_model_computes_with_these_very_tensors(net: nn.Module) -> None:
    params = genesis_parameters(OTHER)
    loaded = build_model(MODEL)
    load_parameters(loaded, params)
    bind_parameters(net, params)
    assert torch.equal(losses(net), losses(loaded))
    assert {name: tensor.data_ptr() for name, tensor in parameters_of(net).items()} == {
        name: tensor.data_ptr() for name, tensor in params.items()
    }
    params["lm_head.weight"].mul_(2)
    assert not torch.equal(losses(net), losses(loaded)), "it holds no copy"


def test_exchanging_tensors_and_back_writes_nothing(net: nn.Module) -> None:
    one, other = genesis_parameters(MODEL), genesis_parameters(OTHER)
    before = parameters_digest(one), parameters_digest(other)
    first = losses(net)
    bind_parameters(net, other)
    assert not torch.equal(losses(net), first)
    bind_parameters(net, one)
    assert torch.equal(losses(net), first)
    assert (parameters_digest(one), parameters_digest(other)) == before


def test_what_was_bound_before_is_let_go(net: nn.Module) -> None:
    gone = genesis_parameters(OTHER)
    bind_parameters(net, gone)
    watched = [weakref.ref(tensor) for tensor in gone.values()]
    storages = [tensor.untyped_storage().data_ptr() for tensor in gone.values()]
    bind_parameters(net, genesis_parameters(MODEL))
    del gone
    assert all(each() is None for each in watched)
    assert not set(storages) & {tensor.untyped_storage().data_ptr() for tensor in parameters_of(net).values()}


@pytest.mark.parametrize("wrong", ["missing", "unknown", "shape"])
def test_parameters_that_do_not_fit_are_refused_and_nothing_is_bound(net: nn.Module, wrong: str) -> None:
    params = genesis_parameters(OTHER)
    if wrong == "missing":
        del params["lm_head.weight"]
    elif wrong == "unknown":
        params["more"] = torch.zeros(1)
    else:
        params["lm_head.weight"] = params["lm_head.weight"].flatten()
    before = {name: tensor.data_ptr() for name, tensor in parameters_of(net).items()}
    with pytest.raises(ValueError, match="more" if wrong == "unknown" else "lm_head"):
        bind_parameters(net, params)
    assert {name: tensor.data_ptr() for name, tensor in parameters_of(net).items()} == before


def test_tied_weights_stay_tied() -> None:
    net = build_model(TIED)
    params = {name: torch.full_like(tensor, 0.25) for name, tensor in parameters_of(net).items()}
    bind_parameters(net, params)
    assert net.get_output_embeddings().weight.data_ptr() == params["model.embed_tokens.weight"].data_ptr()
    assert torch.isfinite(losses(net)).all()


def test_gradients_go_to_the_model_and_not_to_the_tensors(net: nn.Module) -> None:
    params = genesis_parameters(OTHER)
    before = parameters_digest(params)
    bind_parameters(net, params)
    next(micro_batch_losses(net, tokens(2), micro_batch_size=2)).sum().backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in net.parameters())
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in params.values())
    assert parameters_digest(params) == before


# Losses a pass at a time.


@pytest.mark.parametrize(("count", "size", "lengths"), [(5, 2, [2, 2, 1]), (4, 2, [2, 2]), (1, 8, [1]), (0, 2, [])])
def test_every_sequence_has_one_loss_and_what_fills_up_has_none(
    net: nn.Module, count: int, size: int, lengths: list[int]
) -> None:
    with single_threaded(), torch.no_grad():
        batches = list(micro_batch_losses(net, tokens(count), micro_batch_size=size))
    assert [len(batch) for batch in batches] == lengths
    assert all(batch.dtype is torch.float64 for batch in batches)
    assert torch.equal(
        torch.cat([*batches, torch.empty(0)]), sequence_losses(net, tokens(count), micro_batch_size=size)
    )


@pytest.mark.parametrize("preset", ["simulation", "local"])
@pytest.mark.parametrize(("count", "size"), [(5, 2), (3, 4)])
def test_losses_within_autograd_are_the_same_bits(preset: str, count: int, size: int) -> None:
    """A forward pass that remembers takes the same kernels as one that does not."""
    net = build_model(load_hparams(preset).model)
    sequences = tokens(count)
    with single_threaded():
        found = torch.cat([batch.detach() for batch in micro_batch_losses(net, sequences, micro_batch_size=size)])
    assert torch.equal(found, sequence_losses(net, sequences, micro_batch_size=size))


def test_what_fills_up_a_pass_adds_nothing_to_the_gradient(net: nn.Module) -> None:
    def gradient(size: int) -> dict[str, Tensor]:
        net.zero_grad()
        for batch in micro_batch_losses(net, tokens(3), micro_batch_size=size):
            batch.sum().backward()
        return {name: param.grad.clone() for name, param in net.named_parameters() if param.grad is not None}

    once, filled = gradient(3), gradient(2)
    for name, expected in once.items():
        torch.testing.assert_close(filled[name], expected, rtol=1e-4, atol=1e-6)


def test_a_pass_is_made_when_it_is_asked_for(net: nn.Module) -> None:
    """So one can go backward through it before the next one takes its memory; and a stop is heard in between."""
    passes: list[int] = []
    net.register_forward_hook(lambda *_: passes.append(1))
    batches = micro_batch_losses(net, tokens(5), micro_batch_size=2)
    assert passes == []
    next(batches)
    assert len(passes) == 1
    interrupt.request_stop()
    try:
        with pytest.raises(interrupt.StoppedError):
            next(batches)
    finally:
        interrupt.clear_stop()
    assert len(passes) == 1
