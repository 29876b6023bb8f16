"""Everybody's buckets: the own one to write, the others' to read, found through their commitments on chain.

Somebody else's bucket, through whatever read access its owner has committed on chain by now.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from templar.canonical import sha256_hex
from templar.chain.base import Chain, NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError, as_own_failure
from templar.store.address import BucketAddress, decode_address, encode_address
from templar.store.base import DeleteReport, ObjectInfo, ObjectStore

R = TypeVar("R")


_REFUSED = frozenset({Reason.ACCESS_DENIED, Reason.BUCKET_MISSING})


class FollowingReader:
    """A bucket for reading that survives the rotation of its key.

    A read that is refused asks whether other access was committed meanwhile, and is done once more through that. If
    not, the refusal stands.

    Args:
        store: The bucket through the access that is known.
        look_again: The bucket through other access, if there is any; None otherwise.
    """

    def __init__(self, store: ObjectStore, look_again: Callable[[], ObjectStore | None]) -> None:
        self._store = store
        self._look_again = look_again

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._store.name

    def put(self, key: str, data: bytes) -> None:
        """Refused by the bucket: readers do not write."""
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Refused by the bucket."""
        return self._store.put_if_absent(key, data)

    def put_file(self, key: str, path: Path) -> None:
        """Refused by the bucket."""
        self._store.put_file(key, path)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object."""
        return self._read(lambda store: store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`."""
        return self._read(lambda store: store.get_range(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """As `get_range`, into memory that is there."""
        self._read(lambda store: store.read_into(key, start, buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Download to a file that appears whole."""
        self._read(lambda store: store.get_file(key, path, max_bytes=max_bytes, resume=resume))

    def head(self, key: str) -> ObjectInfo | None:
        """What the server says of the object; None is a definite 404."""
        return self._read(lambda store: store.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`; a refusal after the first one stands."""
        first, rest = self._read(lambda store: _begun(store.list(prefix)))
        return chain(first, rest)

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Refused by the bucket."""
        return self._store.delete(keys)

    def close(self) -> None:
        """Give connections back."""
        self._store.close()

    def _read(self, work: Callable[[ObjectStore], R]) -> R:
        try:
            return work(self._store)
        except PermanentError as error:
            other = self._look_again() if error.reason in _REFUSED else None
            if other is None:
                raise
        return work(other)


def _begun(listing: Iterator[ObjectInfo]) -> tuple[tuple[ObjectInfo, ...], Iterator[ObjectInfo]]:
    """A listing of which the first object was asked for, and that object."""
    return tuple(info for info in (next(listing, None),) if info is not None), listing


log = logging.getLogger(__name__)


REFRESH_SECONDS = 600.0
"""Commitments are read again after this long at the latest (documented value)."""


ACTIVE_CHECK_SECONDS = 60.0
"""What `keep_announced` knows of the commitments is never older (documented as `active_check_interval`)."""


RECOMMIT_BLOCKS = 100
"""A commitment that somebody overwrites is made again once in so many blocks at most: chains limit them like that."""


@dataclass(frozen=True)
class OwnBucket:
    """The bucket of this neuron.

    Attributes:
        address: What is committed on chain: account and read key.
        store: The bucket with write rights.
    """

    address: BucketAddress
    store: ObjectStore


class Buckets:
    """The buckets of a subnet as one neuron sees them. Safe under threads.

    Args:
        chain: Where the commitments stand.
        open_reader: Opens a bucket for reading.
        own: This neuron's bucket; None for a node that only reads, such as an auditor.
        hotkey: This neuron's address.
    """

    def __init__(
        self,
        chain: Chain,
        open_reader: Callable[[BucketAddress], ObjectStore],
        *,
        own: OwnBucket | None = None,
        hotkey: str | None = None,
    ) -> None:
        self._chain = chain
        self._open_reader = open_reader
        self._own = own
        self._hotkey = hotkey
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._commitments: dict[str, str] = {}
        self._readers: dict[str, tuple[str, ObjectStore]] = {}
        self._refreshed: float | None = None
        self._announced_block: int | None = None
        self._may_write: Callable[[], None] | None = None

    @property
    def own(self) -> ObjectStore:
        """The own bucket, with write rights.

        Raises:
            PermanentError: `bad_environment`; this node has none. Whatever the condition of `write_while` raises.
        """
        if self._own is None:
            raise PermanentError(Reason.BAD_ENVIRONMENT, "this node has no bucket of its own to write to")
        if self._may_write is not None:
            self._may_write()
        return self._own.store

    @property
    def hotkey(self) -> str | None:
        """This neuron's address, if it has one."""
        return self._hotkey

    def write_while(self, condition: Callable[[], None] | None) -> None:
        """Give out the own bucket only while a condition holds, which raises when it does not; None: always."""
        self._may_write = condition

    def announce(self) -> bool:
        """Commit the own bucket's read access on chain unless it stands there already; whether it had to.

        Raises:
            TransientError: The chain could not be reached.
            PermanentError: The chain refused, for example because the hotkey is not registered.
        """
        if self._own is None or self._hotkey is None:
            return False
        wanted = encode_address(self._own.address)
        self.refresh()
        if self._commitments.get(self._hotkey) == wanted:
            return False
        self._announced_block = self._chain.head()
        self._chain.set_commitment(wanted)
        self.refresh()
        return True

    def keep_announced(self) -> bool:
        """Make sure that the own commitment still stands, and make it again if not; whether it had to.

        Also keeps what is known of the others' commitments fresh, so that a changed one is used from here on. One that
        is overwritten again and again is made again once in `RECOMMIT_BLOCKS` at most.

        Raises:
            TransientError: The chain could not be reached.
            PermanentError: The chain refused.
        """
        if self._own is None or self._hotkey is None:
            return False
        with self._refreshing:
            if self._age() >= ACTIVE_CHECK_SECONDS:
                self.refresh()
        if self._commitments.get(self._hotkey) == encode_address(self._own.address):
            return False
        last = self._announced_block
        if last is not None and self._chain.head() < last + RECOMMIT_BLOCKS:
            return False
        log.warning("the commitment of %s is not that of its bucket any more: committing again", self._hotkey)
        return self.announce()

    def refresh(self) -> None:
        """Read the commitments again.

        Raises:
            TransientError: The chain does not say, whyever: that is nobody's refusal to be read.
        """
        with as_own_failure():
            commitments = self._chain.commitments()
        with self._lock:
            self._commitments = commitments
            self._refreshed = self._chain.clock.now()

    def reader(self, neuron: NeuronInfo) -> ObjectStore:
        """The bucket of a neuron, for reading; the own bucket for oneself.

        Raises:
            RejectedError: `commitment_missing`, `commitment_malformed`.
            TransientError: The chain could not be reached, and the neuron's commitment was never seen.
        """
        if self._own is not None and neuron.hotkey == self._hotkey:
            return self._own.store
        self._refresh_if_old(neuron)
        with self._lock:
            text = self._commitments.get(neuron.hotkey)
            if text is None:
                raise RejectedError(
                    Reason.COMMITMENT_MISSING, f"uid {neuron.uid} ({neuron.hotkey}) committed no bucket on chain"
                )
            known = self._readers.get(neuron.hotkey)
            if known is not None and known[0] == text:
                return known[1]
            bucket = self._open_reader(_decode(neuron, text))
            store = FollowingReader(bucket, partial(self._look_again, neuron, text))
            self._readers[neuron.hotkey] = (text, store)
        if known is not None:
            known[1].close()
        return store

    def account(self, neuron: NeuronInfo) -> str | None:
        """The account that a neuron's commitment names, which outlives every read key; None if it names none.

        Raises:
            TransientError: The chain could not be reached, and the neuron's commitment was never seen.
        """
        self._refresh_if_old(neuron)
        text = self._commitments.get(neuron.hotkey)
        try:
            return None if text is None else _decode(neuron, text).account_id
        except RejectedError:
            return None

    def close(self) -> None:
        """Give every connection back."""
        with self._lock:
            stores = [store for _, store in self._readers.values()]
            self._readers.clear()
        for store in stores:
            store.close()

    def _refresh_if_old(self, neuron: NeuronInfo) -> None:
        """Read the commitments again when they are old, and once per block while somebody's is missing.

        One thread asks, the others wait for it. While the chain cannot be reached the known commitments hold.
        """
        with self._refreshing:
            is_known = neuron.hotkey in self._commitments
            if self._age() < (REFRESH_SECONDS if is_known else self._chain.block_seconds):
                return
            try:
                self.refresh()
            except TransientError as error:
                if not is_known:
                    raise
                log.warning("commitments cannot be read now, the known ones hold: %s", error)
                self._refreshed = self._chain.clock.now() - REFRESH_SECONDS + self._chain.block_seconds

    def _look_again(self, neuron: NeuronInfo, refused: str) -> ObjectStore | None:
        """The bucket that a neuron's commitment names now, if that is another one than was refused; else None.

        The chain is asked once per block at most, however many buckets refuse.
        """
        with self._refreshing:
            if self._commitments.get(neuron.hotkey) == refused and self._age() >= self._chain.block_seconds:
                try:
                    self.refresh()
                except TransientError as error:
                    log.warning("commitments cannot be read now, the known ones hold: %s", error)
        if self._commitments.get(neuron.hotkey) in (None, refused):
            return None
        return self.reader(neuron)

    def _age(self) -> float:
        return math.inf if self._refreshed is None else self._chain.clock.now() - self._refreshed


def bucket_digest(account: str) -> str:
    """What a bucket is known by where its name is of no use to anybody: the hash of its account."""
    return sha256_hex(account.encode())


def _decode(neuron: NeuronInfo, text: str) -> BucketAddress:
    try:
        return decode_address(text)
    except PermanentError as error:
        raise RejectedError(
            Reason.COMMITMENT_MALFORMED, f"uid {neuron.uid} ({neuron.hotkey}): the commitment is no bucket: {error}"
        ) from None
