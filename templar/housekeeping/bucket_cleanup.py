"""What was meant to be temporary and was left behind by somebody who died: unfinished uploads, probes, checkpoints.

An unfinished checkpoint must be old twice, in windows and in hours, before it is taken for abandoned.

Clean-up of a bucket: which objects an operator's criterion matches, which of them stay all the same, and deleting.

The plan is a pure function of a listing, object by object; a listing of any length is never held in memory. Whatever is
selected, nothing that a live network needs is deleted: objects of this protocol version go only if their retention is
over, and by a prefix also those of windows that are far from coming, which no live network has. The one exception is
`wipe`, which takes everything.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from templar.agreement.retention import Retention
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.object_keys import Kind, parse_current_key, parse_key, parse_legacy_key
from templar.interrupt import check_stop
from templar.store.base import ObjectInfo, ObjectStore, Upload, Uploads

CLOCK_MARGIN_SECONDS = 900
"""An age in hours must be exceeded by this much: no clock that is wrong by minutes makes an object old."""


BATCH = 1000
"""Keys deleted at a time; the most that a store deletes in one request."""


LISTED_FAILURES = 100
"""Failures that a report names; all are counted."""


AGGREGATES = frozenset({Kind.AGGREGATE.value, "gathers"})


OTHER = "other"
"""The kind of an object whose key is nobody's."""


class Mode(StrEnum):
    """What a criterion goes by."""

    RETENTION = "retention"
    VERSION = "version"
    AGGREGATES = "aggregates"
    OLDER_THAN = "older_than"
    PREFIX = "prefix"
    SUFFIX = "suffix"
    WIPE = "wipe"


_NEEDS = {
    Mode.VERSION: "version",
    Mode.AGGREGATES: "version",
    Mode.OLDER_THAN: "hours",
    Mode.PREFIX: "prefix",
    Mode.SUFFIX: "suffix",
}


@dataclass(frozen=True)
class Criterion:
    """Which objects of a bucket are meant.

    Attributes:
        mode: What it goes by.
        version: `version`, `aggregates`: exactly this version of the keys, as in `gradient-1-2-v{version}`.
        hours: `older_than`: their age; 0 is a number.
        prefix: `prefix`: what their keys begin with.
        suffix: `suffix`: what their keys end with.

    Raises:
        PermanentError: `bad_parameters`; what the mode needs is missing or empty, or something else is given.
    """

    mode: Mode
    version: str | None = None
    hours: float | None = None
    prefix: str | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        needed = _NEEDS.get(self.mode)
        for name in ("version", "hours", "prefix", "suffix"):
            value = getattr(self, name)
            if name == needed and (value is None or value == ""):
                raise PermanentError(Reason.BAD_PARAMETERS, f"{name}: mode {self.mode.value!r} needs it, and not empty")
            if name != needed and value is not None:
                raise PermanentError(
                    Reason.BAD_PARAMETERS, f"{name}: mode {self.mode.value!r} does not take it; leave it out"
                )
        if self.hours is not None and not 0 <= self.hours < float("inf"):
            raise PermanentError(Reason.BAD_PARAMETERS, f"hours: {self.hours} is not a number of at least 0")


@dataclass(frozen=True)
class Guard:
    """What is known of a bucket when it is cleaned.

    Attributes:
        retention: What of this protocol version has expired.
        now: The time that ages count from, in seconds since the epoch: never later than it is.
        latest: The latest window that an object of the network can be of; those of later ones are another chain's, or
            made up.
        kept_prefixes: What else lives in the bucket, such as a dataset.
    """

    retention: Retention
    now: float
    latest: int
    kept_prefixes: tuple[str, ...] = ()

    def keeps(self, info: ObjectInfo) -> bool:
        """Whether an object is, or may be, one that a live network needs."""
        if info.key.startswith(self.kept_prefixes):
            return True
        key = parse_current_key(info.key)
        return key is not None and not self.retention.is_expired(key)

    def is_far_off(self, info: ObjectInfo) -> bool:
        """Whether an object is of a window that is far from coming, and of no checkpoint that always stays."""
        key = parse_current_key(info.key)
        if key is None or key.window is None or info.key.startswith(self.kept_prefixes):
            return False
        return key.window > self.latest and not self.retention.is_kept_checkpoint(key)

    def is_older(self, info: ObjectInfo, hours: float) -> bool:
        """Whether an object is older, with the margin for wrong clocks on top."""
        return info.last_modified < self.now - 3600 * hours - CLOCK_MARGIN_SECONDS


@dataclass(frozen=True)
class CleanupCandidate:
    """An object that a criterion means.

    Attributes:
        info: The object.
        kind: The first word of its key.
        kept: Whether it stays all the same.
    """

    info: ObjectInfo
    kind: str
    kept: bool = False


@dataclass(frozen=True)
class CleanupRow:
    """What a clean-up found of one kind of object.

    Attributes:
        kind: The kind.
        found: How many are meant.
        kept: How many of them stay, because a live network may need them.
        num_bytes: Bytes of the others.
        deleted: How many were deleted.
        failed: How many could not be.
    """

    kind: str
    found: int = 0
    kept: int = 0
    num_bytes: int = 0
    deleted: int = 0
    failed: int = 0


@dataclass(frozen=True)
class CleanupReport:
    """What a clean-up did.

    Attributes:
        window: The window of the chain at the time.
        rows: One per kind of object.
        failed: Key and reason of objects that could not be deleted, the first `LISTED_FAILURES` of them.
        tries: How many times it was tried. Only the last is counted here; those before it may have deleted more.
    """

    window: int
    rows: tuple[CleanupRow, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    tries: int = 1

    def total(self, name: str) -> int:
        """A column's sum, such as `total("deleted")`."""
        return sum(getattr(row, name) for row in self.rows)


def kind_and_version(text: str) -> tuple[str, str | None]:
    """What a key says of its object: kind and version, of this system's grammar or the reference's."""
    if key := parse_key(text):
        return key.kind.value, key.version
    return parse_legacy_key(text) or (OTHER, None)


def plan(objects: Iterable[ObjectInfo], criterion: Criterion, guard: Guard) -> Iterator[CleanupCandidate]:
    """The objects of a listing that a criterion means, in the listing's order; pure."""
    for info in objects:
        kind, version = kind_and_version(info.key)
        if _is_meant(info, kind, version, criterion, guard):
            yield CleanupCandidate(info, kind, kept=_stays(info, criterion, guard))


def _stays(info: ObjectInfo, criterion: Criterion, guard: Guard) -> bool:
    match criterion.mode:
        case Mode.WIPE:
            return False
        case Mode.PREFIX:
            return guard.keeps(info) and not guard.is_far_off(info)
        case _:
            return guard.keeps(info)


def _is_meant(info: ObjectInfo, kind: str, version: str | None, criterion: Criterion, guard: Guard) -> bool:
    match criterion.mode:
        case Mode.RETENTION:
            return parse_current_key(info.key) is not None and not guard.keeps(info)
        case Mode.VERSION | Mode.AGGREGATES as mode:
            return version == criterion.version and (mode is Mode.VERSION or kind in AGGREGATES)
        case Mode.OLDER_THAN:
            return criterion.hours is not None and guard.is_older(info, criterion.hours)
        case Mode.PREFIX:
            return criterion.prefix is not None and info.key.startswith(criterion.prefix)
        case Mode.SUFFIX:
            return criterion.suffix is not None and info.key.endswith(criterion.suffix)
        case Mode.WIPE:
            return True


@dataclass
class _Tally:
    """A report in the making."""

    found: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    deleted: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def report(self, window: int) -> CleanupReport:
        rows = tuple(
            CleanupRow(
                kind, self.found[kind], self.kept[kind], self.num_bytes[kind], self.deleted[kind], self.failed[kind]
            )
            for kind in sorted(self.found)
        )
        return CleanupReport(window, rows, tuple(self.failures))


def execute(store: ObjectStore, candidates: Iterable[CleanupCandidate], *, window: int, dry_run: bool) -> CleanupReport:
    """Delete what a plan found and does not keep; with `dry_run` only count it.

    Batch by batch, while the listing is still being read. A clean-up that was cut off is simply begun again.

    Raises:
        StoppedError: The host asked the process to stop.
        TransientError: The store failed.
        PermanentError: `access_denied`; the key may not delete.
    """
    tally = _Tally()
    for batch in _batches(_counted(candidates, tally)):
        if dry_run:
            continue
        check_stop()
        failed = dict(store.delete(candidate.info.key for candidate in batch).failed)
        for candidate in batch:
            (tally.failed if candidate.info.key in failed else tally.deleted)[candidate.kind] += 1
        tally.failures += list(failed.items())[: LISTED_FAILURES - len(tally.failures)]
    return tally.report(window)


def _counted(candidates: Iterable[CleanupCandidate], tally: _Tally) -> Iterator[CleanupCandidate]:
    """Enter candidates in a report; those that go are handed on."""
    for candidate in candidates:
        tally.found[candidate.kind] += 1
        if candidate.kept:
            tally.kept[candidate.kind] += 1
        else:
            tally.num_bytes[candidate.kind] += candidate.info.size
            yield candidate


def _batches(candidates: Iterator[CleanupCandidate]) -> Iterator[list[CleanupCandidate]]:
    while batch := list(islice(candidates, BATCH)):
        yield batch


PROBE_PREFIX = "access-check-"
"""Keys of what the access check writes begin so; no key of the protocol does."""


_PROBE = re.compile(rf"{PROBE_PREFIX}[0-9a-f]{{16}}(-[a-z]+)?|test_permissions_file")  # the latter is the reference's


UPLOAD = "unfinished upload"


def plan_temporary(
    objects: Iterable[ObjectInfo], guard: Guard, *, complete: frozenset[int], hours: float
) -> Iterator[CleanupCandidate]:
    """The abandoned objects of a listing; pure.

    Args:
        objects: A listing of the bucket.
        guard: What is known of the bucket.
        complete: Windows of its complete checkpoints.
        hours: How long nobody touched them.
    """
    for info in objects:
        if not guard.is_older(info, hours) or info.key.startswith(guard.kept_prefixes):
            continue
        if _PROBE.fullmatch(info.key):
            yield CleanupCandidate(info, "probe")
        elif _is_unfinished(info, guard, complete):
            yield CleanupCandidate(info, "unfinished checkpoint")


def _is_unfinished(info: ObjectInfo, guard: Guard, complete: frozenset[int]) -> bool:
    """Whether an object belongs to a checkpoint that was not completed within the retention."""
    key, retention = parse_current_key(info.key), guard.retention
    if key is None or key.kind is not Kind.CHECKPOINT or key.window is None:
        return False
    stays = retention.keeps_checkpoints or key.window in retention.kept or key.window in complete
    return not stays and key.window < retention.oldest


@dataclass(frozen=True)
class UploadCleanup:
    """What became of the unfinished uploads of a bucket.

    Attributes:
        row: Counts.
        failed: Key and reason of those that could not be ended, the first `LISTED_FAILURES` of them.
        unseen: Why they could not be looked at, if so: not every key may list them, not every server can.
    """

    row: CleanupRow
    failed: tuple[tuple[str, str], ...]
    unseen: Reason | None


def abort_uploads(
    uploads: Uploads, *, hours: float, dry_run: bool, kept_prefixes: tuple[str, ...] = ()
) -> UploadCleanup:
    """End the uploads that nobody has touched for some hours, by the store's own clock.

    Raises:
        TransientError: The store failed; a later call goes on.
    """
    found = num_bytes = deleted = 0
    failures: list[tuple[str, str]] = []
    unseen: Reason | None = None
    try:
        for upload in uploads.list():
            if not _is_abandoned(upload, hours) or upload.key.startswith(kept_prefixes):
                continue
            found, num_bytes = found + 1, num_bytes + upload.num_bytes
            if dry_run:
                continue
            try:
                uploads.abort(upload)
            except TemplarError as error:
                failures.append((upload.key, str(error.reason)))
            else:
                deleted += 1
    except PermanentError as error:
        if error.reason not in (Reason.ACCESS_DENIED, Reason.STORE_REFUSED):
            raise
        unseen = error.reason
    row = CleanupRow(UPLOAD, found=found, num_bytes=num_bytes, deleted=deleted, failed=len(failures))
    return UploadCleanup(row, tuple(failures[:LISTED_FAILURES]), unseen)


def _is_abandoned(upload: Upload, hours: float) -> bool:
    # The margin is longer than the slowest part takes.
    return upload.idle_seconds > 3600 * hours + CLOCK_MARGIN_SECONDS
