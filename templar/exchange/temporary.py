"""What was meant to be temporary and was left behind by somebody who died: unfinished uploads, probes, checkpoints.

An unfinished checkpoint must be old twice, in windows and in hours, before it is taken for abandoned.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.cleanup import CLOCK_MARGIN_SECONDS, LISTED_FAILURES, Candidate, CleanupRow, Guard
from templar.exchange.keys import Kind, parse_current_key
from templar.store.base import ObjectInfo
from templar.store.uploads import Upload, Uploads

PROBE_PREFIX = "access-check-"
"""Keys of what the access check writes begin so; no key of the protocol does."""
_PROBE = re.compile(rf"{PROBE_PREFIX}[0-9a-f]{{16}}(-[a-z]+)?|test_permissions_file")  # the latter is the reference's
UPLOAD = "unfinished upload"


def plan_temporary(
    objects: Iterable[ObjectInfo], guard: Guard, *, complete: frozenset[int], hours: float
) -> Iterator[Candidate]:
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
            yield Candidate(info, "probe")
        elif _is_unfinished(info, guard, complete):
            yield Candidate(info, "unfinished checkpoint")


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
