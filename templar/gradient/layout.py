"""The cut of every tensor of the model into chunks, the coefficients of a chunk, and the bounds of a payload's length.

Two nodes with the same layout digest read a payload in the same way; a payload names the digest it was made for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Literal, Self

from torch import Tensor

from templar.canonical import canonical_json, sha256_hex
from templar.gradient import Recipe
from templar.hparams import Gradient

LAYOUT_DOMAIN = "templar/layout/3"
MAX_CHUNK_EDGE = 64
MAX_CHUNK_LENGTH = MAX_CHUNK_EDGE**2
HEADER_BYTES = 96
CHECKSUM_BYTES = 4
TOP_BYTES = 2


@dataclass(frozen=True)
class TensorLayout:
    """The chunks of one tensor, and the sizes that follow from them.

    A vector is cut into pieces and a matrix into blocks. A tensor of more dimensions is the matrix whose rows are all
    but its last dimension, in row-major order; a scalar is a vector of one element.
    """

    name: str
    shape: tuple[int, ...]
    edges: tuple[int, ...]  # of a chunk: `(w,)` for a vector, `(h, w)` for a matrix
    k: int  # coefficients published per chunk

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], gradient: Gradient) -> Self:
        """Cut one tensor; ValueError if it has no elements."""
        if math.prod(shape) == 0:
            raise ValueError(f"parameter {name!r} of shape {shape} has no elements to publish")
        edges = tuple(split(length, gradient.target_chunk) for length in _folded(shape))
        return cls(name, shape, edges, min(gradient.topk_compression, math.prod(edges)))

    @cached_property
    def folded_shape(self) -> tuple[int, ...]:
        """The shape as a vector `(N,)` or a matrix `(R, C)`."""
        return _folded(self.shape)

    @cached_property
    def chunk_length(self) -> int:
        """Elements, and coefficients, in a chunk; at most 4096, so that an index fits 12 bits."""
        return math.prod(self.edges)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks in the tensor."""
        return math.prod(self.shape) // self.chunk_length

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return self.num_chunks * self.chunk_length

    @cached_property
    def num_coefficients(self) -> int:
        """Coefficients published of the tensor."""
        return self.num_chunks * self.k

    @cached_property
    def has_index_planes(self) -> bool:
        """Whether a payload says which coefficients it holds; not if it holds all of them."""
        return self.k < self.chunk_length

    @cached_property
    def remainder_bits(self) -> int:
        """Rice parameter of the index code: the smallest b with `k * 2^(b + 1) >= chunk_length`.

        Gaps between k of n random indices are nearly geometric with mean m = n/k, and the best parameter for these is
        the smallest b with `2^b > m * ln(phi)`, phi the golden ratio (Kiely, 2004): m / 2.08. With m / 2 the rule
        stays in whole numbers.
        """
        return next(bits for bits in count() if self.k << (bits + 1) >= self.chunk_length)

    @cached_property
    def max_quotient_bits(self) -> int:
        """Bits that the quotients of a chunk's gaps take at most, in unary."""
        return self.k + (self.chunk_length - self.k >> self.remainder_bits)

    @cached_property
    def min_section_bytes(self) -> int:
        """Bytes of the tensor's section if every chunk is silent."""
        return TOP_BYTES + self.num_chunks

    @cached_property
    def max_section_bytes(self) -> int:
        """Bytes of the tensor's section if no chunk is silent and every index is the largest possible."""
        planes = whole_bytes(self.num_coefficients)
        if self.has_index_planes:
            planes += whole_bytes(self.num_coefficients * self.remainder_bits)
            planes += whole_bytes(self.num_chunks * self.max_quotient_bits)
        return self.min_section_bytes + planes


@dataclass(frozen=True)
class Layout:
    """The chunks of all tensors, sorted by name, and the steps before and after a payload."""

    tensors: tuple[TensorLayout, ...]
    use_dct: bool  # whether coefficients are those of an orthonormal DCT-II of each chunk, or its elements themselves
    recipe: Recipe  # of error feedback and aggregation
    mean_over: Literal["contributors", "payloads", "parts"] = "contributors"  # what an aggregate divides its sums by

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], gradient: Gradient, recipe: Recipe) -> Self:
        """Cut all parameters of a model, given as shape by name; ValueError if there are none or one is empty."""
        if not shapes:
            raise ValueError("a layout needs at least one parameter")
        tensors = tuple(TensorLayout.of(name, shapes[name], gradient) for name in sorted(shapes))
        return cls(tensors, gradient.use_dct, recipe, gradient.mean_over)

    @property
    def updates_are_plain(self) -> bool:
        """Whether an update's elements are the mean coefficients themselves, without a transform or a sign."""
        return self.recipe == "sparseloco" and not self.use_dct

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(tensor.name for tensor in self.tensors)

    def check(self, tensors: Mapping[str, Tensor], kind: str) -> None:
        """Raise ValueError if names or shapes are not those of the layout, with the first difference.

        A mapping that knows its `shapes`, such as that of a file, is not read.
        """
        known: Mapping[str, tuple[int, ...]] | None = getattr(tensors, "shapes", None)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} if known is None else dict(known)
        wanted = {tensor.name: tensor.shape for tensor in self.tensors}
        if shapes != wanted:
            name = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))[0]
            found, right = shapes.get(name, "missing"), wanted.get(name, "among them")
            raise ValueError(f"{kind} must have exactly the tensors of the layout: {name!r} is {found}, not {right}")

    @cached_property
    def num_elements(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @cached_property
    def min_payload_bytes(self) -> int:
        """Bytes of the shortest legal payload."""
        return HEADER_BYTES + sum(tensor.min_section_bytes for tensor in self.tensors) + CHECKSUM_BYTES

    @cached_property
    def max_payload_bytes(self) -> int:
        """Bytes of the longest legal payload: a reader fetches no more (docs/architecture.md D5)."""
        return HEADER_BYTES + sum(tensor.max_section_bytes for tensor in self.tensors) + CHECKSUM_BYTES

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, shapes, edges, k, transform and recipe, as 64 hex digits."""
        value = {
            "domain": LAYOUT_DOMAIN,
            "recipe": self.recipe,
            "tensors": [[tensor.name, tensor.shape, tensor.edges, tensor.k] for tensor in self.tensors],
            "use_dct": self.use_dct,
        }
        return sha256_hex(canonical_json(value))


def split(length: int, target: int) -> int:
    """The chunk edge for a dimension: `target` if it divides `length`, else the largest smaller divisor.

    A dimension shorter than `target` is one chunk edge; a longer prime has the edge 1. Both are at least 1.
    """
    if length < 1 or target < 1:
        raise ValueError(f"a dimension of {length} cannot be cut with target_chunk {target}: both must be at least 1")
    return next(edge for edge in range(min(length, target), 0, -1) if length % edge == 0)


def whole_bytes(bits: int) -> int:
    """Bytes that hold a number of bits."""
    return -(-bits // 8)


def _folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape),)
