"""An object store in memory that remembers its reads and fails on demand."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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

    def __init__(self, name="memory", *, clock=time.time):
        self._name = name
        self._clock = clock
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._lock = threading.RLock()
        self.reads: list[Read] = []
        self.fail: Callable[[Read], TemplarError | None] = lambda read: None

    @property
    def name(self):
        return self._name

    def bytes_read(self, suffix=""):
        """Bytes asked for from keys with this ending."""
        return sum(read.length for read in self.reads if read.key.endswith(suffix))

    def put(self, key, data):
        with self._lock:
            self._objects[key] = (bytes(data), int(self._clock()))

    def put_if_absent(self, key, data):
        with self._lock:
            if key in self._objects:
                return False
            self.put(key, data)
            return True

    def put_file(self, key, path):
        self.put(key, path.read_bytes())

    def get(self, key, *, max_bytes):
        data = self._read("get", key, None)
        if len(data) > max_bytes:
            raise PermanentError(Reason.OBJECT_TOO_LARGE, f"{key}: {len(data)} bytes, at most {max_bytes}")
        return data

    def get_range(self, key, start, length):
        data = self._read("get_range", key, length)[start : start + length]
        if len(data) < length:
            raise PermanentError(Reason.OBJECT_TRUNCATED, f"{key}: {len(data)} bytes from {start}, not {length}")
        return data

    def read_into(self, key, start, buffer):
        buffer[:] = self.get_range(key, start, len(buffer))

    def get_file(self, key, path, *, max_bytes, resume=False):
        path.write_bytes(self.get(key, max_bytes=max_bytes))

    def head(self, key):
        self._note(Read("head", key, 0))
        with self._lock:
            found = self._objects.get(key)
        return None if found is None else ObjectInfo(key, len(found[0]), found[1])

    def list(self, prefix=""):
        with self._lock:
            found = sorted((key, *value) for key, value in self._objects.items() if key.startswith(prefix))
        return iter([ObjectInfo(key, len(data), modified) for key, data, modified in found])

    def delete(self, keys):
        keys = tuple(keys)
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
        return DeleteReport(deleted=keys, failed=())

    def close(self):
        pass

    def _read(self, operation, key, length):
        with self._lock:
            found = self._objects.get(key)
        size = len(found[0]) if found else 0
        self._note(Read(operation, key, size if length is None else length))
        if found is None:
            raise PermanentError(Reason.OBJECT_MISSING, f"{key} is not in {self._name}")
        return found[0]

    def _note(self, read):
        with self._lock:
            self.reads.append(read)
        error = self.fail(read)
        if error is not None:
            raise error
