"""Cleaning buckets: what has expired, what an operator selects, what was left behind by somebody who died.

Every clean-up looks at the whole bucket first, to know what a live network needs of it, and then goes through the
listing a second time. It can be cut off at any moment and run again.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace

from templar.chain.base import Chain
from templar.errors import PermanentError, Reason
from templar.exchange.cleanup import CleanupReport, Criterion, Guard, Mode, execute, plan
from templar.exchange.keys import START_WINDOW_KEY
from templar.exchange.objects import StartWindow
from templar.exchange.retention import Retention, Survey, survey
from templar.exchange.sealing import unseal
from templar.exchange.temporary import abort_uploads, plan_temporary
from templar.hparams import HParams
from templar.store.base import ObjectStore
from templar.store.uploads import Uploads
from templar.windows import window_of

FAR_OFF_WINDOWS = 5
"""This much further ahead than a peer list is published, nothing of a live network can be."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A bucket that is cleaned.

    Attributes:
        store: The bucket with write rights.
        uploads: Its unfinished uploads.
        kept_prefixes: What else lives in it and is not to be touched, such as a dataset.
        is_own: Whether it is the bucket of the neuron that cleans it.
    """

    store: ObjectStore
    uploads: Uploads
    kept_prefixes: tuple[str, ...] = ()
    is_own: bool = False

    def require_confirmed(self, confirm_bucket: str) -> None:
        """Refuse to delete unless somebody repeated the bucket's name.

        Raises:
            PermanentError: `not_confirmed`.
        """
        if confirm_bucket != self.store.name:
            raise PermanentError(
                Reason.NOT_CONFIRMED,
                f"confirm_bucket is {confirm_bucket!r}: repeat the bucket's name, {self.store.name!r}, there",
            )


@dataclass(frozen=True)
class TemporaryReport:
    """What a clean-up of temporary things did.

    Attributes:
        report: Objects and uploads.
        unseen: Why unfinished uploads could not be looked at, if so.
    """

    report: CleanupReport
    unseen: Reason | None


@dataclass(frozen=True)
class _Look:
    """What is known of a bucket: its objects as a whole, what may go, and the window of the chain."""

    found: Survey
    guard: Guard
    window: int


def clean_expired(
    store: ObjectStore, chain: Chain, hparams: HParams, *, genesis_windows: Collection[int], dry_run: bool
) -> CleanupReport:
    """Delete what has expired; see `templar.exchange.retention`.

    Age counts from the newest window that the bucket has, not from the clock: while a network stands still nothing
    expires, so a missing object means that it never was.

    Args:
        store: The bucket.
        chain: The chain of its network.
        hparams: The network's numbers.
        genesis_windows: Windows of genesis checkpoints, besides that of the bucket's own start window.
        dry_run: Only count.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
    """
    look = _look_at(store, chain, hparams, genesis_windows=genesis_windows)
    candidates = plan(store.list(), Criterion(Mode.RETENTION), look.guard)
    return execute(store, candidates, window=look.window, dry_run=dry_run)


def purge_bucket(
    target: Target, chain: Chain, hparams: HParams, criterion: Criterion, *, dry_run: bool, confirm_bucket: str
) -> CleanupReport:
    """Delete what an operator selects, but nothing that a live network needs, unless the criterion is `wipe`.

    Args:
        target: The bucket.
        chain: The chain of the neuron whose network the bucket serves.
        hparams: That network's numbers.
        criterion: What is meant.
        dry_run: Only count.
        confirm_bucket: The bucket's name once more; a dry run needs none.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
        PermanentError: `not_confirmed`, before anything is read; `access_denied`, `bucket_missing`.
    """
    store = target.store
    if not dry_run:
        target.require_confirmed(confirm_bucket)
    look = _look_at(store, chain, hparams, kept_prefixes=target.kept_prefixes)
    return execute(store, plan(store.list(), criterion, look.guard), window=look.window, dry_run=dry_run)


def clean_temporary(
    target: Target, chain: Chain, hparams: HParams, *, hours: float, dry_run: bool, confirm_bucket: str = ""
) -> TemporaryReport:
    """Delete what was left behind by somebody who died; see `templar.exchange.temporary`.

    Args:
        target: The bucket.
        chain: The chain of the neuron whose network the bucket serves.
        hparams: That network's numbers.
        hours: How long nobody may have touched it.
        dry_run: Only count.
        confirm_bucket: The bucket's name once more; a dry run needs none, and the neuron's own bucket neither.

    Raises:
        TransientError: Chain or store failed; a later call goes on.
        PermanentError: `bad_parameters`; `not_confirmed`, before anything is read; `access_denied`, `bucket_missing`.
    """
    if not (dry_run or target.is_own):
        target.require_confirmed(confirm_bucket)
    if not 0 <= hours < float("inf"):
        raise PermanentError(Reason.BAD_PARAMETERS, f"hours: {hours} is not a number of at least 0")
    store, prefixes = target.store, target.kept_prefixes
    look = _look_at(store, chain, hparams, kept_prefixes=prefixes)
    candidates = plan_temporary(store.list(), look.guard, complete=look.found.complete, hours=hours)
    objects = execute(store, candidates, window=look.window, dry_run=dry_run)
    uploads = abort_uploads(target.uploads, hours=hours, dry_run=dry_run, kept_prefixes=prefixes)
    rows = (*objects.rows, uploads.row) if uploads.row.found else objects.rows
    return TemporaryReport(replace(objects, rows=rows, failed=objects.failed + uploads.failed), uploads.unseen)


def _look_at(
    store: ObjectStore,
    chain: Chain,
    hparams: HParams,
    *,
    genesis_windows: Collection[int] = (),
    kept_prefixes: tuple[str, ...] = (),
) -> _Look:
    block = chain.block()
    window, time = window_of(block, hparams.windows), chain.block_time(block)
    found, own = survey(store.list(), window), _own_genesis(store)
    retention = Retention.of(
        found,
        window=window if found.newest_window is None else found.newest_window,
        genesis_windows=None if own is None else {*own, *genesis_windows},
        storage=hparams.storage,
    )
    # The earlier of two clocks: the store's, by its newest object, and the chain's. The later one makes things too old.
    now = time if found.newest_stamp is None else min(time, found.newest_stamp)
    latest = window + hparams.peers.peer_list_window_margin + FAR_OFF_WINDOWS
    return _Look(found, Guard(retention, now, latest, kept_prefixes), window)


def _own_genesis(store: ObjectStore) -> frozenset[int] | None:
    """The checkpoint that the bucket's own start window needs, whichever network its owner is in today.

    None if there is a start window that cannot be read: then it may be any of them.
    """
    if store.head(START_WINDOW_KEY) is None:
        return frozenset()
    try:
        sealed = unseal(store.get(START_WINDOW_KEY, max_bytes=StartWindow.max_bytes), StartWindow)
    except PermanentError as error:
        log.warning("the own start window cannot be read, so every checkpoint stays: %s", error)
        return None
    return frozenset({sealed.body.start_window - 1})
