"""What a test expects of an error: its family, its reason code, and words of its message."""

from contextlib import contextmanager

import pytest

from templar import interrupt
from templar.errors import TemplarError
from templar.interrupt import StoppedError


@contextmanager
def raising(family, reason, *words, match=None):
    """Expect an error of this family and reason inside, whose text has these words."""
    with pytest.raises(family, match=match) as caught:
        yield caught
    assert caught.value.reason is reason
    for word in words:
        assert str(word) in str(caught.value)


def refusal(call, family, reason, *words):
    """Expect that a call raises such an error."""
    with raising(family, reason, *words):
        call()


def error_of(call):
    with pytest.raises(TemplarError) as caught:
        call()
    return caught.value


def reason_of(call):
    return error_of(call).reason


@contextmanager
def stopped():
    """Expect StoppedError inside, and take the request to stop back."""
    try:
        with pytest.raises(StoppedError):
            yield
    finally:
        interrupt.clear_stop()
