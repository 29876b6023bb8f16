import copy

import pytest

from templar.errors import Reason
from templar.exchange.objects import (
    MAX_CHANGES,
    MAX_DEBUG_PARAMETERS,
    MAX_ENTRIES,
    MAX_OWNERS,
    MAX_WORDS,
    AdoptedEntry,
    Approval,
    CheckpointManifest,
    Commit,
    Debug,
    Decision,
    Manifest,
    PeerList,
    PlanEntry,
    PlanProposal,
    Proof,
    Roster,
    RosterEntry,
    SignedWord,
    StartWindow,
    Word,
)
from templar.exchange.signed import Body, unseal
from templar.hparams import MAX_PEERS
from tests.support import errors
from tests.support.subnet import GENESIS, NETUID, fields_of, member, signed_anyhow

ALICE = member(5)
A, B, C = "a1" * 32, "b2" * 32, "c3" * 32
MOST = 2**53
MOST_WORK = {"steps": 2**40, "tokens": 2**40}


def author(**changes):
    return {"netuid": NETUID, "genesis": GENESIS, "uid": 5, "hotkey": ALICE.hotkey.address} | changes


def entry(uid, num_bytes=164, **changes):
    values = {
        "uid": uid,
        "hotkey": member(uid).hotkey.address,
        "payload_sha256": A,
        "payload_bytes": num_bytes,
        "assignment": B,
        "root_before": C,
        "steps": 30,
        "tokens": 61_440,
        "committed_at": 1_700_000_000,
        "revealed_at": 1_700_000_060,
        "commit_signature": "0a" * 64,
        "manifest_signature": "0b" * 64,
    }
    return RosterEntry(**values | changes)


ENTRY = PlanEntry(number=1, previous=A, first_window=17, changes={"training.adamw.learning_rate": 0.0001})

LONGEST_ENTRY = {
    "number": MAX_ENTRIES,
    "previous": A,
    "first_window": MOST,
    "changes": dict.fromkeys((".".join([chr(97 + place) + "x" * 39] * 4) for place in range(MAX_CHANGES)), "x" * 64),
}

BODIES: tuple[Body, ...] = (
    Commit(**author(), window=3, commitment=A),
    Manifest(
        **author(), window=3, payload_sha256=A, payload_bytes=164, assignment=B, root_before=C, steps=30, tokens=61_440
    ),
    Roster(
        **author(),
        window=3,
        previous=A,
        peer_list=None,
        entries=(entry(4), entry(7)),
        aggregate_sha256=B,
        aggregate_bytes=328,
        plan=AdoptedEntry(entry=ENTRY, approvals=(Approval(uid=7, hotkey=ALICE.hotkey.address, signature="0a" * 64),)),
    ),
    PlanProposal(**author(), entry=ENTRY),
    Decision(
        **author(),
        window=3,
        words=(SignedWord(uid=7, ballot=0, step="lock", value=A, locked_in=0, signature="0a" * 64),),
    ),
    Word(**author(), window=3, ballot=1, step="lock", value=A, locked_in=0),
    PeerList(**author(), first_effective_window=3, peers=(7, 4), reserve=(9,)),
    StartWindow(
        **author(),
        start_window=3,
        hparams=A,
        tokenizer=B,
        dataset=C,
        root=A,
        owners=(ALICE.hotkey.address,),
        owners_needed=1,
    ),
    Proof(**author(), window=3, root=A, outer_steps=2, proof=B),
    Debug(**author(), window=3, start=10, values={"head": (0.5, -1.25), "norm": (1.0, 0.0)}),
    CheckpointManifest(
        **author(),
        window=3,
        root=A,
        previous_root=B,
        outer_steps=2,
        null=False,
        epochs=((3, 0), (9, 1)),
        plan=(ENTRY,),
        files={"config.json": A, "model.safetensors": B},
        sizes={"config.json": 10, "model.safetensors": 20},
    ),
)

every_body = pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body.kind))


def reason_of(body_type, value):
    """Why a body is rejected whose author signed it in canonical form."""
    return errors.reason_of(lambda: unseal(signed_anyhow(body_type.kind, value, ALICE.hotkey), body_type))


def other_values(value):
    """Values of other types, or out of range."""
    if isinstance(value, bool):
        return [0, "true"]
    if isinstance(value, int):
        return [-1, MOST + 1, float(value), str(value), True]
    if isinstance(value, str):
        return ["", value + "\n", " " + value, value[:-1] + "\u00e9", [value], 5]
    return [5, "x", [5.5]]


@every_body
def test_every_field_is_needed(body):
    for name in body.model_dump():
        value = fields_of(body)
        del value[name]
        # A protocol that is left out is filled in, and then it is not what was written.
        wanted = Reason.NOT_CANONICAL if name == "protocol" else Reason.MALFORMED
        assert reason_of(type(body), value) is wanted


@every_body
def test_every_field_has_one_type_and_range(body):
    for name, value in fields_of(body).items():
        for wrong in other_values(value):
            assert reason_of(type(body), fields_of(body, **{name: wrong})) is Reason.MALFORMED, (name, wrong)


def changed(body_type, **changes):
    """The fields of the example of a kind, with changes."""
    return fields_of(next(body for body in BODIES if type(body) is body_type), **changes)


def roster(*entries, total):
    return changed(Roster, entries=list(entries), aggregate_bytes=total)


FOUR, SEVEN = entry(4).model_dump(), entry(7).model_dump()


@pytest.mark.parametrize(
    ("body_type", "value"),
    [
        (Roster, roster(SEVEN, FOUR, total=328)),
        (Roster, roster(FOUR, FOUR, total=328)),
        (Roster, roster(FOUR, total=163)),
        (Roster, roster(FOUR, total=165)),
        (Roster, roster(FOUR | {"extra": 1}, total=164)),
        *((Roster, roster(FOUR | {name: 2**40 + 1}, total=164)) for name in MOST_WORK),
        *((Manifest, changed(Manifest, **{name: 2**40 + 1})) for name in MOST_WORK),
        (Roster, roster(*({**FOUR, "uid": uid} for uid in range(MAX_PEERS + 1)), total=164 * (MAX_PEERS + 1))),
        (PeerList, changed(PeerList, peers=[4, 4], reserve=[])),
        (PeerList, changed(PeerList, peers=[4], reserve=[4])),
        (PeerList, changed(PeerList, peers=[2**16], reserve=[])),
        (PeerList, changed(PeerList, peers=[], reserve=list(range(1025)))),
        (StartWindow, changed(StartWindow, start_window=0)),
        (CheckpointManifest, changed(CheckpointManifest, files={"a": A}, sizes={})),
        (CheckpointManifest, changed(CheckpointManifest, files={"a": A}, sizes={"b": 1})),
        (CheckpointManifest, changed(CheckpointManifest, files={"a": A}, sizes={"a": -1})),
        *(
            (CheckpointManifest, changed(CheckpointManifest, files={name: A}, sizes={name: 1}))
            for name in ("", "..", "a/b", ".hidden", "a\n", "a" * 129)  # files stay in the checkpoint's folder
        ),
    ],
)
def test_objects_that_contradict_themselves_are_malformed(body_type, value):
    assert reason_of(body_type, value) is Reason.MALFORMED


def longest(body):
    """The body with the longest value of every scalar field."""
    value = copy.deepcopy(fields_of(body))
    for name, old in value.items():
        if isinstance(old, int) and not isinstance(old, bool):
            value[name] = MOST
    if isinstance(body, Manifest):
        value |= MOST_WORK
    return value | {"uid": 2**16 - 1, "protocol": "9" * 32}


@every_body
def test_the_longest_legal_object_is_not_too_long(body):
    value = longest(body)
    if isinstance(body, Roster):
        longest_entry = {"payload_bytes": 8, "committed_at": MOST, "revealed_at": MOST, **MOST_WORK}
        entries = [entry(4).model_dump() | longest_entry | {"uid": 64_000 + uid} for uid in range(MAX_PEERS)]
        value |= {"entries": entries, "aggregate_bytes": 8 * MAX_PEERS}
    if isinstance(body, PeerList):
        value |= {"peers": list(range(60_000, 60_000 + MAX_PEERS)), "reserve": list(range(62_000, 63_024))}
    if isinstance(body, StartWindow | Roster):
        owners = [ALICE.hotkey.address] * MAX_OWNERS
        approvals = [{"uid": 2**16 - 1, "hotkey": each, "signature": "0a" * 64} for each in owners]
        plan = {"entry": LONGEST_ENTRY, "approvals": approvals}
        value |= {"owners": owners, "owners_needed": MAX_OWNERS} if isinstance(body, StartWindow) else {"plan": plan}
    if isinstance(body, PlanProposal):
        value["entry"] = LONGEST_ENTRY
    if isinstance(body, Word | Decision):
        said = {"ballot": 2**16 - 1, "step": "lock", "value": A, "locked_in": 2**16 - 1}
        word = said | {"uid": 2**16 - 1, "signature": "0a" * 64}
        value |= said if isinstance(body, Word) else {"words": [word] * MAX_WORDS}
    if isinstance(body, CheckpointManifest):
        names = [f"{index:03d}" + "x" * 125 for index in range(64)]
        value |= {"files": dict.fromkeys(names, A), "sizes": dict.fromkeys(names, MOST)}
        value["plan"] = [LONGEST_ENTRY] * MAX_ENTRIES
    if isinstance(body, Debug):
        names = [f"{index:04d}" + "x" * 76 for index in range(MAX_DEBUG_PARAMETERS)]
        value |= {"start": 10, "values": dict.fromkeys(names, [-2.2250738585072014e-308] * 2)}
    data = signed_anyhow(body.kind, value, ALICE.hotkey)
    assert unseal(data, type(body)).body == type(body).model_validate(value)
    # A hotkey may be two characters longer than ours, once per name.
    assert len(data) + 2 * (1 + len(value.get("entries", ()))) <= type(body).max_bytes
