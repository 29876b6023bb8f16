"""Buckets: the own one to write, every other one to read, found through their commitments on chain.

The account of a neuron is the one that the chain names at the block of its metagraph, so every node reads the same
bucket for a window (docs/protocol.md 4). Only the key that opens it may have been committed later.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar, cast

from templar.canonical import sha256_hex
from templar.chain.base import Chain, NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TransientError, as_own_failure
from templar.store.address import BucketAddress, decode_address, encode_address
from templar.store.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

ACTIVE_CHECK_SECONDS = 60.0
"""Maximum age of the commitments that `keep_announced` relies on (documented as `active_check_interval`)."""
ANNOUNCE_TRIES = 3  # a commitment whose fate is unknown is made so often, if it is not on chain afterwards
RECOMMIT_BLOCKS = 100
"""An overwritten commitment is made again at most once in so many blocks, the rate limit of chains."""
ACCOUNTS_OPEN = 2
"""So many buckets of one hotkey are open at the same time: that of this window, and that of an earlier one."""

MAX_LISTED = 50_000  # objects in one listing of another's bucket, which could show new ones without end

_REFUSED = frozenset({Reason.ACCESS_DENIED, Reason.BUCKET_MISSING})

R = TypeVar("R")


@dataclass(frozen=True)
class OwnBucket:
    """The bucket of this neuron."""

    address: BucketAddress  # account and read key, as they are committed on chain
    store: ObjectStore  # with write access


class Buckets:
    """The buckets of a subnet as one neuron sees them. Safe under threads.

    The chain has the commitments. `own` is None for a node that only reads, such as an auditor; `hotkey` is the
    neuron's address.
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
        self._readers: dict[str, dict[str, tuple[str, ObjectStore]]] = {}  # by hotkey and account: access and bucket
        self._refreshed: float | None = None
        self._announced_block: int | None = None
        self._may_write: Callable[[], None] | None = None

    @property
    def own(self) -> ObjectStore:
        """The own bucket, with write access.

        Raises:
            PermanentError: `bad_environment`; this node has none.
            TemplarError: An error that the condition of `write_while` raises.
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
        """Call `condition` before each write access to the own bucket; it raises to forbid it. None removes it."""
        self._may_write = condition

    def announce(self) -> bool:
        """Commit the own bucket's read access on chain unless it is there already; whether it had to.

        If nobody says what became of the commitment, it is looked for on chain, and made again if it is not there.

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
        for tries_left in reversed(range(ANNOUNCE_TRIES)):
            self._announced_block = self._chain.head()
            try:
                self._chain.set_commitment(wanted)
                self.refresh()
                break
            except TransientError as error:
                if error.reason is Reason.CHAIN_RATE_LIMITED:
                    raise
                log.warning("the bucket may be announced or not, it is looked for on chain: %s", error)
                self._announced_block = None
                self._chain.wait_for_block(self._chain.head() + 1)  # a block that has it is final by then
                self.refresh()
                if self._commitments.get(self._hotkey) == wanted:
                    break
                if not tries_left:
                    raise
        return True

    def keep_announced(self) -> bool:
        """Commit again if the own commitment was overwritten, at most once in `RECOMMIT_BLOCKS`; whether it had to.

        Also refreshes the known commitments of others.

        Raises:
            TransientError: The chain could not be reached.
            PermanentError: The chain refused.
        """
        if self._own is None or self._hotkey is None:
            return False
        # 1. Read the commitments unless they were read just now.
        with self._refreshing:
            if self._age() >= ACTIVE_CHECK_SECONDS:
                self.refresh()
        if self._commitments.get(self._hotkey) == encode_address(self._own.address):
            return False
        # 2. The own one is missing or another: commit it, but not more often than chains allow.
        last = self._announced_block
        if last is not None and self._chain.head() < last + RECOMMIT_BLOCKS:
            return False
        log.warning("the commitment of %s is not that of its bucket any more: committing again", self._hotkey)
        return self.announce()

    def refresh(self) -> None:
        """Read the commitments again.

        Raises:
            TransientError: The chain did not answer, for any reason: a local failure is never a verdict on a peer.
        """
        with as_own_failure():
            commitments = self._chain.commitments()
        with self._lock:
            self._commitments = commitments
            self._refreshed = self._chain.clock.now()

    def reader(self, neuron: NeuronInfo) -> ObjectStore:
        """The bucket that the chain named for a neuron at the block of its metagraph, for reading.

        The own bucket, if it is that one. A key that was committed later is used when the known one is refused.

        Raises:
            RejectedError: `commitment_missing`, `commitment_malformed`.
        """
        text = neuron.commitment
        if text is None:
            raise RejectedError(
                Reason.COMMITMENT_MISSING, f"uid {neuron.uid} ({neuron.hotkey}) had committed no bucket on chain"
            )
        account = _decode(neuron, text).account_id
        if self._own is not None and (neuron.hotkey, account) == (self._hotkey, self._own.address.account_id):
            return self._own.store
        with self._lock:
            known = self._readers.get(neuron.hotkey, {}).get(account)
        return self._opened(neuron, account, text) if known is None else known[1]

    def newest_reader(self, neuron: NeuronInfo) -> ObjectStore:
        """The bucket that a neuron names now, for objects that prove themselves; without a newer one, as `reader`.

        The commitments are read again if they were not for `ACTIVE_CHECK_SECONDS`; if the chain does not answer, the
        known ones stay valid.

        Raises:
            RejectedError: `commitment_missing`, `commitment_malformed`.
        """
        with self._refreshing:
            if self._age() >= ACTIVE_CHECK_SECONDS:
                self._try_refresh()
        newest = self._commitments.get(neuron.hotkey)
        is_usable = newest is not None and _account_of(newest) is not None
        return self.reader(replace(neuron, commitment=newest) if is_usable else neuron)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            stores = [store for accounts in self._readers.values() for _, store in accounts.values()]
            self._readers.clear()
        for store in stores:
            store.close()

    def _opened(self, neuron: NeuronInfo, account: str, text: str) -> ObjectStore:
        """The bucket of an account through the access of a commitment, in the place of an older one."""
        with self._lock:
            accounts = self._readers.setdefault(neuron.hotkey, {})
            known = accounts.get(account)
            if known is not None and known[0] == text:
                return known[1]
            bucket = self._open_reader(_decode(neuron, text))
            store = cast(ObjectStore, _RotatingReader(bucket, partial(self._reopened, neuron, account, text)))
            replaced = [] if known is None else [known[1]]
            if known is None and len(accounts) >= ACCOUNTS_OPEN:
                replaced.append(accounts.pop(next(iter(accounts)))[1])
            accounts[account] = (text, store)
        for old in replaced:
            old.close()
        return store

    def _reopened(self, neuron: NeuronInfo, account: str, refused: str) -> ObjectStore | None:
        """The same bucket through the access that is committed now, if that is not the refused one; else None.

        The chain is asked at most once per block, for all refusing buckets together.
        """
        with self._refreshing:
            if self._access(neuron, account) == refused and self._age() >= self._chain.block_seconds:
                self._try_refresh()
        text = self._access(neuron, account)
        return None if text == refused else self._opened(neuron, account, text)

    def _try_refresh(self) -> None:
        try:
            self.refresh()
        except TransientError as error:
            log.warning("commitments cannot be read now, the known ones stay valid: %s", error)

    def _access(self, neuron: NeuronInfo, account: str) -> str:
        """The newest known commitment of a neuron that names this account."""
        newest = self._commitments.get(neuron.hotkey)
        return newest if newest is not None and _account_of(newest) == account else str(neuron.commitment)

    def _age(self) -> float:
        return math.inf if self._refreshed is None else self._chain.clock.now() - self._refreshed


class _RotatingReader:
    """A bucket for reading that survives the rotation of its read key; the bucket itself refuses every write.

    A refused read is repeated once if other access was committed meanwhile; otherwise the refusal stands.
    """

    def __init__(self, store: ObjectStore, reopened: Callable[[], ObjectStore | None]) -> None:
        self._store = store
        self._reopened = reopened

    def __getattr__(self, name: str) -> Any:
        """All but the reads are the bucket's own: its name, `close` and the writes."""
        return getattr(self._store, name)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._read(lambda store: store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._read(lambda store: store.get_range(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._read(lambda store: store.read_into(key, start, buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        self._read(lambda store: store.get_file(key, path, max_bytes=max_bytes, resume=resume))

    def head(self, key: str) -> ObjectInfo | None:
        return self._read(lambda store: store.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`; a refusal after the first one stands."""

        def begin(store: ObjectStore) -> Iterator[ObjectInfo]:
            listing = _at_most(MAX_LISTED, store.list(prefix))
            return chain([info for info in (next(listing, None),) if info is not None], listing)

        return self._read(begin)

    def _read(self, work: Callable[[ObjectStore], R]) -> R:
        try:
            return work(self._store)
        except PermanentError as error:
            other = self._reopened() if error.reason in _REFUSED else None
            if other is None:
                raise
        return work(other)


def _at_most(most: int, listing: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
    yield from islice(listing, most)
    if next(listing, None) is not None:
        raise TransientError(Reason.STORE_BUSY, f"the bucket lists more than {most} objects: its owner must clean up")


def bucket_digest(neuron: NeuronInfo) -> str | None:
    """The hash of a neuron's account, unchanged by key rotation; None if the chain named no bucket.

    It identifies the bucket without naming it.
    """
    account = None if neuron.commitment is None else _account_of(neuron.commitment)
    return None if account is None else sha256_hex(account.encode())


def _account_of(text: str) -> str | None:
    try:
        return decode_address(text).account_id
    except PermanentError:
        return None


def _decode(neuron: NeuronInfo, text: str) -> BucketAddress:
    try:
        return decode_address(text)
    except PermanentError as error:
        raise RejectedError(
            Reason.COMMITMENT_MALFORMED, f"uid {neuron.uid} ({neuron.hotkey}): the commitment is no bucket: {error}"
        ) from None
