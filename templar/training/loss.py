"""The loss for training and measurement: next-token cross-entropy in nats, the same on any number of threads.

Matrix products of a CPU library split their work by the number of threads, and the split changes the order of additions
and so the last bits: gradients of the tests' model with one and with two threads differ. One thread is the only setting
that every machine has.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from templar.interrupt import check_stop
from templar.training.model import logits, named_parameters

_lock = threading.Lock()
_outside = {"users": 0, "threads": 0}


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch's operations on a CPU in the calling thread alone, and restore the setting at the end.

    The setting is the process's own: while several threads are in here, it is restored when the last one leaves.
    On a GPU this changes nothing.
    """
    with _lock:
        if _outside["users"] == 0:
            _outside["threads"] = torch.get_num_threads()
        _outside["users"] += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _outside["users"] -= 1
            if _outside["users"] == 0:
                torch.set_num_threads(_outside["threads"])


def token_losses(net: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of every token but the first, given those before it.

    Args:
        net: A model of `build_model`.
        tokens: Shape (n, L), integer; L at least 2. Every token counts: sequences are packed, without padding.

    Returns:
        Shape (n, L - 1), float32, on the model's device.
    """
    tokens = tokens.to(device=named_parameters(net)[0][1].device, dtype=torch.int64)
    predictions = logits(net, tokens[:, :-1])  # (n, L - 1, vocab)
    return functional.cross_entropy(predictions.transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def sequence_losses(net: nn.Module, tokens: Tensor, *, micro_batch_size: int) -> Tensor:
    """The mean of each sequence's `token_losses`, bit for bit repeatable on the same hardware.

    The kernels of a matrix product treat a row by its place in the matrix and by the matrix's size. So another
    `micro_batch_size`, the number of sequences of a forward pass, changes last bits, and two parties must agree on it
    to compare losses exactly. Every pass has the same shape (the last one repeats a sequence to fill it), and a loss
    depends on the parameters, the sequence and its place alone: not on threads, other sequences or their number.

    Returns:
        Shape (n,), float64, on the CPU. A loss that is not finite is returned as it is.

    Raises:
        StoppedError: A stop was asked for.
    """
    with single_threaded():
        losses = [batch.cpu() for batch in micro_batch_losses(net, tokens, micro_batch_size=micro_batch_size)]
    return torch.cat(losses) if losses else torch.empty(0, dtype=torch.float64)


def micro_batch_losses(net: nn.Module, tokens: Tensor, *, micro_batch_size: int) -> Iterator[Tensor]:
    """As `sequence_losses`, one forward pass at a time, on the model's device and within autograd if that is on.

    Yields:
        Shape (m,), float64; the losses of the next m sequences, without those that only fill the pass up.

    Raises:
        StoppedError: A stop was asked for.
    """
    num_sequences = len(tokens)
    for start in range(0, num_sequences, micro_batch_size):
        check_stop()
        places = torch.arange(start, start + micro_batch_size).clamp(max=num_sequences - 1)
        yield token_losses(net, tokens[places]).double().mean(dim=1)[: num_sequences - start]
