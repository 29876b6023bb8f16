import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from templar.errors import PermanentError, Reason, TransientError
from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, MinerFacts
from templar.scoring.evidence_chain import SCHEMA_VERSION, ScoreBook
from templar.scoring.standing import FRESH, ScoreCard, Standing
from tests.support.facts import AUTHOR, absent, bucket, cards_of, hotkey, like, record_of, revealed, window_of
from tests.support.state_writer import UIDS, run_and_kill

HPARAMS = load_hparams("templar-2.1.3")


def next_of(book: ScoreBook, window: int, *miners: MinerFacts, **changes: Any) -> Evidence:
    """The evidence of a window that follows what is in the book."""
    seen = miners or (revealed(2, 0.2), revealed(3, 0.1))
    return conclude(window_of(*seen, window=window, **changes), book.standing, HPARAMS, AUTHOR)


def entered(book: ScoreBook, window: int, *miners: MinerFacts) -> Evidence:
    evidence = next_of(book, window, *miners)
    book.record(evidence)
    return evidence


def refused(path: Path) -> PermanentError:
    with pytest.raises(PermanentError) as caught:
        ScoreBook(path)
    assert caught.value.reason is Reason.BAD_STATE_FILE
    assert str(path) in str(caught.value)
    return caught.value


@pytest.fixture
def book(tmp_path: Path) -> ScoreBook:
    return ScoreBook(tmp_path / "new" / "scores.sqlite")


# Windows.


def test_an_empty_book_remembers_nobody(book: ScoreBook) -> None:
    assert book.standing == Standing()
    assert book.standing.card(hotkey(2)) == FRESH
    assert book.evidence(1) is None
    book.forget(100)


def test_what_was_concluded_stands_in_the_newest_evidence(book: ScoreBook) -> None:
    copier = revealed(4, repeat=like(3, 0.99))
    evidence = entered(book, 7, revealed(2, 0.2), revealed(3, 0.1, applied=False), copier, absent(5))
    standing = book.standing
    assert standing == evidence.standing
    assert (standing.window, standing.evidence) == (7, evidence.digest)
    assert standing.cards == {hotkey(uid): card for uid, card in cards_of(evidence).items()}
    assert standing.bans == {hotkey(4): 207, bucket(4): 207}
    assert (set(standing.payloads), standing.applied) == ({2, 3}, {2, 4}), "the copy is compared with nothing"
    assert book.standing.card(hotkey(3)) == record_of(evidence, 3).after
    assert book.standing.card(hotkey(77)) == FRESH


def test_evidence_is_read_back_exactly(book: ScoreBook) -> None:
    evidence = entered(book, 7)
    assert book.evidence(7) == evidence
    assert book.evidence(7).digest == evidence.digest  # type: ignore[union-attr]
    assert (book.evidence(6), book.evidence(8)) == (None, None)


def test_each_window_follows_the_one_before(book: ScoreBook) -> None:
    """Whether the validator saw the windows between or not."""
    first, second, third = entered(book, 7), entered(book, 8), entered(book, 20)
    assert [each.previous for each in (first, second, third)] == [None, first.digest, second.digest]
    assert [each.previous_window for each in (first, second, third)] == [None, 7, 8]
    for before, after in ((first, second), (second, third)):
        assert cards_of(before) == {record.uid: record.before for record in after.miners}


def test_a_window_is_entered_once(book: ScoreBook) -> None:
    first = entered(book, 7)
    for again in (first, next_of(book, 7, revealed(9))):
        with pytest.raises(ValueError, match="window 7 is in the score book already"):
            book.record(again)
    assert book.evidence(7) == first
    assert book.standing == first.standing


@pytest.mark.parametrize("window", [7, 8, 9])
def test_evidence_that_does_not_follow_the_newest_is_refused(book: ScoreBook, window: int) -> None:
    """Such as one that was concluded from an older book."""
    stale = next_of(book, window)
    entered(book, 6)
    with pytest.raises(ValueError, match=f"window {window} does not follow window 6, the newest in the book"):
        book.record(stale)
    assert book.evidence(window) is None
    entered(book, window)


def test_an_empty_book_may_begin_in_the_middle(book: ScoreBook, tmp_path: Path) -> None:
    """With evidence that somebody else's book led to; never a book that has begun."""
    elsewhere = ScoreBook(tmp_path / "elsewhere.sqlite")
    entered(elsewhere, 6)
    seventh, eighth, ninth = (entered(elsewhere, window) for window in (7, 8, 9))
    with pytest.raises(ValueError, match="window 7 does not follow"):
        book.record(seventh)
    book.record(seventh, first=True)
    assert book.standing == seventh.standing
    with pytest.raises(ValueError, match="window 9 does not follow window 7"):
        book.record(ninth, first=True)
    book.record(eighth, first=True)
    assert book.standing == eighth.standing


def test_an_older_window_is_refused(book: ScoreBook) -> None:
    entered(book, 7)
    with pytest.raises(ValueError, match="window 5"):
        book.record(next_of(book, 5))


def test_a_failed_entry_changes_nothing_and_the_book_goes_on(book: ScoreBook) -> None:
    first = entered(book, 7)
    (pages,) = book._file.execute("PRAGMA page_count")[0]
    book._file.execute(f"PRAGMA max_page_count = {pages}")
    second = next_of(book, 8, *(revealed(uid) for uid in range(2, 60)))
    with pytest.raises(TransientError) as caught:
        book.record(second)
    assert caught.value.reason is Reason.LOCAL_FILE
    assert book.evidence(8) is None
    assert book.standing == first.standing
    book._file.execute(f"PRAGMA max_page_count = {pages + 1000}")
    book.record(second)
    assert book.standing == second.standing


def test_reopening_finds_everything(tmp_path: Path) -> None:
    path = tmp_path / "scores.sqlite"
    book = ScoreBook(path)
    evidence = entered(book, 7)
    book.close()
    again = ScoreBook(path)
    assert (again.evidence(7), again.standing) == (evidence, evidence.standing)
    assert entered(again, 8).previous == evidence.digest


def test_old_evidence_is_forgotten_but_for_the_newest(book: ScoreBook) -> None:
    kept = [entered(book, window) for window in range(1, 6)]
    book.forget(3)
    assert [book.evidence(window) for window in range(1, 6)] == [None, None, *kept[2:]]
    book.forget(100)
    assert [book.evidence(window) for window in range(1, 6)] == [None] * 4 + [kept[-1]]
    assert book.standing == kept[-1].standing, "what is remembered stays"
    entered(book, 6)


def test_a_hotkey_keeps_its_past_whatever_its_uid(book: ScoreBook) -> None:
    """The newcomer on an old uid is a stranger, and who leaves and returns is not."""
    past = record_of(entered(book, 1), 2).after
    second = entered(book, 2, revealed(2, hotkey=hotkey(50)), revealed(3))
    assert record_of(second, 2).before == FRESH
    assert book.standing.card(hotkey(2)) == past
    third = entered(book, 3, revealed(9, hotkey=hotkey(2)), revealed(3))
    assert record_of(third, 9).before == past
    assert [slash.event for slash in record_of(third, 9).slashes] == ["registered_again"]


# Kills.


@pytest.mark.parametrize("after", [1, 7, 40])
def test_a_kill_leaves_whole_windows(tmp_path: Path, after: int) -> None:
    """Each follows from the one before, and nothing that was acknowledged is gone."""
    path = tmp_path / "scores.sqlite"
    acknowledged = run_and_kill("book", path, after=after)
    book = ScoreBook(path)
    last = acknowledged + 1 if book.evidence(acknowledged + 1) is not None else acknowledged
    found = [book.evidence(window) for window in range(1, last + 2)]
    assert found[-1] is None
    previous = None
    for window, evidence in enumerate(found[:-1], 1):
        assert evidence is not None
        assert (evidence.window, evidence.previous) == (window, previous)
        previous = evidence.digest
        assert {card.last_reveal for card in cards_of(evidence).values()} == {window}
        assert set(cards_of(evidence)) == set(UIDS)
    assert book.standing.window == last
    entered(book, last + 1)


# Files of earlier releases, and of none.

FIRST_SCHEMA = """
CREATE TABLE cards (
    hotkey TEXT PRIMARY KEY, mu REAL NOT NULL, sigma REAL NOT NULL, binary_average REAL NOT NULL,
    sync REAL NOT NULL, final REAL NOT NULL, last_reveal INTEGER
) STRICT;
CREATE TABLE windows (window INTEGER PRIMARY KEY, evidence BLOB NOT NULL) STRICT;
PRAGMA user_version=1;
"""
"""As the first release made it, which kept cards beside evidence of another form."""
OLD_CARDS = {
    hotkey(2): (30.123456789012345, 4.25, 0.125, 0.5, 3.5, 7),
    hotkey(3): (20.0, 8.0, -0.25, 1.0, -2.0, None),
    hotkey(4): (25.0, 25 / 3, 0.0, 0.0, -0.0, 0),
}


def old_book(path: Path, *, evidence: bool = True) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FIRST_SCHEMA)
        rows = [(key, *values) for key, values in OLD_CARDS.items()]
        connection.executemany("INSERT INTO cards VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        if evidence:
            connection.execute("INSERT INTO windows VALUES (7, ?)", (b'{"body": "of another form"}',))
        connection.commit()


def of_old(key: str) -> ScoreCard:
    names = ("mu", "sigma", "binary_average", "sync", "final", "last_reveal")
    return ScoreCard(**dict(zip(names, OLD_CARDS[key], strict=True)))


@pytest.mark.parametrize("evidence", [True, False])
def test_a_book_of_the_first_release_goes_on_where_it_was(tmp_path: Path, evidence: bool) -> None:
    path = tmp_path / "scores.sqlite"
    old_book(path, evidence=evidence)
    for _ in range(2):
        book = ScoreBook(path)
        assert book.standing == Standing(departed={key: of_old(key) for key in OLD_CARDS})
        assert book.standing.card(hotkey(3)) == of_old(hotkey(3))
        assert book.standing.card(hotkey(99)) == FRESH
        assert book.evidence(7) is None, "nobody could read it"
        book.close()
    book = ScoreBook(path)
    found = entered(book, 8, revealed(2), absent(5, hotkey=hotkey(3)))
    assert found.previous is None
    assert record_of(found, 2).before == of_old(hotkey(2))
    assert record_of(found, 5).slashes[0].event == "missing", "which uid it had before is not known"
    assert [each.hotkey for each in found.departed] == [hotkey(4)]
    assert book.standing == found.standing
    assert book._file.execute("PRAGMA user_version") == [(SCHEMA_VERSION,)]


def test_a_book_that_cannot_be_brought_up_to_date_stays_as_it_was(tmp_path: Path) -> None:
    """Half of the work is none: the release that made it can still use it."""
    path = tmp_path / "scores.sqlite"
    old_book(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE beginning (in_the_way INTEGER)")
        connection.commit()
        before = "\n".join(connection.iterdump())
    with pytest.raises(TransientError) as caught:
        ScoreBook(path)
    assert caught.value.reason is Reason.LOCAL_FILE
    with closing(sqlite3.connect(path)) as connection:
        assert "\n".join(connection.iterdump()) == before
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)


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
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    assert f"schema {SCHEMA_VERSION + 1} is newer than this release's {SCHEMA_VERSION}" in str(refused(path))


def test_a_veteran_of_the_first_release_is_paid_at_once(tmp_path: Path) -> None:
    """Nobody begins again because of an upgrade."""
    path = tmp_path / "scores.sqlite"
    old_book(path)
    found = entered(ScoreBook(path), 8, revealed(2, 0.2), revealed(9, 0.1))
    assert record_of(found, 2).final > record_of(found, 9).final
    assert record_of(found, 2).after.mu > 30
