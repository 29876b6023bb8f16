"""The score book: whole windows that follow each other, over kills."""

import pytest

from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence_chain import ScoreBook
from templar.scoring.standing import FRESH, Standing
from tests.support.facts import AUTHOR, absent, cards_of, hotkey, like, record_of, revealed, window_of
from tests.support.kill_points import UIDS, run_and_kill

HPARAMS = load_hparams("templar-2.1.3")


def next_of(book, window, *miners, **changes):
    """The evidence of a window that follows what is in the book."""
    seen = miners or (revealed(2, 0.2), revealed(3, 0.1))
    return conclude(window_of(*seen, window=window, **changes), book.standing, HPARAMS, AUTHOR)


def entered(book, window, *miners):
    evidence = next_of(book, window, *miners)
    book.record(evidence)
    return evidence


@pytest.fixture
def book(tmp_path):
    return ScoreBook(tmp_path / "new" / "scores.sqlite")


# Windows.


def test_the_standing_is_that_of_the_newest_evidence(book):
    assert (book.standing, book.evidence(7)) == (Standing(), None)
    copier = revealed(4, repeat=like(3, 0.99))
    evidence = entered(book, 7, revealed(2, 0.2), revealed(3, 0.1, applied=False), copier, absent(5))
    standing = book.standing
    assert standing == evidence.standing
    assert (standing.window, standing.evidence) == (7, evidence.digest)
    assert standing.cards == {hotkey(uid): card for uid, card in cards_of(evidence).items()}
    assert (set(standing.payloads), standing.applied) == ({2, 3}, {2, 4}), "the copy is compared with nothing"
    assert book.standing.card(hotkey(3)) == record_of(evidence, 3).after
    assert book.standing.card(hotkey(77)) == FRESH


def test_each_window_follows_the_one_before_and_reopening_finds_everything(tmp_path):
    """Whether the validator saw the windows between or not."""
    path, before = tmp_path / "scores.sqlite", None
    for window in (7, 8, 20):
        book = ScoreBook(path)
        evidence = entered(book, window)
        book.close()
        if before is None:
            assert (evidence.previous, evidence.previous_window) == (None, None)
        else:
            assert (evidence.previous, evidence.previous_window) == (before.digest, before.window)
            assert cards_of(before) == {record.uid: record.before for record in evidence.miners}
        again = ScoreBook(path)
        assert (again.evidence(window), again.standing) == (evidence, evidence.standing)
        before = evidence


def test_a_window_is_entered_once_and_follows_the_newest(book):
    stale = {window: next_of(book, window) for window in (5, 8)}
    first = entered(book, 7)
    for again in (first, next_of(book, 7, revealed(9))):
        with pytest.raises(ValueError, match="window 7 is in the score book already"):
            book.record(again)
    for window, evidence in stale.items():
        with pytest.raises(ValueError, match=f"window {window} does not follow window 7, the newest in the book"):
            book.record(evidence)
        assert book.evidence(window) is None
    assert book.evidence(7) == first
    assert book.standing == first.standing
    entered(book, 9)


def test_an_empty_book_may_begin_in_the_middle(book, tmp_path):
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


def test_old_evidence_is_forgotten_but_for_the_newest(book):
    kept = [entered(book, window) for window in range(1, 6)]
    book.forget(3)
    assert [book.evidence(window) for window in range(1, 6)] == [None, None, *kept[2:]]
    book.forget(100)
    assert [book.evidence(window) for window in range(1, 6)] == [None] * 4 + [kept[-1]]
    assert book.standing == kept[-1].standing, "what is remembered stays"
    entered(book, 6)


# Kills.


def test_a_kill_leaves_whole_windows(tmp_path):
    """Each follows from the one before, and nothing that was acknowledged is gone."""
    path = tmp_path / "scores.sqlite"
    acknowledged = run_and_kill("book", path, after=7)
    book = ScoreBook(path)
    last = acknowledged + 1 if book.evidence(acknowledged + 1) is not None else acknowledged
    found = [book.evidence(window) for window in range(1, last + 2)]
    assert found[-1] is None
    previous = None
    for window, evidence in enumerate(found[:-1], 1):
        assert (evidence.window, evidence.previous) == (window, previous)
        previous = evidence.digest
        assert {card.last_reveal for card in cards_of(evidence).values()} == {window}
        assert set(cards_of(evidence)) == set(UIDS)
    assert book.standing.window == last
    entered(book, last + 1)
