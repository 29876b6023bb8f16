"""Vectors of signed objects and object keys."""

from collections.abc import Collection
from functools import cache
from typing import Any

from docs.vectors import judging
from docs.vectors.scenario import (
    MINER_UIDS,
    NETUID,
    SETTLING_HASH,
    TIMES,
    VALIDATOR_UID,
    WINDOW,
    hotkey,
    layout_of,
    params_after,
    payload,
    root_after,
    root_before,
)
from templar import PROTOCOL_VERSION
from templar.agreement.ballot_rules import Said
from templar.agreement.genesis import NO_GENESIS
from templar.agreement.sync_proof import START, debug_values, state_proof
from templar.audit.findings import Exhibit, Finding, Report, Suspect
from templar.canonical import sha256_hex
from templar.chain.hotkey import verify
from templar.errors import Reason
from templar.exchange.object_keys import Kind, ObjectKey, parse_key
from templar.exchange.objects import (
    CheckpointManifest,
    Commit,
    Debug,
    Decision,
    Manifest,
    PeerList,
    Proof,
    Roster,
    RosterEntry,
    SignedWord,
    StartWindow,
    Word,
)
from templar.exchange.signed import Body, Network, Sealed, seal
from templar.gradient.codec.wire import encode
from templar.scoring.evidence import Evidence


@cache
def start_window() -> StartWindow:
    """The birth certificate of the tiny network."""
    digests = {name: sha256_hex(name.encode()) for name in ("hparams", "tokenizer", "dataset")}
    return StartWindow(
        netuid=NETUID,
        genesis=NO_GENESIS,
        uid=VALIDATOR_UID,
        hotkey=hotkey(VALIDATOR_UID).address,
        start_window=WINDOW,
        root=root_before(),
        **digests,
    )


def network() -> Network:
    """Return what is signed into every object."""
    return Network(NETUID, start_window().digest)


def object_vectors(known_signatures: Collection[str]) -> dict[str, Any]:
    """One signed object of every kind, about the same window.

    Args:
        known_signatures: sr25519 signatures differ from one signing to the next, so one that is known and verifies is
            kept.
    """
    return {
        "seeds": {str(uid): (bytes([uid]) * 32).hex() for uid in (VALIDATOR_UID, *MINER_UIDS)},
        "hotkeys": {str(uid): hotkey(uid).address for uid in (VALIDATOR_UID, *MINER_UIDS)},
        "genesis": network().genesis,
        "objects": {body.kind.value: _object(body, key, known_signatures) for body, key in _bodies(known_signatures)},
    }


def key_vectors() -> dict[str, Any]:
    """Object keys and what they mean, and strings that are no keys of this protocol."""
    keys = [*(str(key) for _, key in _bodies(())), "gradient-12-3-v5.bin", "aggregator-12-v1.bin", "debug-12-3-v1.json"]
    strangers = [
        "gradient-012-3-v5.bin",
        "gradient-12-3-v5.json",
        "gradient-12-3.bin",
        "commit-12-3-v5.json.tmp",
        "aggregator-12-3-v5.bin",
        "peers_12_v5.bin",
        "checkpoint-12-3-v5/a/b",
    ]
    return {
        "keys": {key: _meaning(key) for key in keys},
        "not_keys": [text for text in strangers if parse_key(text) is None],
    }


def evidences() -> list[Evidence]:
    """The evidence of some windows, of which the first is this one."""
    return judging.evidences(_author(VALIDATOR_UID), _roster(()).digest)


def _bodies(known_signatures: Collection[str]) -> list[tuple[Body, ObjectKey]]:
    """A body of every kind and where it lies."""
    manifest, roster = _manifest(2), _roster(known_signatures)
    author = _author(2)
    commit = Commit(**author, window=WINDOW, commitment=manifest.digest)
    decision = Decision(**_author(VALIDATOR_UID), window=WINDOW, words=_words(roster.digest, known_signatures))
    peers = PeerList(**_author(VALIDATOR_UID), first_effective_window=3, peers=(4, 2), reserve=(3,))
    proof = state_proof(params_after("sparseloco"), window=WINDOW, block_hash=SETTLING_HASH, hotkey=hotkey(2).address)
    return [
        (commit, ObjectKey(Kind.COMMIT, WINDOW, 2)),
        (manifest, ObjectKey(Kind.MANIFEST, WINDOW, 2)),
        (roster, ObjectKey(Kind.ROSTER, WINDOW, VALIDATOR_UID)),
        (decision, ObjectKey(Kind.DECISION, WINDOW, VALIDATOR_UID)),
        (
            Proof(**author, window=WINDOW, root=root_after(), outer_steps=1, proof=proof),
            ObjectKey(Kind.PROOF, WINDOW, 2),
        ),
        (_report(roster, known_signatures), ObjectKey(Kind.REPORT, WINDOW, 2)),
        (_debug(), ObjectKey(Kind.DEBUG, WINDOW, VALIDATOR_UID)),
        (evidences()[0], ObjectKey(Kind.EVIDENCE, WINDOW, VALIDATOR_UID)),
        (_checkpoint(), ObjectKey(Kind.CHECKPOINT, WINDOW, VALIDATOR_UID, file="manifest.json")),
        (peers, ObjectKey(Kind.PEERS, 3)),
        (start_window(), ObjectKey(Kind.START_WINDOW)),
    ]


def _author(uid: int) -> dict[str, Any]:
    return {"netuid": NETUID, "genesis": network().genesis, "uid": uid, "hotkey": hotkey(uid).address}


def _manifest(uid: int) -> Manifest:
    data = encode(payload(uid, "sparseloco"), layout_of("sparseloco"))
    return Manifest(
        **_author(uid),
        window=WINDOW,
        payload_sha256=sha256_hex(data),
        payload_bytes=len(data),
        assignment=sha256_hex(b"assignment"),
        root_before=root_before(),
        steps=uid,
        tokens=2**40 if uid == max(MINER_UIDS) else 1024 * uid,
    )


def _roster(known_signatures: Collection[str]) -> Roster:
    payloads = [encode(payload(uid, "sparseloco"), layout_of("sparseloco")) for uid in MINER_UIDS]
    entries = tuple(
        RosterEntry(
            uid=uid,
            hotkey=hotkey(uid).address,
            payload_sha256=sha256_hex(data),
            payload_bytes=len(data),
            assignment=_manifest(uid).assignment,
            root_before=_manifest(uid).root_before,
            steps=_manifest(uid).steps,
            tokens=_manifest(uid).tokens,
            committed_at=TIMES.commit_interval.last,
            revealed_at=TIMES.reveal_interval.first,
            commit_signature=_signature(_manifest(uid).commit, known_signatures),
            manifest_signature=_signature(_manifest(uid), known_signatures),
        )
        for uid, data in zip(MINER_UIDS, payloads, strict=True)
    )
    whole = b"".join(payloads)
    return Roster(
        **_author(VALIDATOR_UID),
        window=WINDOW,
        previous=None,
        peer_list=None,
        entries=entries,
        aggregate_sha256=sha256_hex(whole),
        aggregate_bytes=len(whole),
    )


def _words(value: str, known_signatures: Collection[str]) -> tuple[SignedWord, ...]:
    """The vote of the only validator for a roster, and its lock."""
    said = [Said(0, "lock", VALIDATOR_UID, value, 0), Said(0, "vote", VALIDATOR_UID, value)]
    words = [Word(**_author(VALIDATOR_UID), window=WINDOW, **each.spoken) for each in said]
    return tuple(
        SignedWord(**each._asdict(), signature=_signature(word, known_signatures))
        for each, word in zip(said, words, strict=True)
    )


def _debug() -> Debug:
    values = debug_values(params_after("sparseloco"), START)
    return Debug(**_author(VALIDATOR_UID), window=WINDOW, start=START, values=values)


def _checkpoint() -> CheckpointManifest:
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return CheckpointManifest(
        **_author(VALIDATOR_UID),
        window=WINDOW,
        root=root_after(),
        previous_root=root_before(),
        outer_steps=1,
        null=False,
        epochs=(),
        files={name: sha256_hex(name.encode()) for name in names},
        sizes={name: len(name) for name in names},
    )


def _report(roster: Roster, known_signatures: Collection[str]) -> Report:
    """A miner's word on a publisher that showed two rosters."""
    fewer = roster.entries[1:]
    num_bytes = sum(entry.payload_bytes for entry in fewer)
    other = roster.model_copy(update={"entries": fewer, "aggregate_bytes": num_bytes})
    exhibits = tuple(Exhibit.of(Sealed(each, _signature(each, known_signatures))) for each in (roster, other))
    suspect = Suspect(uid=roster.uid, hotkey=roster.hotkey)
    finding = Finding(
        window=WINDOW,
        reason=Reason.ROSTER_EQUIVOCATION.value,
        suspects=(suspect,),
        detail="two rosters for one window",
        exhibits=(0, 1),
    )
    return Report(**_author(2), window=WINDOW, findings=(finding,), exhibits=exhibits)


def _signature(body: Body, known_signatures: Collection[str]) -> str:
    message = f"templar:{PROTOCOL_VERSION}:{body.kind}:".encode() + body.canonical()
    known = (each for each in sorted(known_signatures) if verify(body.hotkey, message, bytes.fromhex(each)))
    return next(known, None) or seal(body, hotkey(body.uid)).signature


def _object(body: Body, key: ObjectKey, known_signatures: Collection[str]) -> dict[str, Any]:
    signature = _signature(body, known_signatures)
    sealed = Sealed(body, signature)
    return {
        "key": str(key),
        "max_bytes": body.max_bytes,
        "digest": body.digest,
        "body": body.canonical().decode(),
        "signature": signature,
        "object_sha256": sha256_hex(sealed.encode()),
    }


def _meaning(text: str) -> dict[str, Any]:
    key = parse_key(text)
    return {} if key is None else vars(key) | {"kind": key.kind.value}
