import threading
import time

import pytest

from templar.errors import Reason
from templar.exchange import gather as gather_module
from templar.exchange.gather import HEAD_START_SECONDS, THREADS_PER_PLACE, Workers, ask_in_turn
from templar.store.deadline import check_deadline, current

LONG = 600.0


class Work:
    """Uids whose calls return when a test says so, or at their deadline if they look at it."""

    def __init__(self) -> None:
        self.going_on: dict[int, threading.Event] = {}
        self.started: list[int] = []
        self.lock = threading.Lock()

    def __call__(self, uid: int) -> str:
        with self.lock:
            self.started.append(uid)
        event = self.going_on.get(uid)
        if event is not None:
            deadline = current()
            with deadline.closing(event.set):
                event.wait()
                check_deadline(f"uid {uid}")
        return f"result {uid}"

    def hold(self, *uids: int) -> None:
        for uid in uids:
            self.going_on[uid] = threading.Event()


def test_results_are_returned_as_they_are_ready() -> None:
    work = Work()
    work.hold(1)
    workers = Workers(work, 2)
    workers.start(1, LONG)
    workers.start(2, LONG)
    assert not workers.has_room()
    assert workers.results(LONG) == [(2, "result 2")]
    assert workers.has_room()
    assert workers.is_running(1)
    work.going_on[1].set()
    assert workers.results(LONG) == [(1, "result 1")]
    assert not workers.is_busy
    assert workers.results(LONG) == []
    workers.close()


def test_with_concurrency_1_calls_run_in_the_callers_thread() -> None:
    threads: list[threading.Thread] = []
    workers = Workers(lambda uid: threads.append(threading.current_thread()), 1)
    workers.start(1, LONG)
    assert not workers.has_room()  # until its result was taken
    assert workers.results(0.0) == [(1, None)]
    assert threads == [threading.current_thread()]
    workers.close()


def test_slow_calls_do_not_block_others_and_spare_ones_leave_the_last_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "SLOW_SECONDS", 0.0)
    work = Work()
    work.hold(*range(100))
    workers = Workers(work, 2)
    last_places = range(2 * (THREADS_PER_PLACE - 1), 2 * THREADS_PER_PLACE)
    for uid in range(last_places.stop):
        assert workers.has_room(spare=True) is (uid not in last_places)
        assert workers.has_room()
        workers.start(uid, LONG)
    assert not workers.has_room()
    workers.close()


def test_a_cancelled_call_ends_with_its_error() -> None:
    work = Work()
    work.hold(1, 2)
    workers = Workers(work, 2)
    workers.start(1, LONG)
    workers.start(2, LONG)
    with pytest.raises(Exception, match="uid 1") as caught:
        workers.cancel([1], LONG)
    assert getattr(caught.value, "reason", None) is Reason.TOO_SLOW
    assert not workers.is_running(1)
    assert workers.is_running(2)
    workers.close()


def test_the_result_of_a_cancelled_call_is_dropped() -> None:
    release, ended = threading.Event(), threading.Event()

    def work(uid: int) -> int:
        if uid == 1:
            release.wait()  # looks at no deadline
            ended.set()
        return uid

    workers = Workers(work, 2)
    workers.start(1, LONG)
    started = time.monotonic()
    assert workers.cancel([1], 0.05) == []
    assert time.monotonic() - started >= 0.05
    assert not workers.is_busy
    release.set()
    ended.wait()
    workers.start(2, LONG)
    assert workers.results(LONG) == [(2, 2)]  # and not what uid 1 brought
    workers.close()


def test_buckets_that_are_asked_in_turn_keep_one_another_from_nothing() -> None:
    """The first one hangs; the second is asked after a head start, and the rest is left when that is enough."""
    asked, opened = [], threading.Event()

    def work(uid: int) -> int:
        asked.append(uid)
        if uid == 1:
            opened.wait(60)
        return 10 * uid

    started = time.monotonic()
    answers = ask_in_turn(work, [1, 2, 3], seconds=30.0, concurrency=2)
    assert next(answers) == (2, 20)
    assert time.monotonic() - started < 10 * HEAD_START_SECONDS
    answers.close()
    opened.set()
    assert asked == [1, 2]
    asked.clear()
    assert list(ask_in_turn(work, [1, 2, 3], seconds=30.0, concurrency=1)) == [(1, 10), (2, 20), (3, 30)]
