"""A miner's backup in its own bucket, and the restore of its folder from there on any machine.

A backup is one encrypted object, `private-{window}-{uid}-v{version}.bin` (`templar.exchange.encryption`): the newest
snapshot with its private state, the journal, and the secrets of this folder. It is made from files that nothing changes
any more, beside the running neuron, which never waits for it. An object appears whole or not at all.

A restore writes a folder as a killed process would have left it in the backup's window: whole, under its final name, or
not at all. The agreed parameters are in it, so it needs nothing but the bucket, and their root shows that they are the
network's. The windows that followed are left to catch-up, and the restored neuron publishes in none of them to which it
has committed before.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from templar.agreement.genesis import Birth
from templar.agreement.retention import BACKUPS_KEPT
from templar.agreement.state import StateMark, check_mark
from templar.canonical import canonical_json
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.encryption import Binding, decrypt, encrypt
from templar.exchange.object_keys import Kind, parse_current_key, window_key
from templar.exchange.publish import publish_file
from templar.neuron.configuration import GENESIS_FILE, NeuronConfig, take_lease
from templar.neuron.journal import Journal
from templar.neuron.lock import NeuronLock, make_private, write_file
from templar.neuron.private_state import PrivateState
from templar.neuron.snapshot import MARK_FILE, PRIVATE_FILE, Snapshots
from templar.statefile import copy_state_file
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.files import COPY_BYTES, link_or_copy, local_file, sync
from templar.timeline import window_of
from templar.training.model import WEIGHTS_FILE

log = logging.getLogger(__name__)

FOLDER = "backup"  # in a neuron's folder: what a backup is made from, until it is stored
JOURNAL_FILE, ORDER_FILE = "journal.sqlite", "order_secret"
SNAPSHOT_FILES = (MARK_FILE, WEIGHTS_FILE, PRIVATE_FILE)
NAMES = (*SNAPSHOT_FILES, JOURNAL_FILE, ORDER_FILE)
"""The files of a backup, in its order; a simulated miner has no order of its own."""
INDEX_BYTES = 4096
_LENGTH_BYTES = 4
_NO_BACKUPS_FAULT = frozenset({Reason.LOCAL_FILE, Reason.ACCESS_DENIED, Reason.BUCKET_MISSING, Reason.LEASE_LOST})


class _File(BaseModel):
    """A file of a backup."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    size: int


class _Index(BaseModel):
    """The beginning of a backup: its files, in the order in which they follow."""

    model_config = ConfigDict(extra="forbid", strict=True)

    window: int
    files: list[_File]


@dataclass(frozen=True)
class BackupReport:
    """Result of a backup that was looked after."""

    window: int | None  # of the newest backup in the bucket; None if there is none
    stored: bool  # whether this call stored it
    num_bytes: int = 0  # its length
    why: str = ""  # why nothing was stored


@dataclass(frozen=True)
class RestoreReport:
    """A folder that was restored."""

    window: int  # of the backup
    root: str  # of its parameters
    num_bytes: int  # length of the object
    current: int  # window of the chain
    abandoned: tuple[int, ...]  # later windows to which this neuron has committed, or may have
    refused: tuple[tuple[int, str], ...]  # newer backups that were passed over, and why


def list_backups(store: ObjectStore) -> list[tuple[int, ObjectInfo]]:
    """The backups in a bucket, the newest first: window and object."""
    keys = ((parse_current_key(info.key), info) for info in store.list(f"{Kind.PRIVATE}-"))
    found = [(key.window, info) for key, info in keys if key is not None and key.window is not None]
    return sorted(found, key=lambda each: each[0], reverse=True)


def store_backup(config: NeuronConfig) -> BackupReport:
    """Store the newest snapshot as a backup if one is due; then delete all but the newest two.

    A call that fails or is killed leaves no object, and a later one stores the newest snapshot of then.

    Raises:
        TransientError: `genesis_missing`, `local_file`, or chain or store failed.
        PermanentError: `not_registered`; `access_denied`, ...
    """
    # 1. Whether one is due. What is of a future window belongs to another chain.
    every, store, birth = config.hparams.storage.private_backup_windows, config.buckets.own, config.birth()
    snapshots = _snapshots(config, config.home, birth)
    mark = next(iter(snapshots.marks()), None)
    current = max(window_of(config.chain.head(), config.hparams.windows), -1 if mark is None else mark.window)
    known = [(window, info) for window, info in list_backups(store) if window <= current]
    newest = known[0][0] if known else None
    if mark is None or not (snapshots.folder(mark.window) / PRIVATE_FILE).exists():
        return BackupReport(
            newest, False, why="no snapshot has private state yet: no payload of this miner was applied"
        )
    if why := _why_not_due(every, newest, mark.window):
        return BackupReport(newest, False, why=why)
    signer, neuron = config.own_signer, config.own_neuron()

    # 2. Give the files a second name, because the neuron deletes old snapshots; encrypt them into one.
    folder, window = config.home / FOLDER, mark.window
    with local_file(folder):
        shutil.rmtree(folder, ignore_errors=True)
        make_private(folder)
    paths = _collect(config.home, snapshots.folder(window), folder)
    container = folder / "container"
    with local_file(container), container.open("wb") as target:
        container.chmod(0o600)
        length, blocks = _content(window, paths)
        encrypt(blocks, length, target, signer=signer, binding=_binding(birth, signer.address, window))

    # 3. Store it, then delete the older ones.
    receipt = publish_file(store, window_key(Kind.PRIVATE, window, neuron.uid), container, clock=config.chain.clock)
    shutil.rmtree(folder, ignore_errors=True)
    store.delete(info.key for _, info in known[BACKUPS_KEPT - 1 :])
    return BackupReport(window, True, receipt.size)


def restore_home(config: NeuronConfig) -> RestoreReport:
    """Write a neuron's folder from the newest intact backup in its bucket; whole or not at all.

    It holds the neuron's lease meanwhile, so nobody else commits. After a kill the next call goes on with the parts
    that were downloaded.

    Raises:
        PermanentError: `local_file`; the folder is not empty, or cannot be written. `already_running`; another machine
            still runs this neuron. `lease_lost`; one took it over meanwhile. `object_missing`; the bucket has no
            backup. `backup_broken`; none can be used.
        TransientError: Chain or store failed, or the disk is full.
    """
    # 1. Nothing may be there, and nobody else may run this neuron.
    home = config.home
    with local_file(home):
        if home.exists() and any(home.iterdir()):
            raise PermanentError(
                Reason.LOCAL_FILE,
                f"{home}: this folder has content, and a restore overwrites nothing: move it away, or set another "
                "TEMPLAR_HOME",
            )
    part = home.with_name(f".{home.name}.restoring")
    lock = NeuronLock(part)
    try:
        lease = take_lease(replace(config, home=part), "miner")
        try:
            # 2. Everything that takes long, in a folder beside it; then its name, if the lease was not lost meanwhile.
            report = _restore_into(config, part)
            if lease is not None:
                lease.check()
            _move(part / "content", home)
        finally:
            config.buckets.write_while(None)
            if lease is not None:
                lease.release()
    finally:
        lock.release()
        if not (part / "content").exists():
            shutil.rmtree(part, ignore_errors=True)
    return report


def _restore_into(config: NeuronConfig, part: Path) -> RestoreReport:
    """Build the folder `content` in a temporary folder, from the newest backup that is intact."""
    store, birth, content = config.buckets.own, config.birth(), part / "content"
    found, refused = list_backups(store), list[tuple[int, str]]()
    for window, info in found:
        # 1. Fetch and check one; an older one takes the place of one that cannot be used.
        try:
            with local_file(content):
                shutil.rmtree(content, ignore_errors=True)
                make_private(content)
            _fetch(config, birth, window, info, part)
            mark = _check(config, birth, window, content)
        except PermanentError as error:
            if error.reason in _NO_BACKUPS_FAULT:
                raise
            log.warning("the backup of window %d is left out: %s", window, error)
            refused.append((window, str(error)))
            continue

        # 2. The later windows to which this neuron has committed, as bucket and journal know them, are over for it.
        keys = (parse_current_key(each.key) for each in store.list(f"{Kind.COMMIT}-"))
        committed = [key.window for key in keys if key is not None and key.window is not None]
        journal = Journal(content / JOURNAL_FILE, durable=config.durable)
        abandoned = journal.return_to(window, committed)
        journal.close()
        current = window_of(config.chain.head(), config.hparams.windows)
        return RestoreReport(window, mark.root, info.size, current, abandoned, tuple(refused))

    # 3. None is left.
    shutil.rmtree(content, ignore_errors=True)
    if not found:
        raise PermanentError(
            Reason.OBJECT_MISSING,
            f"bucket {store.name} has no private backup: start the neuron, it begins at the network's checkpoint",
        )
    raise PermanentError(
        Reason.BACKUP_BROKEN,
        f"bucket {store.name}: none of its {len(found)} private backups can be used; the newest: {refused[0][1]}",
    )


def _fetch(config: NeuronConfig, birth: Birth, window: int, info: ObjectInfo, part: Path) -> None:
    """Download one backup and write its files into `content`, chunk by verified chunk."""
    container = part / "container"
    try:
        config.buckets.own.get_file(info.key, container, max_bytes=info.size, resume=True)
        with local_file(container), container.open("rb") as source:
            binding = _binding(birth, config.own_signer.address, window)
            chunks = decrypt(source, container.stat().st_size, signer=config.own_signer, binding=binding)
            _unpack(chunks, window, part / "content")
    finally:
        container.unlink(missing_ok=True)
    content = part / "content"
    with local_file(content):
        snapshot = content / "snapshots" / str(window)
        snapshot.mkdir(parents=True)
        for name in SNAPSHOT_FILES:
            with suppress(FileNotFoundError):
                (content / name).rename(snapshot / name)
    write_file(content / GENESIS_FILE, lambda path: path.write_text(birth.network.genesis), durable=config.durable)
    replace(config, home=content).keep_settings()


def _check(config: NeuronConfig, birth: Birth, window: int, content: Path) -> StateMark:
    """Check what a backup held as a start would; the mark of its state.

    Raises:
        PermanentError: `backup_broken`, `root_differs`, ...; a file is missing or is not what it should be.
    """
    snapshots = _snapshots(config, content, birth)
    mark = next(iter(snapshots.marks()), None)
    if mark is None or mark.window != window or not (content / JOURNAL_FILE).is_file():
        raise RejectedError(
            Reason.BACKUP_BROKEN, f"it has no snapshot of window {window} of this network or no journal"
        )
    params, private = snapshots.load(mark, config.hparams.model)
    check_mark(params, mark, f"backup of window {window}")
    if private is None:
        raise RejectedError(Reason.BACKUP_BROKEN, f"it has no private state of window {window}")
    PrivateState.load(private)
    return mark


def _why_not_due(every: int, newest: int | None, snapshot: int) -> str:
    """Say why no backup of a snapshot's window is made now; empty if one is due."""
    if every == 0:
        return "storage.private_backup_windows is 0"
    if newest is not None and newest > snapshot:
        return f"this folder is at window {snapshot}, and a backup of window {newest} is stored"
    if newest is not None and snapshot - newest < every:
        return f"the next one is due at window {newest + every}, and the newest snapshot is of window {snapshot}"
    return ""


def _collect(home: Path, snapshot: Path, folder: Path) -> list[Path]:
    """Gather the files of a backup in a folder: by another name, or as copies where they may change."""
    try:
        for name in SNAPSHOT_FILES:
            link_or_copy(snapshot / name, folder / name)
        if (home / ORDER_FILE).exists():
            link_or_copy(home / ORDER_FILE, folder / ORDER_FILE)
    except OSError as error:
        raise TransientError(
            Reason.LOCAL_FILE, f"{snapshot}: {error.strerror}; the neuron may have deleted it meanwhile, try again"
        ) from error
    copy_state_file(home / JOURNAL_FILE, folder / JOURNAL_FILE)
    return [path for name in NAMES if (path := folder / name).exists()]


def _content(window: int, paths: list[Path]) -> tuple[int, Iterator[bytes]]:
    """The length of a backup's content, and its bytes: the index, then the files."""
    files = [{"name": path.name, "size": path.stat().st_size} for path in paths]
    index = canonical_json({"window": window, "files": files})

    def blocks() -> Iterator[bytes]:
        yield len(index).to_bytes(_LENGTH_BYTES, "big") + index
        for path in paths:
            with path.open("rb") as file:
                while block := file.read(COPY_BYTES):
                    yield block

    return _LENGTH_BYTES + len(index) + sum(path.stat().st_size for path in paths), blocks()


def _unpack(chunks: Iterable[bytes], window: int, folder: Path) -> None:
    """Write the files of a backup's content into a folder.

    Raises:
        RejectedError: `backup_broken`; the content is not what a release like this one writes.
    """
    stream = _Stream(chunks)
    try:
        length = int.from_bytes(stream.take(_LENGTH_BYTES), "big")
        index = _Index.model_validate_json(stream.take(min(INDEX_BYTES, length)))
    except ValidationError as error:
        raise RejectedError(Reason.BACKUP_BROKEN, f"its index is not legal: {error.errors()[0]['msg']}") from None
    names = [file.name for file in index.files]
    if index.window != window or not set(names) <= set(NAMES) or len(set(names)) < len(names):
        raise RejectedError(Reason.BACKUP_BROKEN, f"its index names the window {index.window} and the files {names}")
    for file in index.files:
        with (folder / file.name).open("xb") as target:
            stream.copy(file.size, target)
    stream.end()


class _Stream:
    """Reads chunks as one stream of bytes."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._left = iter(chunks), b""

    def take(self, length: int) -> bytes:
        """The next bytes, all of them in memory."""
        return b"".join(self._next(length))

    def copy(self, length: int, target: BinaryIO) -> None:
        """Write the next bytes to a file."""
        for part in self._next(length):
            target.write(part)

    def end(self) -> None:
        """Check that nothing follows; the last chunk's own check is made here."""
        if self._left or any(self._chunks):
            raise RejectedError(Reason.BACKUP_BROKEN, "something follows its last file")

    def _next(self, length: int) -> Iterator[bytes]:
        while length > 0:
            if not self._left:
                self._left = next(self._chunks, b"")
                if not self._left:
                    raise RejectedError(Reason.BACKUP_BROKEN, "its files are cut off")
            part, self._left = self._left[:length], self._left[length:]
            length -= len(part)
            yield part


def _move(content: Path, home: Path) -> None:
    """Give a complete folder its final name; an empty folder that is there is replaced."""
    try:
        for path in (*content.rglob("*"), content):
            sync(path)
        content.rename(home)
        sync(home.parent)
    except OSError as error:
        raise PermanentError(
            Reason.LOCAL_FILE,
            f"{home}: the restored folder cannot get this name ({error.strerror}): if this is a mount point, set "
            "TEMPLAR_HOME to a folder in it",
        ) from error


def _snapshots(config: NeuronConfig, home: Path, birth: Birth) -> Snapshots:
    kept = config.hparams.storage.snapshots_kept
    return Snapshots(home / "snapshots", birth.network, kept=kept, durable=config.durable)


def _binding(birth: Birth, hotkey: str, window: int) -> Binding:
    return Binding(birth.network.netuid, birth.network.genesis, hotkey, window)
