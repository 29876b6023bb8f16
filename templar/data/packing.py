"""Documents of any length into sequences of one length.

Documents follow each other in order, each ends with exactly one end-of-sequence token, and the stream is cut without
regard to their borders; the remainder that fills no sequence is dropped. The reference drops an incomplete batch as
well: here the caller decides about batches.

`pack_flat` does it, on tokens that lie one document after the other; `pack` and `pack_arrow` take them in other shapes.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_Token = TypeVar("_Token", bound=np.integer)


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
    offsets = np.zeros(len(token_lists) + 1, dtype=np.int64)
    np.cumsum([len(tokens) for tokens in token_lists], out=offsets[1:])
    tokens = np.concatenate(token_lists, dtype=np.int32) if token_lists else np.empty(0, dtype=np.int32)
    return pack_flat(tokens, offsets, sequence_length, eos_id)


def pack_arrow(documents: pa.ListArray | pa.LargeListArray, sequence_length: int, eos_id: int) -> NDArray[np.integer]:
    """`pack_flat` of an Arrow array with a list of ids per document; the ids are not copied before they are packed.

    Raises:
        ValueError: A document or an id is null, or as in `pack_flat`.
    """
    if documents.null_count or documents.values.null_count:
        raise ValueError("documents and their ids must not be null")
    tokens = documents.values.to_numpy(zero_copy_only=True)
    offsets = documents.offsets.to_numpy(zero_copy_only=True)
    return pack_flat(tokens, offsets.astype(np.int64, copy=False), sequence_length, eos_id)


def pack_flat(
    tokens: NDArray[_Token], offsets: NDArray[np.int64], sequence_length: int, eos_id: int
) -> NDArray[_Token]:
    """Cut documents that lie one after the other into sequences.

    Args:
        tokens: The ids of all documents.
        offsets: Document i is `tokens[offsets[i]:offsets[i + 1]]`, with or without end tokens at its end; one number
            more than there are documents. A document without any other token is left out.
        sequence_length: Tokens per sequence.
        eos_id: The end-of-sequence token.

    Returns:
        Shape (n, sequence_length), contiguous, of the tokens' type; n is 0 if the documents fill no sequence. It may
        be a view of `tokens`, if every document ended with one end token already.

    Raises:
        ValueError: `sequence_length` is less than 1, the offsets do not rise within the tokens, or the tokens' type has
            no room for `eos_id`.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
    _check_offsets(offsets, len(tokens))
    if not np.iinfo(tokens.dtype).min <= eos_id <= np.iinfo(tokens.dtype).max:
        raise ValueError(f"eos_id {eos_id} is not of the tokens' type {tokens.dtype}")
    stream = _stream(tokens[offsets[0] : offsets[-1]], offsets[1:] - offsets[0], eos_id)
    num_sequences = len(stream) // sequence_length
    return stream[: num_sequences * sequence_length].reshape(num_sequences, sequence_length)


def _stream(tokens: NDArray[_Token], stops: NDArray[np.int64], eos_id: int) -> NDArray[_Token]:
    """The documents that end at the stops, each with exactly one end token.

    The end token that a document has is left where it is. So there is little to remove, the further ones, and little
    to insert, the missing ones; all other tokens move in long runs.
    """
    lengths = np.diff(stops, prepend=0)
    ended = lengths > 0
    ended[ended] = tokens[stops[ended] - 1] == eos_id
    document = np.flatnonzero(ended)
    unusual = document[(lengths[document] == 1) | (tokens[stops[document] - 2] == eos_id)]
    if len(unusual):  # several end tokens, or nothing else
        kept = np.ones(len(tokens), dtype=np.bool_)
        for number in unusual:
            start, stop = stops[number] - lengths[number], stops[number]
            others = np.flatnonzero(tokens[start:stop] != eos_id)
            lengths[number] = others[-1] + 2 if len(others) else 0
            kept[start + lengths[number] : stop] = False
        tokens = tokens[kept]
    missing = lengths.cumsum()[(lengths > 0) & ~ended]
    return np.insert(tokens, missing, eos_id) if len(missing) else tokens


def _check_offsets(offsets: NDArray[np.int64], num_tokens: int) -> None:
    if not len(offsets) or offsets[0] < 0 or offsets[-1] > num_tokens or np.any(offsets[1:] < offsets[:-1]):
        raise ValueError(f"offsets must rise within 0..{num_tokens}")
