"""An object store that passes calls on to another one, with hooks for failures."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from templar.store.base import DeleteReport, ObjectInfo, ObjectStore

T = TypeVar("T")
Hook = Callable[[str, str], None]


class ScriptedStore:
    """Fulfils `templar.store.base.ObjectStore` with the objects of another store.

    An error that `before` raises replaces the call; one that `after` raises replaces the answer, as if that was lost.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []  # operation and key of every call, in order, failed ones too
        self.before: Hook = lambda operation, key: None
        self.after: Hook = lambda operation, key: None
        self.ignores_conditions = False  # `put_if_absent` overwrites, as on servers without conditional writes
        self.closed = 0

    @property
    def name(self) -> str:
        return self.inner.name

    def count(self, operation: str, key: str = "") -> int:
        return sum(1 for call in self.calls if call[0] == operation and key in ("", call[1]))

    def put(self, key: str, data: bytes) -> None:
        self._do("put", key, lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        def put() -> bool:
            if self.ignores_conditions:
                self.inner.put(key, data)
                return True
            return self.inner.put_if_absent(key, data)

        return self._do("put_if_absent", key, put)

    def put_file(self, key: str, path: Path) -> None:
        self._do("put_file", key, lambda: self.inner.put_file(key, path))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self._do("get", key, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self.inner.get_range(key, start, length))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        buffer[:] = self.get_range(key, start, len(buffer))

    def get_file(self, key: str, path: Path, *, max_bytes: int, resume: bool = False) -> None:
        self._do("get_file", key, lambda: self.inner.get_file(key, path, max_bytes=max_bytes, resume=resume))

    def head(self, key: str) -> ObjectInfo | None:
        return self._do("head", key, lambda: self.inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._do("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, keys: Iterable[str]) -> DeleteReport:
        keys = tuple(keys)
        return self._do("delete", "", lambda: self.inner.delete(keys))

    def close(self) -> None:
        self.closed += 1
        self.inner.close()

    def _do(self, operation: str, key: str, work: Callable[[], T]) -> T:
        self.calls.append((operation, key))
        self.before(operation, key)
        answer = work()
        self.after(operation, key)
        return answer


def failing(error: Exception, *operations: str, times: int | None = None, key: str = "") -> Hook:
    """A hook that raises an error: in these operations (all by default), on this key, this many times."""
    left = [times]

    def hook(operation: str, called: str) -> None:
        if (operations and operation not in operations) or (key and called != key) or left[0] == 0:
            return
        if left[0] is not None:
            left[0] -= 1
        raise error

    return hook


def fail_once(store: ScriptedStore, error: Exception, *operations: str, key: str = "", lost: bool = False) -> None:
    """Let one call fail; if its answer is `lost`, it has done its work all the same."""
    setattr(store, "after" if lost else "before", failing(error, *operations, key=key, times=1))


def once(operation: str, key: str, action: Callable[[], None]) -> Hook:
    """A hook that acts once, before the first call of an operation on a key, like a faster process."""
    pending = [action]

    def hook(called: str, called_key: str) -> None:
        if (called, called_key) == (operation, key) and pending:
            pending.pop()()

    return hook
