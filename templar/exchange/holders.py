"""Who holds a neuron's lease, or wants it, as the neuron's bucket shows it."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TypeVar

from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.keys import Kind, lease_key, parse_current_key
from templar.exchange.objects import Heartbeat, Lease
from templar.exchange.sealing import Body, unseal
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
