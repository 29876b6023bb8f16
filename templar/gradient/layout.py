"""How every tensor of the model is cut into chunks, and how many coefficients of a chunk are published.

Two nodes with the same layout digest read the same payload in the same way; a payload names the digest it was made for.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from templar.canonical import canonical_json, sha256_hex
from templar.hparams import Gradient

LAYOUT_DOMAIN = "templar/layout/1"
MAX_CHUNK_EDGE = 64
MAX_CHUNK_LENGTH = MAX_CHUNK_EDGE**2
HEADER_BYTES = 96
CHECKSUM_BYTES = 4


def split(length: int, target: int) -> int:
    """The chunk edge for a dimension: `target` if it divides `length`, else the largest smaller divisor.

    A dimension shorter than `target` is one chunk edge; a longer prime has the edge 1.

    Args:
        length: Elements along the dimension, at least 1.
        target: Wanted edge, at least 1.
    """
    if length < 1 or target < 1:
        raise ValueError(f"a dimension of {length} cannot be cut with target_chunk {target}: both must be at least 1")
    return next(edge for edge in range(min(length, target), 0, -1) if length % edge == 0)


@dataclass(frozen=True)
class TensorLayout:
    """The chunks of one tensor.

    A tensor of one dimension is cut into pieces; one of two dimensions into blocks; one of more dimensions is treated
    as the matrix whose rows are all but its last dimension, in row-major order; a scalar as a vector of one element.

    Attributes:
        name: Name of the parameter.
        shape: Its shape.
        edges: Chunk edges: `(w,)` for a vector, `(h, w)` for a matrix.
        k: Coefficients published per chunk.
    """

    name: str
    shape: tuple[int, ...]
    edges: tuple[int, ...]
    k: int

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], gradient: Gradient) -> Self:
        """Cut one tensor as the hyper-parameters say.

        Raises:
            ValueError: The tensor has no elements.
        """
        if math.prod(shape) == 0:
            raise ValueError(f"parameter {name!r} of shape {shape} has no elements: nothing of it can be published")
        edges = tuple(split(length, gradient.target_chunk) for length in _folded(shape))
        return cls(name, shape, edges, min(gradient.topk_compression, math.prod(edges)))

    @property
    def folded_shape(self) -> tuple[int, ...]:
        """The shape as a vector `(N,)` or a matrix `(R, C)`."""
        return _folded(self.shape)

    @property
    def chunk_length(self) -> int:
        """Elements, and coefficients, in a chunk; at most 4096, so that an index fits 12 bits."""
        return math.prod(self.edges)

    @property
    def num_chunks(self) -> int:
        """Chunks in the tensor."""
        return math.prod(self.shape) // self.chunk_length

    @property
    def num_coefficients(self) -> int:
        """Coefficients published of the tensor."""
        return self.num_chunks * self.k

    @property
    def sign_bytes(self) -> int:
        """Bytes of the packed signs in a payload: one bit each, in whole 16-bit words."""
        return -(-self.num_coefficients // 16) * 2

    @property
    def section_bytes(self) -> int:
        """Bytes of the tensor's section in a payload: 16 bits per scale and per index, and the signs."""
        return 2 * self.num_chunks + 2 * self.num_coefficients + self.sign_bytes


@dataclass(frozen=True)
class Layout:
    """The chunks of all tensors, sorted by name.

    Attributes:
        tensors: One layout per parameter, in the order of their names.
        use_dct: Whether coefficients are those of an orthonormal DCT-II of each chunk, or its elements themselves.
    """

    tensors: tuple[TensorLayout, ...]
    use_dct: bool

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], gradient: Gradient) -> Self:
        """Cut all parameters of a model.

        Args:
            shapes: Shape by parameter name, in any order.
            gradient: The hyper-parameters of the compression.

        Raises:
            ValueError: There are no parameters, or one has no elements.
        """
        if not shapes:
            raise ValueError("a layout needs at least one parameter")
        return cls(tuple(TensorLayout.of(name, shapes[name], gradient) for name in sorted(shapes)), gradient.use_dct)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(tensor.name for tensor in self.tensors)

    @cached_property
    def min_payload_bytes(self) -> int:
        """Bytes of the shortest legal payload. In this version of the format all payloads have one length."""
        return HEADER_BYTES + sum(tensor.section_bytes for tensor in self.tensors) + CHECKSUM_BYTES

    @property
    def max_payload_bytes(self) -> int:
        """Bytes of the longest legal payload: what a reader fetches at most (DESIGN D5)."""
        return self.min_payload_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, shapes, edges, k and the transform, as 64 hex digits."""
        value = {
            "domain": LAYOUT_DOMAIN,
            "tensors": [[tensor.name, tensor.shape, tensor.edges, tensor.k] for tensor in self.tensors],
            "use_dct": self.use_dct,
        }
        return sha256_hex(canonical_json(value))


def _folded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape),)
