"""A model on disk in the Hugging Face layout: safetensors weights, `config.json`, `tokenizer.json`.

`transformers.AutoModelForCausalLM.from_pretrained(folder)` reads what is written here. Nothing is ever unpickled.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.hparams import Model
from templar.model.llama import model_config, parameter_shapes

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"


def write_model(folder: Path, params: Mapping[str, Tensor], model: Model, tokenizer: bytes) -> None:
    """Write weights, configuration and tokenizer into a folder.

    Args:
        folder: Where; made when needed.
        params: The agreed parameters by name, float32.
        model: The architecture.
        tokenizer: The bytes of `tokenizer.json`.
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
