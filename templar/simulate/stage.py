"""What a simulated network stands on: its buckets, its clock, and the faults that some of its nodes see.

The world is the same on every stage. The one that is used unless another is given keeps buckets in directories and
lets simulated time pass; a stage on a real endpoint and in real time fulfils the same protocol.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from templar.chain.base import Chain, Clock
from templar.chain.clock import SimulatedClock
from templar.chain.keys import Hotkey
from templar.store.address import BucketAddress
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore

GENESIS_TIME = 1_700_000_000.0
"""Chain time of block 0 on simulated time; any fixed instant would do."""


@dataclass(frozen=True)
class Member:
    """Somebody on the subnet.

    Attributes:
        name: Unique in the network.
        role: `burn`, `aggregator`, `validator`, or the name of an actor for miners.
        hotkey: Its key.
        uid: Its uid.
    """

    name: str
    role: str
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
        """How many peers a node fetches at once; 1 on simulated time, where only participants may wait."""
        ...

    def open_store(self, bucket: str) -> ObjectStore:
        """A bucket with write rights; made when it is not there."""
        ...

    def open_reader(self, address: BucketAddress) -> ObjectStore:
        """A bucket as those see it who know what its owner committed on chain."""
        ...

    def address_of(self, member: Member) -> BucketAddress:
        """What a member commits on chain: its account and a key that may only read."""
        ...

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """Run participants at once, until all have returned; raises the first failure."""
        ...


class SimulatedStage:
    """Buckets in directories below a folder, on simulated time.

    Args:
        folder: Where the buckets lie; made when needed.
        threads: Worker threads for computations; their number changes nothing but the speed.
    """

    genesis_time = GENESIS_TIME
    gather_concurrency = 1

    def __init__(self, folder: Path, *, threads: int = 1) -> None:
        self._folder = folder
        self._clock = SimulatedClock(GENESIS_TIME, threads=threads)

    @property
    def clock(self) -> SimulatedClock:
        """Simulated time."""
        return self._clock

    def open_store(self, bucket: str) -> DirectoryStore:
        """A directory, made when needed."""
        folder = self._folder / bucket
        folder.mkdir(parents=True, exist_ok=True)
        return DirectoryStore(folder, clock=self._clock.now)

    def open_reader(self, address: BucketAddress) -> DirectoryStore:
        """The account's directory; any key reads it."""
        return DirectoryStore(self._folder / address.bucket, clock=self._clock.now, writable=False)

    def address_of(self, member: Member) -> BucketAddress:
        """The account, with a key that nothing checks."""
        return BucketAddress(member.account_id, "local", "local")

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """One at a time, in the same order every time."""
        self._clock.run(participants)


def _same_store(observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
    del observer, owner
    return store


def _own_store(owner: Member, store: ObjectStore) -> ObjectStore:
    del owner
    return store


def _same_chain(observer: Member, chain: Chain) -> Chain:
    del observer
    return chain


@dataclass(frozen=True)
class Weather:
    """What stands between the nodes and their surroundings: nothing, unless a scenario says otherwise.

    Attributes:
        reader: Given observer, owner and the owner's bucket for reading, what the observer reads instead. The observer
            is None for a node without a hotkey; the owner is None if the world does not know the account.
        own: Given a member and its own bucket, what the member writes to instead.
        chain: Given a member and its chain, what the member sees instead.
    """

    reader: Callable[[Member | None, Member | None, ObjectStore], ObjectStore] = _same_store
    own: Callable[[Member, ObjectStore], ObjectStore] = _own_store
    chain: Callable[[Member, Chain], Chain] = _same_chain


CALM = Weather()
"""Nothing is in the way."""
