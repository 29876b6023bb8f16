"""Writing objects that are never changed again (PROTOCOL 10).

On failure nothing is half-written: the store shows an object whole or not at all, and a repeated call finds what is
there, compares, and does nothing if it is the same.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from templar.chain.base import Clock
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.signed import Body, seal, unseal
from templar.store.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)


COMPARE_BYTES = 1 << 20
"""Objects up to this size are read back and compared byte by byte; of larger ones the length is compared."""


class PublishOutcome(Enum):
    """What a publication did."""

    STORED = "stored"
    ALREADY_THERE = "already_there"


@dataclass(frozen=True)
class PublishReceipt:
    """An object that is in the store now.

    Attributes:
        key: Its key.
        size: Its length in bytes.
        last_modified: The server's time of it, in whole seconds.
        outcome: Whether this call stored it.
    """

    key: str
    size: int
    last_modified: int
    outcome: PublishOutcome


@dataclass(frozen=True)
class TimedReport:
    """What came of a publication that had a deadline.

    Attributes:
        receipts: What is in the store now; nothing if it was too late.
        reason: `no_time_left`, or None if everything is there.
        detail: The same for people.
    """

    receipts: tuple[PublishReceipt, ...]
    reason: Reason | None = None
    detail: str = ""

    @property
    def in_time(self) -> bool:
        """Whether everything is there."""
        return self.reason is None


def publish_in_time(publish: Callable[[], tuple[PublishReceipt, ...]]) -> TimedReport:
    """Turn a missed deadline into a report: being late costs a window, it is no failure.

    Raises:
        PermanentError: Anything else than `no_time_left`.
        TransientError: The store failed.
    """
    try:
        return TimedReport(publish())
    except PermanentError as error:
        if error.reason is not Reason.NO_TIME_LEFT:
            raise
        log.warning("%s", error)
        return TimedReport((), error.reason, str(error))


def publish_bytes(
    store: ObjectStore, key: str, data: bytes, *, clock: Clock | None = None, deadline: float | None = None
) -> PublishReceipt:
    """Store an object once.

    Args:
        store: The own bucket.
        key: Where.
        data: What; the same call with the same bytes does nothing.
        clock: Says whether the deadline has passed.
        deadline: From this instant on nothing is written: an object that is to be stamped second `s` at the latest has
            the deadline `s + 1`.

    Raises:
        PermanentError: `object_differs` (something else is stored there: nothing is overwritten), `no_time_left`.
        TransientError: The store could not be reached, or did not show what was just written.
    """

    def is_ours(info: ObjectInfo) -> bool:
        return info.size == len(data) and _same_bytes(store, info, data)

    return _publish(store, key, lambda: store.put_if_absent(key, data), is_ours, clock=clock, deadline=deadline)


def publish_file(
    store: ObjectStore, key: str, path: Path, *, clock: Clock | None = None, deadline: float | None = None
) -> PublishReceipt:
    """Store a file once; the same promises as `publish_bytes`.

    Large files go up in parts and appear whole at the end. The store makes sure that what arrives is what was sent; of
    what is there already only the length is compared: its readers check the hash.
    """
    size = path.stat().st_size
    if size <= COMPARE_BYTES:
        return publish_bytes(store, key, path.read_bytes(), clock=clock, deadline=deadline)

    def put() -> bool:
        store.put_file(key, path)
        return True

    return _publish(store, key, put, lambda info: info.size == size, clock=clock, deadline=deadline)


def publish_body(
    store: ObjectStore,
    key: str,
    body: Body,
    signer: Signer,
    *,
    clock: Clock | None = None,
    deadline: float | None = None,
) -> PublishReceipt:
    """Sign a body and store it once.

    Signatures differ from one signing to the next, so what is stored is compared by its body.
    The promises are those of `publish_bytes`.
    """
    return _publish(
        store,
        key,
        lambda: store.put_if_absent(key, seal(body, signer).encode()),
        lambda info: info.size <= body.max_bytes and _same_body(store, info, body),
        clock=clock,
        deadline=deadline,
    )


def _publish(
    store: ObjectStore,
    key: str,
    put: Callable[[], bool],
    is_ours: Callable[[ObjectInfo], bool],
    *,
    clock: Clock | None,
    deadline: float | None,
) -> PublishReceipt:
    """Look, write if nothing is there, and look again: what is there in the end must be ours, whoever wrote it."""
    outcome, info = PublishOutcome.ALREADY_THERE, store.head(key)
    if info is None:
        _check_deadline(key, clock, deadline)
        if put():
            outcome = PublishOutcome.STORED
        info = store.head(key)
    if info is None:
        raise TransientError(Reason.OBJECT_MISSING, f"{store.name}/{key}: not there after it was written; retry")
    if not is_ours(info):
        raise PermanentError(
            Reason.OBJECT_DIFFERS,
            f"{store.name}/{key}: something else is stored ({info.size} bytes); nothing was overwritten: does another "
            "process publish under this hotkey?",
        )
    return PublishReceipt(key, info.size, info.last_modified, outcome)


def _same_body(store: ObjectStore, info: ObjectInfo, body: Body) -> bool:
    try:
        return unseal(store.get(info.key, max_bytes=body.max_bytes), type(body)).body == body
    except RejectedError:
        return False


def _same_bytes(store: ObjectStore, info: ObjectInfo, data: bytes) -> bool:
    return info.size > COMPARE_BYTES or store.get(info.key, max_bytes=info.size) == data


def _check_deadline(key: str, clock: Clock | None, deadline: float | None) -> None:
    if clock is not None and deadline is not None and clock.now() >= deadline:
        late = clock.now() - deadline
        raise PermanentError(Reason.NO_TIME_LEFT, f"{key}: not written, its deadline passed {late:.1f} s ago")
