"""The loss for training and measurement: next-token cross-entropy in nats, the same on any number of threads.

Matrix products of a CPU library split their work by the number of threads, and the split changes the order of additions
and so the last bits: gradients of the tests' model with one and with two threads differ. One thread is the only setting
that every machine has.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from templar.interrupt import check_stop
from templar.training.model import logits, named_parameters

SUMMED_ROWS = 4096
"""Rows of the output projection whose gradients a CPU adds up at once, if the products are not in float32."""

_lock = threading.Lock()
_wanted: list[int] = []
_outside = 0


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch's operations on a CPU in this many threads, and restore the setting at the end.

    The setting is the process's own: while several users are in here, the smallest number counts, and the last one to
    leave restores it. On a GPU it changes the speed of copies alone.
    """
    global _outside  # noqa: PLW0603 - torch's setting is global, too
    with _lock:
        if not _wanted:
            _outside = torch.get_num_threads()
        _wanted.append(count)
        torch.set_num_threads(min(_wanted))
    try:
        yield
    finally:
        with _lock:
            _wanted.remove(count)
            torch.set_num_threads(min(_wanted, default=_outside))


def single_threaded() -> AbstractContextManager[None]:
    """Run torch's operations on a CPU in the calling thread alone: the same bits on every number of processors."""
    return torch_threads(1)


def token_losses(net: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of every token but the first, given those before it.

    The tokens are integers of shape (n, L), L at least 2, and every one counts: sequences are packed, without padding.
    The losses are float32 of shape (n, L - 1), on the model's device.
    """
    tokens = tokens.to(device=named_parameters(net)[0][1].device, dtype=torch.int64)
    predictions = logits(net, tokens[:, :-1])  # (n, L - 1, vocab)
    return functional.cross_entropy(predictions.transpose(1, 2), tokens[:, 1:], reduction="none")


def mean_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, each: Tensor | None = None) -> Tensor:
    """Mean cross-entropy of tokens, as `token_losses` gives it but for last bits, in chunks of tokens.

    No tensor of (all tokens, vocabulary) exists: the gradients of a chunk's logits are used as soon as they are known,
    in the forward pass. Products are in autocast's precision, all else in float32, and so is the result.

    Args:
        hidden: Shape (N, H): the normed hidden states.
        weight: Shape (V, H): the output projection.
        targets: Shape (N,), int64: the tokens that follow.
        chunk: Most tokens whose logits are computed at once.
        each: Shape (N,), float32; it is filled with each token's own loss, outside of autograd.
    """
    place = hidden.device.type
    dtype = torch.get_autocast_dtype(place) if torch.is_autocast_enabled(place) else hidden.dtype
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, chunk, dtype, each)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`mean_loss`, with both gradients computed in the forward pass."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes them by position
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype,
        each: Tensor | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with_gradients = any(context.needs_input_grad[:2])
        to_hidden = torch.empty_like(hidden) if with_gradients else None
        to_weight = torch.empty_like(weight) if with_gradients else None
        # All chunks have the same memory: a CPU's allocator takes more than 32 MiB from the system each time.
        shape = min(chunk, len(targets)), len(weight)
        products = hidden.new_empty(shape, dtype=dtype)
        wide = products if dtype is torch.float32 else hidden.new_empty(shape, dtype=torch.float32)
        memory = torch.empty_like(wide)
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(dtype)
            for start in range(0, len(targets), chunk):
                part, wanted = hidden[start : start + chunk].to(dtype), targets[start : start + chunk, None]
                # 1. The losses of the chunk.
                predictions = _cast(torch.mm(part, cast_weight.t(), out=products[: len(part)]), wide)
                chances = torch.log_softmax(predictions, dim=-1, out=memory[: len(part)])  # (n, V), float32
                gathered = chances.gather(1, wanted)
                total -= gathered.sum()
                if each is not None:
                    each[start : start + chunk] = -gathered[:, 0]
                if to_hidden is None or to_weight is None:
                    continue
                # 2. The gradient of the sum of losses to the logits: the probabilities, less 1 at the target.
                chances.exp_().scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=torch.float32))
                gradient = _cast(chances, products)
                # 3. From there to the hidden states and to the weight.
                to_hidden[start : start + chunk] = gradient @ cast_weight
                _add_product(to_weight, gradient, part, is_first=start == 0)
        context.gradients, context.count = (to_hidden, to_weight), len(targets)
        return total / len(targets)

    @staticmethod
    def backward(context: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd adopts a gradient that nobody else holds, and copies one of the tensors that it saved itself.
        (to_hidden, to_weight), context.gradients = context.gradients, None
        scale = outer[0] / context.count
        return to_hidden.mul_(scale), to_weight.mul_(scale), None, None, None, None


def _cast(tensor: Tensor, memory: Tensor) -> Tensor:
    """A tensor in the precision of some memory, where it is put unless it has that precision."""
    return tensor if tensor.dtype is memory.dtype else memory[: len(tensor)].copy_(tensor)


def _add_product(total: Tensor, gradient: Tensor, part: Tensor, *, is_first: bool) -> None:
    """Add `gradient.t() @ part` to a float32 total; the first one takes the place of what is there."""
    if gradient.dtype is torch.float32:
        total.addmm_(gradient.t(), part, beta=0 if is_first else 1)
        return
    # A CPU adds a tensor of another precision by a copy of it, so it does that in pieces.
    rows = len(total) if total.is_cuda else SUMMED_ROWS
    for start in range(0, len(total), rows):
        product = gradient[:, start : start + rows].t() @ part
        piece = total[start : start + rows]
        if is_first:
            piece.copy_(product)
        else:
            piece += product


@torch.no_grad()
def sequence_losses(net: nn.Module, tokens: Tensor, *, micro_batch_size: int) -> Tensor:
    """The mean of each sequence's `token_losses`, bit for bit repeatable on the same hardware.

    The kernels of a matrix product treat a row by its place in the matrix and by the matrix's size. So another
    `micro_batch_size`, the number of sequences of a forward pass, changes last bits, and two parties must agree on it
    to compare losses exactly. Every pass has the same shape (the last one repeats a sequence to fill it), and a loss
    depends on the parameters, the sequence and its place alone: not on threads, other sequences or their number.

    Returns:
        Shape (n,), float64, on the CPU. A loss that is not finite is returned as it is.

    StoppedError: A stop was asked for.
    """
    with single_threaded():
        losses = [batch.cpu() for batch in micro_batch_losses(net, tokens, micro_batch_size=micro_batch_size)]
    return torch.cat(losses) if losses else torch.empty(0, dtype=torch.float64)


def micro_batch_losses(net: nn.Module, tokens: Tensor, *, micro_batch_size: int) -> Iterator[Tensor]:
    """As `sequence_losses`, one forward pass at a time, on the model's device and within autograd if that is on.

    Yields the losses of the next m sequences, shape (m,), float64, without those that only fill the pass up.
    """
    num_sequences = len(tokens)
    for start in range(0, num_sequences, micro_batch_size):
        check_stop()
        places = torch.arange(start, start + micro_batch_size).clamp(max=num_sequences - 1)
        yield token_losses(net, tokens[places]).double().mean(dim=1)[: num_sequences - start]
