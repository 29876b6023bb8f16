from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules, Submission, fetch_reveal
from templar.exchange.signed import Sealed
from templar.timeline import WindowTimes
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
def cache(tmp_path: Path) -> PayloadCache:
    return PayloadCache(tmp_path / "payloads", LAYOUT)


@pytest.fixture
def bucket() -> Bucket:
    bucket = Bucket(ALICE)
    bucket.reveal(TIMES, BYTES)
    return bucket


def assigned(uid: int) -> str | None:
    return ASSIGNMENT if uid in (5, 6) else None


def fetch(bucket: Bucket, cache: PayloadCache, assignment: Callable[[int], str | None] = assigned) -> Submission:
    rules = RevealRules(NETWORK, TIMES, assignment)
    return fetch_reveal(bucket.owner.neuron, bucket.store, rules, cache)


def rejection(bucket: Bucket, cache: PayloadCache, **changes: Any) -> Reason:
    with pytest.raises(RejectedError) as caught:
        fetch(bucket, cache, **changes)
    return caught.value.reason


def commits(bucket: Bucket, manifest: Manifest, at: float = COMMIT_LAST, **changes: Any) -> None:
    bucket.put_signed(COMMIT, commit_to(manifest, **changes), at)


# What counts.


def test_a_reveal_that_counts(bucket: Bucket, cache: PayloadCache) -> None:
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


# Times, to the second (docs/protocol.md 7).


@pytest.mark.parametrize(
    ("key", "first", "last", "early", "late"),
    [
        (COMMIT, COMMIT_FIRST, COMMIT_LAST, Reason.COMMIT_EARLY, Reason.COMMIT_LATE),
        (MANIFEST, REVEAL_FIRST, REVEAL_LAST, Reason.REVEAL_EARLY, Reason.REVEAL_LATE),
        (PAYLOAD, REVEAL_FIRST, REVEAL_LAST, Reason.REVEAL_EARLY, Reason.REVEAL_LATE),
    ],
)
def test_each_object_counts_within_its_interval(
    bucket: Bucket, cache: PayloadCache, *, key: str, first: int, last: int, early: Reason, late: Reason
) -> None:
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


# Commitment, manifest and assignment.


def test_another_manifest_than_the_committed_one_does_not_count(bucket: Bucket, cache: PayloadCache) -> None:
    other = payload_bytes(ALICE, WINDOW, seed=1)
    bucket.put_signed(MANIFEST, manifest_of(ALICE, WINDOW, other), REVEAL_FIRST)
    bucket.put(PAYLOAD, other, REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.COMMIT_MISMATCH
    assert bucket.store.count("get", PAYLOAD) == 0


@pytest.mark.parametrize("assignment", ["00" * 32, None])
def test_training_on_other_data_does_not_count(bucket: Bucket, cache: PayloadCache, assignment: str | None) -> None:
    asked: list[int] = []

    def assign(uid: int) -> str | None:
        asked.append(uid)
        return assignment

    assert rejection(bucket, cache, assignment=assign) is Reason.WRONG_ASSIGNMENT
    assert asked == [5]
    assert bucket.store.count("get", PAYLOAD) == 0


# Size and hash.


@pytest.mark.parametrize("declared", [LAYOUT.min_payload_bytes - 1, LAYOUT.max_payload_bytes + 1])
def test_a_size_that_no_payload_has_is_refused_before_the_payload_is_looked_at(
    cache: PayloadCache, declared: int
) -> None:
    bucket = Bucket(ALICE)
    bucket.reveal(TIMES, BYTES, manifest_of(ALICE, WINDOW, BYTES, payload_bytes=declared))
    assert rejection(bucket, cache) is Reason.WRONG_SIZE
    assert bucket.store.count("head", PAYLOAD) == 0


@pytest.mark.parametrize("stored", [BYTES[:-1], BYTES + b"\0"])
def test_another_length_than_declared_is_refused_before_the_body_is_read(
    bucket: Bucket, cache: PayloadCache, stored: bytes
) -> None:
    bucket.put(PAYLOAD, stored, REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.WRONG_SIZE
    assert bucket.store.count("get", PAYLOAD) == 0


@pytest.mark.parametrize("stored", [bytes(len(BYTES)), other_payload(ALICE, WINDOW)])
def test_bytes_with_another_hash_do_not_count(bucket: Bucket, cache: PayloadCache, stored: bytes) -> None:
    bucket.put(PAYLOAD, stored, REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.WRONG_HASH
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
def test_an_illegal_payload_does_not_count_even_if_its_hash_was_committed(
    cache: PayloadCache, payload: bytes, reason: Reason
) -> None:
    bucket = Bucket(ALICE)
    bucket.reveal(TIMES, payload)
    assert rejection(bucket, cache) is reason


# Signed objects of other authors, windows and networks.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": WINDOW - 1}, Reason.WRONG_WINDOW),
        ({"genesis": "00" * 32}, Reason.WRONG_NETWORK),
        ({"uid": 6}, Reason.WRONG_IDENTITY),
    ],
)
def test_objects_signed_for_another_window_network_or_uid_do_not_count(
    bucket: Bucket, cache: PayloadCache, changes: dict[str, Any], reason: Reason
) -> None:
    honest = manifest_of(ALICE, WINDOW, BYTES)
    other = honest.model_copy(update=changes)
    commits(bucket, honest, commitment=other.digest)
    bucket.put_signed(MANIFEST, other, REVEAL_FIRST)
    assert rejection(bucket, cache) is reason
    commits(bucket, honest, **changes)
    assert rejection(bucket, cache) is reason


# Objects that are replaced while they are read.


def test_a_commitment_that_is_replaced_while_it_is_read_does_not_count(bucket: Bucket, cache: PayloadCache) -> None:
    copied = payload_bytes(ALICE, WINDOW, seed=9)
    late = manifest_of(ALICE, WINDOW, copied)
    bucket.put_signed(MANIFEST, late, REVEAL_LAST)
    bucket.put(PAYLOAD, copied, REVEAL_LAST)
    bucket.store.before = once("get", COMMIT, lambda: commits(bucket, late, REVEAL_LAST))
    assert rejection(bucket, cache) is Reason.OBJECT_DIFFERS
    assert rejection(bucket, cache) is Reason.COMMIT_LATE


@pytest.mark.parametrize(
    ("replacement", "reason"),
    [
        (other_payload(ALICE, WINDOW), Reason.WRONG_HASH),
        (BYTES + BYTES, Reason.WRONG_SIZE),
        (None, Reason.PAYLOAD_MISSING),
    ],
)
def test_a_payload_that_is_replaced_while_it_is_read_does_not_count(
    bucket: Bucket, cache: PayloadCache, replacement: bytes | None, reason: Reason
) -> None:
    def replace() -> None:
        if replacement is None:
            bucket.memory.delete([PAYLOAD])
        else:
            bucket.put(PAYLOAD, replacement, REVEAL_LAST)

    bucket.store.before = once("get", PAYLOAD, replace)
    assert rejection(bucket, cache) is reason


# What is missing, and what cannot be read.


@pytest.mark.parametrize(
    ("key", "missing"),
    [
        (COMMIT, Reason.COMMIT_MISSING),
        (MANIFEST, Reason.MANIFEST_MISSING),
        (PAYLOAD, Reason.PAYLOAD_MISSING),
    ],
)
def test_a_failing_store_is_no_verdict_and_a_missing_object_is_one(
    bucket: Bucket, cache: PayloadCache, key: str, missing: Reason
) -> None:
    for operation in ("head", "get"):
        bucket.store.before = failing(TransientError(Reason.STORE_BUSY, "for a test"), operation, key=key, times=1)
        with pytest.raises(TransientError):
            fetch(bucket, cache)
        assert fetch(bucket, cache).uid == 5
        cache.prune(WINDOW + 1)
    bucket.memory.delete([key])
    assert rejection(bucket, cache) is missing
