from dataclasses import replace
from math import floor

import pytest

from templar.canonical import sha256_hex
from templar.chain.clock import SimulatedClock
from templar.errors import Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import CONCLUSIVE, RevealRules, Submission, fetch_reveal, publish_commit, publish_reveal
from templar.exchange.signed import Sealed
from templar.timeline import WindowTimes
from tests.support.errors import error_of
from tests.support.scripted_store import failing, once
from tests.support.subnet import (
    ASSIGNMENT,
    LAYOUT,
    NETWORK,
    RULES,
    Bucket,
    commit_to,
    manifest_of,
    member,
    other_payload,
    payload_bytes,
)

WINDOW = 10
OPENED, CLOSED = 1_000_000.4, 1_000_060.7  # so C(w-1) = 1000000 and C(w) = 1000060
TIMES = WindowTimes(WINDOW, OPENED, CLOSED, RULES)
COMMIT_FIRST, COMMIT_LAST = 1_000_001, 1_000_058  # C(w-1) + 1, C(w) - guard
REVEAL_FIRST, REVEAL_LAST = 1_000_061, 1_000_064  # C(w) + 1, C(w) + delta

ALICE, MALLORY = member(5), member(6)
COMMIT, MANIFEST, PAYLOAD = (window_key(kind, WINDOW, 5) for kind in (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT))
BYTES = payload_bytes(ALICE, WINDOW)


@pytest.fixture
def cache(tmp_path):
    return PayloadCache(tmp_path / "payloads", LAYOUT)


@pytest.fixture
def bucket():
    bucket = Bucket(ALICE)
    bucket.reveal(TIMES, BYTES)
    return bucket


def fetch(bucket, cache, times=TIMES, assignment={5: ASSIGNMENT}.get, observed=None):
    rules = RevealRules(NETWORK, times, assignment, observed)
    return fetch_reveal(bucket.owner.neuron, bucket.store, rules, cache)


def rejection(bucket, cache, **changes):
    error = error_of(lambda: fetch(bucket, cache, **changes))
    assert isinstance(error, RejectedError)
    return error.reason


def commits(bucket, manifest, at=COMMIT_LAST, **changes):
    bucket.put_signed(COMMIT, commit_to(manifest, **changes), at)


def test_a_reveal_that_counts(bucket, cache):
    found = fetch(bucket, cache)
    manifest = manifest_of(ALICE, WINDOW, BYTES)
    signatures = found.commit_signature, found.manifest_signature  # another one each time
    assert found == Submission(manifest, COMMIT_LAST, REVEAL_FIRST, *signatures)
    signed = [(operation, key) for key in (COMMIT, MANIFEST) for operation in ("head", "get", "head")]
    assert bucket.store.calls == [*signed, ("head", PAYLOAD), ("get", PAYLOAD)]
    commit = Sealed(commit_to(manifest), found.commit_signature)
    assert commit.encode() == bucket.memory.get(COMMIT, max_bytes=1000)
    assert Sealed(manifest, found.manifest_signature).encode() == bucket.memory.get(MANIFEST, max_bytes=1000)
    assert cache.read(WINDOW, found.manifest.payload_sha256) == BYTES


@pytest.mark.parametrize(
    ("key", "first", "last", "early", "late"),
    [
        (COMMIT, COMMIT_FIRST, COMMIT_LAST, Reason.COMMIT_EARLY, Reason.COMMIT_LATE),
        (MANIFEST, REVEAL_FIRST, REVEAL_LAST, Reason.REVEAL_EARLY, Reason.REVEAL_LATE),
        (PAYLOAD, REVEAL_FIRST, REVEAL_LAST, Reason.REVEAL_EARLY, Reason.REVEAL_LATE),
    ],
)
def test_each_object_counts_within_its_interval(bucket, cache, *, key, first, last, early, late):
    data = bucket.memory.get(key, max_bytes=10_000)
    for at in (first, last, last + 0.999):
        bucket.put(key, data, at)
        found = fetch(bucket, cache)
        assert (found.committed_at if key == COMMIT else found.revealed_at) == int(at)
    num_read = bucket.store.count("get", key)
    for at, reason in ((first - 0.001, early), (last + 1, late)):
        bucket.put(key, data, at)
        assert rejection(bucket, cache) is reason
    assert bucket.store.count("get", key) == num_read


def test_another_manifest_than_the_committed_one_does_not_count(bucket, cache):
    other = payload_bytes(ALICE, WINDOW, seed=1)
    bucket.put_signed(MANIFEST, manifest_of(ALICE, WINDOW, other), REVEAL_FIRST)
    bucket.put(PAYLOAD, other, REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.COMMIT_MISMATCH
    assert bucket.store.count("get", PAYLOAD) == 0


@pytest.mark.parametrize("assignment", ["00" * 32, None])
def test_training_on_other_data_does_not_count(bucket, cache, assignment):
    asked: list[int] = []

    def assign(uid):
        asked.append(uid)
        return assignment

    assert rejection(bucket, cache, assignment=assign) is Reason.WRONG_ASSIGNMENT
    assert asked == [5]
    assert bucket.store.count("get", PAYLOAD) == 0


@pytest.mark.parametrize("declared", [LAYOUT.min_payload_bytes - 1, LAYOUT.max_payload_bytes + 1])
def test_a_size_that_no_payload_has_is_refused_before_the_payload_is_looked_at(cache, declared):
    bucket = Bucket(ALICE)
    bucket.reveal(TIMES, BYTES, manifest_of(ALICE, WINDOW, BYTES, payload_bytes=declared))
    assert rejection(bucket, cache) is Reason.WRONG_SIZE
    assert bucket.store.count("head", PAYLOAD) == 0


@pytest.mark.parametrize(
    ("stored", "reason", "reads"),
    [
        (BYTES[:-1], Reason.WRONG_SIZE, 0),
        (BYTES + b"\0", Reason.WRONG_SIZE, 0),
        (bytes(len(BYTES)), Reason.WRONG_HASH, 1),
        (other_payload(ALICE, WINDOW), Reason.WRONG_HASH, 1),
    ],
)
def test_other_bytes_than_declared_do_not_count_and_a_wrong_length_is_not_read(bucket, cache, stored, reason, reads):
    bucket.put(PAYLOAD, stored, REVEAL_FIRST)
    assert rejection(bucket, cache) is reason
    assert bucket.store.count("get", PAYLOAD) == reads
    assert not cache.has(sha256_hex(stored), window=WINDOW, uid=5, hotkey=ALICE.hotkey.address)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (BYTES[:-4] + bytes(4), Reason.MALFORMED),
        (BYTES[:4] + bytes([BYTES[4] + 1]) + BYTES[5:], Reason.WRONG_VERSION),
        (payload_bytes(ALICE, WINDOW - 1), Reason.WRONG_WINDOW),
        (payload_bytes(MALLORY, WINDOW), Reason.WRONG_IDENTITY),
    ],
)
def test_an_illegal_payload_does_not_count_even_if_its_hash_was_committed(cache, payload, reason):
    bucket = Bucket(ALICE)
    bucket.reveal(TIMES, payload)
    assert rejection(bucket, cache) is reason


def test_objects_signed_for_another_window_do_not_count(bucket, cache):
    honest = manifest_of(ALICE, WINDOW, BYTES)
    other = honest.model_copy(update={"window": WINDOW - 1})
    commits(bucket, honest, commitment=other.digest)
    bucket.put_signed(MANIFEST, other, REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.WRONG_WINDOW
    commits(bucket, honest, window=WINDOW - 1)
    assert rejection(bucket, cache) is Reason.WRONG_WINDOW


# Commitments that this node saw before the close, and times that prove nothing.


@pytest.mark.parametrize(
    ("digest", "counts"),
    [(manifest_of(ALICE, WINDOW, BYTES).digest, True), (sha256_hex(b"another"), False), (None, False)],
)
def test_a_reveal_counts_with_the_commitment_that_was_seen(bucket, cache, digest, *, counts):
    observed = {} if digest is None else {ALICE.hotkey.address: digest}
    if counts:
        assert fetch(bucket, cache, observed=observed).manifest.digest == digest
        return
    assert rejection(bucket, cache, observed=observed) is Reason.COMMIT_UNSEEN
    assert Reason.COMMIT_UNSEEN not in CONCLUSIVE, "another node may have seen it"
    assert not bucket.store.count("head", PAYLOAD)


def test_an_object_whose_time_proves_nothing_is_not_read(bucket, cache, monkeypatch):
    """Its server says that it came in parts, or is one of several versions."""
    head = bucket.memory.head
    monkeypatch.setattr(bucket.memory, "head", lambda key: replace(head(key), is_time_unproven=True))
    assert rejection(bucket, cache) is Reason.TIME_UNPROVEN
    assert not bucket.store.count("get", COMMIT)


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (other_payload(ALICE, WINDOW), Reason.WRONG_HASH),
        (BYTES + BYTES, Reason.WRONG_SIZE),
        (None, Reason.PAYLOAD_MISSING),
    ],
)
def test_a_payload_that_is_replaced_while_it_is_read_does_not_count(bucket, cache, replacement, reason):
    def replace():
        if replacement is None:
            bucket.memory.delete([PAYLOAD])
        else:
            bucket.put(PAYLOAD, replacement, REVEAL_LAST)

    bucket.store.before = once("get", PAYLOAD, replace)
    assert rejection(bucket, cache) is reason


@pytest.mark.parametrize(
    ("key", "missing"),
    [(COMMIT, Reason.COMMIT_MISSING), (MANIFEST, Reason.MANIFEST_MISSING), (PAYLOAD, Reason.PAYLOAD_MISSING)],
)
def test_a_failing_store_is_no_verdict_and_a_missing_object_is_one(bucket, cache, key, missing):
    for operation in ("head", "get"):
        bucket.store.before = failing(TransientError(Reason.STORE_BUSY, "for a test"), operation, key=key, times=1)
        with pytest.raises(TransientError):
            fetch(bucket, cache)
        assert fetch(bucket, cache).uid == 5
        cache.prune(WINDOW + 1)
    bucket.memory.delete([key])
    assert rejection(bucket, cache) is missing


# Stores stamp whole seconds and blocks come at any fraction of one: the rules hold at every phase between the two.

PHASES = [0.0, 0.05, 0.4, 0.65, 0.95]
"""Fractions of the second of the close; the window opens 0.35 s later in its second."""
INSTANT = 0.001


@pytest.fixture(params=PHASES, ids=lambda phase: f"{phase:.2f}")
def times(request):
    """A window that closes at a phase of a second; it opened at another one."""
    return WindowTimes(WINDOW, 1_000_000 + (request.param + 0.35) % 1, 1_000_060 + request.param, RULES)


@pytest.mark.parametrize("late", [False, True], ids=["earliest", "latest"])
def test_the_earliest_and_the_latest_reveal_count(times, cache, tmp_path, late):
    """`publish_commit` and `publish_reveal` as a miner calls them, at the first and the last moment that it may."""
    commit, reveal, bucket = times.commit_interval, times.reveal_interval, Bucket(ALICE)
    payload, manifest = tmp_path / "payload", manifest_of(ALICE, WINDOW, BYTES)
    payload.write_bytes(BYTES)
    bucket.hand.now = commit.last + 1 - INSTANT if late else float(commit.first)
    clock = SimulatedClock(bucket.hand.now)
    for _ in range(2):
        publish_commit(bucket.store, manifest, ALICE.hotkey, clock=clock, deadline=commit.last + 1)
    committed = bucket.memory.get(window_key(Kind.COMMIT, WINDOW, ALICE.uid), max_bytes=1000)
    assert BYTES[:16] not in committed
    assert manifest.payload_sha256.encode() not in committed
    seen = times.closed  # the closing block is seen when it comes, at the earliest
    bucket.hand.now = reveal.last + 1 - INSTANT if late else float(max(reveal.first, floor(seen) + 1))
    clock.sleep_until(bucket.hand.now)
    for _ in range(2):
        publish_reveal(bucket.store, manifest, ALICE.hotkey, payload, clock=clock, deadline=reveal.last + 1)
    found = fetch(bucket, cache, times)
    assert (found.committed_at in commit, found.revealed_at in reveal) == (True, True)
