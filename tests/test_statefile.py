import sqlite3
import threading
from contextlib import closing

import pytest

from templar.errors import PermanentError, Reason, TransientError
from templar.statefile import StateFile
from tests.support.errors import raising

SCHEMA = "CREATE TABLE notes (number INTEGER PRIMARY KEY, text TEXT NOT NULL) STRICT;"


def opened(path, *, version=1):
    return StateFile(path, schema=SCHEMA, version=version, remedy="move it away", durable=False)


@pytest.fixture
def file(tmp_path):
    return opened(tmp_path / "new" / "notes.sqlite")


def numbers(file):
    return [row[0] for row in file.execute("SELECT number FROM notes ORDER BY number")]


def note(file, number):
    file.execute("INSERT INTO notes VALUES (?, 'x')", (number,))


@pytest.mark.parametrize("number", [1, 3])
def test_a_transaction_is_whole_or_leaves_nothing_and_the_file_goes_on(file, number):
    """Whether the database refuses or the caller gives up."""
    note(file, 1)

    def fails():
        with file.transaction() as transaction:
            transaction.execute("INSERT INTO notes VALUES (2, 'b')")
            transaction.execute("INSERT INTO notes VALUES (?, 'c')", (number,))
            raise KeyError

    with pytest.raises((sqlite3.IntegrityError, KeyError)):
        fails()
    with file.transaction() as transaction:
        transaction.execute("INSERT INTO notes VALUES (4, 'a')")
        transaction.execute("INSERT INTO notes VALUES (5, 'b')")
    assert numbers(file) == [1, 4, 5]


def test_threads_never_meet_in_one_transaction(file):
    """They share a connection: what one enters must not be rolled back with the other's failure."""
    begun = threading.Event()

    def enters():
        begun.wait()
        note(file, 1)

    writer = threading.Thread(target=enters)
    writer.start()

    def fails():
        with file.transaction() as transaction:
            transaction.execute("INSERT INTO notes VALUES (2, 'b')")
            begun.set()
            writer.join(0.05)  # it has to wait for the end of this transaction
            assert writer.is_alive()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    writer.join()
    assert numbers(file) == [1]


def test_a_full_disk_is_no_damage(file):
    (pages,) = file.execute("PRAGMA page_count")[0]
    file.execute(f"PRAGMA max_page_count = {pages}")
    with raising(TransientError, Reason.LOCAL_FILE, "notes.sqlite: database or disk is full; make room on the disk"):
        file.execute("INSERT INTO notes VALUES (1, ?)", ("x" * 100_000,))
    file.execute(f"PRAGMA max_page_count = {pages + 1000}")
    file.execute("INSERT INTO notes VALUES (1, ?)", ("x" * 100_000,))
    assert numbers(file) == [1]


def test_another_schema_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.sqlite"
    second = opened(path, version=2)
    note(second, 1)
    second.close()
    for version in (1, 3):
        with raising(PermanentError, Reason.BAD_STATE_FILE, f"schema 2 is not this release's {version}"):
            opened(path, version=version)
    assert numbers(opened(path, version=2)) == [1]


def test_a_file_that_somebody_holds_may_be_free_later(tmp_path, monkeypatch):
    """No reason to move anything away."""
    path = tmp_path / "notes.sqlite"
    monkeypatch.setattr("templar.statefile.BUSY_TIMEOUT_SECONDS", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with raising(TransientError, Reason.LOCAL_FILE):
            opened(path)
    opened(path).close()
