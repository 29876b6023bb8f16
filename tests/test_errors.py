import copy
import pickle

import pytest

from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError


@pytest.mark.parametrize("family", [TransientError, PermanentError, RejectedError])
def test_an_error_shows_its_reason_and_survives_a_copy_and_a_process_border(family: type[TemplarError]) -> None:
    """Hosts pickle exceptions of their own runs, for example into a failed state."""
    error = family(Reason.WRONG_SIZE, "at window 3")
    for again in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is family
        assert (again.reason, str(again)) == (Reason.WRONG_SIZE, "[wrong_size] at window 3")
