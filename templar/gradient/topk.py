"""The k largest magnitudes of every chunk, exactly, with one answer for every input."""

import torch
from torch import Tensor

from templar.gradient.layout import MAX_CHUNK_LENGTH

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
