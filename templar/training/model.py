"""The language model, transformers' Llama or Qwen 3 in float32, and its parameters by name and from files.

Importing transformers takes seconds, so it happens when a model is first built. Nothing is ever unpickled.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from templar.errors import PermanentError, Reason, one_line
from templar.hparams import Model, TrainerSettings, Training
from templar.tensorfile import MAX_HEADER_BYTES, reading_header

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

WEIGHTS_FILE = "model.safetensors"

InnerOptimizer = Literal["adamw", "muon"]
LayerStep = Callable[[Any, Tensor, tuple[Tensor, Tensor]], Tensor]
"""A layer, hidden states and rotation -> hidden states, as `transformer_layer`."""

_named_parameters: WeakKeyDictionary[nn.Module, tuple[tuple[str, nn.Parameter], ...]] = WeakKeyDictionary()


def model_config(model: Model) -> "LlamaConfig | Qwen3Config":
    """The architecture in transformers' terms. All other settings are the defaults of Llama, or of Qwen 3."""
    from transformers import LlamaConfig, Qwen3Config  # noqa: PLC0415 - takes seconds, and not every process needs it

    rotation: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rotation |= model.rope_scaling.model_dump()
    return (Qwen3Config if model.query_key_norm else LlamaConfig)(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.attention_size // model.num_attention_heads,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie_word_embeddings,
        rope_parameters=rotation,
        rms_norm_eps=model.rms_norm_eps,
        attention_bias=model.attention_bias,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
        # A fused kernel: it is as deterministic as the plain products and never holds the matrix of all position pairs.
        attn_implementation="sdpa",  # type: ignore[call-arg]  # the base class takes it
        dtype=torch.float32,
    )


def build_model(model: Model) -> "PreTrainedModel":
    """Build a model on the CPU with its genesis parameters. The global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.initializer_seed)
        return _construct(model)


def meta_model(model: Model) -> "PreTrainedModel":
    """Build a model whose parameters have shapes and no storage."""
    with torch.device("meta"):
        return _construct(model)


def empty_model(model: Model) -> "PreTrainedModel":
    """Build a model with empty parameters, which allocates nothing; it computes once their data is set."""
    net = meta_model(model)
    # Real, empty parameters take the place of those without storage.
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in net.modules():
        for name, param in tuple(module.named_parameters(recurse=False)):
            if param not in empty:
                empty[param] = nn.Parameter(torch.empty(0))
            module.register_parameter(name, empty[param])
    use_rotary(net)
    return net


def empty_copy(net: nn.Module) -> nn.Module:
    """A copy of a model on the CPU, without the parameters' values: it computes once they are loaded or bound."""
    empty: dict[int, Any] = {id(param): nn.Parameter(torch.empty(param.shape)) for _, param in named_parameters(net)}
    return copy.deepcopy(net, empty).cpu()


def use_rotary(net: Any) -> None:
    """Compute the frequencies of the rotary embedding, which are no parameters, of a model without storage."""
    net.model.rotary_emb = type(net.model.rotary_emb)(net.config)


def logits(net: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of a float32 model, shape (n, L, vocab), of int64 tokens of shape (n, L) on the model's device.

    They are bit for bit those of `net(input_ids=tokens)`, and so are their gradients.
    """
    return functional.linear(hidden_states(net, tokens), output_weight(net))


def hidden_states(
    net: nn.Module, tokens: Tensor, *, checkpoint_layers: int = 0, layer_step: LayerStep | None = None
) -> Tensor:
    """The normed hidden states that the output projection turns into logits.

    These are transformers' operations in their order, without its Python code around them, which takes longer than the
    operations of a small model. Under autocast, products are in its precision. Every so many `checkpoint_layers` (0 for
    none), one keeps its input alone and computes the rest again in the backward pass. `layer_step` is
    `transformer_layer` or a compiled form of it. The result has shape (n, L, hidden), for tokens as in `logits`.
    """
    model, step = cast("Any", net).model, layer_step or transformer_layer
    hidden = functional.embedding(tokens, model.embed_tokens.weight)
    rotation = _rotation(model.rotary_emb, tokens.shape[1], tokens.device)
    for number, layer in enumerate(model.layers):
        if checkpoint_layers and number % checkpoint_layers == 0 and torch.is_grad_enabled():
            hidden = checkpoint(step, layer, hidden, rotation, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = step(layer, hidden, rotation)
    return _normalize(model.norm, hidden)


def output_weight(net: nn.Module) -> Tensor:
    """The weight of the output projection, of shape (vocab, hidden)."""
    weight: Tensor = cast("Any", net).lm_head.weight
    return weight


def transformer_layer(layer: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """One layer of the model, on hidden states of shape (n, L, hidden)."""
    # Attention.
    shape = hidden.shape[:2]
    attention, normed = layer.self_attn, _normalize(layer.input_layernorm, hidden)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    query, key, value = (
        functional.linear(normed, each.weight, each.bias).view(*shape, -1, attention.head_dim) for each in projections
    )
    if hasattr(attention, "q_norm"):
        query, key = _normalize(attention.q_norm, query.float()), _normalize(attention.k_norm, key.float())
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    mixed = functional.scaled_dot_product_attention(
        _rotate(query, rotation).to(value.dtype),
        _rotate(key, rotation).to(value.dtype),
        value,
        is_causal=shape[1] > 1,
        scale=attention.scaling,
        enable_gqa=attention.num_key_value_groups > 1,
    )
    mixed = mixed.transpose(1, 2).reshape(*shape, -1)
    hidden = hidden + functional.linear(mixed, attention.o_proj.weight, attention.o_proj.bias)

    # Feed-forward network.
    mlp, normed = layer.mlp, _normalize(layer.post_attention_layernorm, hidden)
    gate = functional.silu(functional.linear(normed, mlp.gate_proj.weight))
    inner = gate * functional.linear(normed, mlp.up_proj.weight)
    return hidden + functional.linear(inner, mlp.down_proj.weight)


def genesis_parameters(model: Model) -> dict[str, Tensor]:
    """The parameters that `initializer_seed` gives with this build of torch and transformers.

    Other builds may give others: a network starts from those that its first validator publishes.
    """
    return parameters_of(build_model(model))


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name, sorted, without allocating any. Tied weights appear once."""
    return dict(_shapes(model))


def named_parameters(net: nn.Module) -> tuple[tuple[str, nn.Parameter], ...]:
    """`net.named_parameters()`, found once: the search takes longer than a step of a small model."""
    if (found := _named_parameters.get(net)) is None:
        found = _named_parameters[net] = tuple(net.named_parameters())
    return found


def muon_matrices(model: Model, optimizer: InnerOptimizer | None) -> frozenset[str]:
    """The parameters that Muon moves, if it is the inner optimizer."""
    if optimizer != "muon":
        return frozenset()
    return frozenset(name for name, shape in parameter_shapes(model).items() if is_hidden_matrix(name, shape))


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter is a matrix between hidden states: neither embedding nor head nor norm."""
    return len(shape) == 2 and "embed" not in name and "lm_head" not in name


def inner_optimizer(training: Training, settings: TrainerSettings) -> InnerOptimizer | None:
    """The optimizer of the hidden matrices: the operator's choice, else the network's; `demo` has none."""
    if training.recipe == "demo":
        return None
    return training.optimizer if settings.optimizer == "preset" else settings.optimizer


def parameters_of(net: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, sorted: the model's own tensors, not copies, outside of autograd."""
    return {name: param.detach() for name, param in sorted(named_parameters(net), key=itemgetter(0))}


def load_parameters(net: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Copy parameters into a model; ValueError if names or shapes are not its own, and then nothing was copied."""
    own = parameters_of(net)
    check_shapes({name: tuple(param.shape) for name, param in own.items()}, params)
    for name, param in own.items():
        param.copy_(params[name])


def bind_parameters(net: nn.Module, params: Mapping[str, Tensor]) -> None:
    """Let a model compute with these very tensors, without a copy; its own are released. Errors: `load_parameters`."""
    check_shapes({name: tuple(param.shape) for name, param in parameters_of(net).items()}, params)
    for name, param in named_parameters(net):
        param.data = params[name]


def read_tensors(path: Path, most_header: int = MAX_HEADER_BYTES) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; `checkpoint_broken` if it is none, or has a longer header."""
    with reading_header(path, Reason.CHECKPOINT_BROKEN, most_header):
        return load_file(path)


def check_parameters(params: Mapping[str, Tensor], model: Model, what: str) -> None:
    """Refuse tensors without this model's names and shapes as `checkpoint_broken`; the message begins with `what`."""
    try:
        check_shapes(parameter_shapes(model), params)
    except ValueError as error:
        raise PermanentError(Reason.CHECKPOINT_BROKEN, f"{what}: {error}") from None


@lru_cache(maxsize=64)
def _rotation(rotary: nn.Module, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the first positions, each of shape (1, 1, L, head_dim)."""
    cos, sin = rotary(torch.empty(0, device=device), position_ids=torch.arange(length, device=device).unsqueeze(0))
    return cos.unsqueeze(1), sin.unsqueeze(1)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin


def _normalize(norm: Any, hidden: Tensor) -> Tensor:
    """RMSNorm (arXiv 1910.07467)."""
    variance = hidden.pow(2).mean(-1, keepdim=True)
    normed: Tensor = norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))
    return normed


def check_shapes(shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless parameters have these names and shapes."""
    given = {name: tuple(param.shape) for name, param in params.items()}
    if given != shapes:
        wrong = sorted({name for name, _ in shapes.items() ^ given.items()})
        names = one_line(", ".join(wrong[:3]))
        raise ValueError(f"parameters do not fit the model; missing, unknown or of another shape: {names}")


def _construct(model: Model) -> "PreTrainedModel":
    from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - as above

    config = model_config(model)
    return Qwen3ForCausalLM(config) if isinstance(config, Qwen3Config) else LlamaForCausalLM(config)


@lru_cache(maxsize=8)
def _shapes(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`parameter_shapes`, cached: building a model takes milliseconds even where it allocates nothing."""
    net = meta_model(model)
    return tuple((name, tuple(param.shape)) for name, param in parameters_of(net).items())
