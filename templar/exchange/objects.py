"""The objects of the exchange: one schema per kind."""

import json
from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from templar.canonical import canonical_json, sha256_hex
from templar.exchange.object_keys import Kind
from templar.exchange.signed import ENVELOPE_BYTES, Body, Count, Hex64, Hotkey, Record, Signature, Uid, WindowBody
from templar.hparams import MAX_PEERS
from templar.shared_results import Same, shared

FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{0,127}$")]
Role = Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]
Holder = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]

DEBUG_ELEMENTS = 2
DEBUG_NAME = r"^[0-9A-Za-z_.-]{1,80}$"
MAX_DEBUG_PARAMETERS = 2048
MAX_FLOAT32 = 3.4028234663852886e38
DebugName = Annotated[str, Field(pattern=DEBUG_NAME)]
DebugValue = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32, allow_inf_nan=False)]
DebugValues = Annotated[tuple[DebugValue, DebugValue], Field(strict=False)]
Figure = Annotated[int, Field(ge=0, le=2**40)]  # a number that its author states and nothing depends on
Epoch = Annotated[tuple[Count, Count], Field(strict=False)]
Some = Annotated[int, Field(ge=1, le=2**53)]
MAX_RESULTS = 256
TaskName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._,/:+-]{0,79}$")]
TaskResult = Annotated[tuple[TaskName, TaskName, DebugValue], Field(strict=False)]


class Commit(WindowBody):
    """A commitment before the close: the digest of a manifest that is still secret (docs/protocol.md 7)."""

    kind = Kind.COMMIT
    max_bytes = ENVELOPE_BYTES + 256

    commitment: Hex64


class Manifest(WindowBody):
    """Description of a miner's payload; its digest is what was committed."""

    kind = Kind.MANIFEST
    max_bytes = ENVELOPE_BYTES + 512

    payload_sha256: Hex64
    payload_bytes: Count
    assignment: Hex64  # digest of the data assignment that the miner trained on
    root_before: Hex64  # state root that the training started from
    steps: Figure  # inner steps or batches that the author says went into it; 0 if it does not know
    tokens: Figure  # tokens of these steps: on so much of its data the miner is measured

    @property
    def commit(self) -> Commit:
        """The commitment to it."""
        return Commit(**{name: getattr(self, name) for name in WindowBody.model_fields}, commitment=self.digest)


class RosterEntry(Record):
    """One payload of a roster: all that its author signed, and the times that the publisher saw."""

    uid: Uid
    hotkey: Hotkey
    payload_sha256: Hex64
    payload_bytes: Count
    assignment: Hex64
    root_before: Hex64
    steps: Figure
    tokens: Figure
    committed_at: Count  # LastModified of the commitment
    revealed_at: Count  # the later LastModified of manifest and payload
    commit_signature: Signature  # the author's, of the commitment
    manifest_signature: Signature  # the author's, of the manifest


MAX_OWNERS = 16
MAX_ENTRIES = 128  # of a plan
MAX_CHANGES = 16
Setting = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}(?:\.[a-z][a-z0-9_]{0,39}){1,3}$")]
SettingText = Annotated[str, Field(pattern=r"^[0-9A-Za-z_]{1,64}$")]
SettingValue = Annotated[int, Field(ge=-(2**53), le=2**53)] | DebugValue | bool | SettingText | None


class PlanEntry(Record):
    """Settings that change in a network's life, and the window from which they hold (docs/protocol.md 2)."""

    number: Annotated[int, Field(ge=1, le=MAX_ENTRIES)]  # its place in the plan
    previous: Hex64  # digest of the entry before; of the first one, the genesis hash
    first_window: Count
    # By the setting's name with dots, as in training.adamw.learning_rate
    changes: Annotated[dict[Setting, SettingValue], Field(min_length=1, max_length=MAX_CHANGES)]

    @property
    def digest(self) -> str:
        """SHA-256 of its canonical JSON."""
        return sha256_hex(canonical_json(self.model_dump(mode="json")))

    @property
    def summary(self) -> str:
        """Its settings and their new values, for people."""
        changes = ", ".join(f"{name} = {json.dumps(value)}" for name, value in sorted(self.changes.items()))
        return f"from window {self.first_window} on: {changes}"

    def __eq__(self, other: object) -> bool:  # in Python 1, 1.0 and True are equal; here they are other bytes
        return isinstance(other, PlanEntry) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


class PlanProposal(Body):
    """The next entry of the plan, as an owner of the network wants it."""

    kind = Kind.PLAN
    max_bytes = ENVELOPE_BYTES + 4096

    entry: PlanEntry


class Approval(Record):
    """An owner's signature under its proposal."""

    uid: Uid
    hotkey: Hotkey
    signature: Signature


class AdoptedEntry(Record):
    """An entry of the plan that enough owners propose."""

    entry: PlanEntry
    approvals: Annotated[tuple[Approval, ...], Field(max_length=MAX_OWNERS, strict=False), FailFast()]


_SIGNATURES = {"commit_signature", "manifest_signature"}


class Roster(WindowBody):
    """The payloads of a window, in uid order, as one publisher gathered them (docs/protocol.md 8).

    Its digest leaves out the authors' signatures: they differ from one signing to the next and are verified by
    themselves.
    """

    kind = Kind.ROSTER
    max_bytes = ENVELOPE_BYTES + 1024 + 832 * MAX_PEERS + 4096 + 288 * MAX_OWNERS

    previous: Hex64 | None  # digest of the roster decided for the previous window; None for a null window
    peer_list: Hex64 | None  # digest of the selection that was gathered; None without a peer list
    # Without entries the window is null.
    entries: Annotated[tuple[RosterEntry, ...], Field(max_length=MAX_PEERS, strict=False), FailFast()]
    aggregate_sha256: Hex64  # of the payloads' bytes, one after the other, in this order
    aggregate_bytes: Count  # length of the same
    plan: AdoptedEntry | None  # the entry that the plan gets with this window

    @property
    @shared(Same, most=64)
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


Choice = Annotated[str, Field(pattern=r"^(?:[0-9a-f]{64}|null)$")]
Ballot = Annotated[int, Field(ge=0, lt=2**16)]
Step = Literal["vote", "lock"]
NULL_WINDOW = "null"  # the choice of a null window, beside the digests of rosters
MAX_WORDS = 2048


class Word(WindowBody):
    """One word of a validator in a ballot on a window (docs/protocol.md 11)."""

    kind = Kind.WORD
    max_bytes = ENVELOPE_BYTES + 256

    ballot: Ballot
    step: Step
    value: Choice | None  # the vote; of a lock, the value of the author's highest lock so far; None for none
    locked_in: Ballot | None  # the ballot of that highest lock; None in a vote

    @model_validator(mode="after")
    def _only_a_lock_names_a_ballot(self) -> Self:
        names_one = self.step == "lock" and self.value is not None
        if names_one != (self.locked_in is not None) or (self.locked_in or 0) > self.ballot:
            raise ValueError("locked_in must be the ballot of a lock's value, and of nothing else")
        return self


class SignedWord(Record):
    """A word as it is carried: what `Word` says beyond its window, and its author's signature."""

    uid: Uid
    ballot: Ballot
    step: Step
    value: Choice | None
    locked_in: Ballot | None
    signature: Signature


class Decision(WindowBody):
    """The words on a window that a validator signed or read. Its author replaces it as there are more of them."""

    kind = Kind.DECISION
    max_bytes = ENVELOPE_BYTES + 288 * MAX_WORDS

    words: Annotated[tuple[SignedWord, ...], Field(max_length=MAX_WORDS, strict=False), FailFast()]


class PeerList(Body):
    """The peers that are gathered from a window on, until the next list takes effect."""

    kind = Kind.PEERS
    max_bytes = ENVELOPE_BYTES + 16 * 1024

    first_effective_window: Count
    # The gather tier, best first, and replacements for failed peers, in order
    peers: Annotated[tuple[Uid, ...], Field(max_length=MAX_PEERS, strict=False), FailFast()]
    reserve: Annotated[tuple[Uid, ...], Field(max_length=1024, strict=False), FailFast()]

    @model_validator(mode="after")
    def _nobody_twice(self) -> Self:
        if len(set(self.peers + self.reserve)) != len(self.peers) + len(self.reserve):
            raise ValueError("a uid is listed twice")
        return self


class StartWindow(Body):
    """The start of a network; its digest is the genesis hash."""

    kind = Kind.START_WINDOW
    max_bytes = ENVELOPE_BYTES + 1024 + 64 * MAX_OWNERS

    start_window: Annotated[int, Field(ge=1, le=2**53)]  # the first window that is trained
    hparams: Hex64  # digest of the hyper-parameters that nodes must agree on
    tokenizer: Hex64  # digest
    dataset: Hex64  # digest of the dataset's metadata
    root: Hex64  # state root of the genesis checkpoint, `checkpoint-{start_window - 1}-{uid}-v{version}`
    owners: Annotated[tuple[Hotkey, ...], Field(max_length=MAX_OWNERS, strict=False), FailFast()]  # of the plan
    owners_needed: Annotated[int, Field(ge=1, le=MAX_OWNERS)]  # for an entry of it


class Lease(Body):
    """A process that runs, or wants to run, a neuron; written once. Its `genesis` is all zeros."""

    kind = Kind.LEASE
    max_bytes = ENVELOPE_BYTES + 256

    role: Role
    holder: Holder  # identifies a folder on a machine without naming either
    machine: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]  # identifies the machine for people, without naming it


class Heartbeat(Body):
    """A sign of life of a lease's holder; its LastModified is what counts. Its `genesis` is all zeros."""

    kind = Kind.HEARTBEAT
    max_bytes = ENVELOPE_BYTES + 256

    role: Role
    holder: Holder
    confirmed: Count  # time of the previous heartbeat if the lease was held with it, else 0


class Proof(WindowBody):
    """A node's proof that it holds the state after a window (docs/protocol.md 10)."""

    kind = Kind.PROOF
    max_bytes = ENVELOPE_BYTES + 512

    root: Hex64  # state root after the window
    outer_steps: Count  # outer steps in that state
    proof: Hex64  # see `templar.agreement.sync_proof.state_proof`


class Debug(WindowBody):
    """Two elements of every parameter after a window, for comparison; no decision depends on them."""

    kind = Kind.DEBUG
    max_bytes = ENVELOPE_BYTES + 136 * MAX_DEBUG_PARAMETERS
    max_keys = MAX_DEBUG_PARAMETERS

    # Index of the first of the two in the flattened parameter: 10 of miners, 0 of all others
    start: Annotated[int, Field(ge=0, le=10, multiple_of=10)]
    # By name, as decimals that read back exactly; within the range of float32
    values: Annotated[dict[DebugName, DebugValues], Field(max_length=MAX_DEBUG_PARAMETERS)]

    @property
    def indices(self) -> tuple[int, int]:
        """The elements as a range: the first, and the one after the last."""
        return self.start, self.start + DEBUG_ELEMENTS


class CheckpointManifest(WindowBody):
    """The files of a checkpoint and the state that they hold."""

    kind = Kind.CHECKPOINT
    max_bytes = ENVELOPE_BYTES + 64 * 1024 + 4096 * MAX_ENTRIES
    max_keys = 1024  # of `files`; more do not fit

    root: Hex64  # state root after `window`
    previous_root: Hex64  # state root before it; with the parameters it proves `root`
    outer_steps: Count  # outer steps in that state
    null: bool  # whether `window` was null
    # First window and position of each known epoch of shards; none with pages
    epochs: Annotated[tuple[Epoch, ...], Field(strict=False), FailFast()]
    plan: Annotated[tuple[PlanEntry, ...], Field(strict=False, max_length=MAX_ENTRIES), FailFast()]  # up to `window`
    files: dict[FileName, Hex64]  # SHA-256 by name
    sizes: dict[FileName, Count]  # bytes by name

    @model_validator(mode="after")
    def _every_file_has_a_size(self) -> Self:
        if self.files.keys() != self.sizes.keys():
            raise ValueError("files and sizes name different files")
        return self


class CheckpointEvaluation(WindowBody):
    """The figures of a checkpoint on held-out text, as its publisher measured them. Nothing depends on it.

    It lies beside the checkpoint's files under a name of its own, and stays when these expire.
    """

    kind = Kind.CHECKPOINT
    max_bytes = ENVELOPE_BYTES + 64 * 1024

    root: Hex64  # state root of the checkpoint
    texts: Some
    tokens: Some
    num_bytes: Some  # of UTF-8
    nats: Annotated[float, Field(ge=0, le=MAX_FLOAT32, allow_inf_nan=False)]  # of all tokens
    # Tokens in the payloads that were applied up to `window`, as their authors say; None if the publisher cannot know
    trained: Count | None
    # Task, metric and value, of lm-evaluation-harness
    results: Annotated[tuple[TaskResult, ...], Field(strict=False, max_length=MAX_RESULTS), FailFast()]
