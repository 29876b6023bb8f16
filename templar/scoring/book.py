"""A validator's memory of scores: the evidence of each window, in SQLite, one transaction per window.

What is remembered of the miners stands in the newest evidence, so a window is in the book with all that it changed or
not at all: a crash in mid-window scores nobody twice.
"""

import json
import sqlite3
from pathlib import Path

from pydantic import TypeAdapter

from templar.scoring.cards import ScoreCard, Standing
from templar.scoring.evidence import Evidence
from templar.statefile import StateFile

SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE windows (window INTEGER PRIMARY KEY, evidence BLOB NOT NULL) STRICT;
CREATE TABLE beginning (hotkey TEXT PRIMARY KEY, card TEXT NOT NULL) STRICT;
"""


class ScoreBook:
    """The evidence of a validator's windows, and what is remembered after the newest.

    Args:
        path: The database file; made when needed, and brought up to date if an earlier release made it.
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
            migrations={1: _keep_cards},
            durable=durable,
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered at all."""
        return self.standing == Standing()

    @property
    def standing(self) -> Standing:
        """What is remembered after the newest window; before the first one, what an earlier release left."""
        newest = self._file.execute("SELECT evidence FROM windows ORDER BY window DESC LIMIT 1")
        if newest:
            return Evidence.model_validate_json(newest[0][0]).standing
        rows = self._file.execute("SELECT hotkey, card FROM beginning")
        return Standing(departed={hotkey: _CARD.validate_json(card) for hotkey, card in rows})

    def record(self, evidence: Evidence, *, first: bool = False) -> None:
        """Enter a window.

        Args:
            evidence: What it came to.
            first: Whether it is where an empty book begins, whatever it follows.

        Raises:
            ValueError: The window is in the book already, or an earlier one is missing in between: the evidence does
                not follow the newest of the book. Nothing changed.
        """
        window, standing = evidence.window, self.standing
        with self._file.transaction() as transaction:
            if transaction.execute("SELECT 1 FROM windows WHERE window = ?", (window,)).fetchone():
                raise ValueError(f"window {window} is in the score book already")
            follows = evidence.previous == standing.evidence and (standing.window is None or window > standing.window)
            if not follows and not (first and standing.evidence is None):
                raise ValueError(f"window {window} does not follow window {standing.window}, the newest in the book")
            transaction.execute("INSERT INTO windows VALUES (?, ?)", (window, evidence.canonical()))

    def evidence(self, window: int) -> Evidence | None:
        """The evidence of a window that is in the book; None if it is not."""
        rows = self._file.execute("SELECT evidence FROM windows WHERE window = ?", (window,))
        return Evidence.model_validate_json(rows[0][0]) if rows else None

    def forget(self, before_window: int) -> None:
        """Drop the evidence of windows before this one, but for the newest."""
        self._file.execute(
            "DELETE FROM windows WHERE window < ? AND window < (SELECT MAX(window) FROM windows)", (before_window,)
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _keep_cards(transaction: sqlite3.Connection) -> None:
    """From the first schema, which had cards beside evidence of another form: the cards are where this one begins."""
    names = ("mu", "sigma", "binary_average", "sync", "final", "last_reveal")
    rows = transaction.execute(f"SELECT hotkey, {', '.join(names)} FROM cards").fetchall()  # noqa: S608 - own names
    transaction.execute("CREATE TABLE beginning (hotkey TEXT PRIMARY KEY, card TEXT NOT NULL) STRICT")
    transaction.executemany(
        "INSERT INTO beginning VALUES (?, ?)",
        [(hotkey, json.dumps(dict(zip(names, values, strict=True)))) for hotkey, *values in rows],
    )
    transaction.execute("DELETE FROM windows")
    transaction.execute("DROP TABLE cards")


_CARD = TypeAdapter(ScoreCard)
