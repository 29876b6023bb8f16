"""Commit and reveal: what a miner publishes, and the one function that decides whether it counts (docs/protocol.md 7).

Before the close only the digest of the manifest is public; manifest and payload follow after it. Nobody can commit in
time to a copy of another miner's payload, because nobody else has read it by then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar, Unpack

from templar.chain.base import Clock, NeuronInfo
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest, Roster, RosterEntry
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.publish import PublishReceipt, Times, publish_body, publish_file
from templar.exchange.signed import Found, Network, Reader, Sealed, WindowBody, read_signed
from templar.store.base import ObjectStore
from templar.timeline import Interval, Timing, WindowTimes

INVALID = frozenset(
    {
        Reason.COMMIT_MISMATCH,
        Reason.MALFORMED,
        Reason.NOT_CANONICAL,
        Reason.BAD_SIGNATURE,
        Reason.WRONG_IDENTITY,
        Reason.WRONG_NETWORK,
        Reason.WRONG_WINDOW,
        Reason.WRONG_ASSIGNMENT,
        Reason.WRONG_SIZE,
        Reason.WRONG_HASH,
        Reason.WRONG_SHAPES,
        Reason.BAD_PAYLOAD,
    }
)
"""Reasons for which a revealed object is illegal: its author signed or stored something that no honest miner does."""

HELD_BACK = frozenset(
    {Reason.MANIFEST_MISSING, Reason.PAYLOAD_MISSING, Reason.REVEAL_EARLY, Reason.REVEAL_LATE, Reason.OBJECT_DIFFERS}
)
"""Reasons for which what was committed to in time is not there in time."""

CONCLUSIVE = (
    INVALID
    | HELD_BACK
    | {Reason.COMMIT_MISSING, Reason.COMMIT_EARLY, Reason.COMMIT_LATE, Reason.TIME_UNPROVEN, Reason.WRONG_VERSION}
)
"""Reasons that every reader of the same bucket finds. A failing store is not among them: another node may have read."""

COMMIT_TIMING = {Timing.EARLY: Reason.COMMIT_EARLY, Timing.LATE: Reason.COMMIT_LATE}
REVEAL_TIMING = {Timing.EARLY: Reason.REVEAL_EARLY, Timing.LATE: Reason.REVEAL_LATE}

_MISSING = {Kind.COMMIT: Reason.COMMIT_MISSING, Kind.MANIFEST: Reason.MANIFEST_MISSING}
_REPLACED = {Reason.OBJECT_MISSING: Reason.PAYLOAD_MISSING, Reason.OBJECT_TOO_LARGE: Reason.WRONG_SIZE}

_LISTED = [name for name in RosterEntry.model_fields if name in Manifest.model_fields]
"""The fields of a manifest that stand in its roster entry; the roster itself has the others."""
_SEEN = [name for name in RosterEntry.model_fields if name not in Manifest.model_fields]
"""The fields of an entry that its publisher adds: times and signatures."""

T = TypeVar("T", bound=WindowBody)


@dataclass(frozen=True)
class RevealRules:
    """The rules that a window's reveals must meet."""

    network: Network
    times: WindowTimes  # from finalized blocks
    assignment: Callable[[int], str | None]  # uid -> digest of its data assignment; None if it has none
    # Hotkey -> what it had committed to when this node looked before the close; None if it did not look
    observed: Mapping[str, str] | None = None

    @property
    def window(self) -> int:
        """The window."""
        return self.times.window


@dataclass(frozen=True)
class Submission:
    """A payload that counts, and what its author signed for it; the bytes are cached by `manifest.payload_sha256`."""

    manifest: Manifest
    committed_at: int  # LastModified of the commitment
    revealed_at: int  # the later LastModified of manifest and payload
    commit_signature: str  # the author's, in hex
    manifest_signature: str

    @classmethod
    def listed(cls, roster: Roster, entry: RosterEntry) -> Self:
        """The submission that an entry of a roster describes, as its author signed it if the entry is true."""
        signed = {name: getattr(entry if name in _LISTED else roster, name) for name in Manifest.model_fields}
        return cls(Manifest(**signed), **{name: getattr(entry, name) for name in _SEEN})

    @property
    def entry(self) -> RosterEntry:
        """Its entry in a roster; the inverse of `listed`."""
        signed = {name: getattr(self.manifest, name) for name in _LISTED}
        return RosterEntry(**signed, **{name: getattr(self, name) for name in _SEEN})

    @property
    def uid(self) -> int:
        """Its author."""
        return self.manifest.uid

    @property
    def hotkey(self) -> str:
        """Its author's address."""
        return self.manifest.hotkey

    @property
    def sealed_commit(self) -> Sealed[Commit]:
        """The commitment as its author signed it."""
        return Sealed(self.manifest.commit, self.commit_signature)

    @property
    def sealed_manifest(self) -> Sealed[Manifest]:
        """The manifest as its author signed it."""
        return Sealed(self.manifest, self.manifest_signature)


@dataclass
class Progress:
    """The signed objects of a reveal that were read and accepted; a retry does not ask for them again."""

    commit: Found[Commit] | None = None
    manifest: Found[Manifest] | None = None


def publish_commit(
    store: ObjectStore, manifest: Manifest, signer: Signer, *, clock: Clock, deadline: float
) -> PublishReceipt:
    """Publish the commitment to a manifest before the close. On failure a later call continues."""
    key = window_key(Kind.COMMIT, manifest.window, manifest.uid)
    return publish_body(store, key, manifest.commit, signer, clock=clock, deadline=deadline)


def publish_reveal(
    store: ObjectStore, manifest: Manifest, signer: Signer, payload: Path, **times: Unpack[Times]
) -> tuple[PublishReceipt, PublishReceipt]:
    """Publish manifest and payload after the close. On failure a later call continues."""
    manifest_key = window_key(Kind.MANIFEST, manifest.window, manifest.uid)
    payload_key = window_key(Kind.GRADIENT, manifest.window, manifest.uid)
    return (
        publish_body(store, manifest_key, manifest, signer, **times),
        publish_file(store, payload_key, payload, **times),
    )


def fetch_reveal(
    neuron: NeuronInfo, store: Reader, rules: RevealRules, cache: PayloadCache, progress: Progress | None = None
) -> Submission:
    """Fetch what a miner revealed for a window and decide whether it counts; its payload is in the cache then.

    `progress` is what earlier calls accepted; it grows, also if this call fails.

    Raises:
        RejectedError: It does not count; the reason says why.
        TransientError: The store failed; a later call may succeed.
        PermanentError: The store refuses (key, bucket).
        TemplarError: `local_file`; this machine cannot keep the payload.
    """
    progress = Progress() if progress is None else progress
    # 1. The commitment, stored before the close, and seen then.
    commit, observed = progress.commit or _fetch_signed(neuron, store, rules, Commit), rules.observed
    progress.commit = commit
    if observed is not None and observed.get(neuron.hotkey) != commit.body.commitment:
        seen = "another one" if neuron.hotkey in observed else "none"
        raise RejectedError(Reason.COMMIT_UNSEEN, f"uid {neuron.uid}: {seen} was seen here before the close")
    # 2. The manifest, stored after the close: it must be the one committed to, made on the assigned data.
    found = progress.manifest or _fetch_signed(neuron, store, rules, Manifest)
    manifest = found.body
    if manifest.digest != commit.body.commitment:
        raise RejectedError(Reason.COMMIT_MISMATCH, f"uid {neuron.uid}: the manifest is not the one committed to")
    if manifest.assignment != rules.assignment(neuron.uid):
        raise RejectedError(Reason.WRONG_ASSIGNMENT, f"uid {neuron.uid}: trained on data that it was not assigned")
    progress.manifest = found
    # 3. The payload: time and length are judged before a byte of it is read. It is decoded here, once, so all that
    #    counts can be applied.
    stored_at = _fetch_payload(neuron, store, rules, manifest, cache)
    revealed_at = max(found.last_modified, stored_at)
    return Submission(manifest, commit.last_modified, revealed_at, commit.signature, found.signature)


def check_stored_at(seconds: int, interval: Interval, reasons: Mapping[Timing, Reason], what: str) -> None:
    """Refuse, for one of the reasons, an object whose LastModified does not lie in an interval."""
    timing = interval.timing(seconds)
    if timing is not Timing.IN_TIME:
        off = interval.first - seconds if timing is Timing.EARLY else seconds - interval.last
        raise RejectedError(reasons[timing], f"{what} {off} s too {timing.value}")


def _fetch_signed(neuron: NeuronInfo, store: Reader, rules: RevealRules, body_type: type[T]) -> Found[T]:
    kind, what = body_type.kind, f"uid {neuron.uid}: {body_type.kind} stored"
    interval, reasons = rules.times.reveal_interval, REVEAL_TIMING
    if kind is Kind.COMMIT:
        interval, reasons = rules.times.commit_interval, COMMIT_TIMING
    found = read_signed(
        store,
        window_key(kind, rules.window, neuron.uid),
        body_type,
        network=rules.network,
        author=neuron,
        window=rules.window,
        check=lambda info: check_stored_at(info.last_modified, interval, reasons, what),
    )
    if found is None:
        raise RejectedError(_MISSING[kind], f"uid {neuron.uid}: no {kind} for window {rules.window}")
    return found


def _fetch_payload(
    neuron: NeuronInfo, store: Reader, rules: RevealRules, manifest: Manifest, cache: PayloadCache
) -> int:
    """Bring the payload to the cache; its LastModified."""
    uid, size = neuron.uid, manifest.payload_bytes
    cache.check_size(size, uid=uid)
    info = store.head(window_key(Kind.GRADIENT, rules.window, uid))
    if info is None:
        raise RejectedError(Reason.PAYLOAD_MISSING, f"uid {uid}: no payload for window {rules.window}")
    interval, what = rules.times.reveal_interval, f"uid {uid}: {Kind.GRADIENT} stored"
    check_stored_at(info.last_modified, interval, REVEAL_TIMING, what)
    if info.size != size:
        raise RejectedError(Reason.WRONG_SIZE, f"uid {uid}: {info.size} bytes are stored, the manifest says {size}")
    digest, window, hotkey = manifest.payload_sha256, rules.window, neuron.hotkey
    if not cache.has(digest, window=window, uid=uid, hotkey=hotkey):
        try:
            data = store.get(info.key, max_bytes=size)
        except PermanentError as error:
            if (reason := _REPLACED.get(error.reason)) is None:
                raise
            raise RejectedError(reason, f"uid {uid}: the payload was replaced while it was read") from None
        cache.admit(data, digest, window=window, uid=uid, hotkey=hotkey)
    return info.last_modified
