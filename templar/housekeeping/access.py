"""What each key to a bucket can do, against what it should: found out by trying, with objects of its own.

A read key is public, so it must not write, and it must be able to list: else a missing object answers 403. The probes
have keys that no object of the protocol can have, and are removed whatever happens.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.housekeeping.bucket_cleanup import PROBE_PREFIX
from templar.store.base import ObjectStore, Uploads

PROBE = b"This object was written to see whether it can be. It may be deleted.\n"


WORDS = {True: "yes", False: "no", None: "cannot be told"}


class Right(StrEnum):
    """Something that a key can do, in the order in which it is tried."""

    PUT = "put"
    LIST = "list"
    HEAD = "head"
    GET = "get"
    PARTS = "multipart"
    DELETE = "delete"


_READING = (Right.LIST, Right.HEAD, Right.GET)


@dataclass(frozen=True)
class Credential:
    """One key to one bucket.

    Attributes:
        name: What it is, such as `own read key`.
        store: The bucket, seen with it.
        uploads: The bucket's uploads, seen with it.
        writes: Whether it should be able to write.
        enforced: Whether the store looks at keys at all; a directory does not.
        folder: Where an object to read lies if nothing can be written.
    """

    name: str
    store: ObjectStore
    uploads: Uploads
    writes: bool
    enforced: bool = True
    folder: str = ""


@dataclass(frozen=True)
class AccessRow:
    """One right of one key.

    Attributes:
        bucket: The bucket.
        key: Name of the key.
        writes: Whether the key is for writing.
        right: The right.
        wanted: Whether the key should have it.
        has: Whether it has; None if that cannot be told.
        detail: The store's answer, if it did not let the key.
    """

    bucket: str
    key: str
    writes: bool
    right: Right
    wanted: bool
    has: bool | None
    detail: str = ""

    @property
    def problem(self) -> Reason | None:
        """What is wrong; None if nothing is, or if it cannot be told."""
        if self.has is None or self.has == self.wanted:
            return None
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
    """What a check found.

    Attributes:
        rows: One per right of each key.
        left: Probes that could not be removed: bucket and key.
    """

    rows: tuple[AccessRow, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[tuple[Reason, str], ...]:
        """Reason and explanation of everything that is wrong."""
        wrong = [
            (row.problem, f"bucket {row.bucket}, {row.key}: {row.right}: {row.detail or 'is allowed'}")
            for row in self.rows
            if row.problem is not None
        ]
        return (*wrong, *((Reason.OBJECTS_LEFT, f"{each}: remove it by hand") for each in self.left))

    @property
    def untold(self) -> tuple[str, ...]:
        """What cannot be told, and why."""
        return tuple(f"{row.key}: {row.right} ({row.detail})" for row in self.rows if row.has is None)

    @property
    def summary(self) -> str:
        """One line: what is wrong, what cannot be told, or that all is well."""
        keys = len({(row.bucket, row.key) for row in self.rows})
        told = "; ".join(f"[{reason}] {text}" for reason, text in self.problems) or f"{keys} keys are as they should be"
        return told + (f"; cannot be told: {', '.join(self.untold)}" if self.untold else "")


def check_access(buckets: Sequence[Sequence[Credential]]) -> AccessReport:
    """Try every key of every bucket.

    Args:
        buckets: For each bucket, the keys to it.

    Raises:
        TransientError: A store failed. What was written was removed, if that could be; else a temporary clean-up does.
    """
    rows: list[AccessRow] = []
    left: list[str] = []
    for credentials in buckets:
        check = _Check(credentials)
        try:
            rows += check.rows()
        finally:
            left += check.remove()
    return AccessReport(tuple(rows), tuple(left))


@dataclass
class _Check:
    """The check of one bucket: writers first and last, so that readers have something to read and to delete."""

    credentials: Sequence[Credential]
    key: str = field(default_factory=lambda: f"{PROBE_PREFIX}{secrets.token_hex(8)}")
    written: set[str] = field(default_factory=set)

    def rows(self) -> Iterator[AccessRow]:
        writers = [each for each in self.credentials if each.writes]
        for writer in writers:
            yield from self._try(writer, [right for right in Right if right is not Right.DELETE])
        for reader in self.credentials:
            if not reader.writes:
                yield from self._try(reader, list(Right))
        for writer in writers:
            yield from self._try(writer, [Right.DELETE])

    def remove(self) -> list[str]:
        """Delete what may have been written, with whichever key can; what is still there."""
        for credential in self.credentials:
            with suppress(TemplarError):
                credential.store.delete(sorted(self.written))
        name = self.credentials[0].store.name
        return [f"{name}/{key}" for key in sorted(self.written) if not self._is_seen_by_nobody(key)]

    def _try(self, credential: Credential, rights: Sequence[Right]) -> Iterator[AccessRow]:
        attempts: dict[Right, Callable[[Credential], str]] = {
            Right.PUT: self._put,
            Right.LIST: self._list,
            Right.HEAD: self._head,
            Right.GET: self._get,
            Right.PARTS: self._put_in_parts,
            Right.DELETE: self._delete,
        }
        for right in rights:
            wanted = credential.writes or right in _READING
            if wanted or credential.enforced:
                has, detail = _outcome(lambda: attempts[right](credential), wanted=wanted)  # noqa: B023 - called here
            else:
                has, detail = None, "a directory store looks at no keys"
            yield AccessRow(credential.store.name, credential.name, credential.writes, right, wanted, has, detail)

    # Each attempt returns why its success says nothing; usually that is empty.

    def _put(self, credential: Credential) -> str:
        key = self.key if credential.writes else f"{self.key}-denied"
        return self._write(key, lambda: credential.store.put(key, PROBE))

    def _put_in_parts(self, credential: Credential) -> str:
        key = f"{self.key}-{'parts' if credential.writes else 'deniedparts'}"
        return self._write(key, lambda: credential.uploads.store_in_parts(key, PROBE))

    def _write(self, key: str, write: Callable[[], None]) -> str:
        self.written.add(key)  # before: an answer that is lost may be of a success
        try:
            write()
        except PermanentError:
            self.written.discard(key)
            raise
        return ""

    def _list(self, credential: Credential) -> str:
        next(iter(credential.store.list()), None)
        return ""

    def _head(self, credential: Credential) -> str:
        credential.store.head(f"{self.key}-absent")
        return ""

    def _get(self, credential: Credential) -> str:
        """Read a byte of the probe; of any other object if nobody could write one."""
        store, key = credential.store, self.key if self.key in self.written else None
        if key is None:
            key = next((info.key for info in store.list(credential.folder) if info.size), None)
        if key is None:
            return "there is no object to read"
        store.get_range(key, 0, 1)
        return ""

    def _delete(self, credential: Credential) -> str:
        report = credential.store.delete([self.key])
        if report.failed:
            raise PermanentError(Reason.STORE_REFUSED, f"{self.key}: {report.failed[0][1]}")
        if credential.writes:
            return ""
        if self.key not in self.written:
            return "there is no object to delete"
        # A server may say yes and do nothing.
        return "" if self._is_seen_by_nobody(self.key) else "the object is still there"

    def _is_seen_by_nobody(self, key: str) -> bool:
        for credential in self.credentials:
            with suppress(TemplarError):
                return credential.store.head(key) is None
        return False


def _outcome(attempt: Callable[[], str], *, wanted: bool) -> tuple[bool | None, str]:
    """Whether an attempt succeeded, and what the store said if it did not.

    That a key lacks a right that it must not have, only a refusal proves: a missing bucket refuses every key.

    Raises:
        StoppedError: The host asked the process to stop.
        TransientError: The store does not answer; or it is busy with what should be allowed.
    """
    try:
        untold = attempt()
    except PermanentError as error:
        if wanted or error.reason is Reason.ACCESS_DENIED:
            return False, str(error.reason)
        return None, f"{error.reason}, which is not a refusal"
    except TransientError as error:
        if wanted or error.reason is not Reason.STORE_BUSY:
            raise
        return None, f"{error.reason}, which is not a refusal"  # some servers answer a forbidden write so
    return (None, untold) if untold else (True, "")
