"""The training sequences of a miner's window, and the held-out sequences that everybody is measured on.

Miner and validator call the same functions on the same public objects and get the same bytes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from templar.data.assignment import Assignment
from templar.data.packing import pack
from templar.data.pages import Page, PageDataset
from templar.data.permutation import Permutation
from templar.errors import PermanentError, Reason
from templar.model.tokenizer import Tokenizer

ORDER_DOMAIN = "templar.samples.order"
HELD_OUT_DOMAIN = "templar.samples.held_out"


def page_sequences(
    pages: Sequence[Page], tokenizer: Tokenizer, assignment: Assignment, sequence_length: int
) -> NDArray[np.int32]:
    """The sequences of one miner's window, in the order in which it trains on them.

    The assigned pages are packed in the order of the assignment, every row as one document. The sequences are then
    put into an order that the assignment's digest chooses, because neighbours come from one document and would
    otherwise fill whole batches.

    Args:
        pages: The pages that the assignment names, in its order.
        tokenizer: The network's tokenizer.
        assignment: What the miner was assigned.
        sequence_length: Tokens per sequence.

    Returns:
        int32 of shape (n, sequence_length); n is 0 if nothing was assigned.
    """
    texts = [text for page in pages for text in page.texts]
    sequences = pack(tokenizer.encode_batch(texts), sequence_length, tokenizer.eos_id)
    if not len(sequences):
        return sequences
    order = Permutation(len(sequences), ORDER_DOMAIN, assignment.digest)
    return sequences[order.elements()]


def held_out_sequences(
    dataset: PageDataset, tokenizer: Tokenizer, sequence_length: int, num_sequences: int
) -> NDArray[np.int32]:
    """The first sequences of the held-out split, in an order of pages that is the same for everybody.

    The order mixes the configs, so that a few pages already speak for all of them; more sequences begin with the
    fewer ones.

    Args:
        dataset: The held-out split (`split=HELD_OUT_SPLIT`); the fewer rows per page, the better the mixture.
        tokenizer: The network's tokenizer.
        sequence_length: Tokens per sequence.
        num_sequences: How many sequences.

    Returns:
        int32 of shape (num_sequences, sequence_length).

    Raises:
        TransientError: No store could be read.
        PermanentError: `dataset_too_small`, if the split has fewer sequences; `dataset_missing`, `dataset_malformed`.
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
    """Entropy of the tokens' own unigram distribution, in nats per token.

    It is the least loss of a model that knows how frequent tokens are and nothing of their context: whoever is below
    it on the same tokens has learnt from context.

    Args:
        tokens: Ids of any shape, at least one.
        vocab_size: Ids lie in 0..vocab_size-1.

    Raises:
        ValueError: There are no tokens, or an id is out of range.
    """
    if not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"tokens must be some ids in 0..{vocab_size - 1}")
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    frequencies = counts[counts > 0] / tokens.size
    return float(-(frequencies * np.log(frequencies)).sum())
