"""An object store in memory that remembers its reads and fails on demand."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from templar.errors import PermanentError, Reason, TemplarError
from templar.store.base import DeleteReport, ObjectInfo


@dataclass(frozen=True)
class Read:
    """One request that returned bytes, or was about to: `length` is the length asked for."""

    operation: str
    key: str
    length: int


class MemoryStore:
    """Fulfils `templar.store.base.ObjectStore`.

    Attributes:
        reads: Every `get`, `get_range` and `head`, in order, failed ones too.
        fail: Called before each of them; an error that it returns is raised.
    """

    def __init__(self, name: str = "memory", *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._clock = clock
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._lock = threading.RLock()
        self.reads: list[Read] = []
        self.fail: Callable[[Read], TemplarError | None] = lambda read: None

    @property
    def name(self) -> str:
        return self._name

    def bytes_read(self, suffix: str = "") -> int:
        """Bytes asked for from keys with this ending."""
        return sum(read.length for read in self.reads if read.key.endswith(suffix))

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = (bytes(data), int(self._clock()))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self.put(key, data)
            return True

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._read("get", key, None)
        if len(data) > max_bytes:
            raise PermanentError(Reason.OBJECT_TOO_LARGE, f"{key}: {len(data)} bytes, at most {max_bytes}")
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._read("get_range", key, length)[start : start + length]
        if len(data) < length:
            raise PermanentError(Reason.OBJECT_TRUNCATED, f"{key}: {len(data)} bytes from {start}, not {length}")
        return data

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        buffer[:] = self.get_range(key, start, len(buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        path.write_bytes(self.get(key, max_bytes=max_bytes))

    def head(self, key: str) -> ObjectInfo | None:
        self._note(Read("head", key, 0))
        with self._lock:
            found = self._objects.get(key)
        return None if found is None else ObjectInfo(key, len(found[0]), found[1])

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted((key, *value) for key, value in self._objects.items() if key.startswith(prefix))
        return iter([ObjectInfo(key, len(data), modified) for key, data, modified in found])

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        keys = tuple(keys)
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
        return DeleteReport(deleted=keys, failed=())

    def close(self) -> None:
        pass

    def _read(self, operation: str, key: str, length: int | None) -> bytes:
        with self._lock:
            found = self._objects.get(key)
        size = len(found[0]) if found else 0
        self._note(Read(operation, key, size if length is None else length))
        if found is None:
            raise PermanentError(Reason.OBJECT_MISSING, f"{key} is not in {self._name}")
        return found[0]

    def _note(self, read: Read) -> None:
        with self._lock:
            self.reads.append(read)
        error = self.fail(read)
        if error is not None:
            raise error
