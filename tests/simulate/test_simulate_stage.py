"""A world runs on any stage, and each node sees it through its own weather."""

from lab.adversary.chains import ChainView
from lab.adversary.faults import StoreView
from lab.simulate.run import run_nodes
from lab.simulate.world import Weather, World
from templar.agreement.ballot_box import decided_roster
from templar.neuron.aggregator import Aggregator
from tests.support.network import tiny

ACTORS = ("honest", "honest")


def roots(world):
    nodes = run_nodes(world, 2).values()
    found = {node.state.root for node in nodes}
    for node in nodes:
        node.stop()
    return found


def test_the_weather_is_asked_for_every_reader_bucket_and_chain(folder):
    seen: set[tuple[str | None, str]] = set()
    own: set[str] = set()
    chains: set[str] = set()

    def reader(observer, owner, store):
        seen.add((None if observer is None else observer.name, owner.name))
        return StoreView(store)

    def own_store(owner, store):
        own.add(owner.name)
        return StoreView(store)

    def chain(observer, inner):
        chains.add(observer.name)
        return ChainView(inner)

    world = World(folder, tiny(), seed=1, actors=ACTORS, weather=Weather(reader, own_store, chain))
    names = {member.name for member in world.members if member.role != "burn"}
    assert len(roots(world)) == 1
    observer = world.observer()
    observer.stop()
    assert own == chains == names
    miners = {name for name in names if name.startswith("honest")}
    assert {(one, other) for one in names for other in miners if one != other} <= seen
    assert any(name is None for name, _ in seen)


def test_a_role_can_be_taken_by_another_kind_of_node(folder):
    class Mute(Aggregator):
        def settle_and_publish(self, window, report):
            return self.settle(window)

    world = World(folder, tiny(), seed=1, actors=ACTORS, kinds={"aggregator": Mute})
    nodes = list(run_nodes(world, 2).values())
    assert [type(node) for node in nodes].count(Mute) == 1
    decided = decided_roster(nodes[0].exchange, 2)
    assert decided[1].uid == next(member.uid for member in world.members if member.role == "validator")
    assert len({node.state.root for node in nodes}) == 1
    for node in nodes:
        node.stop()
