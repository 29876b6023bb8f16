"""A model as a folder in the Hugging Face layout: what a checkpoint is made of, and what its readers load.

`AutoModelForCausalLM.from_pretrained(folder)` and `AutoTokenizer.from_pretrained(folder)` read it. The same parameters,
settings and tokenizer give the same files, byte by byte. Nothing is ever unpickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from templar.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from templar.errors import PermanentError, Reason, one_line
from templar.hparams import Model
from templar.store.files import local_file
from templar.tensorfile import MAX_HEADER_BYTES, header_bytes, header_size, stream_tensors
from templar.training.model import WEIGHTS_FILE, check_parameters, model_config, parameter_shapes, read_tensors

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
CARD_FILE = "README.md"
FILE_BYTES = 4 << 30  # most bytes of parameters in one file of weights, unless a single tensor has more
WEIGHTS_PATTERN = "model*.safetensors"


def write_model(
    folder: Path,
    params: Mapping[str, Tensor],
    model: Model,
    tokenizer: Tokenizer,
    *,
    card: str | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a model into a folder, which is made when needed; files of these names are replaced.

    The parameters, float32, are copied one at a time. The tokenizer's end token ends a text that the model generates.
    No card is written if none is given. More than `file_bytes` of parameters make several files and an index.

    TransientError: `local_file`; the disk is full. PermanentError: `local_file`.
    """
    with local_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob(WEIGHTS_PATTERN), folder / INDEX_FILE):
            old.unlink(missing_ok=True)
        _write_weights(folder, params, file_bytes)
        _write_json(folder / CONFIG_FILE, _config(model, tokenizer))
        # A text begins after an end token, as documents do in training, and ends with one.
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)
        _write_json(folder / "generation_config.json", ends)
        special = dict.fromkeys(("eos_token", "pad_token"), tokenizer.eos_token)
        _write_json(folder / TOKENIZER_CONFIG_FILE, _tokenizer_config(model) | special)
        _write_json(folder / "special_tokens_map.json", special)
        (folder / TOKENIZER_FILE).write_bytes(tokenizer.to_bytes())
        if card is not None:
            (folder / CARD_FILE).write_text(card, encoding="utf-8")


def read_weights(folder: Path, model: Model) -> dict[str, Tensor]:
    """The parameters of a folder, from one file or several; they are checked to be this model's.

    The index is not read: the files have every name once.

    PermanentError: `checkpoint_broken`; there are none, a file is not safetensors, two files have one name, or names
    and shapes are not the model's.
    """
    params = read_tensor_files(folder, header_bytes(parameter_shapes(model)))
    check_parameters(params, model, str(folder))
    return params


def read_tensor_files(folder: Path, most_headers: int = MAX_HEADER_BYTES) -> dict[str, Tensor]:
    """The tensors of a folder as they are stored; errors as in `read_weights`, but that none are compared.

    All headers together have at most `most_headers` bytes.
    """
    params: dict[str, Tensor] = {}
    for path in sorted(folder.glob(WEIGHTS_PATTERN)):
        tensors = read_tensors(path, most_headers)
        most_headers -= header_size(path)
        if twice := params.keys() & tensors.keys():
            problem = f"{path}: tensor {one_line(min(twice))!r} is in another file as well"
            remedy = f"keep the files of one upload, or restore the {INDEX_FILE} that names them"
            raise PermanentError(Reason.CHECKPOINT_BROKEN, f"{problem}; {remedy}")
        params |= tensors
    return params


def _write_weights(folder: Path, params: Mapping[str, Tensor], file_bytes: int) -> None:
    """Write the parameters in order of their names, as many to a file as fit; several files get an index."""
    # 1. Which parameters are in which file.
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name in sorted(params):
        size = params[name].nbytes
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    count = len(groups)
    files = [f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]
    files = files if count > 1 else [WEIGHTS_FILE]

    # 2. The files, tensor by tensor, and the index.
    for file, names in zip(files, groups, strict=True):
        shapes = {name: params[name].shape for name in names}
        stream_tensors(folder / file, shapes, ((name, params[name]) for name in names), {"format": "pt"})
    if count > 1:
        weight_map = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in params.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _config(model: Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """The settings in transformers' terms, and the older names that other readers still look for."""
    config = model_config(model).to_diff_dict()
    config.pop("transformers_version", None)  # it says which build wrote the file, and nothing of the model
    scaling = {} if model.rope_scaling is None else {"rope_scaling": model.rope_scaling.model_dump()}
    return {
        **config,
        **scaling,
        "architectures": ["Qwen3ForCausalLM" if model.query_key_norm else "LlamaForCausalLM"],
        "dtype": "float32",
        "torch_dtype": "float32",
        "rope_theta": model.rope_theta,
        "eos_token_id": tokenizer.eos_id,
        "use_cache": True,
    }


def _tokenizer_config(model: Model) -> dict[str, Any]:
    return {
        "add_bos_token": False,  # training adds no token in front of a document
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
