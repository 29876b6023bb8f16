"""One neuron runs in one process, on any machine: a lease in its own bucket (docs/protocol.md 4, Leases).

A process that wants to run a neuron writes a lease once and a heartbeat again and again, then lists both kinds: it
holds the lease if no rival is alive. If two start together, at least one of them sees the other; the one whose lease is
later (time, then key) gives way, and the other waits for that. No conditional write is needed.

Time is the store's: the LastModified of the heartbeat that was just written is now. A holder whose heartbeats were
never more than `lapses_after` seconds apart cannot have been taken for dead, so it continues even if it sees a rival.
After a longer silence it holds nothing until it has looked again, like a newcomer.

Assumptions: a listing shows what was written before it began; the times of one bucket are right to within
`expires_after - lapses_after`; and no process pauses for that long between its look and the write that follows.
"""

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from templar.chain.base import Clock
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.object_keys import Kind, ObjectKey, parse_current_key
from templar.exchange.objects import Heartbeat, Lease
from templar.exchange.signed import Body, seal, unseal
from templar.hparams import Windows
from templar.store.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

NO_NETWORK = "0" * 64  # the genesis field of a lease, which is taken before the genesis hash is known
LOOKS, PAUSE_SECONDS = 5, 2.0
"""Number of looks, and the pause between them, in which a newcomer waits for a later rival to give way."""

T = TypeVar("T", bound=Body)


@dataclass(frozen=True)
class Claimant:
    """A process that wants to run a neuron."""

    netuid: int
    uid: int
    hotkey: str
    role: str
    holder: str  # identifies the neuron's folder on this machine; 32 hex digits
    machine: str  # identifies the machine for people; 8 hex digits

    def key(self, kind: Kind) -> str:
        """The key of its lease, or of its heartbeat."""
        return str(ObjectKey(kind, role=self.role, holder=self.holder))


@dataclass(frozen=True)
class Terms:
    """Ages of a heartbeat, in seconds."""

    expires_after: int  # a holder that was silent for longer counts as dead
    lapses_after: int  # a holder that was silent for longer no longer assumes that it holds the lease
    renewed_after: int  # an older heartbeat is renewed when the neuron next acts

    @classmethod
    def of(cls, rules: Windows) -> Self:
        """Ten minutes, or three windows if that is longer: a neuron acts at least once in a window."""
        expires = max(600, int(3 * rules.seconds))
        return cls(expires, expires * 3 // 4, expires // 6)


class NeuronLease:
    """The lease of one neuron, as one process sees it. Safe under threads.

    The clock decides when a heartbeat is renewed, never who holds the lease.
    """

    def __init__(self, store: ObjectStore, clock: Clock, signer: Signer, claimant: Claimant, terms: Terms) -> None:
        self._store = store
        self._clock = clock
        self._signer = signer
        self._claimant = claimant
        self._terms = terms
        self._lock = threading.Lock()
        self._holders = _Holders(store, claimant, terms.expires_after)
        self._keys = {kind: claimant.key(kind) for kind in (Kind.LEASE, Kind.HEARTBEAT)}
        self._confirmed = 0
        self._acted = 0.0
        self._lost: str | None = None  # how the lease was lost

    @property
    def seconds_left(self) -> float:
        """Seconds until another machine may take the neuron over unless the lease is renewed; 0 if it is lost."""
        return 0.0 if self._lost else max(0.0, self._acted + self._terms.expires_after - self._clock.now())

    def enter(self) -> None:
        """Take the lease. The folder that held it last has it again at once.

        On failure nothing is held, and the objects in the bucket are deleted if the store allows it.

        Raises:
            PermanentError: `already_running`; another process holds it. The message says which, and since when.
            TransientError: The store failed.
        """
        with self._lock:
            self._lost = None
            try:
                self._confirm(self._enter())
            except BaseException:
                self._delete()
                raise

    def check(self) -> None:
        """As `hold`, but also look whether another process took the neuron over.

        If the store fails nothing is raised; `hold` still guards each write.

        Raises:
            PermanentError: `lease_lost`.
        """
        with self._lock:
            self._raise_if_lost()
            try:
                if self._store.head(self._keys[Kind.LEASE]) is None:
                    self._lose("it was taken over by another process after this one had been silent")
                self._renew_if_due()
            except TransientError as error:
                log.warning("the lease of %s cannot be read now: %s", self._claimant.role, error)

    def hold(self) -> None:
        """Check that this process may act for the neuron; renews the heartbeat when it is due.

        A store failure is ignored as long as no rival can have taken this process for dead.

        Raises:
            PermanentError: `lease_lost`; another process runs the neuron. Nothing may be published any more.
            TransientError: The store has failed for so long that a rival may have; a later call continues.
        """
        with self._lock:
            self._raise_if_lost()
            try:
                self._renew_if_due()
            except TransientError as error:
                if not 0 <= self._clock.now() - self._acted < self._terms.expires_after // 2:
                    raise
                log.warning("the lease of %s is renewed later: %s", self._claimant.role, error)

    def release(self) -> None:
        """Delete the lease, so that another machine can take it at once. If that fails it expires."""
        with self._lock:
            self._delete()
            self._lost = "it was given back"

    def _enter(self) -> "_Sight":
        # 1. Write a heartbeat, then the lease: an old heartbeat of this folder must not count for the new lease.
        self._confirmed = self._unbroken_until()
        self._beat()
        if self._store.head(self._keys[Kind.LEASE]) is None:
            body = Lease(**self._author(), machine=self._claimant.machine)
            self._store.put_if_absent(self._keys[Kind.LEASE], seal(body, self._signer).encode())
        # 2. Look for rivals; a later one gives way within a few seconds.
        sight = self._holders.look()
        for _ in range(LOOKS):
            if self._holds(sight) or not sight.rivals or sight.rivals[0].order < sight.own.order:
                break
            self._clock.sleep_until(self._clock.now() + PAUSE_SECONDS)
            sight = self._holders.look()
        if not self._holds(sight):
            raise PermanentError(Reason.ALREADY_RUNNING, self._refusal(sight))
        return sight

    def _renew_if_due(self) -> None:
        if 0 <= self._clock.now() - self._acted < self._terms.renewed_after:
            return
        self._beat()
        sight = self._holders.look()
        if Kind.LEASE not in sight.own.found:
            self._lose("it was taken over by another process after this one had been silent")
        if not self._holds(sight):
            self._lose(
                f"this process was silent for too long, and {self._holders.describe(sight.rivals[0], sight.now)}"
            )
        self._confirm(sight)

    def _holds(self, sight: "_Sight") -> bool:
        if Kind.LEASE not in sight.own.found:
            return False
        is_unbroken = self._confirmed > 0 and sight.now - self._confirmed <= self._terms.lapses_after
        return is_unbroken or not sight.rivals

    def _confirm(self, sight: "_Sight") -> None:
        self._confirmed, self._acted = sight.now, self._clock.now()
        self._holders.delete_dead(sight.dead)

    def _unbroken_until(self) -> int:
        """Time of the last heartbeat of an earlier process of this folder, if it held the lease then; else 0."""
        info = self._store.head(self._keys[Kind.HEARTBEAT])
        if info is None or self._store.head(self._keys[Kind.LEASE]) is None:
            return 0
        left = self._holders.read(info, Heartbeat)
        if left is None or left.confirmed == 0 or info.last_modified - left.confirmed > self._terms.lapses_after:
            return 0
        return info.last_modified

    def _beat(self) -> None:
        body = Heartbeat(**self._author(), confirmed=self._confirmed)
        self._store.put(self._keys[Kind.HEARTBEAT], seal(body, self._signer).encode())

    def _delete(self) -> None:
        self._confirmed = 0
        try:
            self._store.delete(self._keys.values())
        except TemplarError as error:
            log.warning("the lease of %s stays until it expires: %s", self._claimant.role, error)

    def _lose(self, cause: str) -> None:
        self._delete()
        self._lost = cause
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise PermanentError(
                Reason.LEASE_LOST,
                f"lease of {self._claimant.role} {self._claimant.hotkey}: {self._lost}; nothing more is published from "
                "here. Stop the other process first if this one is to run the neuron, then start it again",
            )

    def _refusal(self, sight: "_Sight") -> str:
        what = f"hotkey {self._claimant.hotkey}, {self._claimant.role}, {self._store.name}: "
        if not sight.rivals:
            return f"{what}its own lease was deleted while it was taken; start again"
        left = sight.rivals[0].seen + self._terms.expires_after - sight.now
        rival = self._holders.describe(sight.rivals[0], sight.now)
        return (
            f"{what}{rival}; this machine is {self._claimant.machine}. Stop the neuron there, then it can start here "
            f"at once; if that machine is gone, start again in {left + 1} s"
        )

    def _author(self) -> dict[str, Any]:
        own = self._claimant
        return {
            "netuid": own.netuid,
            "genesis": NO_NETWORK,
            "uid": own.uid,
            "hotkey": self._claimant.hotkey,
            "role": own.role,
            "holder": own.holder,
        }


@dataclass
class _Entry:
    """The objects of one holder in a listing."""

    holder: str
    found: dict[Kind, ObjectInfo] = field(default_factory=dict)  # its lease, its heartbeat or both

    @property
    def seen(self) -> int:
        """Time of its newest object."""
        return max(info.last_modified for info in self.found.values())

    @property
    def since(self) -> int:
        """Time of its lease, or of its heartbeat if there is no lease."""
        return self.found.get(Kind.LEASE, self.found[max(self.found)]).last_modified

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: the earlier lease comes first."""
        return self.since, self.holder


@dataclass(frozen=True)
class _Sight:
    """The holders in one listing of the bucket."""

    now: int  # the store's time
    own: _Entry
    rivals: tuple[_Entry, ...]  # other holders that are alive, in order
    dead: tuple[_Entry, ...]


class _Holders:
    """Reads the holders of one neuron from its bucket."""

    def __init__(self, store: ObjectStore, claimant: Claimant, expires_after: int) -> None:
        self._store = store
        self._claimant = claimant
        self._expires_after = expires_after

    def look(self) -> _Sight:
        """List the holders of this role; `now` is the time of the own heartbeat, written just before.

        Raises:
            TransientError: The store failed, or does not show the own heartbeat.
        """
        entries = self.entries()
        own = entries.pop(self._claimant.holder, None)
        if own is None or Kind.HEARTBEAT not in own.found:
            raise TransientError(
                Reason.OBJECT_MISSING,
                f"{self._store.name}/{self._claimant.key(Kind.HEARTBEAT)}: not listed after it was written; retry",
            )
        now = own.found[Kind.HEARTBEAT].last_modified
        alive, dead = self.rivals(entries, now)
        return _Sight(now, own, alive, dead)

    def entries(self) -> dict[str, _Entry]:
        """Holder -> what the bucket has of it, of this role."""
        entries: dict[str, _Entry] = {}
        for info in self._store.list(Kind.LEASE):
            key = parse_current_key(info.key)
            if key is not None and key.role == self._claimant.role and key.holder is not None:
                entries.setdefault(key.holder, _Entry(key.holder)).found[key.kind] = info
        return entries

    def rivals(self, entries: Mapping[str, _Entry], now: int) -> tuple[tuple[_Entry, ...], tuple[_Entry, ...]]:
        """The other holders of this neuron: those alive at this time of the store, the earliest first, and the dead."""
        others: dict[bool, list[_Entry]] = {True: [], False: []}
        for entry in entries.values():
            if entry.holder != self._claimant.holder and self._is_of_this_neuron(entry):
                others[now - entry.seen <= self._expires_after].append(entry)
        return tuple(sorted(others[True], key=lambda each: each.order)), tuple(others[False])

    def _is_of_this_neuron(self, entry: _Entry) -> bool:
        """Whether an entry is this hotkey's on this subnet; False if its objects cannot be read."""
        for kind, body_type in ((Kind.LEASE, Lease), (Kind.HEARTBEAT, Heartbeat)):
            if kind in entry.found and (body := self.read(entry.found[kind], body_type)) is not None:
                return (body.netuid, body.hotkey) == (self._claimant.netuid, self._claimant.hotkey)
        return False

    def read(self, info: ObjectInfo, body_type: type[T]) -> T | None:
        """The body of an object; None if it is gone or not legal."""
        try:
            return unseal(self._store.get(info.key, max_bytes=body_type.max_bytes), body_type).body
        except PermanentError as error:
            if isinstance(error, RejectedError) or error.reason in (Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE):
                return None
            raise

    def delete_dead(self, dead: Iterable[_Entry]) -> None:
        """Delete the objects of dead holders, except of one that has just written again; errors are only logged."""
        for entry in dead:
            try:
                if all(self._store.head(info.key) == info for info in entry.found.values()):
                    self._store.delete(info.key for info in entry.found.values())
            except TemplarError as error:
                log.warning("the lease of dead holder %s stays for now: %s", entry.holder[:12], error)

    def describe(self, rival: _Entry, now: int) -> str:
        """Describe a rival in a message."""
        lease = self.read(rival.found[Kind.LEASE], Lease) if Kind.LEASE in rival.found else None
        since = datetime.fromtimestamp(rival.since, UTC)
        return (
            f"holder {rival.holder[:12]} on machine {lease.machine if lease else 'unknown'} runs this neuron since "
            f"{since:%Y-%m-%d %H:%M:%S} UTC, last seen {now - rival.seen} s ago"
        )


def foreign_holder(store: ObjectStore, claimant: Claimant, terms: Terms, now: int) -> str | None:
    """Describe the process elsewhere that holds a neuron's lease at this time of the store; None if there is none.

    Nothing is written.

    Raises:
        TransientError: The store failed.
    """
    holders = _Holders(store, claimant, terms.expires_after)
    alive, _ = holders.rivals(holders.entries(), now)
    return holders.describe(alive[0], now) if alive else None
