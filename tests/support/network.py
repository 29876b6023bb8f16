"""A small network in one folder on simulated time, whose nodes a test drives step by step or window by window.

Nothing stands in for anything: the ledger, the buckets, the text, the nodes and their files are the real ones.
"""

import hashlib
import shutil
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from lab.hotkeys import hotkey_from_seed
from lab.simulate.world import Member, World
from templar.agreement.roster import fetch_roster
from templar.chain.base import Role
from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger
from templar.errors import Reason, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal, unseal
from templar.hparams import load_hparams
from templar.neuron.aggregator import Aggregator, RosterNode
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.scoring.evidence import Evidence
from templar.shared_results import sharing
from templar.store.directory import DirectoryStore
from templar.window import drive_window, open_window

N = TypeVar("N", bound=Node)

TINY: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 256,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    "data": {"sequence_length": 32, "rows_per_page": 8, "pages_per_window": 1},
    "training": {"batch_size": 4, "micro_batch_size": 4, "inner_steps": 2},
    "scoring": {"eval_sequences": 4, "eval_micro_batch_size": 4},
    "storage": {"snapshot_frequency": 1, "checkpoint_frequency": 3, "retention_windows": 40},
}


def tiny(preset="local", **sections):
    """A preset with a model that trains in milliseconds, and these changes."""
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {*TINY, *sections}}
    return load_hparams(preset, overrides=merged)


class Network:
    """A network in an empty folder, and those of its nodes that run; the arguments are those of `World`."""

    def __init__(
        self, folder, hparams=None, *, actors=("honest", "honest"), num_validators=1, seed=1, kinds=MappingProxyType({})
    ):
        self.world = World(
            folder, hparams or tiny(), seed=seed, actors=actors, num_validators=num_validators, kinds=kinds
        )
        self.hparams = self.world.hparams
        self.clock = self.world.clock
        self.members = self.world.running
        self._observers: list[Node] = []
        self.nodes = {member.name: self.started(member) for member in self.members}

    def started(self, member):
        """A new node of a member over its folder, started: what a new process would hold."""
        return self.world.node(member)

    def restart(self, who):
        """Stop a node, unless it was killed, and put a new one over its folder."""
        member = self.member(who)
        if member.name in self.nodes:
            self.kill(who)
        node = self.started(member)
        nodes = {**self.nodes, member.name: node}
        self.nodes = {member.name: nodes[member.name] for member in self.members if member.name in nodes}
        return node

    def join(self, name, role="honest"):
        """Register a newcomer and start its node."""
        hotkey = hotkey_from_seed(hashlib.sha256(name.encode()).digest())
        uid = self.register(hotkey)
        self.members.append(Member(name, role, hotkey, uid))
        return self.restart(name)

    def register(self, hotkey, role=Role.MINER, **more):
        """Register a hotkey, which announces a role at once; its uid."""
        uid = self.world.chain.register(hotkey.address, **more)
        self.announce(hotkey, role)
        self.world.chain.wait_for_block(self.world.chain.block() + 1)
        return uid

    def announce(self, hotkey, role):
        """Let a hotkey announce a role in the next block, and wait for nothing."""
        apart = SimulatedClock(self.clock.now())
        Ledger(self.world._ledger, hotkey=hotkey, clock=apart, durable=False).set_role(role)

    def kill(self, who):
        """Let a process die: the kernel drops its lock, and nothing else is done."""
        node = self.nodes.pop(self.member(who).name)
        node._lock.release()
        return node

    def stop(self):
        for node in (*self.nodes.values(), *self._observers):
            node.stop()
        self.nodes.clear()

    def member(self, who):
        known = who if isinstance(who, str | int) else who.name
        return next(member for member in self.members if known in (member.name, member.uid))

    def uid(self, who):
        return self.member(who).uid

    def observer(self):
        """A started observer, in the place of an earlier one; it is stopped with the network."""
        for earlier in self._observers:
            earlier.stop()
        self._observers = [self.world.observer()]
        return self._observers[0]

    @property
    def aggregator(self):
        return self.all(Aggregator)[0]

    @property
    def validator(self):
        return self.all(Validator)[0]

    @property
    def miners(self):
        return self.all(Miner)

    def all(self, kind):
        """The running nodes of a kind, in the order of their uids."""
        return [node for node in self.nodes.values() if isinstance(node, kind)]

    def run(self, windows, *, but=(), beside=()):
        """Drive the running nodes, but some of them, through windows on simulated time, beside other participants."""
        windows = list(windows)

        def live(node):
            def participant():
                for window in windows:
                    self.to_window(window, node.chain)
                    drive_window(node, window)

            return participant

        left_out = {self.member(who).name for who in but}
        lives = [live(node) for name, node in self.nodes.items() if name not in left_out]
        with sharing():
            self.clock.run([*lives, *beside])

    def to_window(self, window, chain=None):
        """Let the time pass until a window opens, on a participant's chain where several live at once."""
        (chain or self.world.chain).wait_for_block(window * self.hparams.windows.blocks_per_window)

    def reveal(self, window):
        """Let every miner commit and reveal, and every author of rosters observe it; then the window is closed."""
        for miner in self.miners:
            open_window(miner, window)
            miner.train(window)
            miner.compress(window)
            assert miner.commit(window).reason is None
        for node in self.all(RosterNode):
            node.observe_commitments(window)
        for miner in self.miners:
            assert miner.upload(window).reason is None

    def bucket(self, who):
        """The bucket of a member, with write rights."""
        root = self.world.root / "buckets" / self.member(who).account_id
        return DirectoryStore(root, clock=self.clock.now)

    def objects(self, who, prefix=""):
        """What lies in a member's bucket, but for leases: key -> time and bytes."""
        store = self.bucket(who)
        listed = [info for info in store.list(prefix) if prefix or not info.key.startswith(Kind.LEASE)]
        return {info.key: (info.last_modified, store.get(info.key, max_bytes=1 << 30)) for info in listed}

    def roster(self, window, node=None):
        """The roster that a node published for a window, the aggregator if none is named."""
        node = node or self.aggregator
        found = fetch_roster(node.exchange, node.exchange.identity(window), window)
        return None if found is None else found.body

    def rostered(self, window, node=None):
        """The uids in such a roster."""
        found = self.roster(window, node)
        return None if found is None else [entry.uid for entry in found.entries]

    def evidence(self, window):
        """What the first validator published for a window."""
        key = window_key(Kind.EVIDENCE, window, self.member(self.validator).uid)
        return unseal(self.objects(self.validator)[key][1], Evidence).body

    def put_evidence(self, evidence, who="validator-2"):
        """Store an evidence as a validator's, signed by it."""
        member = self.member(who)
        key = window_key(Kind.EVIDENCE, evidence.window, member.uid)
        self.bucket(who).put(key, seal(evidence, member.hotkey).encode())

    def config(self, who):
        """What a member's housekeeping works with."""
        return self.nodes[self.member(who).name].config

    @contextmanager
    def outage(self, who):
        """Let every read of a member's bucket fail, as a store does that cannot be reached."""
        bucket, real = self.member(who).account_id, DirectoryStore.head

        def head(store, key):
            if store.name == bucket:
                raise TransientError(Reason.STORE_UNREACHABLE, f"{bucket}: no route")
            return real(store, key)

        DirectoryStore.head = head  # type: ignore[method-assign]
        try:
            yield
        finally:
            DirectoryStore.head = real  # type: ignore[method-assign]

    @contextmanager
    def restored(self):
        """Put the buckets back as they were, with their objects' times, after a test that shares the network."""
        buckets = self.world.root / "buckets"
        kept = buckets.with_name("kept")
        shutil.copytree(buckets, kept)
        yield self
        shutil.rmtree(buckets)
        kept.rename(buckets)

    def blind(self, reader, who):
        """Let a node fail to read a member's bucket from now on."""
        real, bucket = reader.buckets.reader, self.member(who).account_id

        def reader_of(neuron):
            store = real(neuron)
            if store.name == bucket:
                raise TransientError(Reason.STORE_UNREACHABLE, f"{bucket}: no route")
            return store

        reader.buckets.reader = reader_of  # type: ignore[method-assign]

    def roots(self, window):
        """What the running nodes hold to be the root after a window; None for one that did not apply it."""
        found = (node.journal.applied(window) for node in self.nodes.values())
        return {None if applied is None else applied.root for applied in found}
