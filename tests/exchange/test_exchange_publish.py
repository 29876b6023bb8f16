from collections.abc import Callable

import pytest

from templar.chain.clock import SimulatedClock
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit
from templar.exchange.publish import (
    COMPARE_BYTES,
    PublishReceipt,
    publish_body,
    publish_bytes,
    publish_file,
    publish_in_time,
)
from templar.exchange.signed import seal
from tests.support.errors import error_of, raising, refusal
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import ScriptedStore, failing, once
from tests.support.subnet import GENESIS, NETUID, member

ALICE = member(5)
KEY = window_key(Kind.DECISION, 3, 5)
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
BODY = Commit(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=3, commitment="aa" * 32)
OTHER = BODY.model_copy(update={"commitment": "bb" * 32})
SMALL, LARGE = b"small", bytes(COMPARE_BYTES + 5)

Publish = Callable[..., PublishReceipt]


@pytest.fixture
def clock():
    return SimulatedClock(1000.25)


@pytest.fixture
def store(clock):
    return ScriptedStore(MemoryStore(clock=clock.now))


@pytest.fixture(params=["bytes", "small file", "large file", "body"])
def publish(request, store, clock, tmp_path):
    """Publish one thing, or with `other=True` another one, under the same key."""

    def do(*, other=False, **times):
        if request.param == "body":
            return publish_body(store, KEY, OTHER if other else BODY, ALICE.hotkey, clock=clock, **times)
        data = LARGE if request.param == "large file" else SMALL
        data = data[:-1] if other else data
        if request.param == "bytes":
            return publish_bytes(store, KEY, data, clock=clock, **times)
        path = tmp_path / "file"
        path.write_bytes(data)
        return publish_file(store, KEY, path, clock=clock, **times)

    return do


def writes(store):
    return store.count("put") + store.count("put_if_absent") + store.count("put_file")


def stored(store):
    return store.inner.get(KEY, max_bytes=len(LARGE))


def differs(call):
    refusal(call, PermanentError, Reason.OBJECT_DIFFERS, "nothing was overwritten")


def test_it_is_stored_once(publish, store, clock):
    first = publish()
    assert first == PublishReceipt(KEY, len(stored(store)), 1000)
    data = stored(store)
    clock.sleep_until(2000)
    assert publish() == first
    assert stored(store) == data
    assert writes(store) == 1


def test_other_bytes_are_never_overwritten(publish, store):
    publish()
    data = stored(store)
    differs(lambda: publish(other=True))
    assert stored(store) == data
    assert writes(store) == 1


@pytest.mark.parametrize("operations", [("head",), ("put_if_absent", "put_file")])
def test_a_store_that_failed_before_it_wrote_is_written_to_again(publish, store, operations):
    store.before = failing(BUSY, *operations, times=1)
    assert error_of(publish) is BUSY
    assert store.inner.head(KEY) is None
    assert publish().size == len(stored(store))


def test_a_lost_answer_does_no_harm(publish, store, clock):
    store.after = failing(BUSY, "put_if_absent", "put_file", times=1)
    with pytest.raises(TransientError):
        publish()
    data = stored(store)
    clock.sleep_until(1010)
    for deadline in (None, 999):  # a stored object is in time
        again = publish(deadline=deadline)
        assert again == PublishReceipt(KEY, len(data), 1000)
    assert stored(store) == data
    assert writes(store) == 1


def test_nothing_is_written_from_the_deadline_on(publish, store, clock):
    clock.sleep_until(1005)
    for deadline in (1005.0, 1004.999):
        with raising(PermanentError, Reason.NO_TIME_LEFT):
            publish(deadline=deadline)
    assert writes(store) == 0
    assert publish(deadline=1005.001).last_modified == 1005


def test_what_is_stored_too_early_is_put_again_byte_for_byte(publish, store, clock):
    publish()
    data = stored(store)
    clock.sleep_until(1010)
    differs(lambda: publish(other=True, first=1005))
    with raising(PermanentError, Reason.NO_TIME_LEFT):
        publish(first=1005, deadline=1010)
    assert publish(first=1000).last_modified == 1000
    assert publish(first=1005, deadline=1011) == PublishReceipt(KEY, len(data), 1010)
    assert stored(store) == data
    assert writes(store) == 2


def test_a_write_that_does_not_show_may_be_repeated(publish, store):
    def lose(operation, key):
        if operation.startswith("put"):
            store.inner.delete([key])

    store.after = lose
    with raising(TransientError, Reason.OBJECT_MISSING):
        publish()


@pytest.mark.parametrize("body", [BODY, OTHER])
def test_of_a_faster_process_only_the_same_body_is_accepted(clock, store, body):
    faster = seal(body, ALICE.hotkey).encode()
    store.before = once("put_if_absent", KEY, lambda: store.inner.put(KEY, faster))
    if body is BODY:
        receipt = publish_body(store, KEY, BODY, ALICE.hotkey, clock=clock)
        assert receipt.size == len(faster)
    else:
        differs(lambda: publish_body(store, KEY, BODY, ALICE.hotkey, clock=clock))
    assert stored(store) == faster


def test_a_store_that_ignores_conditions_is_read_back(publish, store):
    store.ignores_conditions = True
    first = publish()
    data = stored(store)
    differs(lambda: publish(other=True))
    assert publish() == first
    assert stored(store) == data
    assert writes(store) == 1


def test_small_files_are_compared_byte_by_byte_and_large_ones_by_length(tmp_path):
    store = ScriptedStore(MemoryStore())
    path = tmp_path / "file"
    path.write_bytes(b"a" * COMPARE_BYTES)
    publish_file(store, KEY, path)
    path.write_bytes(b"b" * COMPARE_BYTES)
    differs(lambda: publish_file(store, KEY, path))
    store.inner.delete([KEY])
    path.write_bytes(b"a" * (COMPARE_BYTES + 1))
    publish_file(store, KEY, path)
    path.write_bytes(b"b" * (COMPARE_BYTES + 1))
    assert publish_file(store, KEY, path).size == COMPARE_BYTES + 1
    assert store.count("get", KEY) == 2
    path.write_bytes(b"a" * (COMPARE_BYTES + 2))
    differs(lambda: publish_file(store, KEY, path))


def test_a_missed_deadline_is_a_report_and_another_failure_an_error(store, clock):
    report = publish_in_time(lambda: (publish_bytes(store, KEY, SMALL, clock=clock, deadline=1),))
    assert (report.receipts, report.reason) == ((), Reason.NO_TIME_LEFT)
    assert KEY in report.detail
    store.inner.put(KEY, b"x")
    differs(lambda: publish_in_time(lambda: (publish_bytes(store, KEY, SMALL, clock=clock),)))
