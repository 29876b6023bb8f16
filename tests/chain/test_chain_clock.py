import heapq
import signal
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar import interrupt
from templar.chain.clock import SimulatedClock, SystemClock


def expected_wake_ups(start, plans):
    """A model of simulated time without threads: who wakes when, ties by index; no wait for what is past."""
    queue = [(start, index, 0) for index in range(len(plans))]
    heapq.heapify(queue)
    trace = []
    while queue:
        now, index, step = heapq.heappop(queue)
        while step < len(plans[index]):
            wake = now + plans[index][step]
            trace.append((now, index, step))
            step += 1
            if wake > now:
                heapq.heappush(queue, (wake, index, step))
                break
        else:
            trace.append((now, index, "end"))
    return trace


@given(plans=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.25]), max_size=6), max_size=6))
@settings(max_examples=30)
def test_sleepers_wake_in_the_order_of_time_then_index(plans):
    clock, trace = SimulatedClock(100.0), []

    def participant(index):
        def live():
            for step, seconds in enumerate(plans[index]):
                trace.append((clock.now(), index, step))
                clock.sleep_until(clock.now() + seconds)
            trace.append((clock.now(), index, "end"))

        return live

    clock.run([participant(index) for index in range(len(plans))])
    assert trace == expected_wake_ups(100.0, plans)
    assert clock.now() == max([100.0, *(100.0 + sum(plan) for plan in plans)])


def test_computations_of_one_instant_overlap_and_the_others_go_on():
    clock, trace = SimulatedClock(0.0, threads=2), []
    both, third_went_on = threading.Barrier(2, timeout=60), threading.Event()

    def computing(index):
        def work():
            both.wait()  # passes only if two computations run at once
            assert third_went_on.wait(60)  # and only while the third participant runs
            return index

        return lambda: trace.append(("computed", clock.compute(work), clock.now()))

    def third():
        trace.append(("third", clock.now()))
        third_went_on.set()
        clock.sleep_until(5.0)
        trace.append(("third", clock.now()))

    clock.run([computing(0), computing(1), third])
    assert trace == [("third", 0.0), ("computed", 0, 0.0), ("computed", 1, 0.0), ("third", 5.0)]


class BrokenError(Exception):
    pass


class TornError(BaseException):
    pass


def test_errors_of_a_computation_and_of_the_first_participant():
    clock, caught, before = SimulatedClock(0.0, threads=2), [], set(threading.enumerate())

    def fail():
        raise BrokenError("in the worker")

    def live():
        try:
            clock.compute(fail)
        except BrokenError as error:
            caught.append(str(error))

    clock.run([live, live])
    assert caught == ["in the worker"] * 2
    with pytest.raises(BrokenError):
        clock.run([fail, lambda: caught.append("started")])
    assert len(caught) == 2
    with pytest.raises(BrokenError):
        clock.run([lambda: clock.sleep_until(9.0), lambda: clock.compute(fail)])
    assert set(threading.enumerate()) <= before  # no thread outlives a run


@pytest.mark.parametrize(("error", "culprit"), [(BrokenError, 0), (TornError, 1), (KeyboardInterrupt, 2)])
def test_the_first_failure_unwinds_the_others_and_is_raised(error, culprit):
    clock, unwound, after = SimulatedClock(0.0, threads=2), [], []

    def fail():
        raise error("first")

    def participant(index):
        def live():
            try:
                clock.sleep_until(1.0 + index)
                if index == culprit:
                    fail()
                if index == 0:
                    clock.compute(lambda: None)
                clock.sleep_until(100.0)
                after.append(index)
            except Exception:
                if index != culprit:
                    raise AssertionError("unwinding must not look like an error") from None
                raise
            finally:
                unwound.append(index)

        return live

    with pytest.raises(error, match="first"):
        clock.run([participant(index) for index in range(3)])
    assert sorted(unwound) == [0, 1, 2]
    assert after == []
    assert clock.now() == 1.0 + culprit
    ended = []
    clock.run([lambda: ended.append(clock.now())])  # the clock still works
    assert ended == [1.0 + culprit]


def test_outside_of_a_run_the_caller_moves_the_time_and_misuse_is_refused():
    clock, errors = SimulatedClock(0.0), []

    def stranger():
        for call in (lambda: clock.sleep_until(5.0), lambda: clock.compute(int), lambda: clock.run([])):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    def participant():
        thread = threading.Thread(target=stranger)
        thread.start()
        thread.join()
        clock.compute(stranger)

    clock.run([participant])
    assert len(errors) == 6
    assert clock.now() == 0.0
    clock.sleep_until(2.5)
    clock.sleep_until(1.0)
    clock.run([])
    assert clock.now() == 2.5
    assert clock.compute(threading.current_thread) is threading.current_thread()
    for never in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="cannot sleep"):
            clock.sleep_until(never)
    with pytest.raises(ValueError, match="threads"):
        SimulatedClock(0.0, threads=0)


def test_an_interrupt_of_the_caller_unwinds_the_participants():
    clock, unwound, caller = SimulatedClock(0.0), [], threading.main_thread().ident

    def live():
        try:
            signal.pthread_kill(caller, signal.SIGINT)
            while True:
                clock.sleep_until(clock.now() + 1)
        finally:
            unwound.append(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            clock.run([live])
    finally:
        signal.signal(signal.SIGINT, before)
    assert unwound == [1]


def test_the_system_clock_sleeps_until_the_time_or_a_stop_request():
    clock, asleep, outcome = SystemClock(), threading.Event(), []
    target = clock.now() + 0.02
    clock.sleep_until(target)
    assert clock.now() >= target
    clock.sleep_until(target - 100)
    assert clock.compute(lambda: "done") == "done"

    def sleeper():
        asleep.set()
        try:
            clock.sleep_until(clock.now() + 100_000)
        except interrupt.StoppedError as error:
            outcome.append(error)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert asleep.wait(60)
    interrupt.request_stop()
    thread.join(60)
    assert not thread.is_alive()
    assert len(outcome) == 1
