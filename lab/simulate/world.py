"""A network in one folder: ledger, buckets, dataset, genesis and nodes, all from one seed.

The world is the same on every stage. The one that is used unless another is given keeps buckets in directories and
lets simulated time pass; a stage on a real endpoint and in real time fulfils the same protocol.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lab.adversary.actors import ACTORS, IDLE
from lab.adversary.chains import BlockSchedule, UnevenLedger
from lab.hotkeys import hotkey_from_seed
from templar.agreement.genesis import Birth, draft_birth, publish_genesis
from templar.chain.base import Chain, Clock, Role
from templar.chain.clock import SimulatedClock
from templar.chain.hotkey import Hotkey
from templar.chain.ledger import Ledger, create_ledger
from templar.data.corpus import Document, collect_documents
from templar.data.dataset import TrainingData, dataset_folders, open_training, read_held_out, transfer_of
from templar.data.pages.page_dataset import PageDataset
from templar.data.shards.shard_writer import build_shards
from templar.data.tokenizer import load_tokenizer
from templar.datasets.page_writer import build_dataset, upload_dataset
from templar.exchange.buckets import Buckets, OwnBucket
from templar.hparams import Data, HParams
from templar.neuron.aggregator import Aggregator
from templar.neuron.configuration import NeuronConfig
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.store.address import BucketAddress
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore
from templar.timeline import first_block
from templar.training.model import genesis_parameters

GENESIS_TIME = 1_700_000_000.0  # chain time of block 0 on simulated time; any fixed instant would do


@dataclass(frozen=True)
class Member:
    """Somebody on the subnet; the name is unique in the network."""

    name: str
    role: str  # `burn`, `aggregator`, `validator`, or the name of an actor for miners
    hotkey: Hotkey
    uid: int

    @property
    def account_id(self) -> str:
        """Account, and name, of its bucket."""
        return hashlib.sha256(self.hotkey.address.encode()).hexdigest()[:32]


class Stage(Protocol):
    """Storage and time of one network."""

    @property
    def clock(self) -> Clock:
        """The clock that everybody acts by, and whose time the stores stamp."""
        ...

    @property
    def genesis_time(self) -> float:
        """Chain time of block 0, in seconds since the epoch; on real time not later than now."""
        ...

    @property
    def gather_concurrency(self) -> int:
        """Return how many peers a node fetches at once; 1 on simulated time, where only participants may wait."""
        ...

    def open_store(self, bucket: str) -> ObjectStore:
        """A bucket with write rights; made when it is not there."""
        ...

    def open_reader(self, address: BucketAddress) -> ObjectStore:
        """A bucket as those see it who know what its owner committed on chain."""
        ...

    def address_of(self, member: Member) -> BucketAddress:
        """Return what a member commits on chain: its account and a key that may only read."""
        ...

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """Run participants at once, until all have returned; raises the first failure."""
        ...


class SimulatedStage:
    """Buckets in directories below a folder, on simulated time.

    The number of worker threads for computations changes nothing but the speed.
    """

    genesis_time = GENESIS_TIME
    gather_concurrency = 1

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self._folder = folder
        self.clock = SimulatedClock(GENESIS_TIME, threads=threads)

    def open_store(self, bucket: str) -> DirectoryStore:
        """A directory, made when needed."""
        folder = self._folder / bucket
        folder.mkdir(parents=True, exist_ok=True)
        return DirectoryStore(folder, clock=self.clock.now)

    def open_reader(self, address: BucketAddress) -> DirectoryStore:
        """The account's directory; any key reads it."""
        return DirectoryStore(self._folder / address.account_id, clock=self.clock.now, writable=False)

    def address_of(self, member: Member) -> BucketAddress:
        """The account, with a key that nothing checks."""
        return BucketAddress(member.account_id, "local", "local")

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """One at a time, in the same order every time."""
        self.clock.run(participants)


@dataclass(frozen=True)
class Weather:
    """The weather between the nodes and their surroundings: nothing, unless a scenario says otherwise.

    `reader` gets observer, owner and the owner's bucket, and gives what the observer reads instead; the observer is
    None for a node without a hotkey, the owner if the world does not know the account. `own` gives what a member writes
    to in place of its own bucket, and `chain` what it sees in place of its chain.
    """

    reader: Callable[[Member | None, Member | None, ObjectStore], ObjectStore] = lambda observer, owner, store: store
    own: Callable[[Member, ObjectStore], ObjectStore] = lambda owner, store: store
    chain: Callable[[Member, Chain], Chain] = lambda observer, chain: chain


CALM = Weather()  # nothing is in the way
NETUID = 1
START_WINDOW = 1
DATASET_BUCKET, DATASET_PREFIX = "dataset", "text"
ROW_CHARS = 800
LEAST_BYTES = 600_000  # text that even the smallest network has
WINDOWS_PER_ROUND = 4  # the text lasts for this many windows before its pages come again in another order
ROLES = {"aggregator": Aggregator, "validator": Validator}
VALIDATING = tuple(ROLES)
AGGREGATOR_STAKE, VALIDATOR_STAKE = 500.0, 400.0


class World:
    """A simulated network in an empty folder, before its nodes start.

    The seed makes everything but the text; the number of threads changes nothing but the speed. There is a miner for
    each name of `ACTORS` in `actors`, and `num_validators` besides the aggregator. Without `training` miners publish
    noise and validators measure nothing. The stage gives storage and time, by default directories and simulated time.
    `kinds` are the nodes of roles and actors where it is not the one of that name. `schedule` says when blocks come on
    a difficult chain; by default each is there and final in its slot.
    """

    def __init__(
        self,
        root: Path,
        hparams: HParams,
        *,
        seed: int,
        actors: Sequence[str],
        num_validators: int = 1,
        threads: int = 1,
        training: bool = True,
        stage: Stage | None = None,
        weather: Weather = CALM,
        kinds: Mapping[str, type[Node]] = MappingProxyType({}),
        schedule: BlockSchedule | None = None,
    ) -> None:
        self.root = root
        self.hparams = hparams
        self.training = training
        self._kinds: dict[str, type[Node]] = {**ROLES, **ACTORS, **({} if training else IDLE), **kinds}
        self.stage = stage or SimulatedStage(root / "buckets", threads=threads)
        self.clock = self.stage.clock
        self._weather = weather
        self._schedule = schedule
        self._ledger = root / "ledger.sqlite"
        create_ledger(
            self._ledger,
            netuid=NETUID,
            block_seconds=hparams.windows.block_seconds,
            genesis_time=self.stage.genesis_time,
            seed=seed,
        )
        self.chain = self._open_chain()
        self.members: tuple[Member, ...] = ()
        self.members = self._register(seed, actors, num_validators)
        self._build_dataset()
        self.birth = self._publish_genesis()

    @property
    def running(self) -> list[Member]:
        """The members that have a node, in uid order: all but the burn uid."""
        return [member for member in self.members if member.role != "burn"]

    def opens(self, window: int) -> float:
        """When a window opens, in seconds since the epoch."""
        block = first_block(window, self.hparams.windows)
        if self._schedule is not None:
            return self._schedule.time(block)
        return self.stage.genesis_time + block * self.hparams.windows.block_seconds

    def node(self, member: Member) -> Node:
        """The node of a member, started; the burn uid has none."""
        return self._kinds[member.role](self.config(member))

    def observer(self) -> Node:
        """A node without a hotkey, started: it replays what the others agreed on."""
        home = self.root / "nodes" / "observer"
        buckets = Buckets(self.chain, partial(self._open_reader, None))
        opening = partial(self.open_dataset, home)
        return Node(NeuronConfig("observer", home, self.hparams, self.chain, buckets, None, opening, durable=False))

    def config(self, member: Member, clock: Clock | None = None) -> NeuronConfig:
        """Return what a member's node and housekeeping work with, the latter by another clock if one is given."""
        home = self.root / "nodes" / member.name
        chain: Chain = self._open_chain(member.hotkey, clock)
        if clock is None:
            chain = self._weather.chain(member, chain)
        return NeuronConfig(
            member.name,
            home,
            self.hparams,
            chain,
            self._buckets(member, chain),
            member.hotkey,
            partial(self.open_dataset, home),
            gather_concurrency=self.stage.gather_concurrency,
            durable=False,
            secret_order=False,
        )

    def open_dataset(self, home: Path, data: Data | None = None) -> TrainingData:
        """The training split, for a node with this folder, by the settings of a window."""
        stores, transfer = [self.stage.open_store(DATASET_BUCKET)], transfer_of(self.hparams.storage)
        return open_training(stores, DATASET_PREFIX, data or self.hparams.data, home / "shards", transfer)

    def add_dataset(self) -> str:
        """Put another dataset beside the network's, where nodes look for it; its digest. Its pages are fewer."""
        data, (folder, digest) = self.hparams.data, _other_dataset(self.hparams.data, self.hparams.model.vocab_size)
        prefix, _ = dataset_folders(DATASET_PREFIX, self.root, data.model_copy(update={"other_dataset": digest}))
        upload_dataset(Path(folder.name, DATASET_BUCKET), self.stage.open_store(DATASET_BUCKET), prefix)
        return digest

    def held_out(self, node: Node, num_sequences: int) -> NDArray[np.int32]:
        """Held-out sequences, shape (num_sequences, L)."""
        stores, folder = [self.stage.open_store(DATASET_BUCKET)], node.home / "shards"
        tokenizer, data = node.workload.tokenizer, self.hparams.data
        return read_held_out(stores, DATASET_PREFIX, data, folder, tokenizer=tokenizer, num_sequences=num_sequences)

    def _register(self, seed: int, actors: Sequence[str], num_validators: int) -> tuple[Member, ...]:
        roles = ["aggregator", *["validator"] * num_validators, *actors]
        if (burn_uid := self.hparams.weights.burn_uid) is not None:
            roles.insert(burn_uid, "burn")
        members = []
        for index, role in enumerate(roles):
            hotkey = hotkey_from_seed(hotkey_seed(seed, index))
            stake = {"aggregator": AGGREGATOR_STAKE, "validator": VALIDATOR_STAKE}.get(role, 0.0)
            stake *= max(1.0, self.hparams.peers.validator_min_stake)
            permit = role in VALIDATING
            uid = self.chain.register(hotkey.address, stake=stake, validator_permit=permit)
            members.append(Member(f"{role}-{index}", role, hotkey, uid))
        self.stage.run([partial(self._announce_role, member) for member in members if member.role != "burn"])
        return tuple(members)

    def _announce_role(self, member: Member) -> None:
        own = Ledger(self._ledger, hotkey=member.hotkey, clock=self.clock, durable=False)
        own.set_role(Role.VALIDATOR if member.role in VALIDATING else Role.MINER)
        own.close()

    def _build_dataset(self) -> None:
        data, vocab_size = self.hparams.data, self.hparams.model.vocab_size
        pages = WINDOWS_PER_ROUND * data.pages_per_window * (len(self.members) + data.spare_slots)
        folder = Path(_dataset(data, pages, vocab_size).name, DATASET_BUCKET)
        if not folder.exists():  # a process that lives for days, and a clean-up of old temporary folders
            _dataset.cache_clear()
            folder = Path(_dataset(data, pages, vocab_size).name, DATASET_BUCKET)
        upload_dataset(folder, self.stage.open_store(DATASET_BUCKET), DATASET_PREFIX)

    def _publish_genesis(self) -> Birth:
        publisher = next(member for member in self.members if member.role == "aggregator")
        chain = self._open_chain(publisher.hotkey)
        buckets = self._buckets(publisher, chain)
        buckets.announce()
        dataset = self.open_dataset(self.root / "genesis")
        embedded = dataset.tokenizer_json()
        tokenizer = load_tokenizer(self.hparams.data.tokenizer_name, embedded=embedded)
        neuron = chain.metagraph().by_hotkey(publisher.hotkey.address)
        assert neuron is not None  # noqa: S101 - it was registered
        common: Any = {"params": genesis_parameters(self.hparams.model), "tokenizer": tokenizer}
        numbers: Any = {"dataset_digest": dataset.digest, "start_window": START_WINDOW}
        birth = draft_birth(chain, self.hparams, neuron, **common, **numbers)
        who = buckets.own, publisher.hotkey, chain.clock, self.hparams
        publish_genesis(birth, *who, **common, folder=self.root / "genesis", concurrency=1)
        return birth

    def _open_chain(self, hotkey: Hotkey | None = None, clock: Clock | None = None) -> Ledger:
        clock = clock or self.clock
        if self._schedule is None:
            return Ledger(self._ledger, hotkey=hotkey, clock=clock, durable=False)
        return UnevenLedger(self._ledger, hotkey=hotkey, clock=clock, durable=False, schedule=self._schedule)

    def _buckets(self, member: Member, chain: Chain) -> Buckets:
        own = self._weather.own(member, self.stage.open_store(member.account_id))
        address = self.stage.address_of(member)
        opening = partial(self._open_reader, member)
        return Buckets(chain, opening, own=OwnBucket(address, own), hotkey=member.hotkey.address)

    def _open_reader(self, observer: Member | None, address: BucketAddress) -> ObjectStore:
        owner = next((member for member in self.members if member.account_id == address.account_id), None)
        return self._weather.reader(observer, owner, self.stage.open_reader(address))


def hotkey_seed(seed: int, index: int) -> bytes:
    """Return what the hotkey of a network's member is made from; the index is its uid."""
    return hashlib.sha256(f"templar.simulate:{seed}:{index}".encode()).digest()


# The machine's text is collected, and a dataset is built, once for all the networks of a process that want the same.


@lru_cache(maxsize=2)
def _documents(max_bytes: int) -> list[Document]:
    return list(collect_documents(max_bytes=max_bytes))


@lru_cache(maxsize=8)
def _other_dataset(data: Data, vocab_size: int) -> tuple[TemporaryDirectory[str], str]:
    """Pages of a part of the machine's text, and their digest."""
    folder = TemporaryDirectory(prefix="templar-dataset-")
    root = Path(folder.name, DATASET_BUCKET)
    build_dataset(_documents(LEAST_BYTES)[1::2], root, vocab_size=vocab_size, row_chars=ROW_CHARS)
    pages = PageDataset([DirectoryStore(root)], "", rows_per_page=data.rows_per_page)
    return folder, pages.digest


@lru_cache(maxsize=8)
def _dataset(data: Data, pages: int, vocab_size: int) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix="templar-dataset-")
    root = Path(folder.name, DATASET_BUCKET)
    if data.layout == "pages":
        documents = _documents(max(LEAST_BYTES, 2 * pages * data.rows_per_page * ROW_CHARS))
        build_dataset(documents, root, vocab_size=vocab_size, row_chars=ROW_CHARS)
    else:
        build_shards(
            _documents(LEAST_BYTES),
            root,
            vocab_size=vocab_size,
            sequence_length=data.sequence_length,
            samples_per_shard=pages * data.samples_per_page,
        )
    return folder
