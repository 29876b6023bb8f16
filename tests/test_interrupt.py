import threading

import pytest

from templar import interrupt
from templar.errors import Reason
from templar.interrupt import StoppedError
from tests.support.errors import raising


@pytest.fixture(autouse=True)
def _no_stop_is_left():
    yield
    interrupt.clear_stop()


def test_a_request_stops_the_next_check_and_every_wait_until_it_is_cleared():
    interrupt.request_stop()
    for stopped in (interrupt.check_stop, lambda: interrupt.wait(0), lambda: interrupt.wait(3600)):
        with raising(StoppedError, Reason.STOPPED):
            stopped()
    interrupt.clear_stop()
    interrupt.check_stop()
    interrupt.wait(0)


def test_a_request_wakes_a_thread_that_waits():
    outcomes: list[BaseException] = []

    def wait():
        try:
            interrupt.wait(3600)
        except StoppedError as error:
            outcomes.append(error)

    sleeper = threading.Thread(target=wait)
    sleeper.start()
    interrupt.request_stop()
    sleeper.join()
    assert len(outcomes) == 1
