"""Reading the small signed objects that neurons publish for each other.

Whatever lies in another's bucket is that neuron's to replace at any moment, so what is read is looked at twice: the
time and size that were judged before the body was read must still be the object's afterwards.

Signed objects: strict schemas, one canonical form, one author each.

An object is `{"body": {...}, "signature": "..."}` in canonical JSON. The hash of an object is the SHA-256 of the
canonical JSON of its body, because sr25519 signatures differ from one signing to the next. The signature covers the
kind of the object as well, so that a body can never be passed off as another kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json, sha256_hex
from templar.chain.base import NeuronInfo
from templar.chain.hotkey import Signer, verify
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.object_keys import Kind
from templar.store.base import ObjectInfo

Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


Hotkey = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{46,50}$")]


Count = Annotated[int, Field(ge=0, le=2**53)]


Uid = Annotated[int, Field(ge=0, lt=2**16)]


Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z.+]{1,32}$")]


ENVELOPE_BYTES = 512
"""Room for the envelope, the signature and the network fields around what an object itself may hold."""


@dataclass(frozen=True)
class Network:
    """What two nodes must have in common to be on one network."""

    netuid: int
    genesis: str


class Body(BaseModel):
    """The signed part of an object.

    Attributes:
        protocol: Protocol version.
        netuid: Subnet.
        genesis: Digest of the start window's body; all zeros in the start window itself.
        uid: Author's uid when it was signed.
        hotkey: Author's ss58 address.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: ClassVar[Kind]
    max_bytes: ClassVar[int]

    protocol: Version = PROTOCOL_VERSION
    netuid: Count
    genesis: Hex64
    uid: Uid
    hotkey: Hotkey

    def canonical(self) -> bytes:
        """The bytes that are hashed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical body: the name by which others refer to the object."""
        return sha256_hex(self.canonical())


class WindowBody(Body):
    """An object about one window."""

    window: Count


T = TypeVar("T", bound=Body)


@dataclass(frozen=True)
class Sealed(Generic[T]):
    """A body together with its author's signature."""

    body: T
    signature: str

    def encode(self) -> bytes:
        """The object's bytes."""
        return canonical_json({"body": self.body.model_dump(mode="json"), "signature": self.signature})


def seal(body: T, signer: Signer) -> Sealed[T]:
    """Sign a body.

    Raises:
        ValueError: The body names another hotkey than the signer's.
    """
    if signer.address != body.hotkey:
        raise ValueError(f"{body.kind}: the body names {body.hotkey}, the signer is {signer.address}")
    return Sealed(body, signer.sign(_message(body)).hex())


def unseal(data: bytes, body_type: type[T]) -> Sealed[T]:
    """Read an object that somebody published.

    Raises:
        RejectedError: `malformed` (not the schema, too long), `not_canonical`, `bad_signature`. Nothing else, whatever
            the bytes are.
    """
    kind = body_type.kind
    if len(data) > body_type.max_bytes:
        raise RejectedError(Reason.MALFORMED, f"{kind}: {len(data)} bytes, at most {body_type.max_bytes} are legal")
    sealed = _parse(data, body_type)
    if sealed.encode() != data:
        raise RejectedError(Reason.NOT_CANONICAL, f"{kind}: not in canonical form")
    check_signature(sealed)
    return sealed


def check_signature(sealed: Sealed[T]) -> None:
    """Check that the signature is that of the hotkey that the body names.

    Raises:
        RejectedError: `bad_signature`.
    """
    body = sealed.body
    if not verify(body.hotkey, _message(body), bytes.fromhex(sealed.signature)):
        raise RejectedError(Reason.BAD_SIGNATURE, f"{body.kind}: the signature is not {body.hotkey}'s")


def check_author(body: Body, *, network: Network, uid: int, hotkey: str) -> None:
    """Check that an object belongs to this network and to the neuron in whose bucket it lies.

    Raises:
        RejectedError: `wrong_network`, `wrong_identity`.
    """
    if (body.protocol, body.netuid, body.genesis) != (PROTOCOL_VERSION, network.netuid, network.genesis):
        raise RejectedError(
            Reason.WRONG_NETWORK,
            f"{body.kind} of uid {uid}: made for protocol {body.protocol}, netuid {body.netuid}, "
            f"genesis {body.genesis[:12]}; here it is {PROTOCOL_VERSION}, {network.netuid}, {network.genesis[:12]}",
        )
    if (body.uid, body.hotkey) != (uid, hotkey):
        raise RejectedError(
            Reason.WRONG_IDENTITY, f"{body.kind} in the bucket of uid {uid} ({hotkey}) names {body.uid} ({body.hotkey})"
        )


def check_window(body: WindowBody, window: int) -> None:
    """Check that an object is about the window that its key says.

    Raises:
        RejectedError: `wrong_window`.
    """
    if body.window != window:
        raise RejectedError(Reason.WRONG_WINDOW, f"{body.kind}: signed for window {body.window}, stored for {window}")


class _Envelope(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    body: dict[str, Any]
    signature: Signature


def _parse(data: bytes, body_type: type[T]) -> Sealed[T]:
    try:
        envelope = _Envelope.model_validate_json(data)
        return Sealed(body_type.model_validate_json(canonical_json(envelope.body)), envelope.signature)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _malformed(body_type, f"{where}: {first['msg']}" if where else first["msg"]) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(body_type, str(error)) from None


def _malformed(body_type: type[Body], problem: str) -> RejectedError:
    # The names of unknown fields are the author's: nothing of theirs that is not plain text gets into a log.
    return RejectedError(Reason.MALFORMED, f"{body_type.kind}: {ascii(problem[:200])[1:-1]}")


def _message(body: Body) -> bytes:
    return f"templar:{PROTOCOL_VERSION}:{body.kind}:".encode() + body.canonical()


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
