"""Reading the small signed objects that neurons publish for each other.

Whatever lies in another's bucket is that neuron's to replace at any moment, so what is read is looked at twice: the
time and size that were judged before the body was read must still be the object's afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.sealing import Body, Network, WindowBody, check_author, check_window, unseal
from templar.store.base import ObjectInfo

T = TypeVar("T", bound=Body)

_CHANGED = frozenset({Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE})
"""What a store says of an object that is no longer what its HEAD showed."""


class Reader(Protocol):
    """The part of a store that reading takes; see `templar.store.base.ObjectStore`."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """What the server says of the object."""
        ...


@dataclass(frozen=True)
class Found(Generic[T]):
    """A legal object of its author's.

    Attributes:
        body: What it says.
        last_modified: When the server stored it, in whole seconds.
        signature: The author's signature, in hex: with the body it is the object as it was published.
    """

    body: T
    last_modified: int
    signature: str


def read_signed(
    store: Reader,
    key: str,
    body_type: type[T],
    *,
    network: Network,
    author: NeuronInfo,
    window: int | None = None,
    check: Callable[[ObjectInfo], None] | None = None,
) -> Found[T] | None:
    """Read and check what a neuron published under a key; None if there is nothing (a definite 404).

    Args:
        store: The neuron's bucket.
        key: Where.
        body_type: What must be there.
        network: The network that it must be made for.
        author: Who must have signed it.
        window: The window that it must be about, where it is about one.
        check: Judges time and size before the body is read; raises RejectedError.

    Raises:
        RejectedError: It is not legal: `wrong_size`, a reason of `check`, `unseal`, `check_author` or `check_window`,
            or `object_differs` if it was replaced while it was read.
        TransientError: The store failed; ask again.
        PermanentError: The store refuses (key, bucket).
    """
    info = store.head(key)
    if info is None:
        return None
    if check is not None:
        check(info)
    kind = body_type.kind
    if info.size > body_type.max_bytes:
        raise RejectedError(
            Reason.WRONG_SIZE, f"{kind} of uid {author.uid}: {info.size} bytes, at most {body_type.max_bytes} are legal"
        )
    sealed = unseal(_read(store, info), body_type)
    body = sealed.body
    check_author(body, network=network, uid=author.uid, hotkey=author.hotkey)
    if window is not None and isinstance(body, WindowBody):
        check_window(body, window)
    if store.head(key) != info:
        raise _replaced(info)
    return Found(body, info.last_modified, sealed.signature)


def _read(store: Reader, info: ObjectInfo) -> bytes:
    try:
        return store.get(info.key, max_bytes=info.size)
    except PermanentError as error:
        if error.reason in _CHANGED:
            raise _replaced(info) from None
        raise


def _replaced(info: ObjectInfo) -> RejectedError:
    return RejectedError(Reason.OBJECT_DIFFERS, f"{info.key} was replaced or deleted while it was read")
