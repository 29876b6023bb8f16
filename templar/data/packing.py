"""Documents of any length into sequences of one length.

Documents follow each other in order, each ends with exactly one end-of-sequence token, and the stream is cut without
regard to their borders; the remainder that fills no sequence is dropped. The reference drops an incomplete batch as
well: here the caller decides about batches.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack(token_lists: Sequence[NDArray[np.int32]], sequence_length: int, eos_id: int) -> NDArray[np.int32]:
    """Concatenate documents and cut them into sequences.

    Args:
        token_lists: The ids of each document, with or without end tokens at its end. A document without any other
            token is left out.
        sequence_length: Tokens per sequence.
        eos_id: The end-of-sequence token.

    Returns:
        int32 of shape (n, sequence_length), contiguous; n is 0 if the documents fill no sequence.

    Raises:
        ValueError: `sequence_length` is less than 1.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    end = np.array([eos_id], dtype=np.int32)
    parts: list[NDArray[np.int32]] = []
    for tokens in token_lists:
        length = _length_without_end(tokens, eos_id)
        if length:
            parts += (tokens[:length], end)
    stream = np.concatenate(parts) if parts else end[:0]
    num_sequences = len(stream) // sequence_length
    return stream[: num_sequences * sequence_length].reshape(num_sequences, sequence_length)


def _length_without_end(tokens: NDArray[np.int32], eos_id: int) -> int:
    length = len(tokens)
    while length and tokens[length - 1] == eos_id:
        length -= 1
    return length
