"""Texts into tokens, and tokens into samples, for datasets of shards."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from templar.canonical import keyed_seed
from templar.data.sharded.blocked_writer import TokenType
from templar.model.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from templar.store.files import local_file, sync

BATCH_TOKENS = 2**20
"""Tokens that are packed and written at a time, about."""
BATCH_CHARS = 2**22
"""Characters that are tokenised at a time, about."""


def order_key(source: str, name: str) -> int:
    """The number, 64 bits, by which the documents of a split are ordered."""
    return keyed_seed("templar.shards.order", source, name) >> 64


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer, on the disk before this returns; errors as in `local_file`."""
    with local_file(folder):
        tokenizer.save(folder)
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
            sync(folder / name)


def token_type(tokenizer: Tokenizer) -> TokenType:
    """The smaller type that holds every id."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> list[NDArray[np.integer]]:
    """The tokens of each text with exactly one end token behind them; none if it has no other token."""
    return [_ended(tokens, tokenizer.eos_id) for tokens in tokenizer.encode_batch(texts)]


def _ended(tokens: NDArray[np.integer], eos_id: int) -> NDArray[np.integer]:
    length = len(tokens)
    while length and tokens[length - 1] == eos_id:
        length -= 1
    return np.append(tokens[:length], np.array([eos_id], tokens.dtype)) if length else tokens[:0]


def encode_all(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """`encode` for any number of texts, about `BATCH_CHARS` characters at a time; yields the tokens of each text."""
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= BATCH_CHARS:
            yield from encode(batch, tokenizer)
            batch, length = [], 0
    yield from encode(batch, tokenizer)


def packed(token_lists: Iterable[NDArray[np.integer]], sequence_length: int) -> Iterator[NDArray[np.integer]]:
    """Cut a stream of tokens into samples; what fills no sample at its end is dropped.

    Args:
        token_lists: Pieces of the stream, of any length.
        sequence_length: Tokens per sample.

    Yields:
        Samples of shape (n, sequence_length), about `BATCH_TOKENS` at a time.
    """
    waiting: list[NDArray[np.integer]] = []
    length = 0
    for tokens in token_lists:
        waiting.append(tokens)
        length += len(tokens)
        if length >= max(BATCH_TOKENS, sequence_length):
            stream = np.concatenate(waiting)
            whole = len(stream) // sequence_length * sequence_length
            yield stream[:whole].reshape(-1, sequence_length)
            waiting, length = [stream[whole:]], len(stream) - whole
    if length >= sequence_length:
        stream = np.concatenate(waiting)
        yield stream[: length // sequence_length * sequence_length].reshape(-1, sequence_length)
