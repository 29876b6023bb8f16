"""Error feedback: what is not published in one window is kept and published in a later one.

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
Nothing is changed in place: the new state stands beside the old one until the window is decided.

`demo` warms up: its first call discards the old buffer, and only from its sixth call on is anything subtracted, so
that a restarted miner does not publish a spike. The number of calls is therefore state.

The five steps below are the definition; `kernels.publish` takes them in one pass over the memory, with the same bytes.

The k largest magnitudes of every chunk, exactly, with one answer for every input.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Self

import torch
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.gradient import Recipe, backend, dct
from templar.gradient.codec.values import Coded, Coefficients, SignAndScale, ValueCoding
from templar.gradient.dct import from_chunks, to_chunks
from templar.gradient.layout import MAX_CHUNK_LENGTH, Layout, TensorLayout

_INDEX_BITS = 12


def top_k(chunks: Tensor, k: int) -> Tensor:
    """Choose the k coefficients of largest magnitude in each chunk (PROTOCOL 22).

    Among equal magnitudes the lower index wins; -0.0 counts as 0.0; an all-zero chunk gives the indices 0..k-1.
    The selection compares unique integer keys, so it does not depend on how a machine's `topk` treats ties.

    Args:
        chunks: Shape (num_chunks, chunk_length), float32, no NaN; chunk_length at most 4096.
        k: Between 1 and chunk_length.

    Returns:
        Shape (num_chunks, k), int64, ascending in each row.
    """
    length = chunks.shape[1]
    if chunks.dtype is not torch.float32 or length > MAX_CHUNK_LENGTH or not 1 <= k <= length:
        raise ValueError(
            f"cannot choose {k} of chunks of {length} in {chunks.dtype}: needs float32, k <= length <= 4096"
        )
    # Read as integers, the bits of non-negative floats are ordered as the floats; the index breaks ties from below.
    magnitude_bits = chunks.abs().contiguous().view(torch.int32).to(torch.int64)
    backwards = length - 1 - torch.arange(length, device=chunks.device)
    keys = (magnitude_bits << _INDEX_BITS) | backwards
    largest = torch.topk(keys, k, dim=1, sorted=False).values
    indices = length - 1 - (largest & (2**_INDEX_BITS - 1))
    return torch.sort(indices, dim=1).values


DEMO_WARMUP_CALLS = 5


@dataclass(frozen=True)
class FeedbackRule:
    """What the accumulation depends on.

    Attributes:
        recipe: `sparseloco` subtracts always; `demo` warms up.
        decay: What is kept of the buffer from one window to the next.
        learning_rate: Step size of the outer step of this window.
        null_round: Forget buffer and update and publish zeros. For the reference's known answers only: this network
            has no such rounds (PROTOCOL 18).
    """

    recipe: Recipe
    decay: float
    learning_rate: float
    null_round: bool = False

    def for_call(self, number: int) -> "Call":
        """What the rule says of the `number`-th compression, counted from 1."""
        if self.null_round:
            return Call(decay=None, rate=0.0, subtracts=True)
        warm = self.recipe == "sparseloco" or number > DEMO_WARMUP_CALLS
        first = self.recipe == "demo" and number == 1
        return Call(decay=None if first else self.decay, rate=self.learning_rate, subtracts=warm)


@dataclass(frozen=True)
class Call:
    """How one compression treats a buffer.

    Attributes:
        decay: What is kept of it; None to discard it.
        rate: Factor of the update.
        subtracts: Whether what is published leaves the buffer.
    """

    decay: float | None
    rate: float
    subtracts: bool


@dataclass(frozen=True)
class FeedbackState:
    """The persisted state of the compression.

    Attributes:
        buffers: Residual by parameter name, float32, in the parameters' shapes; with the DCT, of coefficients.
        num_calls: Compressions that went into it.
    """

    buffers: Mapping[str, Tensor]
    num_calls: int

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device | str = "cpu") -> Self:
        """The state of a miner that never published."""
        return cls({tensor.name: torch.zeros(tensor.shape, device=device) for tensor in layout.tensors}, 0)

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return next(iter(self.buffers.values())).device


@dataclass(frozen=True)
class Compressed(Generic[Coded]):
    """What one compression gives.

    Attributes:
        tensors: The coded coefficients by parameter name.
        state: The state that goes live when they are accepted; the state before is untouched.
    """

    tensors: dict[str, Coded]
    state: FeedbackState


Publish = Callable[[Tensor, Tensor, TensorLayout, Call], tuple[Coded, Tensor] | None]
"""The five steps for one tensor, from its buffer and update; None if either is not finite."""


def compress(
    state: FeedbackState,
    update: Mapping[str, Tensor],
    *,
    layout: Layout,
    rule: FeedbackRule,
    spare: FeedbackState | None = None,
) -> Compressed[Coefficients]:
    """Compress an update as this network does, with error feedback.

    Args:
        state: Residuals and number of calls before.
        update: The averaged gradient (demo) or pseudo-gradient (sparseloco) by parameter name.
        layout: Tensors and chunks.
        rule: Recipe, decay and learning rate.
        spare: A state that nobody needs any more; the new one may take over its memory.

    Raises:
        ValueError: State or update do not have the tensors of the layout.
        PermanentError: `non_finite_update`; nothing non-finite is ever published or kept.
    """
    if not backend.uses_kernels(layout.num_elements, state.device):
        coding = SignAndScale(layout.tensors[0].levels)
        return compress_with(coding, state, update, layout=layout, rule=rule)
    if spare is not None:
        layout.check(spare.buffers, "spare error feedback")
        used = {tensor.data_ptr() for tensor in (*state.buffers.values(), *update.values())}
        if any(buffer.data_ptr() in used for buffer in spare.buffers.values()):
            raise ValueError("spare error feedback is still in use: the state and the update must keep their memory")
    from templar.gradient.kernels.error_feedback import publish  # noqa: PLC0415 - numba takes a second to import

    def by_kernel(
        buffer: Tensor, update: Tensor, tensor: TensorLayout, call: Call
    ) -> tuple[Coefficients, Tensor] | None:
        residual = torch.empty(tensor.shape) if spare is None else spare.buffers[tensor.name]
        return publish(buffer, update, residual, tensor, call, use_dct=layout.use_dct)

    return _compress(state, update, layout, rule, by_kernel)


def compress_with(
    coding: ValueCoding[Coded],
    state: FeedbackState,
    update: Mapping[str, Tensor],
    *,
    layout: Layout,
    rule: FeedbackRule,
) -> Compressed[Coded]:
    """The definition of `compress`, with any way to write the values: to compare this network's with others.

    Raises:
        ValueError: As `compress`.
        PermanentError: As `compress`.
    """

    def five_steps(buffer: Tensor, update: Tensor, tensor: TensorLayout, call: Call) -> tuple[Coded, Tensor] | None:
        chunks = to_chunks(update.detach().to(buffer.dtype) * call.rate, tensor)
        chunks = dct.forward(chunks, tensor.edges) if layout.use_dct else chunks
        if call.decay is not None:
            chunks = to_chunks(buffer, tensor) * call.decay + chunks  # two roundings: nothing is fused
        if not torch.isfinite(chunks).all():
            return None
        indices = top_k(chunks, tensor.k)
        values = chunks.gather(1, indices)
        coded = coding.encode(indices, values)
        received = coding.decode(coded).to(chunks.device) if call.subtracts else torch.zeros_like(values)
        return coded, from_chunks(chunks.scatter(1, indices, values - received), tensor)

    return _compress(state, update, layout, rule, five_steps)


def _compress(
    state: FeedbackState, update: Mapping[str, Tensor], layout: Layout, rule: FeedbackRule, publish: Publish[Coded]
) -> Compressed[Coded]:
    layout.check(update, "update")
    layout.check(state.buffers, "error feedback")
    num_calls = state.num_calls + 1
    tensors: dict[str, Coded] = {}
    buffers: dict[str, Tensor] = {}
    for tensor in layout.tensors:
        name = tensor.name
        published = publish(state.buffers[name], update[name], tensor, rule.for_call(num_calls))
        if published is None:
            raise PermanentError(
                Reason.NON_FINITE_UPDATE,
                f"parameter {name!r}: update or error feedback is not finite; nothing is published in this window; "
                "lower the learning rate, or return to the last snapshot",
            )
        tensors[name], buffers[name] = published
    return Compressed(tensors, FeedbackState(buffers, num_calls))
