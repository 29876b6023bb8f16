"""Commit and reveal: what a miner publishes, and the one function that decides whether it counts (PROTOCOL 3-11).

Before the close only the digest of the manifest is public; manifest and payload follow after it. A copy of somebody
else's payload can therefore never match a commitment that was made in time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from templar.chain.base import Clock, NeuronInfo
from templar.chain.hotkey import Signer
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.payload_cache import PayloadCache, check_hash
from templar.exchange.publish import PublishReceipt, publish_body, publish_file
from templar.exchange.signed import Found, Network, Reader, WindowBody, read_signed
from templar.store.base import ObjectInfo, ObjectStore
from templar.timeline import Interval, Timing, WindowTimes


@dataclass(frozen=True)
class RevealRules:
    """What a window's reveals are held against.

    Attributes:
        network: The network that they must be made for.
        times: The window's times, from finalized blocks.
        assignment: Digest of the data assignment of a uid; None for a uid that was assigned nothing.
    """

    network: Network
    times: WindowTimes
    assignment: Callable[[int], str | None]

    @property
    def window(self) -> int:
        """The window."""
        return self.times.window


@dataclass(frozen=True)
class Contribution:
    """A payload that counts. Its bytes lie in the cache under `manifest.payload_sha256`.

    Attributes:
        uid: Its author.
        hotkey: The author's address.
        manifest: What it is.
        committed_at: LastModified of the commitment.
        revealed_at: The later LastModified of manifest and payload.
        commit_signature: The author's signature of the commitment, in hex.
        manifest_signature: The author's signature of the manifest, in hex.
    """

    uid: int
    hotkey: str
    manifest: Manifest
    committed_at: int
    revealed_at: int
    commit_signature: str
    manifest_signature: str


def publish_commit(
    store: ObjectStore, manifest: Manifest, signer: Signer, *, clock: Clock, deadline: float
) -> PublishReceipt:
    """Publish the commitment to a manifest before the close. On failure a later call goes on."""
    key = window_key(Kind.COMMIT, manifest.window, manifest.uid)
    return publish_body(store, key, manifest.commit, signer, clock=clock, deadline=deadline)


def publish_reveal(
    store: ObjectStore, manifest: Manifest, signer: Signer, payload: Path, *, clock: Clock, deadline: float
) -> tuple[PublishReceipt, PublishReceipt]:
    """Publish manifest and payload after the close. On failure a later call goes on."""
    manifest_key = window_key(Kind.MANIFEST, manifest.window, manifest.uid)
    payload_key = window_key(Kind.GRADIENT, manifest.window, manifest.uid)
    return (
        publish_body(store, manifest_key, manifest, signer, clock=clock, deadline=deadline),
        publish_file(store, payload_key, payload, clock=clock, deadline=deadline),
    )


@dataclass
class Progress:
    """What is known of a reveal so far: after a failure of its store nothing of that is asked for again.

    Attributes:
        commit: The commitment, which counts.
        manifest: The manifest, which is the one committed to.
    """

    commit: Found[Commit] | None = None
    manifest: Found[Manifest] | None = None


@dataclass(frozen=True)
class Reveal:
    """A reveal that is what its author promised, in time. Whether its payload is a legal one shows when it is decoded.

    Attributes:
        contribution: What counts then.
        payload: The payload's bytes; None if the cache has them, decoded before.
    """

    contribution: Contribution
    payload: bytes | None


def fetch_reveal(neuron: NeuronInfo, store: Reader, rules: RevealRules, cache: PayloadCache) -> Contribution:
    """Fetch what a miner revealed for a window and decide whether it counts.

    Every check that needs no body comes before the body is read: time and legal size from HEAD, identity from the
    signed manifest. The payload is decoded once, so what is accepted can be applied.

    Raises:
        RejectedError: It does not count; the reason says why.
        TransientError: The store failed; ask again.
        PermanentError: The store refuses (key, bucket).
    """
    return keep_reveal(read_reveal(neuron, store, rules, cache, Progress()), cache)


def read_reveal(
    neuron: NeuronInfo, store: Reader, rules: RevealRules, cache: PayloadCache, progress: Progress
) -> Reveal:
    """The first step of `fetch_reveal`: everything but decoding, hash of the payload included.

    Args:
        neuron: Who revealed.
        store: The neuron's bucket.
        rules: What the reveal is held against.
        cache: Says which lengths are legal and which payloads are here already.
        progress: What is known so far; grows, also if this fails.

    Raises:
        TemplarError: As in `fetch_reveal`.
    """
    commit = progress.commit = progress.commit or _fetch_signed(neuron, store, rules, Commit)
    found = progress.manifest or _fetch_signed(neuron, store, rules, Manifest)
    manifest = found.body
    if manifest.digest != commit.body.commitment:
        raise RejectedError(Reason.COMMIT_MISMATCH, f"uid {neuron.uid}: the manifest is not the one committed to")
    if manifest.assignment != rules.assignment(neuron.uid):
        raise RejectedError(Reason.WRONG_ASSIGNMENT, f"uid {neuron.uid}: trained on data that it was not assigned")
    progress.manifest = found
    payload, stored_at = _fetch_payload(neuron, store, rules, manifest, cache)
    contribution = Contribution(
        neuron.uid,
        neuron.hotkey,
        manifest,
        commit.last_modified,
        max(found.last_modified, stored_at),
        commit.signature,
        found.signature,
    )
    return Reveal(contribution, payload)


def keep_reveal(reveal: Reveal, cache: PayloadCache) -> Contribution:
    """The second step of `fetch_reveal`: decode the payload, and keep it if it is legal.

    Raises:
        RejectedError: The payload is no legal one of its author's.
        TemplarError: `local_file`; this machine cannot keep it.
    """
    found = reveal.contribution
    if reveal.payload is not None:
        digest, window = found.manifest.payload_sha256, found.manifest.window
        cache.keep(reveal.payload, digest, window=window, uid=found.uid, hotkey=found.hotkey)
    return found


T = TypeVar("T", bound=WindowBody)


_MISSING = {Kind.COMMIT: Reason.COMMIT_MISSING, Kind.MANIFEST: Reason.MANIFEST_MISSING}


_CHANGED = {Reason.OBJECT_MISSING: Reason.PAYLOAD_MISSING, Reason.OBJECT_TOO_LARGE: Reason.WRONG_SIZE}


_TIMING = {
    (Kind.COMMIT, Timing.EARLY): Reason.COMMIT_EARLY,
    (Kind.COMMIT, Timing.LATE): Reason.COMMIT_LATE,
}


def _fetch_signed(neuron: NeuronInfo, store: Reader, rules: RevealRules, body_type: type[T]) -> Found[T]:
    kind = body_type.kind
    interval = rules.times.commit_interval if kind is Kind.COMMIT else rules.times.reveal_interval
    found = read_signed(
        store,
        window_key(kind, rules.window, neuron.uid),
        body_type,
        network=rules.network,
        author=neuron,
        window=rules.window,
        check=lambda info: _check_time(neuron, kind, info, interval),
    )
    if found is None:
        raise RejectedError(_MISSING[kind], f"uid {neuron.uid}: no {kind} for window {rules.window}")
    return found


def _fetch_payload(
    neuron: NeuronInfo, store: Reader, rules: RevealRules, manifest: Manifest, cache: PayloadCache
) -> tuple[bytes | None, int]:
    size = manifest.payload_bytes
    cache.check_size(size, uid=neuron.uid)
    info = store.head(window_key(Kind.GRADIENT, rules.window, neuron.uid))
    if info is None:
        raise RejectedError(Reason.PAYLOAD_MISSING, f"uid {neuron.uid}: no payload for window {rules.window}")
    _check_time(neuron, Kind.GRADIENT, info, rules.times.reveal_interval)
    if info.size != size:
        raise RejectedError(Reason.WRONG_SIZE, f"uid {neuron.uid}: {info.size} bytes are stored, {size} were promised")
    digest, window, hotkey = manifest.payload_sha256, rules.window, neuron.hotkey
    if cache.has(digest, window=window, uid=neuron.uid, hotkey=hotkey):
        return None, info.last_modified
    payload = _read_payload(neuron, store, info)
    check_hash(payload, digest, uid=neuron.uid)
    return payload, info.last_modified


def _read_payload(neuron: NeuronInfo, store: Reader, info: ObjectInfo) -> bytes:
    try:
        return store.get(info.key, max_bytes=info.size)
    except PermanentError as error:
        reason = _CHANGED.get(error.reason)
        if reason is None:
            raise
        raise RejectedError(reason, f"uid {neuron.uid}: the payload was replaced while it was read") from None


def _check_time(neuron: NeuronInfo, kind: Kind, info: ObjectInfo, interval: Interval) -> None:
    timing = interval.timing(info.last_modified)
    if timing is Timing.IN_TIME:
        return
    fallback = Reason.REVEAL_EARLY if timing is Timing.EARLY else Reason.REVEAL_LATE
    off = interval.first - info.last_modified if timing is Timing.EARLY else info.last_modified - interval.last
    raise RejectedError(
        _TIMING.get((kind, timing), fallback), f"uid {neuron.uid}: {kind} stored {off} s too {timing.value}"
    )
