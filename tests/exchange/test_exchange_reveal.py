from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from templar.canonical import sha256_hex
from templar.chain.clock import SimulatedClock
from templar.errors import Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules, Submission, fetch_reveal, publish_commit, publish_reveal
from templar.exchange.signed import Sealed
from templar.gradient.layout import Layout
from templar.hparams import Gradient
from templar.timeline import WindowTimes
from tests.support.scripted_store import failing, once
from tests.support.subnet import (
    ASSIGNMENT,
    LAYOUT,
    NETWORK,
    RULES,
    Bucket,
    commit_to,
    fields_of,
    manifest_of,
    member,
    other_payload,
    payload_bytes,
    signed_anyhow,
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


def submission(found: Submission, manifest: Manifest, committed_at: int) -> Submission:
    """What must have been found; a signature is another one each time."""
    signatures = (found.commit_signature, found.manifest_signature)
    return Submission(manifest, committed_at, REVEAL_FIRST, *signatures)


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
    assert found == submission(found, manifest, COMMIT_LAST)
    commit = Sealed(commit_to(manifest), found.commit_signature)
    assert commit.encode() == bucket.memory.get(COMMIT, max_bytes=1000)
    assert Sealed(manifest, found.manifest_signature).encode() == bucket.memory.get(MANIFEST, max_bytes=1000)
    assert cache.read(WINDOW, found.manifest.payload_sha256) == BYTES


def test_the_later_of_manifest_and_payload_is_the_reveals_time(bucket: Bucket, cache: PayloadCache) -> None:
    bucket.put(PAYLOAD, BYTES, REVEAL_LAST)
    assert fetch(bucket, cache).revealed_at == REVEAL_LAST
    bucket.put_signed(MANIFEST, manifest_of(ALICE, WINDOW, BYTES), REVEAL_LAST)
    bucket.put(PAYLOAD, BYTES, REVEAL_FIRST)
    assert fetch(bucket, cache).revealed_at == REVEAL_LAST


def test_objects_are_read_in_a_fixed_order(bucket: Bucket, cache: PayloadCache) -> None:
    fetch(bucket, cache)
    signed = [(operation, key) for key in (COMMIT, MANIFEST) for operation in ("head", "get", "head")]
    assert bucket.store.calls == [*signed, ("head", PAYLOAD), ("get", PAYLOAD)]


# Times, to the second (docs/protocol.md 7).


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (COMMIT_FIRST - 0.001, Reason.COMMIT_EARLY),
        (COMMIT_FIRST, None),
        (COMMIT_LAST, None),
        (COMMIT_LAST + 0.999, None),
        (COMMIT_LAST + 1, Reason.COMMIT_LATE),
    ],
)
def test_a_commitment_counts_within_its_window(
    bucket: Bucket, cache: PayloadCache, at: float, reason: Reason | None
) -> None:
    commits(bucket, manifest_of(ALICE, WINDOW, BYTES), at)
    if reason is None:
        assert fetch(bucket, cache).committed_at == int(at)
    else:
        assert rejection(bucket, cache) is reason
        assert bucket.store.count("get") == 0


@pytest.mark.parametrize("kind", [MANIFEST, PAYLOAD])
@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (REVEAL_FIRST - 0.001, Reason.REVEAL_EARLY),
        (REVEAL_FIRST, None),
        (REVEAL_LAST, None),
        (REVEAL_LAST + 0.999, None),
        (REVEAL_LAST + 1, Reason.REVEAL_LATE),
    ],
)
def test_a_reveal_counts_within_the_grace(
    bucket: Bucket, cache: PayloadCache, kind: str, at: float, reason: Reason | None
) -> None:
    bucket.put(kind, bucket.memory.get(kind, max_bytes=10_000), at)
    if reason is None:
        assert fetch(bucket, cache).revealed_at == max(int(at), REVEAL_FIRST)
    else:
        assert rejection(bucket, cache) is reason
        assert bucket.store.count("get", kind) == 0


def test_an_inclusive_close_is_a_setting(bucket: Bucket, cache: PayloadCache) -> None:
    rules = RULES.model_copy(update={"inclusive_close": True})
    inclusive = RevealRules(NETWORK, WindowTimes(WINDOW, OPENED, CLOSED, rules), assigned)
    bucket.reveal(TIMES, BYTES, revealed=CLOSED)
    assert rejection(bucket, cache) is Reason.REVEAL_EARLY
    assert fetch_reveal(ALICE.neuron, bucket.store, inclusive, cache).revealed_at == REVEAL_FIRST - 1


# What is missing.


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (COMMIT, Reason.COMMIT_MISSING),
        (MANIFEST, Reason.MANIFEST_MISSING),
        (PAYLOAD, Reason.PAYLOAD_MISSING),
    ],
)
def test_each_object_is_needed(bucket: Bucket, cache: PayloadCache, key: str, reason: Reason) -> None:
    bucket.memory.delete([key])
    assert rejection(bucket, cache) is reason


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


@pytest.mark.parametrize(
    "stored", [bytes(len(BYTES)), BYTES[:-1] + bytes([BYTES[-1] ^ 1]), other_payload(ALICE, WINDOW)]
)
def test_bytes_with_another_hash_do_not_count(bucket: Bucket, cache: PayloadCache, stored: bytes) -> None:
    bucket.put(PAYLOAD, stored, REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.WRONG_HASH
    assert not cache.has(sha256_hex(stored), window=WINDOW, uid=5, hotkey=ALICE.hotkey.address)


# Illegal payloads whose hash was committed.


def other_layout() -> bytes:
    """A payload of as many bytes for a model of other shapes."""
    settings = Gradient(momentum_decay=0.9, topk_compression=4, target_chunk=4, magnitude_bits=0, use_dct=False)
    layout = Layout.of({"embed": (8, 8), "other": (8,)}, settings, "sparseloco")
    return payload_bytes(ALICE, WINDOW, layout=layout)


def other_version() -> bytes:
    return BYTES[:4] + bytes([BYTES[4] + 1]) + BYTES[5:]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (bytes(len(BYTES)), Reason.MALFORMED),
        (BYTES[:-4] + bytes(4), Reason.MALFORMED),
        (other_version(), Reason.WRONG_VERSION),
        (other_layout(), Reason.WRONG_SHAPES),
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
    cache: PayloadCache, changes: dict[str, Any], reason: Reason
) -> None:
    honest = manifest_of(ALICE, WINDOW, BYTES)
    first = Bucket(ALICE)
    first.reveal(TIMES, BYTES)
    commits(first, honest, **changes)
    assert rejection(first, cache) is reason
    second = Bucket(ALICE)
    other = honest.model_copy(update=changes)
    second.reveal(TIMES, BYTES, honest)
    commits(second, other, **fields_of(commit_to(honest), commitment=other.digest))
    second.put_signed(MANIFEST, other, REVEAL_FIRST)
    assert rejection(second, cache) is reason


def test_a_forged_signature_does_not_count(bucket: Bucket, cache: PayloadCache) -> None:
    manifest = manifest_of(ALICE, WINDOW, BYTES)
    bucket.put(MANIFEST, signed_anyhow(Kind.MANIFEST, fields_of(manifest), MALLORY.hotkey), REVEAL_FIRST)
    assert rejection(bucket, cache) is Reason.BAD_SIGNATURE
    commit = fields_of(commit_to(manifest))
    bucket.put(COMMIT, signed_anyhow(Kind.COMMIT, commit, MALLORY.hotkey), COMMIT_LAST)
    assert rejection(bucket, cache) is Reason.BAD_SIGNATURE


# Copies and replays.


def test_a_copied_payload_under_an_own_manifest_does_not_count(bucket: Bucket, cache: PayloadCache) -> None:
    fetch(bucket, cache)
    copycat = Bucket(MALLORY)
    copycat.reveal(TIMES, BYTES)  # committed in time, as if the bytes had been known
    for memory in (cache, PayloadCache(cache._root.parent / "empty", LAYOUT)):
        with pytest.raises(RejectedError) as caught:
            fetch(copycat, memory)
        assert caught.value.reason is Reason.WRONG_IDENTITY
    assert fetch(bucket, cache).uid == 5


def test_last_windows_objects_do_not_count_again(bucket: Bucket, cache: PayloadCache) -> None:
    following = WindowTimes(WINDOW + 1, CLOSED, CLOSED + 60, RULES)
    for kind in (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT):
        data = bucket.memory.get(window_key(kind, WINDOW, 5), max_bytes=10_000)
        interval = following.commit_interval if kind is Kind.COMMIT else following.reveal_interval
        bucket.put(window_key(kind, WINDOW + 1, 5), data, interval.first)
    with pytest.raises(RejectedError) as caught:
        fetch_reveal(ALICE.neuron, bucket.store, RevealRules(NETWORK, following, assigned), cache)
    assert caught.value.reason is Reason.WRONG_WINDOW


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


# Stores that fail.


@pytest.mark.parametrize("key", [COMMIT, MANIFEST, PAYLOAD])
@pytest.mark.parametrize("operation", ["head", "get"])
def test_a_failing_store_is_no_verdict(bucket: Bucket, cache: PayloadCache, key: str, operation: str) -> None:
    bucket.store.before = failing(TransientError(Reason.STORE_BUSY, "for a test"), operation, key=key, times=1)
    with pytest.raises(TransientError):
        fetch(bucket, cache)
    assert fetch(bucket, cache).uid == 5


# Publishing.


def test_what_a_miner_publishes_counts(cache: PayloadCache, tmp_path: Path) -> None:
    bucket, clock = Bucket(ALICE), SimulatedClock(COMMIT_FIRST)
    manifest, payload = manifest_of(ALICE, WINDOW, BYTES), tmp_path / "payload"
    payload.write_bytes(BYTES)
    for now in (COMMIT_FIRST, COMMIT_LAST):
        bucket.hand.now = now
        publish_commit(bucket.store, manifest, ALICE.hotkey, clock=clock, deadline=COMMIT_LAST + 1)
    assert BYTES[:16] not in bucket.memory.get(COMMIT, max_bytes=1000)
    assert manifest.payload_sha256.encode() not in bucket.memory.get(COMMIT, max_bytes=1000)
    bucket.hand.now = REVEAL_FIRST
    clock.sleep_until(REVEAL_FIRST)
    for _ in range(2):
        receipts = publish_reveal(bucket.store, manifest, ALICE.hotkey, payload, clock=clock, deadline=REVEAL_LAST + 1)
    assert [receipt.last_modified for receipt in receipts] == [REVEAL_FIRST, REVEAL_FIRST]
    found = fetch(bucket, cache)
    assert found == submission(found, manifest, COMMIT_FIRST)
