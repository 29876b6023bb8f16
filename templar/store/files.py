"""Local files: written whole or not at all, locked, and with the project's errors."""

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from templar.errors import PermanentError, Reason, TemplarError, TransientError

TRANSIENT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ESTALE, errno.EINTR}
)
"""Failures of the operating system that a retry may survive: a full disk, too many open files."""
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
COPY_BYTES = 1 << 20  # memory that copying a file takes
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - Linux's file system in memory


def memory_folder() -> Path | None:
    """A folder in memory, for files that need not survive the machine; None where there is none."""
    return MEMORY_FOLDER if MEMORY_FOLDER.is_dir() and os.access(MEMORY_FOLDER, os.W_OK) else None


def private_folder(path: Path) -> Path:
    """Make a folder that this user alone may enter, or take it: PermanentError `local_file` if it is not."""
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermanentError(Reason.LOCAL_FILE, f"{path} is not this user's alone: remove it, or have it removed")
    return path


@contextmanager
def local_file(path: Path) -> Iterator[None]:
    """Translate the operating system's errors about a local file into the project's.

    TransientError: `local_file`; the disk is full, or too many files are open. PermanentError: `local_file`; the file
    is not there, or may not be touched.
    """
    try:
        yield
    except OSError as error:
        family: type[TemplarError] = TransientError if error.errno in TRANSIENT_ERRNOS else PermanentError
        remedy = "; free space there, or raise the quota" if error.errno in NO_SPACE else ""
        raise family(Reason.LOCAL_FILE, f"local file {path}: {error.strerror or error}{remedy}") from error


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that replaces it when the block succeeds and is removed when it raises.

    The folder must exist. If `durable`, the folder is made, and the content is flushed to the disk before the rename.
    Errors as in `local_file`.
    """
    temporary = path.parent / f".{secrets.token_hex(8)}.partial"
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
    """Hold an exclusive lock on a file, which is made if needed; the kernel drops it when the process ends.

    Yields:
        Whether the lock is held: False if another thread or process has it and `wait` is false.
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
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def write_at(file: int, data: memoryview, start: int) -> None:
    """Write all of `data` from an offset of a file descriptor on."""
    while data:
        written = os.pwrite(file, data, start)
        data, start = data[written:], start + written


def copy_blocks(source: BinaryIO, path: Path, file: int) -> None:
    """Copy an open local file, which is at `path`, to a file descriptor.

    Failures to read are errors as in `local_file`, failures to write OSError.
    """
    while True:
        with local_file(path):
            block = source.read(COPY_BYTES)
        if not block:
            return
        write_all(file, block)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that nobody changes a second name, or copy it where the file system has no hard links.

    OSError: There is no such file, or the target is there already, or the disk is full.
    """
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        sync(target)


def sync(path: Path | str) -> None:
    """Flush a file to the disk; of a folder, flush its entries."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
