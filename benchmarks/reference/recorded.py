"""Gradients that the framework templar published, read so that they can be decoded and compared.

`import_v0` reads the dictionaries of release 0.2.82, `import_v2` those of 2.1.3, as torch's weights-only rules load
them:

    gradient = torch.load(path, map_location="cpu", weights_only=True)
    tensors = import_v2(gradient, {name: tuple(p.shape) for name, p in model.named_parameters()})

The content of such a dictionary raises no exception but a RejectedError that names the entry; wrong arguments of the
caller are a ValueError. This network neither publishes nor accepts these formats.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from benchmarks.reference.wire import scatter_mean, unpack_12_bits
from templar.errors import Reason, RejectedError
from templar.gradient import dct
from templar.gradient.dct import from_chunks
from templar.gradient.layout import MAX_CHUNK_EDGE, TensorLayout, split

MAX_LEVELS = 256  # a code is one byte
IGNORED = frozenset({"metadata", "global_step"})
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class RecordedTensor:
    """The published coefficients of one tensor.

    Attributes:
        name: Name of the parameter.
        shape: Its shape.
        edges: Chunk edges: `(w,)` for a vector, `(h, w)` for a matrix.
        indices: Shape (C, k), int64, each row ascending. An index may stand in a row more than once.
        values: Shape (C, k), float32, in the order of the indices; of equal indices, in the order published.
        use_dct: Whether the values are coefficients of a DCT-II of each chunk, or its elements themselves.
    """

    name: str
    shape: tuple[int, ...]
    edges: tuple[int, ...]
    indices: Tensor
    values: Tensor
    use_dct: bool

    def dense(self) -> Tensor:
        """Decode as the reference does: the mean where an index stands twice, then the transform back.

        Returns:
            Float32, of the parameter's shape. Sums beyond the range of float32 overflow, as they do there.
        """
        layout = TensorLayout(name=self.name, shape=self.shape, edges=self.edges, k=self.values.shape[1])
        chunks = scatter_mean(self.indices, self.values, math.prod(self.edges))
        return from_chunks(dct.inverse(chunks, self.edges).to(torch.float32) if self.use_dct else chunks, layout)


def import_v0(
    gradient: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, target_chunk: int = 64
) -> dict[str, RecordedTensor]:
    """Read a gradient of release 0.2.82: float32 coefficients of the DCT.

    Args:
        gradient: `{name}idxs` (int16) and `{name}vals` (float32) of every parameter, of shape (R/h, C/w, k) for a
            matrix, (N/w, k) for a vector, or (C, k); the object as published, with its outer wrapper, is read as well.
        shapes: Shape of every parameter of the model: vectors and matrices.
        target_chunk: Wanted chunk edge.

    Raises:
        RejectedError: An entry is missing, unknown or illegal.
        ValueError: The shapes or the chunk edge are none that the reference can cut.
    """
    edges = _edges(shapes, target_chunk)
    entries = _entries(gradient, [name + suffix for name in shapes for suffix in ("idxs", "vals")])
    tensors = {}
    for name, shape in shapes.items():
        values = _rows(_tensor(entries, f"{name}vals", torch.float32), f"{name}vals", shape, edges[name])
        indices = _rows(_tensor(entries, f"{name}idxs", torch.int16), f"{name}idxs", shape, edges[name])
        if indices.shape != values.shape:
            message = f"{name}idxs: {indices.shape[1]} per chunk; {name}vals has {values.shape[1]}, and both must agree"
            raise RejectedError(Reason.WRONG_SHAPES, message)
        tensors[name] = _recorded(name, shape, edges[name], indices.to(torch.int64), values, use_dct=True)
    return tensors


def import_v2(
    gradient: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    target_chunk: int = 64,
    use_dct: bool = False,
) -> dict[str, RecordedTensor]:
    """Read a gradient of release 2.1.3: quantised values under packed indices.

    Args:
        gradient: `{name}idxs` (uint8, 12-bit packed), `{name}vals` (uint8 codes, shaped as `import_v0` says) and
            `{name}quant_params` (shift, scale, offset, lookup, original dtype) of every parameter; the object as
            published, with its outer wrapper, is read as well.
        shapes: Shape of every parameter of the model: vectors and matrices.
        target_chunk: Wanted chunk edge.
        use_dct: Whether the run transformed its chunks; the published one did not.

    Raises:
        RejectedError: An entry is missing, unknown or illegal.
        ValueError: The shapes or the chunk edge are none that the reference can cut.
    """
    edges = _edges(shapes, target_chunk)
    entries = _entries(gradient, [name + suffix for name in shapes for suffix in ("idxs", "vals", "quant_params")])
    tensors = {}
    for name, shape in shapes.items():
        codes = _rows(_tensor(entries, f"{name}vals", torch.uint8), f"{name}vals", shape, edges[name])
        packed = _tensor(entries, f"{name}idxs", torch.uint8)
        if packed.dim() != 1 or packed.numel() * 2 != codes.numel() * 3:
            message = f"{name}idxs: shape {tuple(packed.shape)} does not pack the {codes.numel()} indices of {name}vals"
            raise RejectedError(Reason.WRONG_SHAPES, f"{message} into {codes.numel() * 3 / 2:g} bytes")
        indices = unpack_12_bits(packed, tuple(codes.shape))
        values = _dequantised(codes, entries[f"{name}quant_params"], name)
        tensors[name] = _recorded(name, shape, edges[name], indices, values, use_dct=use_dct)
    return tensors


@dataclass(frozen=True)
class Comparison:
    """How alike two tensors are.

    Attributes:
        index_overlap: Share of (chunk, index) pairs that both have, of the larger number of the two. Without
            duplicates and with one k, this is the overlap by which the reference finds copies.
        sign_agreement: Share of the shared pairs whose values have one sign; None if no pair is shared.
        relative_squared_error: `|first - second|^2 / |first|^2` of the dense tensors; 0 if both are zero.
    """

    index_overlap: float
    sign_agreement: float | None
    relative_squared_error: float


def compare(first: RecordedTensor, second: RecordedTensor) -> Comparison:
    """Compare two tensors; the first is the one that the error is relative to.

    Raises:
        ValueError: Their shapes, chunks or transforms differ, so that their indices mean different things.
    """
    if (first.shape, first.edges, first.use_dct) != (second.shape, second.edges, second.use_dct):
        raise ValueError(
            f"shape {first.shape} in chunks {first.edges}, use_dct {first.use_dct}, cannot be compared with "
            f"{second.shape} in {second.edges}, use_dct {second.use_dct}: compare their dense() tensors"
        )
    places, others = _places(first), _places(second)
    shared = places[torch.isin(places, others, assume_unique=True)]
    signs = [scatter_mean(t.indices, t.values, math.prod(t.edges)).flatten()[shared].sign() for t in (first, second)]
    agreement = float((signs[0] == signs[1]).double().mean()) if len(shared) else None
    truth, other = first.dense().double(), second.dense().double()
    error, energy = float((truth - other).square().sum()), float(truth.square().sum())
    relative = error / energy if energy else math.inf if error else 0.0
    return Comparison(len(shared) / max(len(places), len(others)), agreement, relative)


def _places(tensor: RecordedTensor) -> Tensor:
    """Every (chunk, index) pair once, as `chunk * chunk_length + index`, ascending."""
    firsts = torch.arange(len(tensor.indices))[:, None] * math.prod(tensor.edges)
    return torch.unique(firsts + tensor.indices)


def _edges(shapes: Mapping[str, tuple[int, ...]], target_chunk: int) -> dict[str, tuple[int, ...]]:
    if not 1 <= target_chunk <= MAX_CHUNK_EDGE:
        raise ValueError(f"target_chunk {target_chunk} is not in 1..{MAX_CHUNK_EDGE}, as the reference's was")
    for name, shape in shapes.items():
        if len(shape) not in {1, 2}:
            raise ValueError(f"parameter {name!r} of shape {shape}: the reference cuts vectors and matrices only")
    return {name: tuple(split(length, target_chunk) for length in shape) for name, shape in shapes.items()}


def _entries(gradient: object, expected: Iterable[str]) -> Mapping[str, object]:
    """The entries of all parameters, with or without the wrapper that they are published in."""
    entries = gradient.get("state_dict", gradient) if isinstance(gradient, Mapping) else gradient
    if not isinstance(entries, Mapping):
        raise RejectedError(Reason.MALFORMED, f"gradient is a {type(entries).__name__}, not a dictionary of tensors")
    legal = set(expected)
    for key in entries:
        if not isinstance(key, str):
            raise RejectedError(Reason.MALFORMED, f"gradient: a key is a {type(key).__name__}, not a string")
        if key not in legal and key not in IGNORED:
            raise RejectedError(Reason.WRONG_SHAPES, f"{key[:80]!r}: no parameter of this model has such an entry")
    missing = sorted(legal - set(entries))
    if missing:
        raise RejectedError(Reason.WRONG_SHAPES, f"{missing[0]} is missing: {len(missing)} of {len(legal)} entries are")
    return entries


def _tensor(entries: Mapping[str, object], key: str, dtype: torch.dtype) -> Tensor:
    value = entries[key]
    if not _is_plain(value):
        raise RejectedError(
            Reason.MALFORMED,
            f"{key}: a {type(value).__name__}, not a dense tensor in memory; load with map_location='cpu'",
        )
    if value.dtype != dtype:
        raise RejectedError(Reason.MALFORMED, f"{key}: {value.dtype}, not {dtype}")
    return value.detach()


def _is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that every operation works on: no subclass, not sparse, nested or on another device."""
    if type(value) not in {Tensor, torch.nn.Parameter} or not isinstance(value, Tensor):
        return False
    return value.layout == torch.strided and not value.is_nested and value.device.type == "cpu"


def _rows(tensor: Tensor, key: str, shape: tuple[int, ...], edges: tuple[int, ...]) -> Tensor:
    """The tensor as (C, k)."""
    grid = tuple(length // edge for length, edge in zip(shape, edges, strict=True))
    chunk_length = math.prod(edges)
    if tensor.shape[:-1] not in {grid, (math.prod(grid),)} or not 1 <= tensor.shape[-1] <= chunk_length:
        legal = ", ".join(map(str, grid))
        raise RejectedError(
            Reason.WRONG_SHAPES, f"{key}: shape {tuple(tensor.shape)}, not ({legal}, k) with k in 1..{chunk_length}"
        )
    return tensor.reshape(-1, tensor.shape[-1])


def _dequantised(codes: Tensor, params: object, name: str) -> Tensor:
    key = f"{name}quant_params"
    if not isinstance(params, tuple | list) or len(params) != 5:
        raise RejectedError(Reason.MALFORMED, f"{key}: not the five (shift, scale, offset, lookup, dtype)")
    shift, scale, offset, lookup, dtype = params
    if not _is_plain(shift) or shift.dtype not in FLOAT_TYPES or shift.numel() != 1:
        raise RejectedError(Reason.MALFORMED, f"{key}: the shift is not a tensor of one floating-point number")
    if not _is_plain(lookup) or lookup.dtype != torch.float32 or lookup.dim() != 1:
        raise RejectedError(Reason.MALFORMED, f"{key}: the lookup is not a float32 vector")
    if not 1 <= len(lookup) <= MAX_LEVELS:
        raise RejectedError(Reason.WRONG_SHAPES, f"{key}: a lookup of {len(lookup)} levels, not 1..{MAX_LEVELS}")
    if type(scale) is not float or not 0 < scale < math.inf:
        raise RejectedError(Reason.BAD_PAYLOAD, f"{key}: the scale is not a finite float above 0")
    if type(offset) is not int or not 0 <= offset < len(lookup):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{key}: the offset is not an int in 0..{len(lookup) - 1}")
    if not isinstance(dtype, torch.dtype) or dtype not in FLOAT_TYPES:
        raise RejectedError(
            Reason.MALFORMED, f"{key}: the original dtype is none of {', '.join(map(str, FLOAT_TYPES))}"
        )
    if not (bool(shift.isfinite().all()) and bool(lookup.isfinite().all())):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{key}: the shift or a level of the lookup is not finite")
    if int(codes.max()) >= len(lookup):
        message = f"{name}vals: code {int(codes.max())} is beyond the {len(lookup)} levels of {key}"
        raise RejectedError(Reason.BAD_PAYLOAD, message)
    values = lookup.detach()[codes.to(torch.int64)] + shift.detach().reshape(())
    return values.to(dtype).to(torch.float32)


def _recorded(
    name: str, shape: tuple[int, ...], edges: tuple[int, ...], indices: Tensor, values: Tensor, *, use_dct: bool
) -> RecordedTensor:
    last = math.prod(edges) - 1
    if not 0 <= int(indices.min()) <= int(indices.max()) <= last:
        raise RejectedError(Reason.BAD_PAYLOAD, f"{name}idxs: an index is not in 0..{last}")
    if not bool(values.isfinite().all()):
        raise RejectedError(Reason.BAD_PAYLOAD, f"{name}vals: a value is not finite")
    indices, order = indices.sort(dim=1, stable=True)
    return RecordedTensor(name, shape, edges, indices, values.gather(1, order), use_dct)
