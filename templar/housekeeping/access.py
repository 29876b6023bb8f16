"""Checks of what each key to a bucket may do, by trying every right with probe objects.

A read key is public, so it must not write; it must be able to list, because otherwise a missing object answers 403.
Probes have keys that no object of the protocol can have, and are always removed.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.housekeeping.bucket_cleanup import PROBE_PREFIX
from templar.store.base import UploadStore

PROBE = b"This object was written to check access rights. It may be deleted.\n"
WORDS = {True: "yes", False: "no", None: "cannot be told"}


class Right(StrEnum):
    """A right of a key, in the order in which the rights are tried."""

    PUT = "put"
    LIST = "list"
    HEAD = "head"
    GET = "get"
    PARTS = "multipart"
    STAMPS = "stamps"  # not a right but the bucket's: whether times are those of the bytes, as far as readers can tell
    DELETE = "delete"


_READING = (Right.LIST, Right.HEAD, Right.GET, Right.STAMPS)


@dataclass(frozen=True)
class Credential:
    """One key to one bucket."""

    name: str  # such as `own read key`
    store: UploadStore  # the bucket, seen with this key
    writes: bool  # whether the key should be able to write
    enforced: bool = True  # whether the store checks keys at all; a directory does not
    folder: str = ""  # prefix of an object to read if no probe can be written


@dataclass(frozen=True)
class AccessRow:
    """One right of one key."""

    bucket: str
    key: str  # name of the key
    writes: bool  # whether the key is for writing
    right: Right
    wanted: bool  # whether the key should have the right
    has: bool | None  # whether it has; None if that cannot be told
    detail: str = ""  # the store's answer if it refused

    @property
    def problem(self) -> Reason | None:
        """The problem with this right; None if there is none, or if it cannot be told."""
        if self.has is None or self.has == self.wanted:
            return None
        if self.right is Right.STAMPS:
            return Reason.TIME_UNPROVEN if self.detail == Reason.TIME_UNPROVEN else None
        if not self.wanted:
            return Reason.READ_KEY_WRITES
        return Reason.WRITE_KEY_REFUSED if self.writes else Reason.BUCKET_UNREADABLE

    @property
    def cells(self) -> dict[str, str]:
        """The row of a table that people read."""
        return {
            "bucket": self.bucket,
            "key": self.key,
            "right": self.right.value,
            "should": WORDS[self.wanted],
            "does": WORDS[self.has],
            "answer": self.detail,
            "problem": self.problem.value if self.problem else "",
        }


@dataclass(frozen=True)
class AccessReport:
    """Result of a check."""

    rows: tuple[AccessRow, ...] = ()  # one per right of each key
    left: tuple[str, ...] = ()  # probes that could not be removed: bucket and key

    @property
    def problems(self) -> tuple[tuple[Reason, str], ...]:
        """Reason and explanation of every problem."""
        wrong = [
            (row.problem, f"bucket {row.bucket}, {row.key}: {row.right}: {row.detail or 'is allowed'}")
            for row in self.rows
            if row.problem is not None
        ]
        return (*wrong, *((Reason.OBJECTS_LEFT, f"{each}: remove it by hand") for each in self.left))

    @property
    def unknown(self) -> tuple[str, ...]:
        """The rights that cannot be told, and why."""
        return tuple(f"{row.key}: {row.right} ({row.detail})" for row in self.rows if row.has is None)

    @property
    def summary(self) -> str:
        """One line: the problems or that there are none, and the rights that cannot be told."""
        keys = len({(row.bucket, row.key) for row in self.rows})
        text = "; ".join(f"[{reason}] {text}" for reason, text in self.problems) or f"{keys} keys are as they should be"
        return text + (f"; cannot be told: {', '.join(self.unknown)}" if self.unknown else "")


def check_access(buckets: Sequence[Sequence[Credential]]) -> AccessReport:
    """Try every key of every bucket; `buckets` holds the keys of each bucket.

    TransientError if a store failed: probes were removed where possible, and a temporary clean-up removes the others.
    """
    rows, left = list[AccessRow](), list[str]()
    for credentials in buckets:
        check = _Check(credentials)
        try:
            rows += check.rows()
        finally:
            left += check.remove()
    return AccessReport(tuple(rows), tuple(left))


@dataclass
class _Check:
    """The check of one bucket: write keys first and last, so that read keys have a probe to read and to delete."""

    credentials: Sequence[Credential]
    key: str = field(default_factory=lambda: f"{PROBE_PREFIX}{secrets.token_hex(8)}")
    written: set[str] = field(default_factory=set)

    def rows(self) -> Iterator[AccessRow]:
        # 1. Write keys write the probes, and read them.
        writers = [each for each in self.credentials if each.writes]
        for writer in writers:
            yield from self._try(writer, [right for right in Right if right is not Right.DELETE])
        # 2. Read keys try everything, also what they must not do.
        for reader in self.credentials:
            if not reader.writes:
                yield from self._try(reader, list(Right))
        # 3. Write keys delete the probes.
        for writer in writers:
            yield from self._try(writer, [Right.DELETE])

    def remove(self) -> list[str]:
        """Delete every probe that may have been written, trying each key; return the probes that remain."""
        for credential in self.credentials:
            with suppress(TemplarError):
                credential.store.delete(sorted(self.written))
        name = self.credentials[0].store.name
        return [f"{name}/{key}" for key in sorted(self.written) if not self._is_gone(key)]

    def _try(self, credential: Credential, rights: Sequence[Right]) -> Iterator[AccessRow]:
        for right in rights:
            wanted = credential.writes or right in _READING
            if wanted or credential.enforced:
                has, detail = _outcome(partial(self._attempt, right, credential), wanted=wanted)
            else:
                has, detail = None, "a directory store looks at no keys"
            yield AccessRow(credential.store.name, credential.name, credential.writes, right, wanted, has, detail)

    def _attempt(self, right: Right, credential: Credential) -> str:
        """Use a right; the reason for which its success proves nothing, or an empty string."""
        store, writes = credential.store, credential.writes
        match right:
            case Right.PUT:
                self._write(self.key if writes else f"{self.key}-denied", partial(self._publish, credential))
            case Right.PARTS:
                key = f"{self.key}-{'parts' if writes else 'deniedparts'}"
                self._write(key, lambda key: store.put_in_parts(key, PROBE))
            case Right.LIST:
                next(iter(store.list()), None)
            case Right.HEAD:
                store.head(f"{self.key}-absent")
            case Right.GET:
                if (readable := self._existing(credential)) is None:
                    return "there is no object to read"
                store.get_range(readable, 0, 1)
            case Right.STAMPS:
                return self._look_at_stamps(credential)
            case Right.DELETE:
                return self._delete(credential)
        return ""

    def _write(self, key: str, write: Callable[[str], None]) -> None:
        self.written.add(key)  # before the request: a lost answer may have been a success
        try:
            write(key)
        except PermanentError:
            self.written.discard(key)
            raise

    def _publish(self, credential: Credential, key: str) -> None:
        """Store an object, with a write key as publications do."""
        if not credential.writes:
            credential.store.put(key, PROBE)
        elif not credential.store.put_if_absent(key, PROBE):
            raise PermanentError(Reason.STORE_REFUSED, f"{key}: the server says that a new object is there already")

    def _look_at_stamps(self, credential: Credential) -> str:
        """Refuse a bucket whose objects readers refuse; say if they cannot tell an object that came in parts."""
        key, parts = self._existing(credential), f"{self.key}-parts"
        info = None if key is None else credential.store.head(key)
        if info is None:
            return "there is no object to look at"
        if info.is_time_unproven and key == self.key:
            raise PermanentError(Reason.TIME_UNPROVEN, f"{key}: the bucket keeps versions: switch that off")
        if credential.enforced and parts in self.written:
            shown = credential.store.head(parts)
            if shown is None or not shown.is_time_unproven:
                return "the server does not show which objects came in parts"
        return ""

    def _existing(self, credential: Credential) -> str | None:
        """The key of the probe; of any other object if nobody could write one."""
        if self.key in self.written:
            return self.key
        return next((info.key for info in credential.store.list(credential.folder) if info.size), None)

    def _delete(self, credential: Credential) -> str:
        report = credential.store.delete([self.key])
        if report.failed:
            raise PermanentError(Reason.STORE_REFUSED, f"{self.key}: {report.failed[0][1]}")
        if credential.writes:
            return ""
        if self.key not in self.written:
            return "there is no object to delete"
        # A server may say yes and do nothing.
        return "" if self._is_gone(self.key) else "the object is still there"

    def _is_gone(self, key: str) -> bool:
        for credential in self.credentials:
            with suppress(TemplarError):
                return credential.store.head(key) is None
        return False


def _outcome(attempt: Callable[[], str], *, wanted: bool) -> tuple[bool | None, str]:
    """Whether an attempt succeeded (None if that cannot be told), and the store's answer if it did not.

    Only a refusal proves that a key lacks a right that it must not have: a missing bucket refuses every key.
    TransientError if the store does not answer, or is busy with an attempt that should be allowed.
    """
    try:
        inconclusive = attempt()
    except PermanentError as error:
        if wanted or error.reason is Reason.ACCESS_DENIED:
            return False, str(error.reason)
        return None, f"{error.reason}, which is not a refusal"
    except TransientError as error:
        if wanted or error.reason is not Reason.STORE_BUSY:
            raise
        return None, f"{error.reason}, which is not a refusal"  # some servers answer a forbidden write like this
    return (None, inconclusive) if inconclusive else (True, "")
