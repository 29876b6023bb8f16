"""The first parameters of a network: those of the preset's seed, or those of a model that exists (`--from`).

The model is a folder in the Hugging Face layout, a checkpoint in a bucket or a repository of the Hub. It must be the
network's in all but the numbers: the preset's architecture and the network's tokenizer. Otherwise one line says what
differs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from blocks.buckets import open_folder
from templar.agreement.checkpoint import fetch_copy, read_copied_manifest
from templar.agreement.model_folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_PATTERN, read_tensor_files
from templar.data.tokenizer import MAX_CONFIG_BYTES, Tokenizer, load_tokenizer
from templar.errors import PermanentError, Reason, one_line, parsing
from templar.hparams import Model
from templar.tensorfile import MAX_HEADER_BYTES
from templar.training.model import WEIGHTS_FILE, genesis_parameters, model_config, parameter_shapes, read_tensors

SOURCE_FOLDER = "genesis-source"  # in the neuron's folder: the files of a bucket
STORED_TYPES = (torch.float32, torch.float16, torch.bfloat16)  # types whose numbers float32 holds exactly
FAMILIES = ("llama", "qwen3")
SWITCHED_OFF = {"mlp_bias": ("False",), "use_sliding_window": ("False",)}
KNOWN = {"hidden_act": ("silu",), "rope_type": ("default", "llama3"), **SWITCHED_OFF}
"""Settings of which a preset can have these values alone."""
OUTPUT, EMBEDDING, OLD_BUFFER = "lm_head.weight", "model.embed_tokens.weight", ".rotary_emb.inv_freq"
REMEDY = "name a model of the preset's shape, or take a preset of the model's"
SHAPE = tuple(name for name in Model.model_fields if name not in ("initializer_seed", "max_position_embeddings"))
"""Settings that change what a model computes; the length of the context does not."""


def first_parameters(
    source: str | None,
    model: Model,
    tokenizer: Tokenizer,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    download: Path = Path(SOURCE_FOLDER),
) -> dict[str, Tensor]:
    """The parameters that a network starts with, in float32, by name.

    `source` is a folder; `s3://BUCKET/FOLDER`, whose files come to the folder `download` and replace what is there; or
    `REPOSITORY` or `REPOSITORY@REVISION` of the Hub; None means the preset's seed. The environment has the keys.

    Raises:
        PermanentError: `bad_hparams`, `tokenizer_missing`, `checkpoint_broken`, and as in `open_folder`, `fetch_copy`
            and `download_model`.
        TransientError: Bucket or Hub could not be reached; a later call goes on.
    """
    if source is None:
        return genesis_parameters(model)
    if source.startswith("s3://"):
        folder, (store, place) = download, open_folder(source, environment, "model")
        fetch_copy(store, place, read_copied_manifest(store, place), folder, model, CONFIG_FILE)
    else:
        folder = _folder_of(source, environment.get("HF_TOKEN"))
    _check_config(folder / CONFIG_FILE, source, model)
    _check_tokenizer(folder, source, tokenizer)
    return _parameters(folder, source, model)


def _folder_of(source: str, hub_token: str | None) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    repository, _, revision = source.partition("@")
    if source.startswith(("/", ".", "~")) or repository.count("/") > 1:
        problem = "no such folder; name one, a repository of the Hub (USER/NAME), or s3://BUCKET/FOLDER"
        raise _refusal(source, problem, Reason.BAD_PARAMETERS)
    from deployments.hub import download_model  # noqa: PLC0415 - a folder does without the Hub's client

    return download_model(repository, revision or None, token=hub_token)


def _check_config(path: Path, source: str, model: Model) -> None:
    """Compare the settings that change what the model computes."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds

    # 1. What the model says of itself.
    if not path.exists():
        raise _refusal(source, f"there is no {CONFIG_FILE}; name a model in the Hugging Face layout")
    what, size = f"--from {source}: {CONFIG_FILE}", path.stat().st_size
    with parsing(what, Reason.CHECKPOINT_BROKEN, size=size, most=MAX_CONFIG_BYTES, remedy="restore the file"):
        given = json.loads(path.read_text(encoding="utf-8"))
        kind = given.pop("model_type", None)
        found = AutoConfig.for_model(kind, **given) if kind in FAMILIES else None
        theirs = {} if found is None else _shape_of(found)
    if found is None:
        problem = f"model_type is {one_line(repr(kind))}, not one of {', '.join(FAMILIES)}; {REMEDY}"
        raise _refusal(source, problem, Reason.BAD_HPARAMS)
    for name, values in KNOWN.items():
        if (value := str(getattr(found, name, found.rope_parameters.get(name, values[0])))) not in values:
            problem = f"{name} is {one_line(value)}, and no preset has that; name another model"
            raise _refusal(source, problem, Reason.BAD_HPARAMS)

    # 2. What differs from the preset.
    ours = _shape_of(model_config(model))
    differing = {name: value for name, value in theirs.items() if value != ours.get(name)}
    if differing:
        name, value = next(iter(differing.items()))
        others = f" (and {len(differing) - 1} more settings differ)" if len(differing) > 1 else ""
        shown = f"{name} is {one_line(str(value))}, the preset's is {ours.get(name)}{others}"
        wanted = f"in hparams.json its `model` has {one_line(json.dumps(differing), 1000)}"
        raise _refusal(source, f"{shown}; {REMEDY}: {wanted}", Reason.BAD_HPARAMS)


def _shape_of(config: Any) -> dict[str, Any]:
    """The settings of a preset's `model` that a configuration of transformers stands for."""
    rotation = dict(config.rope_parameters)
    theta, scaled = rotation.pop("rope_theta"), rotation.get("rope_type") != "default"
    named: dict[str, Any] = {name: getattr(config, name) for name in SHAPE if hasattr(config, name)}
    heads_fill_the_width = config.head_dim * config.num_attention_heads == config.hidden_size
    return {
        **named,
        "head_dim": None if heads_fill_the_width else config.head_dim,
        "rope_theta": theta,
        "rope_scaling": rotation if scaled else None,
        "query_key_norm": config.model_type == "qwen3",
    }


def _check_tokenizer(folder: Path, source: str, tokenizer: Tokenizer) -> None:
    """A row of the embedding must be that of the same token in the network."""
    theirs = load_tokenizer(str(folder))
    if theirs.vocabulary == tokenizer.vocabulary and theirs.eos_token == tokenizer.eos_token:
        return
    differing = min(
        (token for token, _ in theirs.vocabulary.items() ^ tokenizer.vocabulary.items()), default=theirs.eos_token
    )
    ids, own = theirs.vocabulary.get(differing), tokenizer.vocabulary.get(differing)
    sizes = f"it has {theirs.vocab_size} ids, the network's {tokenizer.vocab_size}"
    problem = f"{sizes}; token {one_line(differing)!r} is {ids} there and {own} here"
    remedy = "set data.tokenizer_name to the model's tokenizer and build the dataset with it, or name another model"
    raise _refusal(source, f"its tokenizer is not the network's: {problem}; {remedy}", Reason.TOKENIZER_MISSING)


def _parameters(folder: Path, source: str, model: Model) -> dict[str, Tensor]:
    """The model's tensors in float32, checked one by one; they are converted one at a time."""
    found, shapes = _tensors(folder, source), parameter_shapes(model)
    if not found:
        raise _refusal(source, f"there is no {WEIGHTS_PATTERN}; convert the weights to safetensors")
    for name in _spare(found, shapes):
        del found[name]
    for stored in sorted(shapes.keys() | found.keys()):
        tensor, shape, name = found.get(stored), shapes.get(stored), one_line(stored)
        if tensor is None:
            raise _refusal(source, f"tensor {name} is missing; restore the file of weights that has it")
        if shape is None or tuple(tensor.shape) != tuple(shape):
            wanted = "not there" if shape is None else f"of shape {tuple(shape)}"
            shown = one_line(str(tuple(tensor.shape)))
            problem = f"tensor {name} has the shape {shown}, in the preset's model it is {wanted}; {REMEDY}"
            raise _refusal(source, problem, Reason.BAD_HPARAMS)
        if tensor.dtype not in STORED_TYPES:
            raise _refusal(source, f"tensor {name} is stored as {tensor.dtype}; store it as float32 or bfloat16")
        if not torch.isfinite(tensor).all():
            raise _refusal(source, f"tensor {name} has numbers that are not finite; name another checkpoint")
        found[stored] = tensor.to(torch.float32)
    return found


def _tensors(folder: Path, source: str) -> dict[str, Tensor]:
    """The tensors as they are stored: those that the index names, or those of the single file, or of all files.

    A repository may have leftovers of an earlier upload, or weights of something else, beside what counts.
    """
    if not (folder / INDEX_FILE).exists():
        single = folder / WEIGHTS_FILE
        return read_tensors(single) if single.exists() else read_tensor_files(folder)
    what, size = f"--from {source}: {INDEX_FILE}", (folder / INDEX_FILE).stat().st_size
    with parsing(what, Reason.CHECKPOINT_BROKEN, size=size, most=MAX_HEADER_BYTES, remedy="restore the file"):
        places = dict(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8-sig"))["weight_map"])
        files = sorted({str(file) for file in places.values()})
    tensors: dict[str, Tensor] = {}
    for file in files:
        if Path(file).name != file or not file.endswith(".safetensors") or not (folder / file).is_file():
            problem = f"{INDEX_FILE} names {one_line(file)!r}, and the folder has no such safetensors file"
            raise _refusal(source, f"{problem}; restore the file")
        tensors |= {name: each for name, each in read_tensors(folder / file).items() if places.get(name) == file}
    return tensors


def _spare(found: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors that are stored and no parameters: a copy of a tied weight, and a buffer of older files."""
    spare = [name for name in found if name.endswith(OLD_BUFFER)]
    tied = OUTPUT in found and OUTPUT not in shapes and EMBEDDING in found
    return [*spare, OUTPUT] if tied and torch.equal(found[OUTPUT], found[EMBEDDING]) else spare


def _refusal(source: str, problem: str, reason: Reason = Reason.CHECKPOINT_BROKEN) -> PermanentError:
    return PermanentError(reason, f"--from {source}: {problem}")
