"""A small network for tests: members with keys, buckets in memory, payloads of a tiny model."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab.hotkeys import hotkey_from_seed
from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json, sha256_hex
from templar.chain.base import NeuronInfo, Role
from templar.chain.clock import SimulatedClock
from templar.chain.hotkey import Hotkey
from templar.chain.ledger import Ledger, create_ledger
from templar.exchange.buckets import Buckets, OwnBucket
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.reveal import Submission
from templar.exchange.signed import Network, seal
from templar.gradient.codec.wire import Header, Payload, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.hparams import Gradient, HParams, Windows, load_hparams
from templar.store.address import BucketAddress, encode_address
from templar.store.base import ObjectStore
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import ScriptedStore

NETUID = 7
GENESIS = "ab" * 32
NETWORK = Network(NETUID, GENESIS)
ASSIGNMENT = "cd" * 32
ROOT = "ef" * 32
SINGLE, LEASES = (Kind.START_WINDOW, Kind.SETTINGS, Kind.PLAN), (Kind.LEASE, Kind.HEARTBEAT)
SPECIAL = (Kind.AGGREGATE, Kind.CHECKPOINT, Kind.PEERS, Kind.WORD, *SINGLE, *LEASES)
PER_WINDOW = [kind for kind in Kind if kind not in SPECIAL]
"""Kinds of which each neuron stores an object of each window."""
BIRTHDAY = 1_700_000_000.4
"""Chain time of block 0: not a whole second, so that seconds of the chain and of the stores differ."""

LAYOUT = Layout.of(
    {"embed": (8, 8), "norm": (8,)},
    Gradient(momentum_decay=0.9, topk_compression=4, target_chunk=4, use_dct=False),
    "sparseloco",
)
RULES = Windows(
    blocks_per_window=60,
    block_seconds=1.0,
    commit_guard_seconds=2,
    time_window_delta_seconds=4,
    read_margin_seconds=2,
    roster_slot_seconds=4,
    roster_ranks=3,
    quorum=0.5,
    plan_notice_windows=3,
    train_margin_seconds=1.0,
)


@dataclass(frozen=True)
class Member:
    """A neuron with a key. Members of equal uid are equal in all tests."""

    uid: int
    hotkey: Hotkey
    stake: float = 0.0
    permit: bool = False

    @property
    def neuron(self):
        return NeuronInfo(
            self.uid, self.hotkey.address, self.stake, self.permit, 0.0, encode_address(self.address), self.role
        )

    @property
    def signing(self):
        return {"netuid": NETUID, "genesis": GENESIS, "uid": self.uid, "hotkey": self.hotkey.address}

    @property
    def role(self):
        return Role.VALIDATOR if self.permit else Role.MINER

    @property
    def account(self):
        return f"bucket-{self.uid}"

    @property
    def address(self):
        return BucketAddress(self.account, "id", "secret")


def member(uid, *, stake=0.0, permit=False):
    return Member(uid, hotkey_from_seed(sha256_hex(f"member {uid}".encode()).encode()[:32]), stake, permit)


def payload_bytes(author, window, *, seed=0, layout=LAYOUT):
    """A legal payload; the same arguments give the same bytes."""
    generator = torch.Generator().manual_seed(1000 * author.uid + seed)
    update = {tensor.name: torch.randn(tensor.shape, generator=generator) for tensor in layout.tensors}
    rule = FeedbackRule("sparseloco", decay=0.9, learning_rate=1.0)
    coded = compress(FeedbackState.zeros(layout), update, layout=layout, rule=rule)
    header = Header(layout.recipe, window, author.uid, author.hotkey.address, layout.digest)
    return encode(Payload.of(header, coded.tensors, layout), layout)


def other_payload(author, window):
    """Another legal payload than `payload_bytes(author, window)`, as long."""
    length = len(payload_bytes(author, window))
    others = (payload_bytes(author, window, seed=seed) for seed in range(1, 100))
    return next(other for other in others if len(other) == length)


def signed_anyhow(kind, body, signer, *, version=PROTOCOL_VERSION):
    """Sign any value, legal or not, in canonical form."""
    message = f"templar:{version}:{kind}:".encode() + canonical_json(body)
    return canonical_json({"body": body, "signature": signer.sign(message).hex()})


def fields_of(body, **changes):
    """A body as JSON, with changes."""
    return body.model_dump(mode="json") | changes


def manifest_of(author, window, payload, **changes):
    values: dict[str, Any] = {
        **author.signing,
        "window": window,
        "payload_sha256": sha256_hex(payload),
        "payload_bytes": len(payload),
        "assignment": ASSIGNMENT,
        "root_before": ROOT,
        "steps": 3,
        "tokens": 384,
    }
    return Manifest(**values | changes)


def commit_to(manifest, **changes):
    """The commitment to a manifest."""
    values = manifest.model_dump(include={"protocol", "netuid", "genesis", "uid", "hotkey", "window"})
    return Commit(**values | {"commitment": manifest.digest} | changes)


def submission_of(author, manifest, committed_at, revealed_at):
    """The submission of an honest reveal, signed by its author."""
    signatures = [seal(body, author.hotkey).signature for body in (manifest.commit, manifest)]
    return Submission(manifest, committed_at, revealed_at, *signatures)


def gathered(cache, authors, window, *, seed=0, times=(1, 2)):
    """What a publisher gathered of these miners and has in its cache; a miner's uid is added to the times."""
    submissions = []
    for author in authors:
        data, hotkey = payload_bytes(author, window, seed=seed), author.hotkey.address
        cache.admit(data, sha256_hex(data), window=window, uid=author.uid, hotkey=hotkey)
        committed, revealed = (time + author.uid for time in times)
        submissions.append(submission_of(author, manifest_of(author, window, data), committed, revealed))
    return submissions


class Hand:
    """A clock that a test sets by hand, for the stamps of a store."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


@dataclass
class Bucket:
    """One member's bucket, stamped by hand."""

    owner: Member
    hand: Hand = field(default_factory=Hand)

    def __post_init__(self):
        self.memory = MemoryStore(f"bucket-{self.owner.uid}", clock=self.hand)
        self.store = ScriptedStore(self.memory)

    def put(self, key, data, at):
        """Store bytes at a time, replacing an earlier object."""
        self.hand.now = at
        self.memory.put(key, data)

    def put_signed(self, key, body, at):
        self.put(key, seal(body, self.owner.hotkey).encode(), at)

    def reveal(self, times, payload, manifest=None, *, committed=None, revealed=None):
        """Commit and reveal, in time unless another time is given."""
        manifest = manifest or manifest_of(self.owner, times.window, payload)
        committed = times.commit_interval.last if committed is None else committed
        revealed = times.reveal_interval.first if revealed is None else revealed
        uid, window = self.owner.uid, times.window
        self.put_signed(window_key(Kind.COMMIT, window, uid), commit_to(manifest), committed)
        self.put_signed(window_key(Kind.MANIFEST, window, uid), manifest, revealed)
        self.put(window_key(Kind.GRADIENT, window, uid), payload, revealed)
        return manifest


class Subnet:
    """A chain on simulated time and a bucket in memory for each member, stamped by that time.

    Uid 0 is the burn uid, then come validators with the given stakes, then miners.
    """

    def __init__(self, folder, *, stakes=(100.0,), num_miners=3, overrides=None):
        sections = {"windows": RULES.model_dump(), **(overrides or {})}
        self.hparams: HParams = load_hparams(
            "simulation", path=Path(__file__).parents[2] / "hparams.json", overrides=sections
        )
        self.clock = SimulatedClock(BIRTHDAY)
        self.ledger_path = folder / "ledger.sqlite"
        create_ledger(self.ledger_path, netuid=NETUID, block_seconds=1.0, genesis_time=BIRTHDAY, seed=1)
        self.chain = Ledger(self.ledger_path, clock=self.clock, durable=False)
        validators = [member(1 + index, stake=stake, permit=True) for index, stake in enumerate(stakes)]
        miners = [member(1 + len(stakes) + index) for index in range(num_miners)]
        self.members = (member(0), *validators, *miners)
        self.validators, self.miners = tuple(validators), tuple(miners)
        self.stores = {
            each.account: ScriptedStore(MemoryStore(each.account, clock=self.clock.now)) for each in self.members
        }
        for each in self.members:
            self.chain.register(each.hotkey.address, stake=each.stake, validator_permit=each.permit)
            self.exchange(each).buckets.announce()
            if each.uid:
                self.ledger(each).set_role(each.role)

    def store(self, owner):
        return self.stores[owner.account]

    def put(self, owner, key, data):
        """Store bytes, or a body that its owner signs, in a member's bucket, past what a test does to its store."""
        self.store(owner).inner.put(key, data if isinstance(data, bytes) else seal(data, owner.hotkey).encode())

    def ledger(self, owner):
        hotkey = None if owner is None else owner.hotkey
        return Ledger(self.ledger_path, hotkey=hotkey, clock=self.clock, durable=False)

    def buckets(self, owner=None, views=None):
        """All buckets as one member sees them; `views` replace those of some accounts."""
        shown: dict[str, ObjectStore] = {**self.stores, **(views or {})}
        own = None if owner is None else OwnBucket(owner.address, self.store(owner))
        hotkey = None if owner is None else owner.hotkey.address
        return Buckets(self.ledger(owner), lambda address: shown[address.account_id], own=own, hotkey=hotkey)

    def exchange(self, owner=None, views=None):
        buckets = self.buckets(owner, views)
        signer = None if owner is None else owner.hotkey
        return NetworkView(self.ledger(owner), buckets, NETWORK, self.hparams, signer)

    def times(self, window):
        """The times of a window; waits for its closing block."""
        return self.exchange().times(window)
