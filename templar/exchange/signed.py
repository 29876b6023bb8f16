"""Signed objects: strict schemas, one canonical form, one author each (docs/protocol.md 5).

An object is `{"body": {...}, "signature": "..."}` in canonical JSON. Its digest is the SHA-256 of the canonical JSON of
its body alone, because sr25519 signatures differ from one signing to the next. The signature also covers the object's
kind, so a body of one kind cannot be presented as another kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json, sha256_hex
from templar.chain.base import NeuronInfo
from templar.chain.hotkey import Signer, verify
from templar.errors import PermanentError, Reason, RejectedError, as_reader_failure
from templar.exchange.object_keys import Kind
from templar.shared_results import Same, shared
from templar.store.base import ObjectInfo

Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hotkey = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{46,50}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Uid = Annotated[int, Field(ge=0, lt=2**16)]
Version = Annotated[str, Field(pattern=r"^[0-9A-Za-z.+]{1,32}$")]

ENVELOPE_BYTES = 512
"""Upper bound of the envelope, the signature and the fields of `Body`; a kind's `max_bytes` adds its own fields."""

MAX_VALUES = 1 << 18
"""Most commas and opening brackets in one object: a bound of the values in it. Legal objects have far fewer."""

_GONE = frozenset({Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE})
"""The reasons for which a GET fails when the object was deleted or replaced after its HEAD."""


@dataclass(frozen=True)
class Network:
    """The subnet and the genesis hash: two nodes are on one network if both are equal."""

    netuid: int
    genesis: str


class Record(BaseModel):
    """A frozen part of an object; unknown fields and values of other types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Body(Record):
    """The signed part of an object."""

    kind: ClassVar[Kind]
    max_bytes: ClassVar[int]  # of the encoded object
    max_keys: ClassVar[int] = 64  # of each JSON object in it; at least as many as the schema allows anywhere

    protocol: Version = PROTOCOL_VERSION
    netuid: Count
    genesis: Hex64  # digest of the start window; all zeros in the start window itself and in leases
    uid: Uid  # the author's, when it was signed
    hotkey: Hotkey

    @shared(Same, most=4096)
    def canonical(self) -> bytes:
        """The bytes that are hashed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical body; other objects refer to this one by it."""
        return sha256_hex(self.canonical())


class WindowBody(Body):
    """An object about one window."""

    window: Count


T = TypeVar("T", bound=Body)


@dataclass(frozen=True)
class Sealed(Generic[T]):
    """A body and its author's signature, in hex."""

    body: T
    signature: str

    def encode(self) -> bytes:
        """The object's bytes."""
        return b'{"body":%b,"signature":%b}' % (self.body.canonical(), canonical_json(self.signature))


@dataclass(frozen=True)
class Found(Generic[T]):
    """A legal object as it was read from its author's bucket."""

    body: T
    last_modified: int  # the server's time of it, in whole seconds
    signature: str  # the author's, in hex


class Reader(Protocol):
    """The two calls of `templar.store.base.ObjectStore` that reading needs."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Size and time of the object; None if there is none."""
        ...


def seal(body: T, signer: Signer) -> Sealed[T]:
    """Sign a body; ValueError if it names another hotkey than the signer's."""
    if signer.address != body.hotkey:
        raise ValueError(f"{body.kind}: the body names {body.hotkey}, the signer is {signer.address}")
    return Sealed(body, signer.sign(_message(body)).hex())


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
    """Read and check the object that a neuron published under a key; None if there is none (a definite 404).

    `check` judges time and size before the body is read, and raises RejectedError.

    Raises:
        RejectedError: It is not legal: `wrong_size`, a reason of `check`, `unseal`, `check_author` or `check_window`,
            or `object_differs` if it was replaced while it was read.
        TransientError: The store failed; a later call may succeed. `reader_failed`: this node did, unexpectedly.
        PermanentError: The store refuses (key, bucket).
    """
    what = f"{body_type.kind} of uid {author.uid}"
    replaced = RejectedError(Reason.OBJECT_DIFFERS, f"{key} was replaced or deleted while it was read")
    with as_reader_failure(what):
        # 1. HEAD: time and size are judged before a byte of the body is read.
        info = store.head(key)
        if info is None:
            return None
        if check is not None:
            check(info)
        if info.is_time_unproven:
            problem = "it came in parts, or its bucket keeps versions: its time may be older than its bytes"
            raise RejectedError(Reason.TIME_UNPROVEN, f"{what}: {problem}")
        if info.size > body_type.max_bytes:
            problem = f"{info.size} bytes, at most {body_type.max_bytes} are legal"
            raise RejectedError(Reason.WRONG_SIZE, f"{what}: {problem}")
        # 2. GET: schema, signature, author, window.
        try:
            data = store.get(key, max_bytes=info.size)
        except PermanentError as error:
            if error.reason in _GONE:
                raise replaced from None
            raise
        sealed = unseal(data, body_type)
        body = sealed.body
        check_author(body, network=network, uid=author.uid, hotkey=author.hotkey)
        if window is not None and isinstance(body, WindowBody):
            check_window(body, window)
        # 3. HEAD again: the owner may replace an object at any moment, so the judged time must still be this body's.
        if store.head(key) != info:
            raise replaced
        return Found(body, info.last_modified, sealed.signature)


@shared(lambda data, body_type: (data, body_type), most=4096)
def unseal(data: bytes, body_type: type[T]) -> Sealed[T]:
    """Parse an object's bytes and verify its signature.

    Raises:
        RejectedError: `malformed` (not the schema, too long), `not_canonical`, `bad_signature`; no bytes raise another.
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
    """Refuse, as `bad_signature`, any signature but that of the hotkey that the body names."""
    body = sealed.body
    if not verify(body.hotkey, _message(body), bytes.fromhex(sealed.signature)):
        raise RejectedError(Reason.BAD_SIGNATURE, f"{body.kind}: the signature is not {body.hotkey}'s")


def check_author(body: Body, *, network: Network, uid: int, hotkey: str) -> None:
    """Refuse an object of a `wrong_network`, or of another neuron than the bucket's (`wrong_identity`)."""
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
    """Refuse, as `wrong_window`, an object about another window than its key names."""
    if body.window != window:
        raise RejectedError(Reason.WRONG_WINDOW, f"{body.kind}: signed for window {body.window}, stored for {window}")


class _Envelope(Record):
    body: dict[str, Any]
    signature: Signature


def _parse(data: bytes, body_type: type[T]) -> Sealed[T]:
    """The object that bytes hold, in bounded memory and time.

    Pydantic reports all errors with their inputs. So values and keys are counted first, lists stop at their first bad
    element, and the parsed value is validated: errors then refer to it, where those of bytes would copy it.
    """
    if sum(data.count(byte) for byte in (b",", b"[", b"{")) > MAX_VALUES:
        raise _malformed(body_type, f"more than {MAX_VALUES} values")
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings=False)
        if _most_keys(value) > body_type.max_keys:
            raise _malformed(body_type, f"an object in it has more than {body_type.max_keys} keys")
        envelope = _Envelope.model_validate(value)
        return Sealed(body_type.model_validate(envelope.body), envelope.signature)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _malformed(body_type, f"{where}: {first['msg']}" if where else first["msg"]) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(body_type, str(error)) from None


def _most_keys(value: Any) -> int:
    """Number of keys of the largest JSON object within a value."""
    most, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if type(each) is dict:
            most = max(most, len(each))
            waiting += each.values()
        elif type(each) is list:
            waiting += each
    return most


def _malformed(body_type: type[Body], problem: str) -> RejectedError:
    # The author chose the names of unknown fields: only their plain text may reach a log.
    return RejectedError(Reason.MALFORMED, f"{body_type.kind}: {ascii(problem[:200])[1:-1]}")


def _message(body: Body) -> bytes:
    """The bytes that are signed."""
    return f"templar:{PROTOCOL_VERSION}:{body.kind}:".encode() + body.canonical()
