"""A bucket in a directory: the semantics of S3 on files, for simulation, tests and single machines.

An object is written under a temporary name in a reserved folder of the bucket and then renamed or linked to its place,
so a reader in any process sees it whole or not at all. Its modification time is the store's stamp. A writer that dies
leaves a temporary file behind, which counts as an unfinished upload: a directory has none in parts.

One limit that S3 does not have: a key cannot be both an object and the folder of other objects (`a` and `a/b`).
"""

# Paths are strings, system calls direct: the simulator makes hundreds per window, and a `Path` costs as much as a call.
# ruff: noqa: PTH102, PTH103, PTH106, PTH108, PTH112, PTH116, PTH120

import errno
import itertools
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.store import files
from templar.store.base import DeleteReport, ObjectInfo, Upload, check_key, is_key

INCOMING = ".incoming"  # folder of objects that are being written; no key may lie in it
_NANOSECONDS = 10**9
_PLACE_ATTEMPTS = 64
_BAD_PLACE = frozenset({errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_process_token = secrets.token_hex(4)
_counter = itertools.count()


class DirectoryStore:
    """One bucket in a directory, which must exist. Safe under threads and between processes.

    The directory's name is the bucket's. The clock gives the stamps of new objects, the machine's by default.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float] | None = None, writable: bool = True) -> None:
        self._name = root.name
        self._root = os.fspath(root)
        self._incoming = f"{self._root}/{INCOMING}"
        self._clock = clock or time.time
        self._writable = writable

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self._name

    def put(self, key: str, data: bytes) -> None:
        """Store an object; replaces one that is there."""
        self._store(key, lambda file: files.write_all(file, data), os.replace)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Store an object unless the key is taken; exactly one of several writers gets True."""
        return self._store(key, lambda file: files.write_all(file, data), os.link)

    def put_file(self, key: str, path: Path) -> None:
        """Store a copy of a file, stamped with the time at the end of copying."""
        with files.local_file(path):
            source = path.open("rb", buffering=0)
        with source:
            self._store(key, lambda file: files.copy_blocks(source, path, file), os.replace)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object; `object_too_large` before anything is read."""
        file, size = self._open(key, max_bytes)
        try:
            return files.read_exactly(file, size)
        finally:
            os.close(file)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """`length` bytes from offset `start`; `object_truncated` if the object ends before."""
        if start < 0 or length < 0:
            raise ValueError(f"start {start} and length {length} of a range must not be negative")
        file, size = self._open(key)
        try:
            if start + length > size:
                raise PermanentError(
                    Reason.OBJECT_TRUNCATED, f"bucket {self._name}: {key} ends at {size}, before {start + length}"
                )
            os.lseek(file, start, os.SEEK_SET)
            return files.read_exactly(file, length)
        finally:
            os.close(file)

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from offset `start`."""
        buffer[:] = self.get_range(key, start, len(buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        """Copy the object to a file that appears whole; `object_too_large` before anything is copied."""
        file, _ = self._open(key, max_bytes)
        with os.fdopen(file, "rb") as source, files.replacing(path) as target:
            shutil.copyfileobj(source, target, files.COPY_BYTES)

    def head(self, key: str) -> ObjectInfo | None:
        """Size and stamp of the object; None if it is not there."""
        try:
            status = os.stat(self._path(key))
        except (FileNotFoundError, NotADirectoryError):
            self._check_bucket()
            return None
        except OSError as error:
            raise self._failure(error, key) from error
        return _info(key, status) if stat.S_ISREG(status.st_mode) else None

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in key order."""
        self._check_bucket()
        folder = prefix.rpartition("/")[0]
        if is_key(folder or "-") and not _is_reserved(folder):
            yield from self._walk(f"{folder}/" if folder else "", prefix)

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        """Delete any number of keys, and the folders that they leave empty."""
        self._check_writable()
        self._check_bucket()
        deleted: list[str] = []
        failed: list[tuple[str, str]] = []
        for key in dict.fromkeys(keys):
            try:
                self._delete(key)
            except TemplarError as error:
                failed.append((key, str(error.reason)))
            else:
                deleted.append(key)
        return DeleteReport(tuple(deleted), tuple(failed))

    def uploads(self) -> Iterator[Upload]:
        """Every file in the folder of objects that are being written."""
        try:
            entries = sorted(os.scandir(self._incoming), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failure(error, INCOMING) from error
        for entry in entries:
            with suppress(FileNotFoundError):  # in its place since
                status = entry.stat(follow_symlinks=False)
                # Not its modification time, which the store sets to the object's stamp.
                yield Upload(entry.name, entry.name, max(0.0, time.time() - status.st_ctime), status.st_size)

    def abort(self, upload: Upload) -> None:
        """Delete the file."""
        path = Path(self._incoming, upload.upload_id)
        with files.local_file(path):
            path.unlink(missing_ok=True)

    def put_in_parts(self, key: str, data: bytes) -> None:
        """Store an object; a directory has no parts."""
        self.put(key, data)

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _path(self, key: str) -> str:
        check_key(key)
        if _is_reserved(key):
            raise PermanentError(Reason.BAD_KEY, f"key {key!r} lies in the reserved folder {INCOMING!r}")
        return f"{self._root}/{key}"

    def _check_writable(self) -> None:
        if not self._writable:
            raise PermanentError(
                Reason.ACCESS_DENIED, f"bucket {self._name}: this handle may only read; open it with write access"
            )

    def _check_bucket(self) -> None:
        if not os.path.isdir(self._root):
            raise PermanentError(Reason.BUCKET_MISSING, f"bucket {self._name}: there is no directory {self._root}")

    def _open(self, key: str, max_bytes: int | None = None) -> tuple[int, int]:
        """Open an object for reading: file descriptor and size."""
        path = self._path(key)
        try:
            file = os.open(path, os.O_RDONLY)
        except NotADirectoryError:
            raise self._missing(key) from None
        except OSError as error:
            raise self._failure(error, key) from error
        status = os.fstat(file)
        if stat.S_ISREG(status.st_mode) and (max_bytes is None or status.st_size <= max_bytes):
            return file, status.st_size
        os.close(file)
        if not stat.S_ISREG(status.st_mode):
            raise self._missing(key)
        raise PermanentError(
            Reason.OBJECT_TOO_LARGE, f"bucket {self._name}: {key} has {status.st_size} bytes, {max_bytes} are allowed"
        )

    def _store(self, key: str, fill: Callable[[int], None], place: Callable[[str, str], None]) -> bool:
        """Write an object to a temporary file, stamp it and move it to its key; False if the key was taken."""
        self._check_writable()
        path = self._path(key)
        temporary = f"{self._incoming}/{_process_token}-{os.getpid()}-{next(_counter)}"
        try:
            # 1. Write the bytes where no listing shows them.
            file = self._create(temporary)
            try:
                fill(file)
                # 2. Stamp the object in whole seconds, when all of it is written.
                seconds = math.floor(self._clock())
                os.utime(file, (seconds, seconds))
            finally:
                os.close(file)
            # 3. Rename or link it to its key: it appears whole.
            stored = self._place(temporary, path, place)
        except BaseException as error:
            with suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError):
                raise self._failure(error, key) from error
            raise
        if place is os.link:
            os.unlink(temporary)
        return stored

    def _create(self, temporary: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        with suppress(FileNotFoundError):
            return os.open(temporary, flags, 0o666)
        self._check_bucket()
        with suppress(FileExistsError):
            os.mkdir(self._incoming)
        return os.open(temporary, flags, 0o666)

    def _place(self, temporary: str, path: str, place: Callable[[str, str], None]) -> bool:
        """Rename or link an object to its path; False if a link finds it taken."""
        folder = os.path.dirname(path)
        for _ in range(_PLACE_ATTEMPTS):
            try:
                place(temporary, path)
            except FileNotFoundError:
                # The folder is not there yet, or `delete` has just found it empty.
                self._check_bucket()
                with suppress(FileNotFoundError, FileExistsError):  # another thread makes or deletes it; see next turn
                    os.makedirs(folder, exist_ok=True)
            except FileExistsError:
                if os.path.isdir(path):
                    raise
                return False
            else:
                return True
        raise TransientError(Reason.STORE_BUSY, f"bucket {self._name}: {folder} vanishes as soon as it is made")

    def _delete(self, key: str) -> None:
        path = self._path(key)
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return
        except OSError as error:
            raise self._failure(error, key) from error
        folder = os.path.dirname(path)
        with suppress(OSError):  # it ends at the first folder that is not empty
            while len(folder) > len(self._root):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    def _walk(self, folder: str, prefix: str) -> Iterator[ObjectInfo]:
        """Objects below `folder` ("" or ending in a slash) whose keys start with `prefix`, in key order."""
        try:
            with os.scandir(f"{self._root}/{folder}") as entries:
                # A folder sorts as its keys do: with the slash that follows its name.
                found = sorted((f"{folder}{entry.name}{'/' if entry.is_dir() else ''}", entry) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failure(error, folder) from error
        for key, entry in found:
            if key.endswith("/"):
                if key != f"{INCOMING}/" and (key.startswith(prefix) or prefix.startswith(key)):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                with suppress(FileNotFoundError):  # deleted since
                    yield _info(key, entry.stat())

    def _missing(self, key: str) -> PermanentError:
        return PermanentError(Reason.OBJECT_MISSING, f"bucket {self._name}: there is no object {key}")

    def _failure(self, error: OSError, key: str) -> TemplarError:
        """The project's error for an error of the operating system."""
        where = f"bucket {self._name}: {key}"
        if error.errno == errno.ENOENT:
            self._check_bucket()
            return self._missing(key)
        if error.errno in _BAD_PLACE:
            return PermanentError(Reason.BAD_KEY, f"{where}: there can be no such file: {error.strerror}")
        if error.errno in _DENIED:
            return PermanentError(Reason.ACCESS_DENIED, f"{where}: {error.strerror}; check the rights on {self._root}")
        return TransientError(Reason.STORE_BUSY, f"{where}: {error.strerror or error}")


def _is_reserved(key: str) -> bool:
    return key.partition("/")[0] == INCOMING


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key=key, size=status.st_size, last_modified=status.st_mtime_ns // _NANOSECONDS)
