import sqlite3
import threading
from contextlib import closing

import pytest

from templar.errors import PermanentError, Reason, TransientError
from templar.statefile import StateFile
from tests.support.errors import raising

SCHEMA = "CREATE TABLE notes (number INTEGER PRIMARY KEY, text TEXT NOT NULL) STRICT;"


def opened(path, *, version=1, migrations=None):
    return StateFile(
        path, schema=SCHEMA, version=version, remedy="move it away", migrations=migrations or {}, durable=False
    )


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


def test_a_file_that_cannot_be_opened_says_what_to_do(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("this is not a database" * 100)
    for name in ("folder", "text"):
        with raising(PermanentError, Reason.BAD_STATE_FILE, match="; move it away$"):
            opened(tmp_path / name)


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.sqlite"
    newer = opened(path, version=3)
    note(newer, 1)
    newer.close()
    with pytest.raises(PermanentError, match="schema 3 is newer than this release's 1"):
        opened(path)
    assert numbers(opened(path, version=3)) == [1]


def test_a_file_that_somebody_holds_may_be_free_later(tmp_path, monkeypatch):
    """No reason to move anything away."""
    path = tmp_path / "notes.sqlite"
    monkeypatch.setattr("templar.statefile.BUSY_TIMEOUT_SECONDS", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with raising(TransientError, Reason.LOCAL_FILE):
            opened(path)
    opened(path).close()


def version_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def adding(number):
    """A migration that adds a note."""
    return lambda transaction: transaction.execute("INSERT INTO notes VALUES (?, 'migrated')", (number,))


def test_an_older_file_is_brought_up_to_date_version_by_version(tmp_path):
    path = tmp_path / "notes.sqlite"
    old = opened(path)
    note(old, 1)
    old.close()
    steps: list[int] = []

    def step(older):
        def migrate(transaction):
            steps.append(older)
            adding(10 + older)(transaction)

        return migrate

    for _ in range(2):
        file = opened(path, version=4, migrations={3: step(3), 2: step(2), 1: step(1)})
        assert numbers(file) == [1, 11, 12, 13]
        file.close()
    assert steps == [1, 2, 3], "once, in their order"
    assert version_of(path) == 4


def test_a_migration_that_fails_leaves_the_file_at_the_version_before_it(tmp_path):
    """Tables included; and the next start goes on from there."""
    path = tmp_path / "notes.sqlite"
    opened(path).close()

    def fails(transaction):
        transaction.execute("CREATE TABLE half (number INTEGER)")
        transaction.execute("INSERT INTO notes VALUES (99, 'lost')")
        raise KeyError

    with raising(TransientError, Reason.LOCAL_FILE, match=r"notes\.sqlite: no such table: gone"):
        opened(path, version=2, migrations={1: lambda transaction: transaction.execute("DROP TABLE gone")})
    assert version_of(path) == 1
    with pytest.raises(KeyError):
        opened(path, version=3, migrations={1: adding(11), 2: fails})
    assert version_of(path) == 2
    file = opened(path, version=3, migrations={1: adding(12), 2: adding(13)})
    assert numbers(file) == [11, 13]
    assert file.execute("SELECT name FROM sqlite_master WHERE name = 'half'") == []
    assert version_of(path) == 3
