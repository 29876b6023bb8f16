import copy
import pickle
import re

import pytest

from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError

FAMILIES = [TransientError, PermanentError, RejectedError]


def test_reasons_are_words_that_can_be_searched_for() -> None:
    assert all(reason.value == reason.name.lower() for reason in Reason)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", reason) for reason in Reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_message_begins_with_the_reason(family: type[TemplarError]) -> None:
    error = family(Reason.WRONG_SIZE, "uid 3: 10 bytes, 20 were promised")
    assert error.reason is Reason.WRONG_SIZE
    assert str(error) == "[wrong_size] uid 3: 10 bytes, 20 were promised"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_survives_a_copy_and_a_process_border(family: type[TemplarError]) -> None:
    """Hosts pickle exceptions of their own runs, for example into a failed state."""
    error = family(Reason.DESYNC, "at window 3")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is family
        assert (again.reason, str(again)) == (Reason.DESYNC, "[desync] at window 3")
