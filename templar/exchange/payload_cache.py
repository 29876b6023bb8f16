"""Payloads on the local disk, by window and hash: each is fetched once, verified once and read many times.

Only bytes that decode as a legal payload of their author and window are kept, so every cached payload can be applied.
"""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from cachetools import LRUCache, cached

from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, RejectedError
from templar.gradient.codec.wire import Payload, decode
from templar.gradient.layout import Layout
from templar.store.files import local_file, replacing

MEMORY_BYTES = 64 << 20  # decoded payloads that one process keeps in memory; a larger payload is decoded at each use


class PayloadCache:
    """Files `{window}/{sha256}` below a folder. Safe under threads and after a crash."""

    def __init__(self, root: Path, layout: Layout) -> None:
        self._root = root
        self._layout = layout

    def check_size(self, num_bytes: int, *, uid: int) -> None:
        """Refuse, as `wrong_size`, a length that no payload of this model has, before any byte is read."""
        if not self._layout.min_payload_bytes <= num_bytes <= self._layout.max_payload_bytes:
            raise RejectedError(Reason.WRONG_SIZE, f"uid {uid}: no payload of this model has {num_bytes} bytes")

    def admit(self, data: bytes, digest: str, *, window: int, uid: int, hotkey: str) -> None:
        """Keep bytes that a peer published.

        Raises:
            RejectedError: The bytes do not have this hash, are no legal payload, or are another author's or window's;
                they are not kept.
            TemplarError: `local_file`; this machine cannot keep them.
        """
        if sha256_hex(data) != digest:
            raise RejectedError(Reason.WRONG_HASH, f"uid {uid}: the payload does not have the committed hash")
        payload, _ = _decoded_and_size(self._layout, digest, lambda: data)
        _check_author(payload, window=window, uid=uid, hotkey=hotkey)
        path = self._path(window, digest)
        with local_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)

    def has(self, digest: str, *, window: int, uid: int, hotkey: str) -> bool:
        """Whether the whole payload is in the cache; RejectedError if it is, and its author is another one."""
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
        return _decoded_and_size(self._layout, digest, lambda: self.read(window, digest))[0]

    def prune(self, before_window: int) -> int:
        """Delete every payload of windows before this one; the number of windows deleted."""
        old = [folder for folder in self._root.glob("[0-9]*") if int(folder.name) < before_window]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)

    def _path(self, window: int, digest: str) -> Path:
        return self._root / str(window) / digest


@cached(
    LRUCache(MEMORY_BYTES, getsizeof=lambda item: item[1]),
    key=lambda layout, digest, read: (layout.digest, digest),
    lock=threading.Lock(),
)
def _decoded_and_size(layout: Layout, digest: str, read: Callable[[], bytes]) -> tuple[Payload, int]:
    """The payload in the bytes that `read` returns, and their number; their hash is `digest`, or `read` raises."""
    data = read()
    return decode(data, layout), len(data)  # the payload's sections are views of these bytes


def _check_author(payload: Payload, *, window: int, uid: int, hotkey: str) -> None:
    header = payload.header
    if (header.uid, header.hotkey) != (uid, hotkey):
        raise RejectedError(Reason.WRONG_IDENTITY, f"uid {uid}: the payload's header names uid {header.uid}")
    if header.window != window:
        raise RejectedError(Reason.WRONG_WINDOW, f"uid {uid}: the payload was made for window {header.window}")
