"""Clean-up of a bucket: the objects that a criterion selects, those of them that stay, and their deletion.

The plan is a pure function of a listing, object by object, so a listing of any length is never held in memory.
No criterion but `wipe` deletes an object that a live network needs: objects of this protocol version are deleted only
after their retention, or, by a prefix, if their window lies too far in the future for any live network.

Temporary objects of interrupted processes (unfinished uploads, probes, unfinished checkpoints) are planned and deleted
by `plan_temporary` and `abort_uploads`. An unfinished checkpoint must be old both in windows and in hours.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from templar.agreement.checkpoint import EVALUATION_FILE
from templar.agreement.retention import Retention
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.object_keys import Kind, parse_current_key, parse_key, parse_legacy_key
from templar.interrupt import check_stop
from templar.store.base import ObjectInfo, ObjectStore, UploadStore

CLOCK_MARGIN_SECONDS = 900
"""An age in hours must be exceeded by this much, so that a clock that is wrong by minutes makes no object old."""
BATCH = 1000  # keys per deletion; the most that a store deletes in one request
LISTED_FAILURES = 100  # failures that a report names; all are counted
AGGREGATES = frozenset({Kind.AGGREGATE.value, "gathers"})
OTHER = "other"  # the kind of an object with an unknown key
UPLOAD = "unfinished upload"
PROBE_PREFIX = "access-check-"  # prefix of the access check's probes; no key of the protocol has it
_PROBE = re.compile(rf"{PROBE_PREFIX}[0-9a-f]{{16}}(-[a-z]+)?|test_permissions_file")  # the latter is the reference's


class Mode(StrEnum):
    """The property by which a criterion selects."""

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
    """The objects of a bucket that an operator selects; `bad_parameters` unless it has its mode's one parameter."""

    mode: Mode
    version: str | None = None  # modes `version`, `aggregates`: exactly this version, as in `gradient-1-2-v{version}`
    hours: float | None = None  # mode `older_than`: least age, 0 included
    prefix: str | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        needed = _NEEDS.get(self.mode)
        for name in ("version", "hours", "prefix", "suffix"):
            value = getattr(self, name)
            mode = f"mode {self.mode.value!r}"
            if name == needed and (value is None or value == ""):
                raise PermanentError(Reason.BAD_PARAMETERS, f"{name}: {mode} needs it, and not empty")
            if name != needed and value is not None:
                raise PermanentError(Reason.BAD_PARAMETERS, f"{name}: {mode} does not take it; leave it out")
        if self.hours is not None and not 0 <= self.hours < float("inf"):
            raise PermanentError(Reason.BAD_PARAMETERS, f"hours: {self.hours} is not a number of at least 0")


@dataclass(frozen=True)
class Guard:
    """The objects of a bucket that a clean-up must keep."""

    retention: Retention  # decides which objects of this protocol version have expired
    now: float  # ages count from here, in seconds since the epoch: never later than the true time
    latest: int  # latest window of which the network can have objects; later ones belong to another chain or are fake
    kept_prefixes: tuple[str, ...] = ()  # other content of the bucket, such as a dataset

    def keeps(self, info: ObjectInfo) -> bool:
        """Whether a live network may need the object."""
        if info.key.startswith(self.kept_prefixes):
            return True
        key = parse_current_key(info.key)
        return key is not None and not self.retention.is_expired(key)

    def is_far_off(self, info: ObjectInfo) -> bool:
        """Whether the object is of a window far in the future, and of no checkpoint that is always kept."""
        key = parse_current_key(info.key)
        if key is None or key.window is None or info.key.startswith(self.kept_prefixes):
            return False
        return key.window > self.latest and not self.retention.is_kept_checkpoint(key)

    def is_older(self, info: ObjectInfo, hours: float) -> bool:
        """Whether the object is older than `hours` and the margin for wrong clocks."""
        return info.last_modified < self.now - 3600 * hours - CLOCK_MARGIN_SECONDS


@dataclass(frozen=True)
class CleanupCandidate:
    """An object that a criterion selects."""

    info: ObjectInfo
    kind: str  # the first word of its key
    kept: bool = False  # whether it stays, because a live network may need it


@dataclass(frozen=True)
class CleanupRow:
    """Counts of one kind of object."""

    kind: str
    found: int = 0  # selected
    kept: int = 0  # of these, kept because a live network may need them
    num_bytes: int = 0  # bytes of the others
    deleted: int = 0
    failed: int = 0


@dataclass(frozen=True)
class CleanupReport:
    """Result of a clean-up."""

    window: int  # the window of the chain at the time
    rows: tuple[CleanupRow, ...] = ()  # one per kind of object
    failed: tuple[tuple[str, str], ...] = ()  # key and reason of the first `LISTED_FAILURES` failures
    unseen: Reason | None = None  # why unfinished uploads could not be listed, if so
    tries: int = 1  # number of attempts; only the last is counted here, earlier ones may have deleted more

    def total(self, name: str) -> int:
        """A column's sum, such as `total("deleted")`."""
        return sum(getattr(row, name) for row in self.rows)


def plan(objects: Iterable[ObjectInfo], criterion: Criterion, guard: Guard) -> Iterator[CleanupCandidate]:
    """The objects of a listing that a criterion selects, in the listing's order; a pure function."""
    mode = criterion.mode
    for info in objects:
        key = parse_key(info.key)
        kind, version = (key.kind.value, key.version) if key else parse_legacy_key(info.key) or (OTHER, None)
        if _is_selected(info, kind, version, criterion, guard):
            kept = mode is not Mode.WIPE and guard.keeps(info) and not (mode is Mode.PREFIX and guard.is_far_off(info))
            yield CleanupCandidate(info, kind, kept)


def _is_selected(info: ObjectInfo, kind: str, version: str | None, criterion: Criterion, guard: Guard) -> bool:
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


def execute(store: ObjectStore, candidates: Iterable[CleanupCandidate], *, window: int, dry_run: bool) -> CleanupReport:
    """Delete the candidates that are not kept, in batches while the listing is read; with `dry_run` only count them.

    After a stop, a failure of the store, or `access_denied`, where the key may not delete, it can be run again.
    """
    counts, failures = defaultdict[str, Counter[str]](Counter), list[tuple[str, str]]()  # counts: kind -> column

    def to_delete() -> Iterator[CleanupCandidate]:
        for candidate in candidates:
            columns = counts[candidate.kind]
            columns["found"] += 1
            if candidate.kept:
                columns["kept"] += 1
            else:
                columns["num_bytes"] += candidate.info.size
                yield candidate

    wanted = to_delete()
    while batch := list(islice(wanted, BATCH)):
        if dry_run:
            continue
        check_stop()
        failed = dict(store.delete(candidate.info.key for candidate in batch).failed)
        for candidate in batch:
            counts[candidate.kind]["failed" if candidate.info.key in failed else "deleted"] += 1
        failures += list(failed.items())[: LISTED_FAILURES - len(failures)]
    rows = tuple(CleanupRow(kind, **columns) for kind, columns in sorted(counts.items()))
    return CleanupReport(window, rows, tuple(failures))


def plan_temporary(
    objects: Iterable[ObjectInfo], guard: Guard, *, complete: frozenset[int], hours: float
) -> Iterator[CleanupCandidate]:
    """The probes and checkpoints of a listing that were abandoned for `hours`; a pure function.

    `complete` has the windows of the bucket's complete checkpoints.
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
    if key is None or key.kind is not Kind.CHECKPOINT or key.window is None or key.file == EVALUATION_FILE:
        return False
    stays = retention.keeps_checkpoints or key.window in retention.kept or key.window in complete
    return not stays and key.window < retention.oldest


def abort_uploads(
    store: UploadStore, *, hours: float, dry_run: bool, kept_prefixes: tuple[str, ...]
) -> tuple[CleanupRow, list[tuple[str, str]], Reason | None]:
    """End the uploads that have been idle for `hours`, by the store's own clock; a later call continues.

    Beside the counts, key and reason of the first `LISTED_FAILURES` failures, and the reason for which uploads could
    not be listed: not every key may, not every server can.
    """
    found = num_bytes = deleted = 0
    failures: list[tuple[str, str]] = []
    unseen: Reason | None = None
    try:
        for upload in store.uploads():
            # The margin is longer than the slowest part of an upload.
            is_abandoned = upload.idle_seconds > 3600 * hours + CLOCK_MARGIN_SECONDS
            if not is_abandoned or upload.key.startswith(kept_prefixes):
                continue
            found, num_bytes = found + 1, num_bytes + upload.num_bytes
            if dry_run:
                continue
            try:
                store.abort(upload)
            except TemplarError as error:
                failures.append((upload.key, str(error.reason)))
            else:
                deleted += 1
    except PermanentError as error:
        if error.reason not in (Reason.ACCESS_DENIED, Reason.STORE_REFUSED):
            raise
        unseen = error.reason
    row = CleanupRow(UPLOAD, found=found, num_bytes=num_bytes, deleted=deleted, failed=len(failures))
    return row, failures[:LISTED_FAILURES], unseen
