"""No fault of an upload shows a reader an incomplete checkpoint, and the publisher's next call completes it."""

import errno
from functools import partial
from pathlib import Path

import pytest

from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.object_keys import checkpoint_key
from templar.store.files import local_file
from tests.support import kill_points
from tests.support.checkpoint_kills import FILES, bucket_in, is_shown, publish, write_files
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import ScriptedStore

WEIGHTS = checkpoint_key(12, 5, "model-2.safetensors")


class KilledError(BaseException):
    """The process ends here."""


class Upload:
    """A bucket in memory whose n-th call meets a fault; a reader looks at it after every write and every fault."""

    def __init__(self, folder, point, fault, *, late):
        self.bucket, self.folder, self.fault = MemoryStore(), folder, fault
        self.store, self.left, self.late, self.shown = ScriptedStore(self.bucket), point, late, False
        self.store.before = partial(self._step, late=False)
        self.store.after = partial(self._step, late=True)

    def _step(self, operation, key, *, late):
        is_faulty = late == self.late and self.left == 0
        self.left -= late == self.late
        try:
            if is_faulty:
                self.fault(self, operation, key)
        finally:
            if is_faulty or (late and operation.startswith("put")):
                self.look()

    def look(self):
        """A reader finds the checkpoint whole or not at all, and what it has found once it finds again."""
        shown = self.is_shown()
        assert shown or not self.shown, "what was there is gone"
        self.shown = shown

    def is_shown(self):
        """Whether a reader takes the checkpoint now; an illegal manifest is none."""
        try:
            return is_shown(self.bucket, self.folder / "fetched")
        except RejectedError as error:
            assert error.reason is Reason.MALFORMED, "a legal manifest without its files"  # noqa: PT017
            return False


def busy(upload, operation, key):
    raise TransientError(Reason.STORE_BUSY, "503")


def denied(upload, operation, key):
    raise PermanentError(Reason.ACCESS_DENIED, "403")


def killed(upload, operation, key):
    raise KilledError


def disk_full(upload, operation, key):
    with local_file(Path(key)):
        raise OSError(errno.ENOSPC, "No space left on device")


def damaged(upload, operation, key):
    """A server that checks no digest stores other bytes; the uploader sees it by the ETag, and is killed."""
    if operation.startswith("put"):
        data = upload.bucket.get(key, max_bytes=1 << 30)
        upload.bucket.put(key, bytes([data[0] ^ 1]) + data[1:])
    raise KilledError


def truncated(upload, operation, key):
    """As `damaged`, but the object ends early."""
    if operation.startswith("put"):
        upload.bucket.put(key, upload.bucket.get(key, max_bytes=1 << 30)[:-1])
    raise KilledError


EARLY, LATE = (busy, denied, killed, disk_full), (busy, killed)


def faults_at(point, operation):
    """The faults that are tried at a call, and whether after it: the kinds take turns, but each write is damaged."""
    yield EARLY[point % 4], False
    yield EARLY[(point + 1 + point // 4 % 3) % 4], False
    yield LATE[point % 2], True
    if operation.startswith("put"):
        yield from ((damaged, True), (truncated, True))


@pytest.fixture
def folder(tmp_path):
    return write_files(tmp_path / "files")


def test_at_no_call_does_a_fault_show_half_a_checkpoint_and_the_next_call_completes_it(folder, tmp_path):
    clean, cases = ScriptedStore(MemoryStore()), 0
    publish(clean, folder, concurrency=1)
    for point, (operation, _) in enumerate(clean.calls):
        for fault, late in faults_at(point, operation):
            upload = Upload(tmp_path, point, fault, late=late)
            with pytest.raises((TemplarError, KilledError)):
                publish(upload.store, folder, concurrency=1)
            for _ in range(2):
                publish(upload.store, folder, concurrency=1)
            assert upload.is_shown(), (point, operation, fault, late)
            if fault not in (damaged, truncated):  # nothing that was stored is stored again
                stored = sum(called.startswith("put") for called, _ in upload.store.calls)
                assert stored == len(FILES) + 1 + (operation.startswith("put") and not late)
            cases += 1
    assert cases >= 50


@pytest.mark.slow
def test_a_process_that_is_killed_before_any_operation_on_a_file(tmp_path):
    killed_at = kill_points.run(tmp_path, "checkpoint")["checkpoint"]
    assert len(killed_at) >= 20
    shown = []
    for folder in killed_at:
        store = bucket_in(folder)
        shown.append(is_shown(store, folder / "fetched"))
        publish(store, folder / "files")
        assert is_shown(store, folder / "fetched")
    assert shown == sorted(shown)
    assert not shown[0]
