"""What the objects of the exchange say: one schema per kind."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from templar.canonical import canonical_json, sha256_hex
from templar.exchange.object_keys import Kind
from templar.exchange.signed import ENVELOPE_BYTES, Body, Count, Hex64, Hotkey, Signature, Uid, WindowBody
from templar.hparams import MAX_PEERS

FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,127}$")]


Role = Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]


Holder = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


DEBUG_ELEMENTS = 2


DEBUG_NAME = r"^[0-9A-Za-z_.-]{1,80}$"


MAX_DEBUG_PARAMETERS = 2048


MAX_FLOAT32 = 3.4028234663852886e38


DebugName = Annotated[str, Field(pattern=DEBUG_NAME)]


DebugValue = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32, allow_inf_nan=False)]


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

    @property
    def commit(self) -> Commit:
        """The commitment to it."""
        return Commit(
            protocol=self.protocol,
            netuid=self.netuid,
            genesis=self.genesis,
            window=self.window,
            uid=self.uid,
            hotkey=self.hotkey,
            commitment=self.digest,
        )


class RosterEntry(BaseModel):
    """One payload of a roster: everything that its author signed, and when it was stored, as the publisher saw it.

    Attributes:
        uid: The payload's author.
        hotkey: The author's address.
        payload_sha256: As in the author's manifest, like the next three.
        payload_bytes: The payload's length.
        assignment: Digest of the data assignment.
        root_before: State root that the training started from.
        committed_at: LastModified of the commitment.
        revealed_at: The later LastModified of manifest and payload.
        commit_signature: The author's signature of the commitment.
        manifest_signature: The author's signature of the manifest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    uid: Uid
    hotkey: Hotkey
    payload_sha256: Hex64
    payload_bytes: Count
    assignment: Hex64
    root_before: Hex64
    committed_at: Count
    revealed_at: Count
    commit_signature: Signature
    manifest_signature: Signature


_SIGNATURES = {"commit_signature", "manifest_signature"}


class Roster(WindowBody):
    """The payloads of a window, in uid order, as one publisher saw them (PROTOCOL 13).

    Its digest does not cover the authors' signatures: they differ from one signing to the next, and prove themselves.

    Attributes:
        previous: Digest of the roster decided for the window before; None for a null window.
        peer_list: Digest of the peer list that was gathered; None before the first one.
        entries: The payloads; none at all makes a null window.
        aggregate_sha256: SHA-256 of the aggregate: the payloads' bytes, one after the other, in this order.
        aggregate_bytes: Its length.
    """

    kind = Kind.ROSTER
    max_bytes = ENVELOPE_BYTES + 1024 + 832 * MAX_PEERS

    previous: Hex64 | None
    peer_list: Hex64 | None
    entries: Annotated[tuple[RosterEntry, ...], Field(max_length=MAX_PEERS, strict=False)]
    aggregate_sha256: Hex64
    aggregate_bytes: Count

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical body without the signatures in its entries."""
        fields = self.model_dump(mode="json", exclude={"entries": {"__all__": _SIGNATURES}})
        return sha256_hex(canonical_json(fields))

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
    peers: Annotated[tuple[Uid, ...], Field(max_length=MAX_PEERS, strict=False)]
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


class Lease(Body):
    """Who runs, or wants to run, a neuron; written once. Its `genesis` is all zeros: a lease is of no network's.

    Attributes:
        role: The neuron's role.
        holder: Who; it names a folder on a machine, and nothing of either can be read from it.
        machine: The machine, for the people who look for it; the same holds.
    """

    kind = Kind.LEASE
    max_bytes = ENVELOPE_BYTES + 256

    role: Role
    holder: Holder
    machine: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class Heartbeat(Body):
    """A sign of life of a lease's holder; its time is what counts. Its `genesis` is all zeros.

    Attributes:
        role: The neuron's role.
        holder: Who.
        confirmed: Time of the heartbeat before it, if with that one the lease was held; 0 while it was not.
    """

    kind = Kind.HEARTBEAT
    max_bytes = ENVELOPE_BYTES + 256

    role: Role
    holder: Holder
    confirmed: Count


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


class Debug(WindowBody):
    """Two elements of every parameter after a window, for comparison; they decide nothing.

    Attributes:
        start: The first of the two, counted over the flattened parameter: 10 of miners, 0 of everybody else.
        values: The two by name, as decimals that read back exactly; no number that float32 has not the range for.
    """

    kind = Kind.DEBUG
    max_bytes = ENVELOPE_BYTES + 136 * MAX_DEBUG_PARAMETERS

    start: Annotated[int, Field(ge=0, le=10, multiple_of=10)]
    values: Annotated[dict[DebugName, tuple[DebugValue, DebugValue]], Field(max_length=MAX_DEBUG_PARAMETERS)]

    @property
    def indices(self) -> tuple[int, int]:
        """The elements as a range: the first, and the one after the last."""
        return self.start, self.start + DEBUG_ELEMENTS


class CheckpointManifest(WindowBody):
    """The files of a checkpoint and the state that they hold.

    Attributes:
        root: State root after `window`.
        previous_root: State root before it; with the parameters it proves `root`.
        outer_steps: Outer steps in that state.
        null: Whether `window` was null.
        epochs: First window and position of each epoch of shards that the state knows; none with pages.
        files: SHA-256 of each file in the checkpoint's folder, by name.
        sizes: Length of each file in bytes, by name.
    """

    kind = Kind.CHECKPOINT
    max_bytes = ENVELOPE_BYTES + 64 * 1024

    root: Hex64
    previous_root: Hex64
    outer_steps: Count
    null: bool
    epochs: tuple[tuple[Count, Count], ...]
    files: dict[FileName, Hex64]
    sizes: dict[FileName, Count]

    @model_validator(mode="after")
    def _every_file_has_a_size(self) -> Self:
        if self.files.keys() != self.sizes.keys():
            raise ValueError("files and sizes name different files")
        return self
