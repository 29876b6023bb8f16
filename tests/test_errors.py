import copy
import errno
import pickle

import pytest
from tokenizers import Tokenizer as Backend

from templar.errors import PermanentError, Reason, RejectedError, TransientError, as_reader_failure, parsing
from templar.interrupt import StoppedError
from tests.support.errors import raising
from tests.support.foreign_bytes import PANICKING


@pytest.mark.parametrize("family", [TransientError, PermanentError, RejectedError])
def test_an_error_shows_its_reason_and_survives_a_copy_and_a_process_border(family):
    """Hosts pickle exceptions of their own runs, for example into a failed state."""
    error = family(Reason.WRONG_SIZE, "at window 3")
    for again in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is family
        assert (again.reason, str(again)) == (Reason.WRONG_SIZE, "[wrong_size] at window 3")


class TestParsing:
    def run(self, error=None, *, size=7):
        with parsing("file of uid 3", Reason.CHECKPOINT_BROKEN, size=size, most=7, remedy="ask uid 3"):
            if error is not None:
                raise error

    def test_bytes_are_bounded_before_the_parser_runs(self):
        self.run()
        with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "file of uid 3", "8 bytes", "at most 7", "ask uid 3"):
            self.run(AssertionError("it ran"), size=8)

    @pytest.mark.parametrize(
        "kind", [TypeError, RecursionError, ValueError, KeyError, OSError, RuntimeError, Exception]
    )
    def test_an_error_is_short_and_names_the_object(self, kind):
        with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "file of uid 3", kind.__name__, "ask uid 3") as caught:
            self.run(kind("\x1b[31m\n" + "x" * 10**6))
        assert len(str(caught.value)) < 500
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "many files"), OSError(errno.EIO, "disk")])
    def test_a_fault_of_this_machine_is_no_verdict(self, error):
        with raising(TransientError, Reason.READER_FAILED, "file of uid 3"):
            self.run(error)

    @pytest.mark.parametrize("error", [StoppedError("stop"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
    def test_a_request_to_stop_passes(self, error):
        for boundary in (lambda: self.run(error), lambda: self.read(error)):
            with pytest.raises(type(error)):
                boundary()

    def test_the_projects_own_error_passes(self):
        with raising(TransientError, Reason.STORE_BUSY):
            self.run(TransientError(Reason.STORE_BUSY, "for a test"))

    def read(self, error):
        with as_reader_failure("object of uid 3"):
            raise error

    def test_a_panic_of_a_library_is_a_failure(self):
        """It is no Exception."""
        with pytest.raises(BaseException, match="precompiled_charsmap") as caught:
            Backend.from_str(PANICKING)
        assert not isinstance(caught.value, Exception)
        with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "PanicException"):
            self.run(caught.value)
        with raising(TransientError, Reason.READER_FAILED, "object of uid 3"):
            self.read(caught.value)
