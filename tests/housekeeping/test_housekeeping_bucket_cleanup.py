"""The objects that a clean-up deletes and keeps, as a property of any bucket."""

import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar import PROTOCOL_VERSION
from templar.agreement.checkpoint import MANIFEST_FILE
from templar.agreement.retention import Retention, survey
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import (
    Kind,
    ObjectKey,
    checkpoint_key,
    parse_current_key,
    parse_legacy_key,
    window_key,
)
from templar.housekeeping.bucket_cleanup import (
    BATCH,
    CLOCK_MARGIN_SECONDS,
    LISTED_FAILURES,
    Criterion,
    Guard,
    Mode,
    execute,
    plan,
    plan_temporary,
)
from templar.hparams import load_hparams
from templar.interrupt import request_stop
from templar.store.base import DeleteReport, ObjectInfo
from tests.support.errors import raising, stopped
from tests.support.memory_store import MemoryStore
from tests.support.subnet import PER_WINDOW

NOW, GENESIS, RETENTION, AHEAD = 100, 4, 20, 10
TIME, WINDOW_SECONDS = 1_700_000_000, 600
STORAGE = load_hparams(path=Path(__file__).parents[2] / "hparams.json").storage.model_copy(
    update={"retention_windows": RETENTION, "checkpoints_kept": 2}
)
VERSIONS = ("0.2.8", "0.2.82", "0.2.81", "20", "1")
OTHER_KEYS = ["readme.txt", "data/_metadata.yaml", "data/train_000001.npy", "x.pt", "gathers", "gradient-1-1-v2"]

windows = st.integers(0, NOW + 5)
uids = st.sampled_from([1, 2, 11, 111])
versions = st.sampled_from([PROTOCOL_VERSION, *VERSIONS])


def of_version(version, window, uid):
    """One object of every kind, ours and the reference's."""
    return [
        *(str(ObjectKey(kind, window, uid, version)) for kind in PER_WINDOW),
        str(ObjectKey(Kind.AGGREGATE, window, version=version)),
        str(ObjectKey(Kind.PEERS, window, version=version)),
        str(ObjectKey(Kind.START_WINDOW, version=version)),
        str(ObjectKey(Kind.CHECKPOINT, window, uid, version, MANIFEST_FILE)),
        str(ObjectKey(Kind.CHECKPOINT, window, uid, version, "model.safetensors")),
        *(f"{kind}-{window}-{uid}-v{version}.pt" for kind in ("gradient", "debug", "checkpoint")),
        f"aggregator-{window}-v{version}.pt",
        f"gathers/{version}/{window}/{uid}.pt",
        f"checkpoints/{version}/{window}/__0_0.distcp",
        f"checkpoints/{version}/_LATEST.json",
    ]


keys = st.one_of(st.builds(of_version, versions, windows, uids).flatmap(st.sampled_from), st.sampled_from(OTHER_KEYS))
buckets = st.dictionaries(keys, st.integers(0, 2 * NOW * WINDOW_SECONDS), max_size=30)


def listing(bucket):
    """A listing of keys and their ages in seconds."""
    return [ObjectInfo(key, 10, TIME - age) for key, age in sorted(bucket.items())]


def guard_of(objects, *, chain_time=TIME, now=NOW, **changes):
    """What `templar.housekeeping.maintenance` knows of a bucket."""
    found = survey(objects, now)
    base = now if found.newest_window is None else found.newest_window
    retention = Retention.of(found, window=base, genesis_windows={GENESIS}, storage=STORAGE)
    newest = chain_time if found.newest_stamp is None else min(chain_time, found.newest_stamp)
    return Guard(retention, newest, latest=now + AHEAD, **changes)


def meant(objects, criterion, guard=None):
    return [each.info.key for each in plan(objects, criterion, guard or guard_of(objects))]


def gone(objects, criterion, guard=None):
    return [each.info.key for each in plan(objects, criterion, guard or guard_of(objects)) if not each.kept]


criteria = st.one_of(
    versions.map(lambda version: Criterion(Mode.VERSION, version=version)),
    versions.map(lambda version: Criterion(Mode.AGGREGATES, version=version)),
    st.sampled_from([0.0, 0.5, 1.0, 24.0]).map(lambda hours: Criterion(Mode.OLDER_THAN, hours=hours)),
    st.sampled_from(["g", "gradient-1", "checkpoint-", "start", "data/", "p"]).map(
        lambda prefix: Criterion(Mode.PREFIX, prefix=prefix)
    ),
    st.sampled_from([".json", ".bin", f"v{PROTOCOL_VERSION}.json", "n", ".pt"]).map(
        lambda suffix: Criterion(Mode.SUFFIX, suffix=suffix)
    ),
    st.just(Criterion(Mode.RETENTION)),
)


# What a live network needs.


@given(buckets, criteria, st.integers(-600, 600))
@settings(max_examples=150)
def test_live_objects_are_never_deleted_with_skewed_clocks(bucket, criterion, skew):
    objects = listing(bucket)
    guard = guard_of(objects, chain_time=TIME + skew)
    base = guard.retention.window
    for key in gone(objects, criterion, guard):
        parsed = parse_current_key(key)
        if parsed is None:
            continue
        assert parsed.window is not None, "a start window"
        assert parsed.window < base
        if parsed.kind is Kind.CHECKPOINT:
            assert parsed.window != GENESIS
            assert parsed.window not in guard.retention.kept
        else:
            assert parsed.window < base - RETENTION


@given(buckets, criteria)
@settings(max_examples=100)
def test_selected_expired_and_unknown_objects_are_deleted(bucket, criterion):
    objects = listing(bucket)
    guard, found = guard_of(objects), meant(objects, criterion)
    expired = set(gone(objects, Criterion(Mode.RETENTION)))
    ours = {key for key in found if parse_current_key(key)}
    assert set(gone(objects, criterion, guard)) == (set(found) - ours) | (ours & expired)


# What is meant.


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_exactly_that_version(version):
    every = {each: of_version(each, 1, 1) for each in (*VERSIONS, PROTOCOL_VERSION)}
    objects = listing(dict.fromkeys([key for several in every.values() for key in several], 0))
    assert sorted(gone(objects, Criterion(Mode.VERSION, version=version))) == sorted(every[version])


def test_aggregates_are_those_of_both_systems():
    objects = listing(dict.fromkeys(of_version("0.2.8", 1, 1) + of_version("0.2.82", 1, 1), 0))
    found = sorted(gone(objects, Criterion(Mode.AGGREGATES, version="0.2.8")))
    assert found == ["aggregator-1-v0.2.8.bin", "aggregator-1-v0.2.8.pt", "gathers/0.2.8/1/1.pt"]


@pytest.mark.parametrize("hours", [0, 0.25])
def test_an_age_counts_from_the_newest_object_with_a_margin(hours):
    limit = int(3600 * hours) + CLOCK_MARGIN_SECONDS
    objects = listing({"newest": 0, "at-the-limit": limit, "older": limit + 1})
    assert gone(objects, Criterion(Mode.OLDER_THAN, hours=hours)) == ["older"]


@given(buckets, st.sampled_from(["", *OTHER_KEYS, "gradient-", "1"]))
def test_a_prefix_and_a_suffix_are_what_they_say(bucket, text):
    objects = listing(bucket)
    if text:
        assert meant(objects, Criterion(Mode.PREFIX, prefix=text)) == [k for k in sorted(bucket) if k.startswith(text)]
        assert meant(objects, Criterion(Mode.SUFFIX, suffix=text)) == [k for k in sorted(bucket) if k.endswith(text)]


@pytest.mark.parametrize(
    ("mode", "given_", "word"),
    [
        (Mode.OLDER_THAN, {}, "hours: mode 'older_than' needs it"),
        (Mode.OLDER_THAN, {"hours": math.inf}, "hours: inf is not"),
        (Mode.SUFFIX, {"prefix": "x", "suffix": ".pt"}, "prefix: mode 'suffix' does not take it"),
    ],
)
def test_missing_and_extra_parameters_are_refused(mode, given_, word):
    with raising(PermanentError, Reason.BAD_PARAMETERS, word):
        Criterion(mode, **given_)


@pytest.mark.parametrize("text", ["gradient-1-1-v0.2.8.pth", "gradient-01-1-v1.pt", "gathers//x"])
def test_unknown_keys_have_no_version(text):
    assert parse_legacy_key(text) is None
    (found,) = plan(listing({text: 0}), Criterion(Mode.WIPE), guard_of([]))
    assert found.kind == "other"


# Windows that are far from coming.


def far(window):
    """One object of every kind of a window, and those of no window."""
    return [*(key for key in of_version(PROTOCOL_VERSION, window, 1) if parse_current_key(key)), LEASE]


LEASE = str(ObjectKey(Kind.LEASE, role="miner", holder="ab" * 16))


@pytest.mark.parametrize("prefix", ["gradient-", "checkpoint-", "aggregator-", "peers_", "start", "lease-"])
def test_a_prefix_deletes_objects_of_far_future_windows_only(prefix):
    far_off, near = far(NOW + AHEAD + 1), far(NOW + AHEAD)
    found = gone(listing(dict.fromkeys([*far_off, *near], 0)), Criterion(Mode.PREFIX, prefix=prefix))
    assert found == sorted(key for key in set(far_off) - set(near) if key.startswith(prefix))
    assert bool(found) == (prefix not in ("start", "lease-"))


def test_other_criteria_keep_far_future_windows():
    objects = listing({"newest": 0} | dict.fromkeys(far(50_000), 10**6))
    for criterion in (
        Criterion(Mode.RETENTION),
        Criterion(Mode.VERSION, version=PROTOCOL_VERSION),
        Criterion(Mode.AGGREGATES, version=PROTOCOL_VERSION),
        Criterion(Mode.OLDER_THAN, hours=0.0),
        Criterion(Mode.SUFFIX, suffix=".json"),
    ):
        assert not [key for key in gone(objects, criterion) if parse_current_key(key)]


def test_a_far_future_genesis_stays():
    keys = [checkpoint_key(window, 1, MANIFEST_FILE) for window in (50_000, 50_001)]
    objects, purge = listing(dict.fromkeys(keys, 0)), Criterion(Mode.PREFIX, prefix="checkpoint-")
    guard = guard_of(objects)
    assert gone(objects, purge, guard) == keys
    own = replace(guard, retention=replace(guard.retention, kept=frozenset({50_000})))
    assert gone(objects, purge, own) == keys[1:]
    unknown = replace(guard, retention=replace(guard.retention, keeps_checkpoints=True))
    assert gone(objects, purge, unknown) == []
    assert gone(objects, purge, replace(guard, kept_prefixes=("",))) == []


# Deleting.


def numbered(store, count):
    for number in range(count):
        store.put(f"old-{number:05}", b"12345")


def test_thousands_of_keys_go_in_batches_while_the_listing_is_read():
    class Batching(MemoryStore):
        sizes: ClassVar[list[int]] = []

        def delete(self, keys):
            keys = list(keys)
            self.sizes.append(len(keys))
            return super().delete(keys)

    store = Batching(clock=lambda: TIME)
    numbered(store, 2 * BATCH + 7)
    candidates = plan(store.list(), Criterion(Mode.PREFIX, prefix="old-"), guard_of([]))
    report = execute(store, candidates, window=NOW, dry_run=False)
    assert store.sizes == [BATCH, BATCH, 7]
    (row,) = report.rows
    assert (row.kind, row.found, row.deleted, row.num_bytes) == ("other", 2007, 2007, 5 * 2007)
    assert list(store.list()) == []


def test_failed_deletions_are_counted_and_the_first_are_named():
    class Refusing(MemoryStore):
        def delete(self, keys):
            keys = list(keys)
            return DeleteReport(tuple(keys[1::2]), tuple((key, "InternalError") for key in keys[::2]))

    store = Refusing(clock=lambda: TIME)
    numbered(store, 300)
    report = execute(store, plan(store.list(), Criterion(Mode.WIPE), guard_of([])), window=NOW, dry_run=False)
    assert (report.total("deleted"), report.total("failed")) == (150, 150)
    assert len(report.failed) == LISTED_FAILURES
    assert report.failed[0] == ("old-00000", "InternalError")


def test_a_clean_up_that_is_stopped_ends_between_two_batches():
    store = MemoryStore(clock=lambda: TIME)
    numbered(store, 3)
    with stopped():
        request_stop()
        execute(store, plan(store.list(), Criterion(Mode.WIPE), guard_of([])), window=NOW, dry_run=False)
    assert len(list(store.list())) == 3


# Temporary things.


PROBE = "access-check-0123456789abcdef"


def left_behind(bucket, hours=1, **changes):
    objects = listing(bucket)
    complete = survey(objects, NOW).complete
    guard = guard_of(objects, **changes)
    return [each.info.key for each in plan_temporary(objects, guard, complete=complete, hours=hours)]


OLD = 3600 + CLOCK_MARGIN_SECONDS + 1


def test_probes_go_when_they_are_old():
    probes = [PROBE, f"{PROBE}-parts", f"{PROBE}-denied", "test_permissions_file"]
    assert sorted(left_behind({"newest": 0} | dict.fromkeys(probes, OLD))) == sorted(probes)
    assert left_behind({"newest": 0} | dict.fromkeys(probes, OLD - 1)) == []
    assert left_behind({"newest": 0} | dict.fromkeys([f"{PROBE}.txt", f"x{PROBE}", "access-check-1"], OLD)) == []


@pytest.mark.parametrize(
    ("window", "age", "complete", "goes"),
    [
        (50, OLD, False, True),
        (50, OLD - 1, False, False),
        (50, OLD, True, False),
        (NOW - RETENTION, OLD, False, False),
        (GENESIS, OLD, False, False),
    ],
)
def test_a_checkpoint_is_abandoned_when_it_is_old_in_windows_and_in_hours(window, age, complete, goes):
    names = ["config.json", *([MANIFEST_FILE] if complete else [])]
    bucket = {checkpoint_key(window, 1, name): age for name in names}
    assert left_behind({**bucket, window_key(Kind.PROOF, NOW, 1): 0}) == (sorted(bucket) if goes else [])


@given(buckets, st.sampled_from([0.0, 1.0, 24.0]))
@settings(max_examples=75)
def test_no_temporary_clean_up_touches_what_is_complete(bucket, hours):
    complete = survey(listing(bucket), NOW).complete
    for key in left_behind(bucket, hours):
        parsed = parse_current_key(key)
        assert parsed is None or (parsed.kind is Kind.CHECKPOINT and parsed.window not in complete)
