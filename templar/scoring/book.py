"""A validator's memory of scores: SQLite, one transaction per window.

A window is in the book once or not at all, so a crash in mid-window scores nobody twice. Cards belong to hotkeys: a uid
that changes hands starts afresh, and a hotkey that registers again keeps its past.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from templar.errors import PermanentError, Reason
from templar.scoring.ratings import Rating
from templar.scoring.scores import ScoreCard

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

    Raises:
        PermanentError: `bad_state_file`; the file is not a score book, or of a newer release.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode=WAL")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            raise self._broken(str(error)) from None
        if version > SCHEMA_VERSION:
            raise self._broken(f"schema {version} is newer than this release's {SCHEMA_VERSION}")

    def cards(self, hotkeys: Iterable[str]) -> dict[str, ScoreCard]:
        """The cards of these hotkeys; a fresh one for a hotkey that is not in the book."""
        rows = self._connection.execute("SELECT hotkey, mu, sigma, binary_average, sync, final, last_reveal FROM cards")
        known = {row[0]: ScoreCard(Rating(row[1], row[2]), *row[3:]) for row in rows}
        return {hotkey: known.get(hotkey, ScoreCard()) for hotkey in hotkeys}

    def record(self, window: int, cards: Mapping[str, ScoreCard], evidence: bytes) -> None:
        """Enter a window: the cards after it and its evidence, together.

        Raises:
            ValueError: The window is in the book already.
        """
        rows = [
            (key, card.rating.mu, card.rating.sigma, card.binary_average, card.sync, card.final, card.last_reveal)
            for key, card in cards.items()
        ]
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            cursor.execute("INSERT INTO windows VALUES (?, ?)", (window, evidence))
            cursor.executemany("INSERT OR REPLACE INTO cards VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        except sqlite3.IntegrityError:
            cursor.execute("ROLLBACK")
            raise ValueError(f"window {window} is in the score book already") from None
        cursor.execute("COMMIT")

    def evidence(self, window: int) -> bytes | None:
        """The evidence of a window that is in the book; None if it is not."""
        row = self._connection.execute("SELECT evidence FROM windows WHERE window = ?", (window,)).fetchone()
        return None if row is None else row[0]

    def forget(self, before_window: int) -> None:
        """Drop the evidence of windows before this one; cards stay."""
        self._connection.execute("DELETE FROM windows WHERE window < ?", (before_window,))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _broken(self, problem: str) -> PermanentError:
        return PermanentError(
            Reason.BAD_STATE_FILE, f"{self._path}: {problem}; move the file away to start with fresh scores"
        )
