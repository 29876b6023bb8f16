import sqlite3
from pathlib import Path

import pytest

from templar.errors import PermanentError, Reason
from templar.scoring.book import SCHEMA_VERSION, ScoreBook
from templar.scoring.ratings import Rating
from templar.scoring.scores import ScoreCard
from tests.support.state_writer import HOTKEYS, run_and_kill

ALICE = ScoreCard(Rating(30.5, 4.25), 0.125, 0.5, 3.5, last_reveal=7)
BOB = ScoreCard(Rating(20.0, 8.0), -0.25, 1.0, -2.0, last_reveal=None)


def refused(path: Path) -> PermanentError:
    with pytest.raises(PermanentError) as caught:
        ScoreBook(path)
    assert caught.value.reason is Reason.BAD_STATE_FILE
    assert str(path) in str(caught.value)
    return caught.value


def test_cards_are_read_back_exactly_and_strangers_are_fresh(tmp_path: Path) -> None:
    book = ScoreBook(tmp_path / "new" / "scores.sqlite")
    assert book.cards(["alice"]) == {"alice": ScoreCard()}
    book.record(7, {"alice": ALICE, "bob": BOB}, b"{}")
    assert book.cards(["bob", "alice", "carol"]) == {"bob": BOB, "alice": ALICE, "carol": ScoreCard()}


def test_a_window_is_entered_once(tmp_path: Path) -> None:
    book = ScoreBook(tmp_path / "scores.sqlite")
    assert book.evidence(7) is None
    book.record(7, {"alice": ALICE}, b"first")
    with pytest.raises(ValueError, match="window 7 is in the score book already"):
        book.record(7, {"alice": BOB}, b"second")
    assert (book.evidence(7), book.cards(["alice"])) == (b"first", {"alice": ALICE})
    book.record(8, {"alice": BOB}, b"third")
    assert book.cards(["alice"]) == {"alice": BOB}


def test_a_failed_entry_changes_nothing_and_the_book_goes_on(tmp_path: Path) -> None:
    book = ScoreBook(tmp_path / "scores.sqlite")
    book.record(7, {"alice": ALICE}, b"first")
    broken = ScoreCard(Rating(float("nan"), 1.0))
    with pytest.raises(ValueError, match="window 8: a score card is not finite"):
        book.record(8, {"bob": BOB, "carol": broken}, b"second")
    assert book.evidence(8) is None
    assert book.cards(["bob"]) == {"bob": ScoreCard()}
    book.record(8, {"bob": BOB}, b"second")
    assert book.cards(["alice", "bob"]) == {"alice": ALICE, "bob": BOB}


def test_a_hotkey_keeps_its_past_whatever_its_uid(tmp_path: Path) -> None:
    """Cards know no uids: the newcomer on an old uid is a stranger, and who leaves and returns is not."""
    path = tmp_path / "scores.sqlite"
    book = ScoreBook(path)
    book.record(1, {"alice": ALICE}, b"1")
    book.record(2, {"newcomer on the same uid": ScoreCard(final=0.5)}, b"2")
    assert book.cards(["alice", "newcomer on the same uid"])["alice"] == ALICE


def test_reopening_finds_everything(tmp_path: Path) -> None:
    path = tmp_path / "scores.sqlite"
    book = ScoreBook(path)
    book.record(7, {"alice": ALICE}, b"evidence")
    book.close()
    again = ScoreBook(path)
    assert (again.cards(["alice"]), again.evidence(7)) == ({"alice": ALICE}, b"evidence")


def test_old_evidence_is_forgotten_and_cards_stay(tmp_path: Path) -> None:
    book = ScoreBook(tmp_path / "scores.sqlite")
    for window in range(5):
        book.record(window, {"alice": ALICE}, b"%d" % window)
    book.forget(3)
    assert [book.evidence(window) for window in range(5)] == [None, None, None, b"3", b"4"]
    assert book.cards(["alice"]) == {"alice": ALICE}


@pytest.mark.parametrize("after", [1, 7, 40])
def test_a_kill_leaves_whole_windows(tmp_path: Path, after: int) -> None:
    """Evidence and cards belong to the same last window, and nothing that was acknowledged is gone."""
    path = tmp_path / "scores.sqlite"
    acknowledged = run_and_kill("book", path, after=after)
    book = ScoreBook(path)
    last = acknowledged + 1 if book.evidence(acknowledged + 1) is not None else acknowledged
    assert [book.evidence(window) for window in range(1, last + 2)] == [b"%d" % n for n in range(1, last + 1)] + [None]
    assert {card.last_reveal for card in book.cards(HOTKEYS).values()} == {last}
    book.record(last + 1, {"alice": ALICE}, b"goes on")


def test_a_file_that_is_no_book_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scores.sqlite"
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    assert "move the file away to start with fresh scores" in str(refused(path))
    assert path.read_bytes().startswith(b"not a database")


def test_a_folder_in_the_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scores.sqlite"
    path.mkdir()
    refused(path)


def test_a_book_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scores.sqlite"
    ScoreBook(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    connection.close()
    assert f"schema {SCHEMA_VERSION + 1} is newer than this release's {SCHEMA_VERSION}" in str(refused(path))
