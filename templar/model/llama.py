"""The language model: transformers' Llama in float32, its parameters by name.

Importing transformers costs seconds, so it happens when a model is first built.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from templar.hparams import Model

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM


def model_config(model: Model) -> "LlamaConfig":
    """The architecture in transformers' terms. What is not a hyper-parameter is Llama's default."""
    from transformers import LlamaConfig  # noqa: PLC0415 - seconds, and not every process needs it

    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
        # One kernel: as deterministic as the plain products, without holding the matrix of all pairs of positions.
        attn_implementation="sdpa",  # type: ignore[call-arg]  # the base class takes it
        dtype=torch.float32,
    )


def build_model(model: Model) -> "LlamaForCausalLM":
    """A model on the CPU at its genesis parameters. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.initializer_seed)
        return _construct(model)


def genesis_parameters(model: Model) -> dict[str, Tensor]:
    """The parameters that `initializer_seed` gives with this build of torch and transformers.

    Other builds may give others: a network starts from those that its first validator publishes.
    """
    return parameters_of(build_model(model))


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, sorted, without allocating any. Tied weights appear once."""
    return dict(_shapes(model))


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, sorted: the model's own tensors, not copies, outside of autograd."""
    return {name: param.detach() for name, param in sorted(net.named_parameters())}


def load_parameters(net: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copy parameters into a model.

    Raises:
        ValueError: Names or shapes are not the model's; then nothing was copied.
    """
    own = parameters_of(net)
    _check_shapes(own, params)
    for name, param in own.items():
        param.copy_(params[name])


def bind_parameters(net: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Let a model compute with these very tensors, without a copy; what it held before is let go.

    Raises:
        ValueError: As in `load_parameters`.
    """
    _check_shapes(parameters_of(net), params)
    for name, param in net.named_parameters():
        param.data = params[name]


def _check_shapes(own: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(param.shape) for name, param in own.items()}
    given = {name: tuple(param.shape) for name, param in params.items()}
    if given != shapes:
        wrong = sorted({name for name, _ in shapes.items() ^ given.items()})
        raise ValueError(f"parameters do not fit the model; missing, unknown or of another shape: {wrong[:3]}")


def _construct(model: Model) -> "LlamaForCausalLM":
    from transformers import LlamaForCausalLM  # noqa: PLC0415 - as above

    return LlamaForCausalLM(model_config(model))


@lru_cache(maxsize=8)
def _shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Building a model takes milliseconds even where it allocates nothing, and every checkpoint is held against it."""
    with torch.device("meta"):
        net = _construct(model)
    return tuple((name, tuple(param.shape)) for name, param in parameters_of(net).items())
