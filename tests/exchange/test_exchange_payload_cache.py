from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError
from templar.exchange.payload_cache import PayloadCache, _decoded_and_size
from templar.gradient.codec.wire import decode
from tests.support.errors import raising, reason_of
from tests.support.subnet import LAYOUT, member, payload_bytes

WINDOW = 10
ALICE, BOB = member(5), member(6)
BYTES = payload_bytes(ALICE, WINDOW)
DIGEST = sha256_hex(BYTES)


@pytest.fixture(autouse=True)
def _empty_memory():
    """Forget the payloads that other tests decoded."""
    _decoded_and_size.cache_clear()


@pytest.fixture
def cache(tmp_path):
    return PayloadCache(tmp_path / "payloads", LAYOUT)


def admit(cache, data=BYTES, digest=None, *, window=WINDOW):
    digest = digest or sha256_hex(data)
    cache.admit(data, digest, window=window, uid=5, hotkey=ALICE.hotkey.address)


def has(cache, digest=DIGEST):
    return cache.has(digest, window=WINDOW, uid=5, hotkey=ALICE.hotkey.address)


def test_an_admitted_payload_can_be_read_and_applied(cache, tmp_path):
    assert not has(cache)
    admit(cache)
    admit(cache)
    assert has(cache)
    assert cache.read(WINDOW, DIGEST) == BYTES
    assert cache.payload(WINDOW, DIGEST) == decode(BYTES, LAYOUT)
    assert cache.payload(WINDOW, DIGEST) is cache.payload(WINDOW, DIGEST)
    assert PayloadCache(tmp_path / "payloads", LAYOUT).read(WINDOW, DIGEST) == BYTES
    assert [path.name for path in (tmp_path / "payloads").rglob("*") if path.is_file()] == [DIGEST]


@pytest.mark.parametrize(
    ("data", "digest", "reason"),
    [
        (BYTES, "00" * 32, Reason.WRONG_HASH),
        (BYTES[: LAYOUT.min_payload_bytes - 1], None, Reason.WRONG_SIZE),
        (BYTES + bytes(LAYOUT.max_payload_bytes), None, Reason.WRONG_SIZE),
        (BYTES[:-1], None, Reason.MALFORMED),
        (bytes(len(BYTES)), None, Reason.MALFORMED),
        (payload_bytes(BOB, WINDOW), None, Reason.WRONG_IDENTITY),
        (payload_bytes(ALICE, WINDOW + 1), None, Reason.WRONG_WINDOW),
    ],
)
def test_illegal_bytes_are_rejected_and_not_kept(cache, tmp_path, data, digest, reason):
    for _ in range(2):
        assert reason_of(lambda: admit(cache, data, digest)) is reason
    assert not has(cache, digest or sha256_hex(data))
    assert list((tmp_path / "payloads").rglob("*")) == []


def test_a_cached_payload_of_another_author_is_rejected(cache):
    admit(cache)
    for uid, hotkey in ((6, BOB.hotkey.address), (5, BOB.hotkey.address), (6, ALICE.hotkey.address)):
        with raising(RejectedError, Reason.WRONG_IDENTITY):
            cache.has(DIGEST, window=WINDOW, uid=uid, hotkey=hotkey)


@pytest.mark.parametrize("left", [b"", bytes(len(BYTES)), payload_bytes(BOB, WINDOW)])
def test_a_damaged_file_counts_as_absent_and_can_be_fetched_again(cache, tmp_path, left):
    admit(cache)
    (tmp_path / "payloads" / str(WINDOW) / DIGEST).write_bytes(left)
    _decoded_and_size.cache_clear()
    assert not has(cache)
    assert reason_of(lambda: cache.payload(WINDOW, DIGEST)) is Reason.OBJECT_MISSING
    assert reason_of(lambda: cache.read(WINDOW, DIGEST)) is Reason.OBJECT_MISSING
    admit(cache)
    assert has(cache)
    assert cache.read(WINDOW, DIGEST) == BYTES


def test_an_impossible_length_is_refused(cache):
    for impossible in (0, LAYOUT.min_payload_bytes - 1, LAYOUT.max_payload_bytes + 1):
        assert reason_of(partial(cache.check_size, impossible, uid=5)) is Reason.WRONG_SIZE
    for legal in (LAYOUT.min_payload_bytes, len(BYTES), LAYOUT.max_payload_bytes):
        cache.check_size(legal, uid=5)


def test_old_windows_are_pruned(cache):
    for window in (8, 9, 10, 100):
        admit(cache, payload_bytes(ALICE, window), window=window)
    assert not cache.has(DIGEST, window=9, uid=5, hotkey=ALICE.hotkey.address), "it is another window's"
    assert cache.prune(10) == 2
    assert cache.prune(10) == 0
    assert reason_of(lambda: cache.read(9, sha256_hex(payload_bytes(ALICE, 9)))) is Reason.OBJECT_MISSING
    assert cache.read(10, DIGEST) == BYTES
    assert cache.read(100, sha256_hex(payload_bytes(ALICE, 100)))


def test_many_threads_may_admit_the_same(cache, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: admit(cache), range(64)))
    assert [path.name for path in (tmp_path / "payloads" / str(WINDOW)).iterdir()] == [DIGEST]
    assert cache.read(WINDOW, DIGEST) == BYTES
