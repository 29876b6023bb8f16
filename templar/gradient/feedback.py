"""Error feedback: what is not published in one window is kept and published in a later one.

Per tensor, with the buffer e, the update g, the decay and the learning rate of the outer step:

1. accumulate  e <- decay * e + learning_rate * g
2. transform   c <- the chunks of e, or their DCT-II
3. select      i <- the k largest magnitudes of each chunk
4. code        v <- c[i] as every receiver will read it
5. subtract    e <- e - inverse(v at i)

so the buffer holds exactly what receivers did not get, the error of the value code included (SparseLoCo, arXiv
2508.15706; DeMo, arXiv 2411.19870). Without the DCT, coefficients that are not published keep their bits, and a
published one keeps the float32 nearest to its residual; with it, the float32 roundings of `inverse` and of the
difference are added. Nothing is changed in place: the new state stands beside the old one until the window is decided.

`demo` warms up: its first call discards the old buffer, and only from its sixth call on is anything subtracted, so
that a restarted miner does not publish a spike. The number of calls is therefore state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Self

import torch
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.gradient import Recipe, dct
from templar.gradient.chunks import from_chunks, to_chunks
from templar.gradient.layout import Layout, TensorLayout
from templar.gradient.topk import top_k
from templar.gradient.values import Coded, ValueCoding

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


@dataclass(frozen=True)
class FeedbackState:
    """The persisted state of the compression.

    Attributes:
        buffers: Residual by parameter name, float32, in the parameters' shapes.
        num_calls: Compressions that went into it.
    """

    buffers: Mapping[str, Tensor]
    num_calls: int

    @classmethod
    def zeros(cls, layout: Layout, device: torch.device | str = "cpu") -> Self:
        """The state of a miner that never published."""
        return cls({tensor.name: torch.zeros(tensor.shape, device=device) for tensor in layout.tensors}, 0)


@dataclass(frozen=True)
class Compressed(Generic[Coded]):
    """What one compression gives.

    Attributes:
        tensors: The coded coefficients by parameter name.
        state: The state that goes live when they are accepted; the state before is untouched.
    """

    tensors: dict[str, Coded]
    state: FeedbackState


def compress(
    state: FeedbackState,
    update: Mapping[str, Tensor],
    *,
    layout: Layout,
    rule: FeedbackRule,
    coding: ValueCoding[Coded],
) -> Compressed[Coded]:
    """Compress an update, with error feedback.

    Args:
        state: Residuals and number of calls before.
        update: The averaged gradient (demo) or pseudo-gradient (sparseloco) by parameter name.
        layout: Tensors and chunks.
        rule: Recipe, decay and learning rate.
        coding: How values are written; the network's is `values.SIGN_AND_SCALE`.

    Raises:
        ValueError: State or update do not have the tensors of the layout.
        PermanentError: `non_finite_update`; nothing non-finite is ever published or kept.
    """
    if set(update) != set(layout.names) or set(state.buffers) != set(layout.names):
        raise ValueError("update and error feedback must have exactly the tensors of the layout")
    num_calls = state.num_calls + 1
    tensors: dict[str, Coded] = {}
    buffers: dict[str, Tensor] = {}
    for tensor in layout.tensors:
        grown = _accumulate(state.buffers[tensor.name], update[tensor.name], rule, num_calls)
        if not torch.isfinite(grown).all():
            raise PermanentError(
                Reason.NON_FINITE_UPDATE,
                f"parameter {tensor.name!r}: update or error feedback is not finite; nothing is published in this "
                "window; lower the learning rate, or return to the last snapshot",
            )
        coded, residual = _publish(grown, tensor, layout.use_dct, coding)
        subtracts = rule.recipe == "sparseloco" or num_calls > DEMO_WARMUP_CALLS
        tensors[tensor.name], buffers[tensor.name] = coded, residual if subtracts else grown
    return Compressed(tensors, FeedbackState(buffers, num_calls))


def _accumulate(buffer: Tensor, update: Tensor, rule: FeedbackRule, num_calls: int) -> Tensor:
    """Step 1, in float32, product by product: no operation is fused."""
    if rule.null_round:
        return torch.zeros_like(buffer)
    scaled = update.detach().to(buffer.dtype) * rule.learning_rate
    if rule.recipe == "demo" and num_calls == 1:
        return scaled
    return buffer * rule.decay + scaled


def _publish(grown: Tensor, tensor: TensorLayout, use_dct: bool, coding: ValueCoding[Coded]) -> tuple[Coded, Tensor]:
    """Steps 2 to 5: the coded coefficients, and the buffer without what they carry."""
    chunks = to_chunks(grown, tensor)
    coefficients = dct.forward(chunks, tensor.edges).to(torch.float32) if use_dct else chunks
    indices = top_k(coefficients, tensor.k)
    values = coefficients.gather(1, indices)
    coded = coding.encode(indices, values)
    received = coding.decode(coded).to(grown.device)
    if use_dct:
        sparse = torch.zeros_like(coefficients).scatter(1, indices, received)
        residual = chunks - dct.inverse(sparse, tensor.edges).to(torch.float32)
    else:
        residual = chunks.scatter(1, indices, values - received)
    return coded, from_chunks(residual, tensor)
