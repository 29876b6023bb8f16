"""The signed objects of the exchange: strict schemas, one canonical form, one author each.

An object is `{"body": {...}, "signature": "..."}` in canonical JSON. The hash of an object is the SHA-256 of the
canonical JSON of its body, because sr25519 signatures differ from one signing to the next. The signature covers the
kind of the object as well, so that a body can never be passed off as another kind.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json, sha256_hex
from templar.chain.keys import Signer, verify
from templar.errors import Reason, RejectedError
from templar.exchange.keys import Kind

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hotkey = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{46,50}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Uid = Annotated[int, Field(ge=0, le=2**16)]
FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,127}$")]

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

    protocol: Annotated[str, Field(max_length=32)] = PROTOCOL_VERSION
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


class Commit(WindowBody):
    """A promise made before the close: the digest of a manifest that nobody has seen yet (PROTOCOL 8)."""

    kind = Kind.COMMIT
    max_bytes = ENVELOPE_BYTES + 256

    commitment: Hex64


class Manifest(WindowBody):
    """What a miner's payload is; its digest is what was committed.

    Attributes:
        payload_sha256: SHA-256 of the payload's bytes.
        payload_bytes: Their number.
        assignment: Digest of the data assignment that the miner trained on.
        root_before: State root that the training started from.
    """

    kind = Kind.MANIFEST
    max_bytes = ENVELOPE_BYTES + 512

    payload_sha256: Hex64
    payload_bytes: Count
    assignment: Hex64
    root_before: Hex64


class RosterEntry(BaseModel):
    """One payload of a roster: who, which bytes, and when they were stored, as the publisher saw it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    uid: Uid
    hotkey: Hotkey
    payload_sha256: Hex64
    payload_bytes: Count
    committed_at: Count
    revealed_at: Count


class Roster(WindowBody):
    """The payloads of a window, in uid order, as one publisher saw them (PROTOCOL 13).

    Attributes:
        previous: Digest of the roster decided for the window before; None for a null window.
        peer_list: Digest of the peer list that was gathered; None before the first one.
        entries: The payloads; none at all makes a null window.
        aggregate_sha256: SHA-256 of the aggregate: the payloads' bytes, one after the other, in this order.
        aggregate_bytes: Its length.
    """

    kind = Kind.ROSTER
    max_bytes = ENVELOPE_BYTES + 1024 + 320 * 1024

    previous: Hex64 | None
    peer_list: Hex64 | None
    entries: Annotated[tuple[RosterEntry, ...], Field(max_length=1024, strict=False)]
    aggregate_sha256: Hex64
    aggregate_bytes: Count

    @model_validator(mode="after")
    def _entries_are_in_order(self) -> Self:
        uids = [entry.uid for entry in self.entries]
        if uids != sorted(set(uids)):
            raise ValueError("entries must be in uid order, each uid once")
        if self.aggregate_bytes != sum(entry.payload_bytes for entry in self.entries):
            raise ValueError("aggregate_bytes is not the sum of the payloads")
        return self


class Decision(WindowBody):
    """A validator's word on a window: the roster it applied, or None for a null window (PROTOCOL 15)."""

    kind = Kind.DECISION
    max_bytes = ENVELOPE_BYTES + 128

    roster: Hex64 | None


class PeerList(Body):
    """Who is gathered from a window on, until the next list.

    Attributes:
        first_effective_window: The first window that it holds for.
        peers: The gather tier, best first.
        reserve: Miners that fill the places of failed ones, in order.
    """

    kind = Kind.PEERS
    max_bytes = ENVELOPE_BYTES + 16 * 1024

    first_effective_window: Count
    peers: Annotated[tuple[Uid, ...], Field(max_length=1024, strict=False)]
    reserve: Annotated[tuple[Uid, ...], Field(max_length=1024, strict=False)]

    @model_validator(mode="after")
    def _nobody_twice(self) -> Self:
        if len(set(self.peers + self.reserve)) != len(self.peers) + len(self.reserve):
            raise ValueError("a uid is listed twice")
        return self


class StartWindow(Body):
    """The birth certificate of a network; its digest is the genesis hash.

    Attributes:
        start_window: The first window that is trained.
        hparams: Digest of the hyper-parameters that nodes must agree on.
        tokenizer: Digest of the tokenizer.
        dataset: Digest of the dataset's metadata.
        root: State root of the genesis checkpoint, `checkpoint-{start_window - 1}-{uid}-v{version}`.
    """

    kind = Kind.START_WINDOW
    max_bytes = ENVELOPE_BYTES + 1024

    start_window: Annotated[int, Field(ge=1, le=2**53)]
    hparams: Hex64
    tokenizer: Hex64
    dataset: Hex64
    root: Hex64


class Proof(WindowBody):
    """A node's proof that it holds the state after a window (DESIGN 4).

    Attributes:
        root: State root after the window.
        outer_steps: Outer steps in that state.
        proof: Keyed hash over parameter slices that the settling block chose; see `templar.exchange.proof`.
    """

    kind = Kind.PROOF
    max_bytes = ENVELOPE_BYTES + 512

    root: Hex64
    outer_steps: Count
    proof: Hex64


class CheckpointManifest(WindowBody):
    """The files of a checkpoint and the state that they hold.

    Attributes:
        root: State root after `window`.
        previous_root: State root before it; with the parameters it proves `root`.
        outer_steps: Outer steps in that state.
        null: Whether `window` was null.
        files: SHA-256 of each file in the checkpoint's folder, by name.
        sizes: Length of each file in bytes, by name.
    """

    kind = Kind.CHECKPOINT
    max_bytes = ENVELOPE_BYTES + 64 * 1024

    root: Hex64
    previous_root: Hex64
    outer_steps: Count
    null: bool
    files: dict[FileName, Hex64]
    sizes: dict[FileName, Count]

    @model_validator(mode="after")
    def _every_file_has_a_size(self) -> Self:
        if self.files.keys() != self.sizes.keys():
            raise ValueError("files and sizes name different files")
        return self


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
    if not verify(sealed.body.hotkey, _message(sealed.body), bytes.fromhex(sealed.signature)):
        raise RejectedError(Reason.BAD_SIGNATURE, f"{kind}: the signature is not {sealed.body.hotkey}'s")
    return sealed


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
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def _parse(data: bytes, body_type: type[T]) -> Sealed[T]:
    try:
        envelope = _Envelope.model_validate_json(data)
        return Sealed(body_type.model_validate_json(canonical_json(envelope.body)), envelope.signature)
    except (ValidationError, ValueError, RecursionError) as error:
        problem = str(error).splitlines()[0][:200]
        raise RejectedError(Reason.MALFORMED, f"{body_type.kind}: {problem}") from None


def _message(body: Body) -> bytes:
    return f"templar:{PROTOCOL_VERSION}:{body.kind}:".encode() + body.canonical()
