"""Which data a miner is assigned in a window, and the data itself.

Everything here follows from public objects and finalized blocks, so a validator rebuilds what a miner trained on.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from templar.agreement.genesis import Birth, require_digest
from templar.agreement.settings_plan import SettingsPlan
from templar.data.assignment import Assignment, Epoch, Epochs, ShardEpoch, SlotPlan, assign, epoch_of, spare_units
from templar.data.dataset import PageOrigin, Reading, TrainingData
from templar.data.tokenizer import EMBEDDED, Tokenizer, check_fits, load_tokenizer
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import AdoptedEntry, StartWindow
from templar.hparams import Data, HParams
from templar.neuron.configuration import NeuronConfig
from templar.timeline import first_block

log = logging.getLogger(__name__)

CACHED_WINDOWS = 2  # windows whose data is kept: the one that is trained and the one that is scored
REMEMBERED_EPOCHS = 2  # epochs before those of the state that a running node still knows


@dataclass(frozen=True)
class SequenceReader:
    """The sequences of an assignment, by training position."""

    count: int
    read: Callable[[Sequence[int]], NDArray[np.int32]]  # of some positions, shape (k, L)


@dataclass
class Workload:
    """The training data of a network, window by window."""

    exchange: NetworkView
    dataset: TrainingData  # of the window that is run or replayed: the plan may change it
    tokenizer: Tokenizer
    start: StartWindow
    open_dataset: Callable[[Data], TrainingData]
    _epochs: Epochs = ()
    _state_window: int = 0
    _known: dict[ShardEpoch, tuple[str, int]] = field(default_factory=dict)  # key, and slots that are wanted
    _sequences: dict[tuple[int, str], tuple[int, NDArray[np.int32]]] = field(default_factory=dict)
    _openings: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    _datasets: dict[str, TrainingData] = field(default_factory=dict)  # by digest

    def __post_init__(self) -> None:
        self._datasets[self.dataset.digest] = self.dataset

    def opened(self, data: Data) -> TrainingData:
        """The dataset of a window with these settings; it stays open.

        Raises:
            TransientError: The dataset could not be reached.
            PermanentError: `dataset_missing`, `dataset_malformed`, `tokenizer_missing`, ...
        """
        digest = data.other_dataset or self.start.dataset
        if (known := self._datasets.get(digest)) is None:
            known = self.open_dataset(data)
            require_digest(known.digest, digest)
            known.check(self.tokenizer)
            self._datasets[digest] = known
        return known

    def follows(self, plan: SettingsPlan, added: AdoptedEntry | None) -> None:
        """Check that this node can follow a plan with one more entry.

        Raises:
            TemplarError: `plan_unknown`; or as in `opened`, the dataset is not there.
        """
        if added is not None and added.entry not in plan.entries:
            self.opened(plan.after(added.entry).at(added.entry.first_window).data)

    def prepare(self, plan: SettingsPlan, window: int, check: Callable[[HParams], None]) -> None:
        """Check the settings of later windows and open their data; what is wrong is in the log while there is time."""
        for entry in plan.entries:
            try:
                if entry.first_window > window:
                    check(settings := plan.at(entry.first_window))
                    self.opened(settings.data)
            except TemplarError as error:
                log.error("from window %d on nothing will run here: %s", entry.first_window, error)  # noqa: TRY400

    def use(self, settings: HParams) -> HParams:
        """Take the settings of a window, and their dataset; errors as in `opened`, and nothing was changed."""
        self.dataset, self.exchange.hparams = self.opened(settings.data), settings
        return settings

    def follow(self, epochs: Epochs, window: int) -> None:
        """Take over the shard epochs of the node's state, which is that of `window`."""
        earlier: Epochs = ()
        if epochs and window == self._state_window + 1:  # otherwise they may belong to another history
            earlier = tuple(epoch for epoch in self._epochs if epoch.first_window < epochs[0].first_window)
        self._epochs = (*earlier[-REMEMBERED_EPOCHS:], *epochs)
        self._state_window = window

    def assignment(self, window: int, uid: int) -> Assignment:
        """A miner's assignment in a window.

        Raises:
            TransientError: The chain could not be reached, or the window's shard is not known yet.
            PermanentError: `window_passed`; the window's shard is no longer known.
        """
        epoch, plan = self._permuted(self.shard_epoch(window))
        uids, block_hash = self._opening(window)
        return assign(window, uid, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash)

    def digest(self, window: int, uid: int) -> str | None:
        """Digest of a miner's assignment; None if it was assigned nothing."""
        assignment = self.assignment(window, uid)
        return assignment.digest if assignment.units else None

    def read(self, assignment: Assignment) -> Reading:
        """The pages of an assignment and their sequences.

        Raises:
            TransientError: The dataset could not be read.
            PermanentError: The dataset does not match its metadata.
        """
        position = self.shard_epoch(assignment.window).position
        return self.dataset.read(position, assignment, self.tokenizer)

    def sequences(self, assignment: Assignment) -> NDArray[np.int32]:
        """The sequences of an assignment, int32 of shape (n, L), in training order; cached within `loader_mib`.

        Raises:
            TemplarError: As in `read`.
        """
        key = self.shard_epoch(assignment.window).position, assignment.digest
        if (known := self._sequences.get(key)) is not None:
            return known[1]
        sequences = self.read(assignment).sequences
        oldest = assignment.window - CACHED_WINDOWS
        kept = {other: item for other, item in self._sequences.items() if item[0] > oldest}
        room = (self.exchange.hparams.storage.loader_mib << 20) - sequences.nbytes
        while kept and sum(item[1].nbytes for item in kept.values()) > room:
            del kept[next(iter(kept))]
        self._sequences = {**kept, key: (assignment.window, sequences)}
        return sequences

    def reader(self, assignment: Assignment) -> SequenceReader:
        """Access to single sequences of an assignment; errors, also of `read`, as in `read`.

        Of a shard only these are read. Pages are read whole, once, and stay in memory as long as the reader.
        """
        position = self.shard_epoch(assignment.window).position
        count = self.dataset.num_sequences(assignment)
        if count is None or (position, assignment.digest) in self._sequences:
            sequences = self.sequences(assignment)
            return SequenceReader(len(sequences), lambda places: sequences[list(places)])
        dataset, tokenizer = self.dataset, self.tokenizer
        return SequenceReader(count, lambda places: dataset.read(position, assignment, tokenizer, places).sequences)

    def spare_assignment(self, window: int) -> Assignment:
        """Units that no miner was assigned in a window, as many as one miner has."""
        epoch, plan = self._permuted(self.shard_epoch(window))
        uids, block_hash = self._opening(window)
        units = spare_units(window, epoch=epoch, plan=plan, uids=uids, block_hash=block_hash)
        return Assignment(window, -1, units[: plan.units_per_slot], f"spare-{window}")

    def shard_epoch(self, window: int) -> ShardEpoch:
        """The shard epoch that a window trains on; a dataset of pages is one epoch.

        Raises:
            TemplarError: As in `assignment`.
        """
        if not self._epochs:
            return ShardEpoch(self.start.start_window, 0)
        return epoch_of(self._epochs, self._state_window, window)

    def _permuted(self, stretch: ShardEpoch) -> tuple[Epoch, SlotPlan]:
        """Permute the units of a shard epoch and cut them into slots."""
        data, chain = self.exchange.hparams.data, self.exchange.chain
        if stretch not in self._known:
            # 1. The key has the hash of the epoch's first block, so nobody knows the order before. There is one slot
            #    per miner at that block, and the spare ones.
            block_hash = chain.block_hash(first_block(stretch.first_window, self.exchange.hparams.windows))
            key = f"{self.exchange.network.genesis}/{stretch.position}/{block_hash}"
            self._known[stretch] = key, len(self.exchange.miners(stretch.first_window)) + data.spare_slots

        # 2. No more slots than the data has: then some miners wait in each window, for a network must not stop because
        #    many have registered.
        key, wanted = self._known[stretch]
        pages = self.dataset.num_pages(stretch.position)
        slots = max(1, min(wanted, pages // data.pages_per_window))
        return Epoch(key, pages, stretch.first_window), SlotPlan(slots, data.pages_per_window)

    def _opening(self, window: int) -> tuple[tuple[int, ...], str]:
        """The miners at a window's first block, and its hash; both are final, so the chain is asked once."""
        known = self._openings.get(window)
        if known is None:
            uids = tuple(neuron.uid for neuron in self.exchange.miners(window))
            block_hash = self.exchange.chain.block_hash(first_block(window, self.exchange.hparams.windows))
            self._openings = {
                number: item for number, item in self._openings.items() if number > window - CACHED_WINDOWS
            }
            known = self._openings[window] = uids, block_hash
        return known


@dataclass(frozen=True)
class Preview:
    """A miner's data of one window."""

    window: int
    uid: int
    opens_at: int
    """The window's first block."""
    digest: str
    """Digest of the assignment, as in the miner's manifest."""
    pages: tuple[PageOrigin, ...]
    """In training order; none if the miner waits for a slot."""
    num_sequences: int
    texts: tuple[str, ...]
    """The first sequences in training order, decoded."""


def preview(workload: Workload, window: int, uid: int, *, num_texts: int) -> Preview:
    """Fetch and pack a miner's assignment as the miner does, and decode the first `num_texts` sequences.

    Raises:
        TransientError: Chain or dataset could not be reached, or the window has not opened.
        PermanentError: `window_passed`: the network began later; or the dataset does not match its metadata.
    """
    if window < workload.start.start_window:
        raise PermanentError(
            Reason.WINDOW_PASSED, f"window {window}: the network began with window {workload.start.start_window}"
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


def open_workload(config: NeuronConfig, birth: Birth) -> Workload:
    """The data of a network, once dataset and tokenizer are known to be the network's.

    Raises:
        PermanentError: `dataset_malformed`, `tokenizer_missing`, ...
        TransientError: The dataset could not be reached.
    """
    start, data = birth.start, config.hparams.data
    dataset = config.open_dataset(data)
    require_digest(dataset.digest, start.dataset)
    embedded = dataset.tokenizer_json() if data.tokenizer_name == EMBEDDED else None
    tokenizer = load_tokenizer(data.tokenizer_name, embedded=embedded)
    check_fits(tokenizer, config.hparams.model.vocab_size)
    if tokenizer.digest != start.tokenizer:
        raise PermanentError(
            Reason.TOKENIZER_MISSING,
            f"tokenizer {data.tokenizer_name!r}: digest {tokenizer.digest[:12]} is not the network's "
            f"{start.tokenizer[:12]}; another version of it was loaded",
        )
    dataset.check(tokenizer)
    exchange = NetworkView(config.chain, config.buckets, birth.network, config.hparams, config.signer)
    return Workload(exchange, dataset, tokenizer, start, config.open_dataset)
