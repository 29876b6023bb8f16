"""A validator's memory of scores: SQLite, one transaction per window.

A window is in the book once or not at all, so a crash in mid-window scores nobody twice. Cards belong to hotkeys: a uid
that changes hands starts afresh, and a hotkey that registers again keeps its past.
"""

import math
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from templar.scoring.ratings import Rating
from templar.scoring.scores import ScoreCard
from templar.statefile import StateFile

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE cards (
    hotkey TEXT PRIMARY KEY, mu REAL NOT NULL, sigma REAL NOT NULL, binary_average REAL NOT NULL,
    sync REAL NOT NULL, final REAL NOT NULL, last_reveal INTEGER
) STRICT;
CREATE TABLE windows (window INTEGER PRIMARY KEY, evidence BLOB NOT NULL) STRICT;
"""


class ScoreBook:
    """Score cards by hotkey, and the evidence of each window that made them.

    Args:
        path: The database file; made when needed.
        durable: Wait for the disk at every window; a simulation does without.

    Raises:
        PermanentError: `bad_state_file`; the file is not a score book, or of a newer release.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._file = StateFile(
            path,
            schema=_SCHEMA,
            version=SCHEMA_VERSION,
            remedy="move the file away to start with fresh scores",
            durable=durable,
        )

    def cards(self, hotkeys: Iterable[str]) -> dict[str, ScoreCard]:
        """The cards of these hotkeys; a fresh one for a hotkey that is not in the book."""
        rows = self._file.execute("SELECT hotkey, mu, sigma, binary_average, sync, final, last_reveal FROM cards")
        known = {row[0]: ScoreCard(Rating(row[1], row[2]), *row[3:]) for row in rows}
        return {hotkey: known.get(hotkey, ScoreCard()) for hotkey in hotkeys}

    def record(self, window: int, cards: Mapping[str, ScoreCard], evidence: bytes) -> None:
        """Enter a window: the cards after it and its evidence, together.

        Raises:
            ValueError: The window is in the book already, or a card is not finite; nothing changed.
        """
        if not all(math.isfinite(card.final) for card in cards.values()):
            raise ValueError(f"window {window}: a final score is not finite")
        rows = [
            (key, card.rating.mu, card.rating.sigma, card.binary_average, card.sync, card.final, card.last_reveal)
            for key, card in cards.items()
        ]
        with self._file.transaction() as transaction:
            if transaction.execute("SELECT 1 FROM windows WHERE window = ?", (window,)).fetchone():
                raise ValueError(f"window {window} is in the score book already")
            transaction.execute("INSERT INTO windows VALUES (?, ?)", (window, evidence))
            try:
                transaction.executemany("INSERT OR REPLACE INTO cards VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            except sqlite3.IntegrityError as error:
                raise ValueError(f"window {window}: a score card is not finite: {error}") from None

    def evidence(self, window: int) -> bytes | None:
        """The evidence of a window that is in the book; None if it is not."""
        rows = self._file.execute("SELECT evidence FROM windows WHERE window = ?", (window,))
        return rows[0][0] if rows else None

    def forget(self, before_window: int) -> None:
        """Drop the evidence of windows before this one; cards stay."""
        self._file.execute("DELETE FROM windows WHERE window < ?", (before_window,))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
