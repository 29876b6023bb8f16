"""The loss that everything is trained on and measured by: next-token cross-entropy in nats."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from templar.interrupt import check_stop
from templar.model.threads import single_threaded


def token_losses(net: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of every token but the first, given those before it.

    Args:
        net: A causal language model that returns `logits`.
        tokens: Shape (n, L), integer; L at least 2. Every token counts: sequences are packed, without padding.

    Returns:
        Shape (n, L - 1), float32, on the model's device.
    """
    tokens = tokens.to(device=next(net.parameters()).device, dtype=torch.int64)
    logits = net(input_ids=tokens[:, :-1]).logits.float()  # (n, L - 1, vocab)
    return functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


@torch.no_grad()
def sequence_losses(net: nn.Module, tokens: Tensor, *, micro_batch_size: int) -> Tensor:
    """The mean loss of each sequence, bit for bit repeatable on like hardware.

    The kernels of a matrix product treat a row by its place in the matrix and by the matrix's size: another
    `micro_batch_size` changes last bits, so it is part of what two parties must agree on to compare losses exactly.
    With it given, every forward pass has the same shape (the last one repeats a sequence to fill it), and a loss
    depends on the parameters, the sequence and its place alone: not on threads, not on other sequences, not on
    how many there are.

    Args:
        net: A causal language model.
        tokens: Shape (n, L), integer; L at least 2.
        micro_batch_size: Sequences per forward pass.

    Returns:
        Shape (n,), float64, on the CPU. A loss that is not finite is returned as it is.

    Raises:
        StoppedError: A stop was asked for.
    """
    with single_threaded():
        losses = [batch.cpu() for batch in micro_batch_losses(net, tokens, micro_batch_size=micro_batch_size)]
    return torch.cat(losses) if losses else torch.empty(0, dtype=torch.float64)


def micro_batch_losses(net: nn.Module, tokens: Tensor, *, micro_batch_size: int) -> Iterator[Tensor]:
    """As `sequence_losses`, a forward pass at a time, on the model's device and within autograd if that is on.

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
