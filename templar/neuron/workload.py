"""Which data belongs to whom in a window, and the data itself.

Everything here follows from public objects and finalized blocks, so a validator rebuilds what a miner trained on.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from templar.data.assignment import Assignment, Epoch, SlotPlan, assign, spare_units
from templar.data.pages import PageDataset
from templar.data.samples import window_sequences
from templar.exchange.context import Exchange
from templar.model.tokenizer import Tokenizer
from templar.windows import first_block

CACHED_WINDOWS = 2
"""Windows whose data is kept: the one that is trained and the one that is scored."""


@dataclass
class Workload:
    """The data of a network, window by window.

    Attributes:
        exchange: Chain and numbers.
        dataset: The training split.
        tokenizer: The network's tokenizer.
        start_window: First window of the network, and of the assignment epoch.
    """

    exchange: Exchange
    dataset: PageDataset
    tokenizer: Tokenizer
    start_window: int
    _plan: SlotPlan | None = None
    _sequences: dict[str, tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    _openings: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)

    @cached_property
    def epoch(self) -> Epoch:
        """The assignment epoch that the network is in."""
        return Epoch(self.exchange.network.genesis, self.dataset.num_pages, self.start_window)

    @property
    def plan(self) -> SlotPlan:
        """Slots per window: one for every miner at the epoch's first block, and the spare ones."""
        if self._plan is None:
            data = self.exchange.hparams.data
            miners = len(self.exchange.miners(self.start_window))
            self._plan = SlotPlan(miners + data.spare_slots, data.pages_per_window)
        return self._plan

    def assignment(self, window: int, uid: int) -> Assignment:
        """What a miner is assigned in a window.

        Raises:
            TransientError: The chain could not be reached.
        """
        uids, block_hash = self._opening(window)
        return assign(window, uid, epoch=self.epoch, plan=self.plan, uids=uids, block_hash=block_hash)

    def digest(self, window: int, uid: int) -> str | None:
        """Digest of a miner's assignment; None if it was assigned nothing."""
        assignment = self.assignment(window, uid)
        return assignment.digest if assignment.units else None

    def sequences(self, assignment: Assignment) -> NDArray[np.int32]:
        """The sequences of an assignment, int32 of shape (n, L), in training order.

        Raises:
            TransientError: The dataset could not be read.
            PermanentError: The dataset is not what its metadata says.
        """
        known = self._sequences.get(assignment.digest)
        if known is not None:
            return known[1]
        length = self.exchange.hparams.data.sequence_length
        sequences = window_sequences(self.dataset, self.tokenizer, assignment, length)
        oldest = assignment.window - CACHED_WINDOWS
        self._sequences = {digest: item for digest, item in self._sequences.items() if item[0] > oldest}
        self._sequences[assignment.digest] = (assignment.window, sequences)
        return sequences

    def spare_sequences(self, window: int) -> NDArray[np.int32]:
        """Sequences of units that nobody was assigned in a window."""
        uids, block_hash = self._opening(window)
        units = spare_units(window, epoch=self.epoch, plan=self.plan, uids=uids, block_hash=block_hash)
        nobody = Assignment(window, -1, units, f"spare-{window}")
        return self.sequences(replace(nobody, units=units[: self.plan.units_per_slot]))

    def _opening(self, window: int) -> tuple[tuple[int, ...], str]:
        """The miners at a window's first block, and its hash: asked of the chain once, for they never change."""
        known = self._openings.get(window)
        if known is None:
            uids = tuple(neuron.uid for neuron in self.exchange.miners(window))
            block_hash = self.exchange.chain.block_hash(first_block(window, self.exchange.hparams.windows))
            self._openings = {
                number: item for number, item in self._openings.items() if number > window - CACHED_WINDOWS
            }
            known = self._openings[window] = uids, block_hash
        return known
