"""Publishing objects that never change again (docs/protocol.md 4).

On failure nothing is half-written: a store shows an object whole or not at all. A repeated call compares the stored
object with its own and does nothing if they are equal.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from templar.chain.base import Clock
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.signed import Body, seal, unseal
from templar.store.base import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)


COMPARE_BYTES = 1 << 20
"""Objects up to this size are read back and compared byte by byte; of larger ones the length is compared."""


@dataclass(frozen=True)
class PublishReceipt:
    """An object that is in the store now."""

    key: str
    size: int  # bytes
    last_modified: int  # the server's time of it, in whole seconds


@dataclass(frozen=True)
class TimedReport:
    """Result of a publication that had a deadline."""

    receipts: tuple[PublishReceipt, ...]  # empty if it was too late
    reason: Reason | None = None  # `no_time_left` or `self_check_failed`; None if everything is stored
    detail: str = ""  # the reason in words


def publish_in_time(publish: Callable[[], tuple[PublishReceipt, ...]]) -> TimedReport:
    """Turn a missed deadline or a failed check of the own object into a report: it costs the window's pay alone.

    Raises:
        PermanentError: Any reason but `no_time_left` and `self_check_failed`.
        TransientError: The store failed.
    """
    try:
        return TimedReport(publish())
    except PermanentError as error:
        if error.reason not in (Reason.NO_TIME_LEFT, Reason.SELF_CHECK_FAILED):
            raise
        log.warning("%s", error)
        return TimedReport((), error.reason, str(error))


class Times(TypedDict, total=False):
    """When an object must be stored."""

    clock: Clock | None
    """Says whether the deadline has passed."""
    deadline: float | None
    """From this instant on nothing is written. The deadline of a stamp of second `s` or earlier is `s + 1`."""
    first: int
    """The same bytes are put again if they are stored with an earlier stamp, in whole seconds."""


def publish_bytes(store: ObjectStore, key: str, data: bytes, **times: Unpack[Times]) -> PublishReceipt:
    """Store an object once.

    Raises:
        PermanentError: `object_differs` (another object is stored there; nothing is overwritten), `no_time_left`.
        TransientError: The store could not be reached, or did not show the object that was just written.
    """

    def is_ours(info: ObjectInfo) -> bool:
        is_compared = info.size <= COMPARE_BYTES
        return info.size == len(data) and (not is_compared or store.get(key, max_bytes=info.size) == data)

    return _publish(
        store, key, lambda: store.put_if_absent(key, data), is_ours, lambda: store.put(key, data), times=times
    )


def publish_file(store: ObjectStore, key: str, path: Path, **times: Unpack[Times]) -> PublishReceipt:
    """Store a file once; arguments and errors as in `publish_bytes`.

    A large file is uploaded in parts and appears whole at the end; the store verifies what arrives. If such an object
    is stored already, only its length is compared: its readers check the hash.
    """
    size = path.stat().st_size
    if size <= COMPARE_BYTES:
        return publish_bytes(store, key, path.read_bytes(), **times)

    def put() -> bool:
        store.put_file(key, path)
        return True

    return _publish(store, key, put, lambda info: info.size == size, put, times=times)


def publish_body(store: ObjectStore, key: str, body: Body, signer: Signer, **times: Unpack[Times]) -> PublishReceipt:
    """Sign a body and store it once; arguments and errors as in `publish_bytes`.

    Signatures differ from one signing to the next, so a stored object is compared by its body.
    """

    def is_ours(info: ObjectInfo) -> bool:
        try:
            is_short = info.size <= body.max_bytes
            return is_short and unseal(store.get(key, max_bytes=body.max_bytes), type(body)).body == body
        except RejectedError:
            return False

    return _publish(
        store,
        key,
        lambda: store.put_if_absent(key, seal(body, signer).encode()),
        is_ours,
        lambda: store.put(key, store.get(key, max_bytes=body.max_bytes)),  # not signed again: the same bytes
        times=times,
    )


def _publish(
    store: ObjectStore,
    key: str,
    put: Callable[[], bool],
    is_ours: Callable[[ObjectInfo], bool],
    again: Callable[[], object],
    *,
    times: Times,
) -> PublishReceipt:
    # 1. Look; write if nothing is there, and look again.
    info, is_new = store.head(key), False
    if info is None:
        _check_deadline(key, times)
        is_new = put()
        info = _there(store, key)
    # 2. The stored object must be ours, also if another process of this hotkey wrote it.
    if not is_ours(info):
        raise PermanentError(
            Reason.OBJECT_DIFFERS,
            f"{store.name}/{key}: another object is stored ({info.size} bytes); nothing was overwritten: does another "
            "process publish under this hotkey?",
        )
    # 3. The same bytes get another stamp if theirs is too early.
    early = times.get("first", 0) - info.last_modified
    if early > 0 and not is_new:
        _check_deadline(key, times)
        log.warning("%s: stored %d s too early to count, put again", key, early)
        again()
        info = _there(store, key)
    return PublishReceipt(key, info.size, info.last_modified)


def _check_deadline(key: str, times: Times) -> None:
    clock, deadline = times.get("clock"), times.get("deadline")
    if clock is not None and deadline is not None and (late := clock.now() - deadline) >= 0:
        raise PermanentError(Reason.NO_TIME_LEFT, f"{key}: not written, its deadline passed {late:.1f} s ago")


def _there(store: ObjectStore, key: str) -> ObjectInfo:
    """Look at an object that was just written."""
    info = store.head(key)
    if info is None:
        raise TransientError(Reason.OBJECT_MISSING, f"{store.name}/{key}: not there after it was written; retry")
    return info
