"""Payloads on the local disk, by window and hash: fetched once, verified on the way in, read many times.

Only what decodes as a legal payload of its author and window gets in, so whatever is here can be applied.
"""

import shutil
import threading
from collections import OrderedDict
from pathlib import Path

from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, RejectedError
from templar.gradient.codec.wire import Payload, decode
from templar.gradient.layout import Layout
from templar.store.files import local_file

MEMORY_BYTES = 64 << 20
"""Decoded payloads that a process keeps at hand; larger ones are decoded each time."""


class PayloadCache:
    """Content-addressed files `{window}/{sha256}` below a folder. Safe under threads and after a crash.

    Args:
        root: The folder; made when needed.
        layout: The model's tensors and chunks.
    """

    def __init__(self, root: Path, layout: Layout) -> None:
        self._root = root
        self._layout = layout

    def check_size(self, num_bytes: int, *, uid: int) -> None:
        """Refuse a length that no payload of this model has, before anything of it is read.

        Raises:
            RejectedError: `wrong_size`.
        """
        if not self._layout.min_payload_bytes <= num_bytes <= self._layout.max_payload_bytes:
            raise RejectedError(Reason.WRONG_SIZE, f"uid {uid}: no payload of this model has {num_bytes} bytes")

    def admit(self, data: bytes, digest: str, *, window: int, uid: int, hotkey: str) -> None:
        """Take in what somebody published.

        Raises:
            RejectedError: The bytes are not those of `digest`, no legal payload, or somebody else's; they are not
                kept.
            TemplarError: `local_file`; this machine cannot keep them.
        """
        check_hash(data, digest, uid=uid)
        self.keep(data, digest, window=window, uid=uid, hotkey=hotkey)

    def keep(self, data: bytes, digest: str, *, window: int, uid: int, hotkey: str) -> None:
        """As `admit`, for bytes whose hash is known to be `digest`."""
        _check_author(_decoded(data, digest, self._layout), window=window, uid=uid, hotkey=hotkey)
        path = self._path(window, digest)
        with local_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f".{digest}.{threading.get_ident()}")
            part.write_bytes(data)
            part.replace(path)

    def has(self, digest: str, *, window: int, uid: int, hotkey: str) -> bool:
        """Whether the payload is here, whole.

        Raises:
            RejectedError: It is, and it is somebody else's.
        """
        if not self._path(window, digest).exists():
            return False
        try:
            payload = self.payload(window, digest)
        except PermanentError:
            return False
        _check_author(payload, window=window, uid=uid, hotkey=hotkey)
        return True

    def read(self, window: int, digest: str) -> bytes:
        """The payload's bytes.

        Raises:
            PermanentError: `object_missing`; it was never admitted, was pruned, or a crash left half of it.
        """
        try:
            data = self._path(window, digest).read_bytes()
        except FileNotFoundError:
            data = b""
        if sha256_hex(data) != digest:
            raise PermanentError(
                Reason.OBJECT_MISSING, f"payload {digest[:12]} of window {window} is not in the cache {self._root}"
            )
        return data

    def payload(self, window: int, digest: str) -> Payload:
        """The decoded payload; errors as in `read`."""
        known = _memory.get((self._layout.digest, digest))
        return known if known is not None else _decoded(self.read(window, digest), digest, self._layout)

    def prune(self, before_window: int) -> int:
        """Drop every payload of windows before this one; the number of windows dropped."""
        old = [folder for folder in self._root.glob("[0-9]*") if int(folder.name) < before_window]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)

    def _path(self, window: int, digest: str) -> Path:
        return self._root / str(window) / digest


def check_hash(data: bytes, digest: str, *, uid: int) -> None:
    """Refuse other bytes than those that were promised.

    Raises:
        RejectedError: `wrong_hash`.
    """
    if sha256_hex(data) != digest:
        raise RejectedError(Reason.WRONG_HASH, f"uid {uid}: the payload is not the one that was promised")


class _Memory:
    """Decoded payloads by layout and hash, the least recently used ones dropped; shared by the whole process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._items: OrderedDict[tuple[str, str], tuple[Payload, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, str]) -> Payload | None:
        with self._lock:
            item = self._items.get(key)
            if item is None:
                return None
            self._items.move_to_end(key)
            return item[0]

    def add(self, key: tuple[str, str], payload: Payload, num_bytes: int) -> None:
        with self._lock:
            if key in self._items or num_bytes > self._max_bytes:
                return
            self._items[key] = (payload, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._items.popitem(last=False)[1][1]


_memory = _Memory(MEMORY_BYTES)


def _decoded(data: bytes, digest: str, layout: Layout) -> Payload:
    """Decode bytes whose hash is known to be `digest`."""
    key = (layout.digest, digest)
    known = _memory.get(key)
    if known is not None:
        return known
    payload = decode(data, layout)
    _memory.add(key, payload, len(data))  # its sections are views of these bytes
    return payload


def _check_author(payload: Payload, *, window: int, uid: int, hotkey: str) -> None:
    header = payload.header
    if (header.uid, header.hotkey) != (uid, hotkey):
        raise RejectedError(Reason.WRONG_IDENTITY, f"uid {uid}: the payload's header names uid {header.uid}")
    if header.window != window:
        raise RejectedError(Reason.WRONG_WINDOW, f"uid {uid}: the payload was made for window {header.window}")
