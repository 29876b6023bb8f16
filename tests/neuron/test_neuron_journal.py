import sqlite3

import pytest

from templar.errors import PermanentError, Reason
from templar.neuron.journal import Applied, Journal, Status
from tests.support.errors import raising
from tests.support.kill_points import run_and_kill

ROOT = "a" * 64
ROSTER = "b" * 64


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "home" / "journal.sqlite")


@pytest.mark.parametrize("status", list(Status))
def test_a_window_is_claimed_and_closed_once(journal, status):
    assert journal.status(4) is None
    for window in (7, 3, 4):
        journal.claim(window)
    assert journal.status(4) is Status.CLAIMED
    assert journal.open_claims() == (3, 4, 7)
    journal.close_window(4, status, Reason.WINDOW_PASSED)
    journal.claim(4)
    assert journal.status(4) is status
    assert (4 in journal.open_claims()) == (status is Status.CLAIMED)


def results(journal, step, *windows):
    return [journal.result(window, step) for window in windows]


def test_a_step_has_a_result_once_it_is_entered(journal):
    """Steps that finish together are entered together."""
    assert results(journal, "train", 4) == [None]
    journal.enter(4, "train", '{"loss": 1.5}')
    journal.enter(4, "commit", "{}")
    journal.enter(5, "train", "null")
    assert results(journal, "train", 4, 5) == ['{"loss": 1.5}', "null"]
    assert results(journal, "commit", 4, 5) == ["{}", None]
    with pytest.raises(sqlite3.Error):
        journal.enter_together(6, {"compress": "{}", "train": object()})
    assert results(journal, "compress", 6) == [None]
    journal.enter_together(6, {"compress": "{}", "train": "null"})
    assert (results(journal, "compress", 6), results(journal, "train", 6)) == (["{}"], ["null"])


def test_applied_windows_and_their_roots(journal):
    assert journal.applied(4) is None
    for applied in (Applied(4, ROSTER, ROOT), Applied(5, None, "c" * 64), Applied(7, ROSTER, "d" * 64)):
        journal.enter_applied(applied)
        assert journal.applied(applied.window) == applied
    assert journal.roots(5, 7) == {5: "c" * 64, 7: "d" * 64}
    journal.enter_applied(Applied(4, None, "e" * 64))
    assert journal.applied(4) == Applied(4, None, "e" * 64)


def test_applied_windows_are_confirmed_one_by_one(journal):
    for window in (4, 5, 6):
        journal.enter_applied(Applied(window, ROSTER, ROOT))
    journal.confirm(5)
    assert [applied.window for applied in journal.unconfirmed(0, 99)] == [4, 6]
    assert journal.unconfirmed(5, 6) == (Applied(6, ROSTER, ROOT),)
    journal.enter_applied(Applied(5, None, ROOT))
    assert [applied.window for applied in journal.unconfirmed(0, 99)] == [4, 5, 6], "what replaced it is not confirmed"


def test_old_windows_and_a_rolled_back_settlement_are_forgotten(journal):
    """Of which other steps stay."""
    for window in (3, 4, 5, 6):
        journal.claim(window)
        journal.enter(window, "compress", "{}")
        journal.enter(window, "settle", "null")
        journal.enter_applied(Applied(window, None, ROOT))
    journal.forget_settlement(5)
    assert journal.roots(0, 99) == {3: ROOT, 4: ROOT}
    assert results(journal, "settle", 3, 4, 5, 6) == ["null", "null", None, None]
    assert results(journal, "compress", 3, 4, 5, 6) == ["{}"] * 4
    assert journal.open_claims() == (3, 4, 5, 6)
    journal.forget(4)
    assert journal.open_claims() == (4, 5, 6)
    assert journal.roots(0, 99) == {4: ROOT}
    assert results(journal, "compress", 3, 4) == [None, "{}"]


def test_entered_windows_survive_a_kill(tmp_path):
    path = tmp_path / "journal.sqlite"
    last = run_and_kill("journal", path, after=30)
    journal = Journal(path)
    for window in range(1, last + 1):
        assert journal.status(window) is Status.FINISHED
        assert journal.result(window, "settle") == str(window)
        assert journal.applied(window) == Applied(window, None, f"{window:064x}")
    assert journal.open_claims() in ((), (last + 1,))


def test_a_file_that_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"this is no database at all, however long it may be" * 100)
    with raising(PermanentError, Reason.BAD_STATE_FILE, path, "move the neuron's folder away"):
        Journal(path)
