"""What a miner trains on in a window, in words: for people who want to see the data before the loss."""

from dataclasses import dataclass

from templar.data.training import PageOrigin
from templar.errors import PermanentError, Reason
from templar.neuron.workload import Workload
from templar.windows import first_block


@dataclass(frozen=True)
class Preview:
    """A miner's data of one window.

    Attributes:
        window: The window.
        uid: The miner.
        opens_at: The window's first block.
        digest: Digest of the assignment, as the miner's manifest names it.
        pages: The assigned pages in training order; none if the miner waits for a slot.
        num_sequences: Training sequences in them.
        texts: The first of these in training order, decoded.
    """

    window: int
    uid: int
    opens_at: int
    digest: str
    pages: tuple[PageOrigin, ...]
    num_sequences: int
    texts: tuple[str, ...]


def preview(workload: Workload, window: int, uid: int, *, num_texts: int) -> Preview:
    """Fetch, pack and decode what a miner was assigned, as the miner does it.

    Args:
        workload: The network's data.
        window: A window that has opened.
        uid: The miner.
        num_texts: How many sequences are decoded.

    Raises:
        TransientError: Chain or dataset could not be reached, or the window has not opened.
        PermanentError: `window_passed`: it lies before the network's first; or the dataset is not what its metadata
            says.
    """
    if window < workload.start_window:
        raise PermanentError(
            Reason.WINDOW_PASSED, f"window {window}: the network began with window {workload.start_window}"
        )
    assignment = workload.assignment(window, uid)
    reading = workload.read(assignment)
    return Preview(
        window=window,
        uid=uid,
        opens_at=first_block(window, workload.exchange.hparams.windows),
        digest=assignment.digest,
        pages=reading.pages,
        num_sequences=len(reading.sequences),
        texts=tuple(workload.tokenizer.decode(sequence) for sequence in reading.sequences[:num_texts]),
    )
