"""Error feedback: coefficients that are not published in one window are kept and published in a later one.

Per tensor, with the buffer e, the update g, the decay and the learning rate of the outer step:

1. transform   g <- learning_rate * g, cut into chunks, or their DCT-II
2. accumulate  e <- decay * e + g
3. select      i <- the k largest magnitudes of each chunk of e
4. code        v <- e[i] as every receiver will read it
5. subtract    e[i] <- e[i] - v

so the buffer holds exactly what receivers did not get, the error of the value code included (SparseLoCo, arXiv
2508.15706; DeMo, arXiv 2411.19870). With the DCT the buffer lives in the transform domain, each chunk's coefficients in
the chunk's place: the transform is linear, so this is DeMo's residual without an inverse transform and its roundings.
Coefficients that are not published keep their bits, and a published one keeps the float32 nearest to its residual.
Nothing is changed in place: the new state stands beside the old one until the window is decided. `compress_each` gives
it tensor by tensor, so that neither of the two has to be in memory as a whole.

`demo` warms up: its first call discards the old buffer, and only from its sixth call on is anything subtracted, so
that a restarted miner does not publish a spike. The number of calls is therefore state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.gradient import Recipe, dct, kernels
from templar.gradient.codec.values import Coefficients, decode_values, encode_values
from templar.gradient.dct import from_chunks, to_chunks
from templar.gradient.layout import MAX_CHUNK_LENGTH, Layout, TensorLayout
from templar.tensorfile import LessShare

DEMO_WARMUP_CALLS = 5
_INDEX_BITS = 12


@dataclass(frozen=True)
class FeedbackRule:
    """Recipe and settings of the accumulation in one window."""

    recipe: Recipe
    decay: float  # factor of the buffer
    learning_rate: float  # of this window's outer step

    def call(self, num_calls: int) -> "Call":
        """The treatment of a buffer in the compression after so many others."""
        is_demo = self.recipe == "demo"
        decay = None if is_demo and num_calls == 0 else self.decay
        return Call(decay, self.learning_rate, subtracts=not is_demo or num_calls >= DEMO_WARMUP_CALLS)


@dataclass(frozen=True)
class Call:
    """The treatment of a buffer in one compression."""

    decay: float | None  # factor of the buffer; None discards it
    rate: float  # factor of the update
    subtracts: bool  # whether published values are subtracted from the buffer


@dataclass(frozen=True)
class FeedbackState:
    """The persisted state of the compression."""

    buffers: Mapping[str, Tensor]  # residuals, float32, in the parameters' shapes; of coefficients with the DCT
    num_calls: int  # compressions so far

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device | str = "cpu") -> Self:
        """The state of a miner that never published."""
        return cls({tensor.name: torch.zeros(tensor.shape, device=device) for tensor in layout.tensors}, 0)

    def beginning(self, params: Mapping[str, Tensor], share: float) -> Mapping[str, Tensor] | None:
        """Where a training begins: the agreed parameters less a share of the buffers (docs/protocol.md 6).

        None for the agreed ones.
        """
        return LessShare(params, self.buffers, share) if share and self.num_calls else None


@dataclass(frozen=True)
class Compressed:
    """The result of one compression; the state before it is untouched."""

    tensors: dict[str, Coefficients]  # by parameter name
    state: FeedbackState  # goes live when the coefficients are accepted


def compress(state: FeedbackState, update: Mapping[str, Tensor], *, layout: Layout, rule: FeedbackRule) -> Compressed:
    """As `compress_each`, of all tensors at once."""
    tensors, buffers = dict[str, Coefficients](), dict[str, Tensor]()
    for name, coefficients, buffer in compress_each(state, update, layout=layout, rule=rule):
        tensors[name], buffers[name] = coefficients, buffer.clone()
    return Compressed(tensors, FeedbackState(buffers, state.num_calls + 1))


def compress_each(
    state: FeedbackState,
    update: Mapping[str, Tensor],
    *,
    layout: Layout,
    rule: FeedbackRule,
    memory: Tensor | None = None,
) -> Iterator[tuple[str, Coefficients, Tensor]]:
    """Compress an update, tensor by tensor in the layout's order: name, coefficients and new buffer.

    The update is the averaged gradient (demo) or the pseudo-gradient (sparseloco) by parameter name. A buffer of the
    state is read when its turn comes and not before; a new one is valid until the next is asked for. `memory`, float32,
    flat, as long as the largest tensor, takes the new buffers.

    ValueError: State or update do not have the tensors of the layout. PermanentError: `non_finite_update`; nothing
    non-finite is ever published or kept.
    """
    layout.check(update, "update")
    layout.check(state.buffers, "error feedback")
    call = rule.call(state.num_calls)
    fast = kernels.uses_kernels(layout.num_elements, next(iter(update.values())).device)
    if fast:
        from templar.gradient.kernels.error_feedback import compress_tensor  # noqa: PLC0415 - numba takes a second

        room = torch.empty(max(tensor.num_elements for tensor in layout.tensors)) if memory is None else memory
    for tensor in layout.tensors:
        buffer, new = state.buffers[tensor.name], update[tensor.name]
        if fast:
            residual = room[: tensor.num_elements].view(tensor.shape)
            result = compress_tensor(buffer, new, residual, tensor, use_dct=layout.use_dct, **vars(call))
        else:
            result = _compress_tensor(buffer, new, tensor, call, use_dct=layout.use_dct)
        if result is None:
            raise PermanentError(
                Reason.NON_FINITE_UPDATE,
                f"parameter {tensor.name!r}: update or error feedback is not finite; nothing is published in this "
                "window; lower the learning rate, or return to the last snapshot",
            )
        yield tensor.name, *result


def _compress_tensor(
    buffer: Tensor, update: Tensor, tensor: TensorLayout, call: Call, *, use_dct: bool
) -> tuple[Coefficients, Tensor] | None:
    """The five steps for one tensor, as they are defined; None if a coefficient is not finite."""
    # 1 and 2. Transform and accumulate.
    chunks = accumulated(buffer, update, tensor, call, use_dct=use_dct)
    if not torch.isfinite(chunks).all():
        return None
    # 3. Select.
    indices = top_k(chunks, tensor.k)
    values = chunks.gather(1, indices)
    # 4. Code.
    coded = encode_values(indices, values)
    received = decode_values(coded).to(chunks.device) if call.subtracts else torch.zeros_like(values)
    # 5. Subtract.
    return coded, from_chunks(chunks.scatter(1, indices, values - received), tensor)


def accumulated(buffer: Tensor, update: Tensor, tensor: TensorLayout, call: Call, *, use_dct: bool) -> Tensor:
    """The chunks of buffer and update together, transformed or not, float32 of shape (C, n): steps 1 and 2."""
    chunks = to_chunks(update.detach().to(buffer.dtype) * call.rate, tensor)
    chunks = dct.forward(chunks, tensor.edges) if use_dct else chunks
    # Two roundings: product and sum are not fused.
    return chunks if call.decay is None else to_chunks(buffer, tensor) * call.decay + chunks


def top_k(chunks: Tensor, k: int) -> Tensor:
    """Indices of the k coefficients of largest magnitude in each chunk (docs/protocol.md 6).

    Among equal magnitudes the lower index wins; -0.0 counts as 0.0; an all-zero chunk gives the indices 0..k-1. The
    chunks are float32 of shape (C, n), without NaN, n at most 4096; the indices int64 of shape (C, k), ascending.
    """
    length = chunks.shape[1]
    if chunks.dtype is not torch.float32 or length > MAX_CHUNK_LENGTH or not 1 <= k <= length:
        raise ValueError(f"cannot choose {k} of {length} in {chunks.dtype}: needs float32, k <= length <= 4096")
    # Read as integers, the bits of non-negative floats are ordered as the floats; the index breaks ties from below.
    # All keys differ, so the result does not depend on how a machine's `topk` treats ties.
    magnitude_bits = chunks.abs().contiguous().view(torch.int32).to(torch.int64)
    backwards = length - 1 - torch.arange(length, device=chunks.device)
    keys = (magnitude_bits << _INDEX_BITS) | backwards
    largest = torch.topk(keys, k, dim=1, sorted=False).values
    indices = length - 1 - (largest & (2**_INDEX_BITS - 1))
    return torch.sort(indices, dim=1).values
