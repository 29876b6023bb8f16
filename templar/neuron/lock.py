"""The neuron's folder: one process per folder, the folder's identity for the lease, and files written atomically.

The kernel releases the lock when the process ends. Against other machines there is a lease in the bucket
(`templar.exchange.lease`).
"""

import hashlib
import json
import logging
import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from templar import PROTOCOL_VERSION, RELEASE
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, locked, sync

log = logging.getLogger(__name__)

HOLDER_FILE = "holder"
LAST_RUN_FILE = "last-run.json"


class NeuronLock:
    """An exclusive lock on a neuron's folder, which is made when needed; held until `release`.

    Raises:
        PermanentError: `already_running`; another process holds it, and the message says which. `local_file`; the
            folder cannot be written.
    """

    def __init__(self, home: Path) -> None:
        path = home / "lock"
        with local_file(path), ExitStack() as held:
            make_private(home)
            if not held.enter_context(locked(path, wait=False)):
                raise PermanentError(
                    Reason.ALREADY_RUNNING,
                    f"{home}: process {path.read_text().strip() or 'unknown'} already runs this neuron; stop it first, "
                    "or give this one its own home",
                )
            path.write_text(str(os.getpid()))
            self._held = held.pop_all()

    def release(self) -> None:
        """Release the lock: another process may run the neuron."""
        self._held.close()


def holder_of(home: Path, *, durable: bool = True) -> str:
    """The folder's identity in the neuron's lease: 32 hex digits that stay the same from one process to the next.

    A copy of the folder has another identity, since host and path are part of it. The folder's lock must be held.

    Raises:
        PermanentError: `bad_state_file`; the folder's secret is not what this function wrote. `local_file`.
        TransientError: `local_file`; the disk is full.
    """
    path = home / HOLDER_FILE
    with local_file(path):
        if not path.exists():
            write_file(path, lambda part: part.write_text(secrets.token_hex(16)), durable=durable)
        token = path.read_text(encoding="utf-8", errors="replace").strip()
        place = f"{socket.gethostname()}:{home.resolve()}"
    if re.fullmatch("[0-9a-f]{32}", token) is None:
        raise PermanentError(
            Reason.BAD_STATE_FILE, f"{path}: not 32 hex digits; remove it, then this folder counts as a new holder"
        )
    return hashlib.sha256(f"templar.holder:{token}:{place}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class LastRun:
    """The release that ran in a folder last, and the state that it loaded when it began."""

    window: int
    root: str
    began: float  # seconds since the epoch
    release: str = RELEASE
    protocol: str = PROTOCOL_VERSION

    def save(self, home: Path) -> None:
        """Keep it in the folder; `local_file`."""
        with local_file(path := home / LAST_RUN_FILE):
            write_file(path, lambda part: part.write_text(json.dumps(asdict(self))), durable=False)

    @classmethod
    def read(cls, home: Path) -> Self | None:
        """The inverse of `save`; None if no release that keeps it has run there."""
        try:
            return cls(**json.loads((home / LAST_RUN_FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None


def this_machine() -> str:
    """A name of this machine for people to compare: 8 hex digits that hide its host name."""
    return hashlib.sha256(f"templar.resources:{socket.gethostname()}".encode()).hexdigest()[:8]


def make_private(home: Path) -> None:
    """Make a folder private, or make one: payloads lie in it before others may read them, under any umask."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if home.stat().st_mode & 0o077:
        try:
            home.chmod(0o700)
        except PermissionError:
            log.warning("%s belongs to another user: others may read what is in it before it is published", home)


def write_file(path: Path, write: Callable[[Path], Any], *, durable: bool = True) -> None:
    """Write a file so that it exists completely or not at all, also after a power cut if `durable`.

    Its folder is made when needed. `write` writes the content to the path that it is given. Nobody but the owner may
    read the file at any moment.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    part.touch(mode=0o600)
    try:
        write(part)
    except OSError:
        part.unlink(missing_ok=True)  # it may have filled the disk
        raise
    part.chmod(0o600)  # `write` may have replaced it
    if durable:
        sync(part)
    part.replace(path)
    if durable:
        sync(path.parent)


def prune_spool(folder: Path, before_window: int) -> None:
    """Delete the files `{name}-{window}.{kind}` of windows before this one."""
    for file in folder.glob("*-*.*"):
        number = file.stem.rsplit("-", 1)[-1]
        if number.isdigit() and int(number) < before_window:
            file.unlink(missing_ok=True)
