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
from templar.data.tokenizer import Tokenizer, encode
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
    sequences = pack(encode(texts, tokenizer), sequence_length)
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
    documents: list[NDArray[np.integer]] = []
    sequences = pack(documents, sequence_length)
    for position in range(dataset.num_pages):
        if len(sequences) >= num_sequences:
            break
        documents += encode(dataset.read_page(order.at(position)).texts, tokenizer)
        sequences = pack(documents, sequence_length)
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


def pack(documents: Sequence[NDArray[np.integer]], sequence_length: int) -> NDArray[np.int32]:
    """Cut documents as `encode` gives them into sequences: int32 of shape (n, sequence_length), n may be 0."""
    stream = np.concatenate([np.empty(0, dtype=np.int32), *documents])
    num_sequences = len(stream) // sequence_length
    return stream[: num_sequences * sequence_length].reshape(num_sequences, sequence_length)
