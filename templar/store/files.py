"""Local files that a store reads from or writes to: whole or not at all, and with our kind of errors."""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from templar.errors import PermanentError, Reason, TemplarError, TransientError

PASSING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE, errno.EINTR}
)
"""Failures of the operating system that may pass by themselves: a full disk, too many open files."""


COPY_BYTES = 1 << 20
"""Memory that copying a file takes."""


@contextmanager
def local_file(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a local file into our errors.

    Raises:
        TransientError: `local_file`; the disk is full, or too many files are open.
        PermanentError: `local_file`; the file is not there, or may not be touched.
    """
    try:
        yield
    except OSError as error:
        family: type[TemplarError] = TransientError if error.errno in PASSING else PermanentError
        raise family(Reason.LOCAL_FILE, f"local file {path}: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that takes its place when the block ends well and is removed when it does not.

    Args:
        path: The file; its folder is there, or is made if `durable`.
        durable: The content is on the disk before the file has its name.

    Raises:
        TemplarError: As in `local_file`.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    with local_file(path):
        try:
            if durable:
                path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock on a file, against every other thread and process; the kernel drops it when the process ends.

    Args:
        path: The file; it is made if it is not there.
        wait: Wait for whoever holds it.

    Yields:
        Whether the lock is held: False if somebody else has it and `wait` is false.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(file)
        yield False
        return
    except BaseException:
        os.close(file)
        raise
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a child may have been forked meanwhile
        os.close(file)


def read_exactly(file: int, length: int) -> bytes:
    """`length` bytes from the position of a file descriptor; fewer only if the file ends."""
    data = os.read(file, length)
    while len(data) < length and (more := os.read(file, length - len(data))):  # one call returns 2 GiB at most
        data += more
    return data


def write_all(file: int, data: bytes) -> None:
    """Write all of `data` at the position of a file descriptor."""
    written = os.write(file, data)
    if written < len(data):
        rest = memoryview(data)
        while written < len(data):
            written += os.write(file, rest[written:])


def copy_blocks(source: BinaryIO, path: Path, file: int) -> None:
    """Copy an open local file, which is at `path`, to a file descriptor.

    Raises:
        TemplarError: Reading failed, as in `local_file`.
        OSError: Writing failed.
    """
    while True:
        with local_file(path):
            block = source.read(COPY_BYTES)
        if not block:
            return
        write_all(file, block)


def sync(path: Path | str) -> None:
    """Bring a file, or what was renamed or linked into a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sweep(folder: str, max_age_seconds: float) -> None:
    """Remove the files that nobody has touched for longer. Ages are change times: a stamp cannot fake them."""
    oldest = time.time() - max_age_seconds
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.stat().st_ctime < oldest:
                    Path(entry.path).unlink()
