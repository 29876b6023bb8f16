"""The training sequences of a miner's window, and the held-out sequences that every node measures on.

Miner and validator call the same functions on the same public objects and get the same bytes.

Packing turns documents of any length into sequences of one length: documents follow each other in order, each ends
with exactly one end-of-sequence token, and the stream is cut without regard to their borders; the remainder that fills
no sequence is dropped.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from templar.data.assignment import Assignment
from templar.data.pages.page_dataset import Page, PageDataset
from templar.data.permutation import Permutation
from templar.data.tokenizer import Tokenizer
from templar.errors import PermanentError, Reason
from templar.shared_results import shared

ORDER_DOMAIN = "templar.samples.order"
HELD_OUT_DOMAIN = "templar.samples.held_out"


def sample_order(assignment: Assignment, samples_per_page: int) -> NDArray[np.int64]:
    """The samples of one miner's window, in the order in which it trains on them: their numbers, shape (n,).

    The units of the assignment are pages of one shard; n is 0 if nothing was assigned.
    """
    # 1. Page p is the samples p * samples_per_page up to (p + 1) * samples_per_page; pages in the assignment's order.
    pages = np.array(assignment.units, dtype=np.int64)
    samples = (pages[:, None] * samples_per_page + np.arange(samples_per_page)).ravel()
    if not len(samples):
        return samples
    # 2. Shuffle them by the assignment's digest, as `page_sequences` does.
    return samples[Permutation(len(samples), ORDER_DOMAIN, assignment.digest).elements()]


@shared(
    lambda pages, tokenizer, assignment, sequence_length: (
        tuple(text for page in pages for text in page.texts),
        tokenizer.digest,
        assignment.digest,
        sequence_length,
    ),
    most=128,
)
def page_sequences(
    pages: Sequence[Page], tokenizer: Tokenizer, assignment: Assignment, sequence_length: int
) -> NDArray[np.int32]:
    """The sequences of one miner's window, in the order in which it trains on them.

    They are int32 of shape (n, sequence_length); n is 0 if nothing was assigned. `pages` are those of the assignment,
    in its order.
    """
    # 1. Pack the pages in the order of the assignment, every row as one document.
    texts = [text for page in pages for text in page.texts]
    sequences = pack(tokenizer.encode_batch(texts), sequence_length, tokenizer.eos_id)
    if not len(sequences):
        return sequences
    # 2. Shuffle: neighbours come from one document and would otherwise fill whole batches.
    order = Permutation(len(sequences), ORDER_DOMAIN, assignment.digest)
    return sequences[order.elements()]


def held_out_sequences(
    dataset: PageDataset, tokenizer: Tokenizer, sequence_length: int, num_sequences: int
) -> NDArray[np.int32]:
    """The first sequences of the held-out split, in an order of pages that is the same for everybody.

    The order mixes the configs, so that a few pages already represent all of them: the fewer rows per page, the better
    the mixture. The first n sequences are the same for every larger number. They are int32 of shape
    (num_sequences, sequence_length). `dataset_too_small` if the split has fewer, otherwise errors as in `read_page`.
    """
    order = Permutation(dataset.num_pages, HELD_OUT_DOMAIN)
    documents: list[NDArray[np.int32]] = []
    sequences = pack(documents, sequence_length, tokenizer.eos_id)
    for position in range(dataset.num_pages):
        if len(sequences) >= num_sequences:
            break
        documents += tokenizer.encode_batch(dataset.read_page(order.at(position)).texts)
        sequences = pack(documents, sequence_length, tokenizer.eos_id)
    if len(sequences) < num_sequences:
        raise too_few_held_out(dataset.split, len(sequences), sequence_length, num_sequences)
    return sequences[:num_sequences]


def too_few_held_out(split: str, available: int, sequence_length: int, wanted: int) -> PermanentError:
    """The error of a held-out split with fewer sequences than are to be measured."""
    return PermanentError(
        Reason.DATASET_TOO_SMALL,
        f"split {split!r} holds {available} sequences of {sequence_length} tokens, not {wanted}; ask for fewer or "
        "build the dataset with a larger held_out_fraction",
    )


def unigram_entropy(tokens: NDArray[np.integer], vocab_size: int) -> float:
    """Entropy of the tokens' own unigram distribution, in nats per token; `tokens` have any shape.

    It is the least loss of a model that knows only the frequencies of tokens: a model with a lower loss on the same
    tokens has learnt from context.

    ValueError: There are no tokens, or an id is out of range.
    """
    if not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"tokens must be one id or more, all in 0..{vocab_size - 1}")
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    frequencies = counts[counts > 0] / tokens.size
    return float(-(frequencies * np.log(frequencies)).sum())


def pack(token_lists: Sequence[NDArray[np.int32]], sequence_length: int, eos_id: int) -> NDArray[np.int32]:
    """Concatenate documents and cut them into sequences; documents are as in `pack_flat`.

    Returns:
        int32 of shape (n, sequence_length), contiguous; n is 0 if the documents fill no sequence.
    """
    offsets = np.zeros(len(token_lists) + 1, dtype=np.int64)
    np.cumsum([len(tokens) for tokens in token_lists], out=offsets[1:])
    tokens = np.concatenate(token_lists, dtype=np.int32) if token_lists else np.empty(0, dtype=np.int32)
    return pack_flat(tokens, offsets, sequence_length, eos_id)


def pack_flat(
    tokens: NDArray[np.int32], offsets: NDArray[np.int64], sequence_length: int, eos_id: int
) -> NDArray[np.int32]:
    """Cut documents that lie one after the other in one array into sequences, contiguous, shape (n, sequence_length).

    Document i is `tokens[offsets[i]:offsets[i + 1]]`, with or without end tokens at its end; together the documents are
    all of the tokens. A document without any other token than the end is left out. The sequences may be a view of
    `tokens`, if every document ended with one end token.
    """
    stream = _stream(tokens, offsets[1:], eos_id)
    num_sequences = len(stream) // sequence_length
    return stream[: num_sequences * sequence_length].reshape(num_sequences, sequence_length)


def _stream(tokens: NDArray[np.int32], stops: NDArray[np.int64], eos_id: int) -> NDArray[np.int32]:
    """The documents that end at the stops, each with exactly one end token.

    An end token that is there stays in its place, so that few tokens are removed or inserted and the others move in
    long runs.
    """
    # 1. Find the documents that end with an end token.
    lengths = np.diff(stops, prepend=0)
    ended = lengths > 0
    ended[ended] = tokens[stops[ended] - 1] == eos_id
    document = np.flatnonzero(ended)
    # 2. Remove end tokens beyond the first, and documents of nothing else.
    unusual = document[(lengths[document] == 1) | (tokens[stops[document] - 2] == eos_id)]
    if len(unusual):
        kept = np.ones(len(tokens), dtype=np.bool_)
        for number in unusual:
            start, stop = stops[number] - lengths[number], stops[number]
            others = np.flatnonzero(tokens[start:stop] != eos_id)
            lengths[number] = others[-1] + 2 if len(others) else 0
            kept[start + lengths[number] : stop] = False
        tokens = tokens[kept]
    # 3. Insert the end tokens that are missing.
    missing = lengths.cumsum()[(lengths > 0) & ~ended]
    return np.insert(tokens, missing, eos_id) if len(missing) else tokens
