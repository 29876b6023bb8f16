"""The language model, transformers' Llama in float32, its parameters by name, and its files in the Hugging Face layout.

Importing transformers takes seconds, so it happens when a model is first built. Nothing is ever unpickled.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from templar.errors import PermanentError, Reason
from templar.hparams import Model

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"


def model_config(model: Model) -> "LlamaConfig":
    """The architecture in transformers' terms. All other settings are Llama's defaults."""
    from transformers import LlamaConfig  # noqa: PLC0415 - takes seconds, and not every process needs it

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
        # A fused kernel: it is as deterministic as the plain products and never holds the matrix of all position pairs.
        attn_implementation="sdpa",  # type: ignore[call-arg]  # the base class takes it
        dtype=torch.float32,
    )


def build_model(model: Model) -> "LlamaForCausalLM":
    """Build a model on the CPU with its genesis parameters. The global random state is left as it was."""
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
    """Let a model compute with these very tensors, without a copy; its own are released.

    Raises:
        ValueError: As in `load_parameters`.
    """
    _check_shapes(parameters_of(net), params)
    for name, param in net.named_parameters():
        param.data = params[name]


def write_model(folder: Path, params: Mapping[str, Tensor], model: Model, tokenizer: bytes) -> None:
    """Write float32 weights, configuration and the bytes of `tokenizer.json` into a folder, which is made when needed.

    `transformers.AutoModelForCausalLM.from_pretrained(folder)` reads them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in params.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    model_config(model).to_json_file(folder / CONFIG_FILE)
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)


def read_parameters(path: Path, model: Model) -> dict[str, Tensor]:
    """Read parameters and check that they are this model's.

    Raises:
        PermanentError: `checkpoint_broken`; the file is not safetensors, or names and shapes are not the model's.
    """
    try:
        params = load_file(path)
    except (SafetensorError, OSError) as error:
        raise PermanentError(Reason.CHECKPOINT_BROKEN, f"{path}: cannot be read: {error}") from None
    wanted = {name: tuple(shape) for name, shape in parameter_shapes(model).items()}
    found = {name: tuple(tensor.shape) for name, tensor in params.items()}
    if wanted != found:
        wrong = sorted(set(wanted.items()) ^ set(found.items()))[:3]
        raise PermanentError(
            Reason.CHECKPOINT_BROKEN, f"{path}: not the tensors of this model's hparams; first differences: {wrong}"
        )
    return params


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
    """`parameter_shapes`, cached: building a model takes milliseconds even where it allocates nothing."""
    with torch.device("meta"):
        net = _construct(model)
    return tuple((name, tuple(param.shape)) for name, param in parameters_of(net).items())
