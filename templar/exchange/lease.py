"""One neuron runs once, on whatever machine: a lease in its own bucket (PROTOCOL 23).

Whoever wants to run a neuron writes a lease, once, and a heartbeat, again and again. Then it lists both kinds: it holds
the lease if it sees nobody else alive. Of two that start together each sees the other, or the later one sees the first;
the one whose lease is later (time, then key) gives way and the other waits for that. Nothing rests on a conditional
write.

Time is the store's own: the stamp of the heartbeat that was just written is now. A holder whose heartbeats never
stopped for `lapses_after` seconds cannot have been taken for dead by anybody, so it goes on whoever else is there. One
that was silent for longer holds nothing until it has looked again, like a newcomer.

What this rests on: a listing shows what was written before it began; the stamps of one bucket are right to within
`expires_after - lapses_after`; and nobody stands still for that long between looking and the write that follows.

Who holds a neuron's lease, or wants it, as the neuron's bucket shows it.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn, Self, TypeVar

from templar.chain.base import Clock
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.object_keys import Kind, lease_key, parse_current_key
from templar.exchange.objects import Heartbeat, Lease
from templar.exchange.signed import Body, seal, unseal
from templar.hparams import Windows
from templar.store.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)


T = TypeVar("T", bound=Body)


@dataclass(frozen=True)
class Claimant:
    """Who wants to run a neuron.

    Attributes:
        netuid: Subnet.
        uid: Uid of the hotkey now.
        hotkey: Its address.
        role: The neuron's role.
        holder: Names the neuron's folder on this machine; 32 hex digits.
        machine: Names the machine for people; 8 hex digits.
    """

    netuid: int
    uid: int
    hotkey: str
    role: str
    holder: str
    machine: str

    def key(self, kind: Kind) -> str:
        """The key of its lease, or of its heartbeat."""
        return lease_key(kind, self.role, self.holder)


@dataclass
class Entry:
    """What a listing shows of one holder.

    Attributes:
        holder: The holder.
        found: Its lease and its heartbeat, or one of them.
    """

    holder: str
    found: dict[Kind, ObjectInfo] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """The last sign of life."""
        return max(info.last_modified for info in self.found.values())

    @property
    def since(self) -> int:
        """When its lease was written; of one that has only a heartbeat, the time of that."""
        return self.found.get(Kind.LEASE, self.found[max(self.found)]).last_modified

    @property
    def order(self) -> tuple[int, str]:
        """Where it stands among the holders."""
        return self.since, self.holder


@dataclass(frozen=True)
class Sight:
    """One look at the bucket.

    Attributes:
        now: The store's time.
        own: The own objects.
        rivals: Others that live.
        dead: Others that do not.
    """

    now: int
    own: Entry
    rivals: tuple[Entry, ...]
    dead: tuple[Entry, ...]


class Holders:
    """The holders of one neuron.

    Args:
        store: The neuron's bucket.
        claimant: Who looks.
        expires_after: A holder that was silent for more seconds counts as dead.
    """

    def __init__(self, store: ObjectStore, claimant: Claimant, expires_after: int) -> None:
        self._store = store
        self._claimant = claimant
        self._expires_after = expires_after

    def look(self) -> Sight:
        """List the leases of this role; now is the time of the own heartbeat, which was written before.

        Raises:
            TransientError: The store failed, or does not show the own heartbeat.
        """
        entries: dict[str, Entry] = {}
        for info in self._store.list(Kind.LEASE):
            key = parse_current_key(info.key)
            if key is not None and key.role == self._claimant.role and key.holder is not None:
                entries.setdefault(key.holder, Entry(key.holder)).found[key.kind] = info
        own = entries.pop(self._claimant.holder, None)
        if own is None or Kind.HEARTBEAT not in own.found:
            raise TransientError(
                Reason.OBJECT_MISSING,
                f"{self._store.name}/{self._claimant.key(Kind.HEARTBEAT)}: not listed after it was written; retry",
            )
        now = own.found[Kind.HEARTBEAT].last_modified
        others: dict[bool, list[Entry]] = {True: [], False: []}
        for entry in entries.values():
            if self._is_of_this_neuron(entry):
                others[now - entry.seen <= self._expires_after].append(entry)
        return Sight(now, own, tuple(sorted(others[True], key=lambda each: each.order)), tuple(others[False]))

    def _is_of_this_neuron(self, entry: Entry) -> bool:
        """Whether an entry is this hotkey's on this subnet; what cannot be read says nothing."""
        for kind, body_type in ((Kind.LEASE, Lease), (Kind.HEARTBEAT, Heartbeat)):
            if kind in entry.found and (body := self.read(entry.found[kind], body_type)) is not None:
                return (body.netuid, body.hotkey) == (self._claimant.netuid, self._claimant.hotkey)
        return False

    def read(self, info: ObjectInfo, body_type: type[T]) -> T | None:
        """What an object says; None if it is gone, or not legal."""
        try:
            return unseal(self._store.get(info.key, max_bytes=body_type.max_bytes), body_type).body
        except PermanentError as error:
            if isinstance(error, RejectedError) or error.reason in (Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE):
                return None
            raise

    def bury(self, dead: Iterable[Entry]) -> None:
        """Delete what dead holders left, unless one has just come back to life; the next renewal tries again."""
        for entry in dead:
            try:
                if all(self._store.head(info.key) == info for info in entry.found.values()):
                    self._store.delete(info.key for info in entry.found.values())
            except TemplarError as error:
                log.warning("the lease of dead holder %s stays for now: %s", entry.holder[:12], error)

    def describe(self, rival: Entry, now: int) -> str:
        """Who runs the neuron, for people."""
        lease = self.read(rival.found[Kind.LEASE], Lease) if Kind.LEASE in rival.found else None
        since = datetime.fromtimestamp(rival.since, UTC)
        return (
            f"holder {rival.holder[:12]} on machine {lease.machine if lease else 'unknown'} runs this neuron since "
            f"{since:%Y-%m-%d %H:%M:%S} UTC, last seen {now - rival.seen} s ago"
        )


NO_NETWORK = "0" * 64
"""The genesis field of a lease: it is taken before the network's birth is known."""


LOOKS, PAUSE_SECONDS = 5, 2.0
"""How often, and how far apart, a newcomer looks for whether one that came after it has given way."""


@dataclass(frozen=True)
class Terms:
    """How long things take, in seconds.

    Attributes:
        expires_after: A holder that was silent for longer counts as dead.
        lapses_after: A holder that was silent for longer no longer counts on being alive.
        renewed_after: Age at which a heartbeat is renewed when the neuron next acts.
    """

    expires_after: int
    lapses_after: int
    renewed_after: int

    @classmethod
    def of(cls, rules: Windows) -> Self:
        """Ten minutes, or three windows if that is longer: a neuron acts at least once in a window."""
        expires = max(600, int(3 * rules.seconds))
        return cls(expires, expires * 3 // 4, expires // 6)


class NeuronLease:
    """The lease of one neuron, as one process sees it. Safe under threads.

    Args:
        store: The own bucket.
        clock: Says when to act; it decides nothing.
        signer: The hotkey.
        claimant: Who wants the lease.
        terms: How long things take.
    """

    def __init__(self, store: ObjectStore, clock: Clock, signer: Signer, claimant: Claimant, terms: Terms) -> None:
        self._store = store
        self._clock = clock
        self._signer = signer
        self._claimant = claimant
        self._terms = terms
        self._lock = threading.Lock()
        self._holders = Holders(store, claimant, terms.expires_after)
        self._keys = {kind: claimant.key(kind) for kind in (Kind.LEASE, Kind.HEARTBEAT)}
        self._confirmed = 0
        self._acted = 0.0
        self._lost: PermanentError | None = None

    def enter(self) -> None:
        """Take the lease. Whoever held it last, from this very folder, has it again at once.

        On failure nothing is held, and nothing is left in the bucket if it can be helped.

        Raises:
            PermanentError: `already_running`; somebody else has it, and the message says who, and since when.
            TransientError: The store failed.
        """
        with self._lock:
            self._lost = None
            try:
                self._confirm(self._enter())
            except BaseException:
                self._give_up()
                raise

    def check(self) -> None:
        """As `hold`, and notice at once if somebody took the neuron over.

        A store that fails says nothing of that: nothing is raised then, and `hold` still guards what is published.

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
                log.warning("the lease of %s cannot be looked at now: %s", self._claimant.role, error)

    def hold(self) -> None:
        """Make sure that this process may act for the neuron; renews the heartbeat when that is due.

        A store that fails in passing stops nothing while nobody can have taken this process for dead.

        Raises:
            PermanentError: `lease_lost`; somebody else runs the neuron now. Nothing may be published any more.
            TransientError: The store fails for so long that somebody may have; a later call goes on.
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
        """Give the lease back, so that another machine can take it at once. If that fails it expires."""
        with self._lock:
            self._give_up()
            self._lost = self._loss("it was given back")

    def _enter(self) -> Sight:
        self._confirmed = self._unbroken_until()
        self._beat()  # first: a heartbeat that an earlier lease of this folder left says nothing of this one
        if self._store.head(self._keys[Kind.LEASE]) is None:
            body = Lease(**self._author(), machine=self._claimant.machine)
            self._store.put_if_absent(self._keys[Kind.LEASE], seal(body, self._signer).encode())
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

    def _holds(self, sight: Sight) -> bool:
        if Kind.LEASE not in sight.own.found:
            return False
        return not sight.rivals or self._is_unbroken(sight.now)

    def _is_unbroken(self, now: int) -> bool:
        return self._confirmed > 0 and now - self._confirmed <= self._terms.lapses_after

    def _confirm(self, sight: Sight) -> None:
        self._confirmed, self._acted = sight.now, self._clock.now()
        self._holders.bury(sight.dead)

    def _unbroken_until(self) -> int:
        """Time of the heartbeat that an earlier process of this folder left while it held the lease, or 0."""
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

    def _give_up(self) -> None:
        self._confirmed = 0
        try:
            self._store.delete(self._keys.values())
        except TemplarError as error:
            log.warning("the lease of %s stays until it expires: %s", self._claimant.role, error)

    def _lose(self, what: str) -> NoReturn:
        self._give_up()
        self._lost = self._loss(what)
        raise self._lost

    def _loss(self, what: str) -> PermanentError:
        return PermanentError(
            Reason.LEASE_LOST,
            f"lease of {self._claimant.role} {self._claimant.hotkey}: {what}; nothing more is published from here. "
            "Stop the other process first if this one is to run the neuron, then start it again",
        )

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise PermanentError(self._lost.reason, self._lost.message)

    def _refusal(self, sight: Sight) -> str:
        what = f"hotkey {self._claimant.hotkey}, {self._claimant.role}, {self._store.name}: "
        if not sight.rivals:
            return f"{what}the own lease was deleted while it was taken; start again"
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
