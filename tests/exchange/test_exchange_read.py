from collections.abc import Callable
from functools import partial

import pytest

from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Decision
from templar.exchange.signed import Found, Network, Sealed, read_signed, seal
from templar.store.base import ObjectInfo
from tests.support.scripted_store import failing, once
from tests.support.subnet import GENESIS, NETUID, NETWORK, Bucket, member

ALICE, BOB = member(5), member(6)
KEY = window_key(Kind.DECISION, 3, 5)


def decision(roster: str | None = None, window: int = 3) -> Decision:
    return Decision(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=window, roster=roster)


@pytest.fixture
def bucket() -> Bucket:
    bucket = Bucket(ALICE)
    bucket.put_signed(KEY, decision(), at=1000.9)
    return bucket


def read(
    bucket: Bucket, check: Callable[[ObjectInfo], None] | None = None, network: Network = NETWORK, window: int = 3
) -> Found[Decision] | None:
    return read_signed(bucket.store, KEY, Decision, network=network, author=ALICE.neuron, window=window, check=check)


def rejection(call: Callable[[], object]) -> Reason:
    with pytest.raises(RejectedError) as caught:
        call()
    return caught.value.reason


def test_what_is_there_comes_with_its_time_and_its_signature(bucket: Bucket) -> None:
    found = read(bucket)
    assert found is not None
    assert found == Found(decision(), 1000, found.signature)
    assert Sealed(found.body, found.signature).encode() == bucket.memory.get(KEY, max_bytes=1000)


def test_nothing_is_a_definite_404() -> None:
    empty = Bucket(ALICE)
    assert read(empty) is None
    assert empty.store.calls == [("head", KEY)]


def test_the_check_comes_before_the_body(bucket: Bucket) -> None:
    def check(info: ObjectInfo) -> None:
        assert info.last_modified == 1000
        raise RejectedError(Reason.COMMIT_LATE, "for a test")

    assert rejection(lambda: read(bucket, check)) is Reason.COMMIT_LATE
    assert bucket.store.count("get") == 0


def test_what_is_too_long_is_not_read(bucket: Bucket) -> None:
    bucket.put(KEY, b"x" * (Decision.max_bytes + 1), at=1000)
    assert rejection(lambda: read(bucket)) is Reason.WRONG_SIZE
    assert bucket.store.count("get") == 0
    bucket.put(KEY, b"x" * Decision.max_bytes, at=1000)
    assert rejection(lambda: read(bucket)) is Reason.MALFORMED


def test_network_author_and_window_are_checked(bucket: Bucket) -> None:
    assert rejection(lambda: read(bucket, network=Network(NETUID, "00" * 32))) is Reason.WRONG_NETWORK
    assert rejection(lambda: read(bucket, window=4)) is Reason.WRONG_WINDOW
    foreign = decision().model_copy(update={"uid": 6, "hotkey": BOB.hotkey.address})
    bucket.put(KEY, seal(foreign, BOB.hotkey).encode(), at=1000)
    assert rejection(lambda: read(bucket)) is Reason.WRONG_IDENTITY


@pytest.mark.parametrize(
    "replacement",
    [
        seal(decision("aa" * 32), ALICE.hotkey).encode(),  # legal, and longer
        seal(decision(), ALICE.hotkey).encode(),  # legal, as long, and even the same body
        b"x",
        b"x" * 10_000,
        None,
    ],
)
@pytest.mark.parametrize("moment", ["before the body", "after the body"])
def test_what_is_replaced_while_it_is_read_does_not_count(
    bucket: Bucket, replacement: bytes | None, moment: str
) -> None:
    def replace() -> None:
        if replacement is None:
            bucket.memory.delete([KEY])
        else:
            bucket.put(KEY, replacement, at=1001)

    if moment == "before the body":
        bucket.store.before = once("get", KEY, replace)
    else:
        bucket.store.after = once("get", KEY, replace)
    found = rejection(lambda: read(bucket))
    torn = replacement == b"x" and moment == "before the body"
    assert found is (Reason.MALFORMED if torn else Reason.OBJECT_DIFFERS)


@pytest.mark.parametrize("operation", ["head", "get"])
def test_a_store_that_fails_says_nothing_about_the_object(bucket: Bucket, operation: str) -> None:
    for error in (
        TransientError(Reason.STORE_BUSY, "for a test"),
        PermanentError(Reason.ACCESS_DENIED, "for a test"),
        PermanentError(Reason.BUCKET_MISSING, "for a test"),
    ):
        bucket.store.before = failing(error, operation)
        with pytest.raises(type(error)) as caught:
            partial(read, bucket)()
        assert caught.value is error
