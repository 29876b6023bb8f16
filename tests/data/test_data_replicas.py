import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

import pytest

from templar import interrupt
from templar.data.replicas import (
    LONGEST_REST_SECONDS,
    PAUSE_SECONDS,
    REST_SECONDS,
    RETRY_SECONDS,
    ROUNDS,
    EndpointReport,
    Replicas,
)
from templar.errors import PermanentError, Reason, TransientError
from tests.support.errors import error_of, stopped
from tests.support.memory_store import MemoryStore, Read

DATA = b"0123456789"
AT_FAULT = [Reason.ACCESS_DENIED, Reason.BUCKET_MISSING, Reason.STORE_REFUSED]
COPY_DIFFERS = [Reason.OBJECT_MISSING, Reason.OBJECT_TRUNCATED, Reason.OBJECT_TOO_LARGE]


class Time:
    """A clock that only sleeping moves, and a chosen jitter: 1 gives the longest pauses."""

    def __init__(self):
        self.now = 1000.0
        self.slept: list[float] = []
        self.chance = 1.0

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time():
    return Time()


def stores_with(data, count=3):
    stores = [MemoryStore(f"store-{number}") for number in range(count)]
    for store in stores:
        store.put("key", data)
    return stores


def replicas_of(stores, time):
    return Replicas(stores, clock=lambda: time.now, sleep=time.sleep, chance=lambda: time.chance)


def failing(time, *fails):
    """Stores of which each fails in its way, and the replicas over them."""
    stores = stores_with(DATA, len(fails))
    for store, fail in zip(stores, fails, strict=True):
        store.fail = fail
    return stores, replicas_of(stores, time)


def unreachable(read):
    return TransientError(Reason.STORE_UNREACHABLE, f"no answer for {read.key}")


def well(read):
    del read


def refusing(reason):
    return lambda read: PermanentError(reason, f"{read.key} for a test")


def stopping(read):
    interrupt.request_stop()
    return unreachable(read)


def asked(stores):
    """How many reads each store has seen since the last call."""
    counts = [len(store.reads) for store in stores]
    for store in stores:
        store.reads.clear()
    return counts


def read(replicas, times=1):
    for _ in range(times):
        assert replicas.get("key", max_bytes=10) == DATA


def failure(replicas):
    return error_of(lambda: replicas.get("key", max_bytes=10))


def range_of(replicas, start, length):
    room = bytearray(length)
    replicas.read_into("key", start, memoryview(room), check=lambda: None)
    return bytes(room)


def test_reads_go_round():
    stores = stores_with(DATA)
    replicas = Replicas(stores)
    for _ in range(2):
        assert replicas.get("key", max_bytes=10) == DATA
        assert range_of(replicas, 3, 4) == b"3456"
        assert replicas.head("key").size == 10
    assert [[read.operation for read in store.reads] for store in stores] == [
        ["get", "get"],
        ["get_range", "get_range"],
        ["head", "head"],
    ]


@pytest.mark.parametrize(
    "operation",
    [lambda r: r.get("key", max_bytes=10), lambda r: range_of(r, 0, 10), lambda r: r.head("key")],
    ids=["get", "read_into", "head"],
)
def test_a_failing_store_is_passed_over(time, operation):
    stores, replicas = failing(time, unreachable, unreachable, well)
    expected = operation(Replicas(stores[2:]))
    stores[2].reads.clear()
    assert [operation(replicas) for _ in range(4)] == [expected] * 4
    assert asked(stores) == [1, 1, 4]
    assert time.slept == []


def test_a_rest_doubles_until_the_longest_and_a_success_ends_it(time):
    stores, replicas = failing(time, unreachable, well)
    read(replicas)
    rests = [min(LONGEST_REST_SECONDS, REST_SECONDS * 2**failures) for failures in range(8)]
    assert rests[0] < rests[-2] == rests[-1]
    for rest in rests:
        asked(stores)
        time.now += rest - 0.001
        read(replicas, 3)
        assert asked(stores) == [0, 3]
        time.now += 0.001
        read(replicas, 3)
        assert asked(stores) == [1, 3]  # one read tries it, and fails over
    stores[0].fail = well
    time.now += LONGEST_REST_SECONDS
    asked(stores)
    read(replicas, 10)
    assert asked(stores) == [5, 5]
    stores[0].fail = unreachable
    read(replicas, 3)
    assert asked(stores) == [1, 3]
    time.now += REST_SECONDS  # the first rest again
    read(replicas, 2)
    assert asked(stores) == [1, 2]


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (1.0, 1.0)])
def test_a_rest_and_a_pause_have_jitter(time, chance, share):
    time.chance = chance
    stores, replicas = failing(time, unreachable, well)
    read(replicas)
    time.now += REST_SECONDS * share - 0.001
    assert [report.resting for report in replicas.report()] == [True, False]
    time.now += 0.001
    assert [report.resting for report in replicas.report()] == [False, False]
    stores[1].fail = unreachable
    failure(replicas)
    assert time.slept == [PAUSE_SECONDS * share, 2 * PAUSE_SECONDS * share]


def test_when_all_rest_the_one_whose_rest_ends_first_is_tried(time):
    stores = stores_with(DATA)
    replicas = replicas_of(stores, time)
    for store in (stores[2], stores[1]):
        store.fail = unreachable
        read(replicas, 3)
        time.now += 0.1
    stores[0].fail = stopping
    asked(stores)
    with stopped():
        replicas.get("key", max_bytes=10)
    assert asked(stores) == [1, 0, 0]  # a stop ends a read that fails
    assert all(report.resting for report in replicas.report())
    for store in stores:
        store.fail = well
    read(replicas, 4)
    assert asked(stores) == [0, 0, 4]
    assert [report.resting for report in replicas.report()] == [True, True, False]


@pytest.mark.parametrize(
    ("fails", "family", "reason"),
    [
        ([unreachable] * 2, TransientError, Reason.STORE_UNREACHABLE),
        ([refusing(AT_FAULT[0])] * 3, PermanentError, AT_FAULT[0]),
        ([refusing(COPY_DIFFERS[0])] * 3, PermanentError, COPY_DIFFERS[0]),
        ([refusing(AT_FAULT[0]), refusing(COPY_DIFFERS[0])], PermanentError, AT_FAULT[0]),  # an error is never absence
        # The endpoint that does not answer may have the object; the others do not have it.
        ([refusing(AT_FAULT[0]), refusing(COPY_DIFFERS[0]), unreachable], TransientError, Reason.STORE_UNREACHABLE),
    ],
)
def test_a_read_that_every_store_fails_is_repeated_only_for_those_that_may_have_the_object(time, fails, family, reason):
    stores, replicas = failing(time, *fails)
    for _ in range(3 if family is PermanentError else 1):
        error = failure(replicas)
        assert (type(error), error.reason) == (family, reason)
        assert (
            f"all {len(fails)} endpoints failed: store-0: [{fails[0](Read('get', 'key', 0)).reason}] " in error.message
        )
        assert all(f"store-{number}: [" in error.message for number in range(len(fails)))
        assert asked(stores) == [ROUNDS if fail is unreachable else 1 for fail in fails]
    repeats = ROUNDS - 1 if family is TransientError else 0
    assert time.slept == [PAUSE_SECONDS * 2**number for number in range(repeats)]


def test_stores_that_hang_are_not_asked_again(time):
    """A store that hangs has tried the request several times itself."""
    store = stores_with(DATA, 1)[0]

    def hang(read):
        time.now += RETRY_SECONDS
        return unreachable(read)

    store.fail = hang
    assert failure(replicas_of([store], time)).reason is Reason.STORE_UNREACHABLE
    assert asked([store]) == [1]
    assert time.slept == []


@pytest.mark.parametrize(
    ("reason", "rests"), [*((reason, True) for reason in AT_FAULT), *((reason, False) for reason in COPY_DIFFERS)]
)
def test_an_endpoint_that_refuses_rests_and_one_that_lacks_an_object_does_not(time, reason, *, rests):
    stores, replicas = failing(time, refusing(reason), well)
    read(replicas, 4)
    assert asked(stores) == [1 if rests else 2, 4]
    assert [(report.last_failure, report.resting) for report in replicas.report()] == [(reason, rests), (None, False)]


def test_a_callers_mistake_does_not_count_against_an_endpoint(time):
    stores, replicas = failing(time, refusing(Reason.BAD_KEY), well)
    assert failure(replicas).reason is Reason.BAD_KEY
    assert asked(stores) == [1, 0]
    assert not any(report.failures for report in replicas.report())


def test_an_object_is_absent_only_if_every_endpoint_says_so(time):
    stores = stores_with(DATA)
    replicas = replicas_of(stores, time)
    assert replicas.head("other") is None
    assert asked(stores) == [1, 1, 1]
    stores[2].put("other", b"1234")
    for _ in range(3):
        assert replicas.head("other").size == 4
    assert not any(report.failures for report in replicas.report())


def test_each_endpoint_has_its_figures(time):
    stores = stores_with(DATA)

    def slow(read):
        time.now += 0.25
        return unreachable(read) if read.operation == "get_range" else None

    stores[1].fail = slow
    stores[2].fail = refusing(Reason.ACCESS_DENIED)
    replicas = replicas_of(stores, time)
    assert [astuple(report)[1:] for report in replicas.report()] == [(0, 0, 0.0, 0, None, False)] * 3
    for _ in range(2):
        read(replicas)
        replicas.get("key", max_bytes=10)
        range_of(replicas, 0, 3)
        replicas.head("key")
    assert replicas.report() == (
        EndpointReport("store-0", reads=6, num_bytes=26, seconds=0.0, failures=0, last_failure=None, resting=False),
        EndpointReport("store-1", 3, 20, 0.75, 1, Reason.STORE_UNREACHABLE, resting=True),
        EndpointReport("store-2", 1, 0, 0.0, 1, Reason.ACCESS_DENIED, resting=True),
    )


def test_one_outage_in_several_threads_is_one_failure(time):
    stores = stores_with(DATA, 2)
    together = threading.Barrier(4)

    def fail_together(read):
        together.wait(30)
        return unreachable(read)

    stores[0].fail = fail_together
    replicas = replicas_of(stores, time)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, [replicas] * 8))  # four each
    assert replicas.report()[0].failures == 4
    stores[0].fail = unreachable
    time.now += REST_SECONDS
    assert not replicas.report()[0].resting
