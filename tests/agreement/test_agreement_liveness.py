"""No minority stops a network of seven validators: some are dead, silent or flapping, or have buckets that fail."""

from dataclasses import dataclass
from functools import partial

import pytest

from lab.adversary.faults import FORBIDDEN, SERVER_ERROR, TIMED_OUT, FailingStore, SlowStore, StoreView
from lab.adversary.gauntlet import arrive
from lab.simulate.world import START_WINDOW, Weather, World
from templar.errors import Reason, TransientError
from templar.neuron.node import Node
from templar.shared_results import sharing
from templar.store.base import ObjectStore
from templar.timeline import first_block
from templar.window import drive_window
from tests.support.network import tiny

SEVEN, WINDOWS = 7, 4
TLS = TransientError(Reason.STORE_UNREACHABLE, "the handshake failed")


class FlappingStore(StoreView):
    """Fails in every second period of five seconds."""

    def __init__(self, inner, clock):
        super().__init__(inner)
        self._clock = clock

    def before(self, operation, key):
        """Raise 503 half of the time."""
        if self._clock.now() % 10 < 5:
            raise self._failure(SERVER_ERROR, operation, key)


class EndlessStore(StoreView):
    """Answers with bodies that do not end within the time that a reader has."""

    def body(self, key, data):
        """The reader gives up."""
        raise TransientError(Reason.TOO_SLOW, f"{self.name}/{key}: did not arrive before the deadline")


@dataclass(eq=False)
class GenesisSpared(StoreView):
    """A faulty bucket whose genesis can be read: the network has begun before the fault."""

    faulty: ObjectStore

    def _store(self, key):
        return self._inner if key.startswith(("start_window", "checkpoint")) else self.faulty

    def get(self, key, *, max_bytes):
        """The whole object."""
        return self._store(key).get(key, max_bytes=max_bytes)

    def get_range(self, key, start, length):
        """A part of the object."""
        return self._store(key).get_range(key, start, length)

    def head(self, key):
        """The object's size and time."""
        return self._store(key).head(key)

    def list(self, prefix=""):
        """Every object."""
        return self.faulty.list(prefix)


BUCKETS = {
    "no answer": lambda store, clock: SlowStore(store, clock, seconds=0.2, then=TIMED_OUT),
    "tls": lambda store, clock: FailingStore(store, TLS, clock),
    "403": lambda store, clock: FailingStore(store, FORBIDDEN, clock),
    "500": lambda store, clock: FailingStore(store, SERVER_ERROR, clock),
    "endless body": lambda store, clock: EndlessStore(store),
    "flapping": FlappingStore,
}
QUICK = {("dead", 1, 1 / 2), ("403", 3, 1 / 2), ("flapping", 2, 2 / 3)}


def cases():
    for fault in ("dead", *BUCKETS):
        for number in (1, 2, 3):
            for share in (1 / 2, 2 / 3):
                marks = [] if (fault, number, share) in QUICK else [pytest.mark.long]
                yield pytest.param(fault, number, share, marks=marks)


class Seven:
    """Seven validators; the first ones have as much stake together as the quorum lets be missing, and a fault."""

    def __init__(self, folder, fault, number, share):
        self.fault, self.number = fault, number
        self.faulty: set[str] = set()
        self.world = World(
            folder,
            tiny("simulation", windows={"quorum": share}),
            seed=1,
            actors=["honest", "honest"],
            num_validators=SEVEN - 1,
            training=False,
            weather=Weather(reader=self._reader),
        )
        validators = [member for member in self.world.members if member.role in ("aggregator", "validator")]
        missing = (1 - share) * 0.99
        for place, member in enumerate(validators):
            part = missing / number if place < number else (1 - missing) / (SEVEN - number)
            self.world.chain.set_stake(member.hotkey.address, 1000.0 * part)
        self.faulty = {member.name for member in validators[:number]}
        self.nodes: dict[str, Node] = {}
        self.behind: list[int] = []

    def _reader(self, observer, owner, store):
        if owner is None or owner.name not in self.faulty or self.fault not in BUCKETS:
            return store
        return GenesisSpared(store, BUCKETS[self.fault](store, self.world.clock))

    def live(self, member):
        node = self.nodes[member.name] = self.world.node(member)
        for window in range(START_WINDOW, START_WINDOW + WINDOWS):
            node.chain.wait_for_block(first_block(window, self.world.hparams.windows))
            drive_window(node, window)
            self.behind.append(window - node.state.window)
        arrive(self.world, node, START_WINDOW + WINDOWS - 1)

    def run(self):
        """Let everybody live who does."""
        dead = self.faulty if self.fault == "dead" else set()
        members = [each for each in self.world.members if each.role != "burn" and each.name not in dead]
        with sharing():
            self.world.stage.run([partial(self.live, member) for member in members])


@pytest.mark.parametrize(("fault", "number", "share"), list(cases()))
def test_a_minority_stops_nobody(tmp_path, fault, number, share):
    network = Seven(tmp_path, fault, number, share)
    network.run()
    healthy = [node for name, node in network.nodes.items() if name not in network.faulty]
    assert {node.state.window for node in healthy} == {START_WINDOW + WINDOWS - 1}
    assert len({node.state.root for node in healthy}) == 1
    assert max(network.behind) <= 1, "every window is decided while the next one runs"
    for node in network.nodes.values():
        node.stop()
