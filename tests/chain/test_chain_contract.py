"""What the domain relies on, run against every chain: the ledger in real and in simulated time, and Bittensor's SDK."""

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import bittensor_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.hotkeys import hotkey_from_seed
from templar import interrupt
from templar.chain.base import Role
from templar.chain.bittensor import BittensorChain
from templar.chain.clock import SimulatedClock, SystemClock
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.substrate import KeyPairWallet, MemorySubstrate

NETUID = 3
SEEDS = [bytes([number]) * 32 for number in range(1, 6)]
ADDRESSES = [hotkey_from_seed(seed).address for seed in SEEDS]
ROUNDING = 1 / 65535


class World:
    """One chain and the means to see it as any participant; `operator` may change the subnet."""

    def __init__(self, kind, folder):
        self.clock = SystemClock() if kind == "ledger" else SimulatedClock(1_800_000_000.0)
        self.opened: list[Any] = []
        if kind == "bittensor":
            self.substrate = MemorySubstrate(self.clock, netuid=NETUID)
            self.operator: Any = self.substrate
            self._open = self._open_bittensor
        else:
            self.path = folder / "ledger.db"
            create_ledger(
                self.path,
                netuid=NETUID,
                block_seconds=0.05 if kind == "ledger" else 12.0,
                genesis_time=self.clock.now(),
                seed=1,
            )
            self._open = self._open_ledger
            self.operator = self._open(None)

    def chain(self, index=None):
        """The chain as participant `index` sees it, or a reader."""
        chain = self._open(index)
        self.opened.append(chain)
        return chain

    def _open_ledger(self, index):
        hotkey = None if index is None else hotkey_from_seed(SEEDS[index])
        return Ledger(self.path, hotkey=hotkey, clock=self.clock, durable=False)

    def _open_bittensor(self, index):
        wallet = None if index is None else KeyPairWallet(bittensor_core.Keypair.create_from_seed(SEEDS[index]))
        return BittensorChain("local", NETUID, wallet=wallet, substrates=lambda *_: self.substrate, clock=self.clock)


@pytest.fixture(params=["ledger", "simulated-ledger", "bittensor"])
def world(request, tmp_path):
    world = World(request.param, tmp_path)
    yield world
    for chain in world.opened:
        chain.close()


def test_blocks_come_by_the_clock_and_a_past_one_is_not_waited_for(world):
    chain = world.chain()
    first = chain.block()
    chain.wait_for_block(first + 3)
    last = chain.block()
    assert last >= first + 3
    assert chain.head() >= last
    assert chain.netuid == NETUID
    times = [chain.block_time(number) for number in range(first, last + 1)]
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert steps == pytest.approx([chain.block_seconds] * len(steps), abs=0.001)
    assert times[-1] <= chain.clock.now()
    for finalized in (True, False):
        before = chain.clock.now()
        chain.wait_for_block(chain.block(), finalized=finalized)
        if not isinstance(chain.clock, SystemClock):
            assert chain.clock.now() == before


def test_everybody_sees_the_same_blocks(world):
    one, other = world.chain(), world.chain()
    one.wait_for_block(one.block() + 4)
    numbers = range(one.block() - 4, one.block() + 1)
    hashes = [one.block_hash(number) for number in numbers]
    assert hashes == [other.block_hash(number) for number in numbers] == [one.block_hash(number) for number in numbers]
    assert [one.block_time(number) for number in numbers] == [other.block_time(number) for number in numbers]
    assert len(set(hashes)) == len(hashes)
    assert all(re.fullmatch("0x[0-9a-f]{64}", text) for text in hashes)


def test_a_block_that_is_not_there_is_unknown(world):
    chain = world.chain()
    for number in (-1, chain.block() + 1000):
        for read in (chain.block_time, chain.block_hash, chain.metagraph):
            with raising(PermanentError, Reason.BLOCK_UNKNOWN):
                read(number)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["register", "deregister", "stake", "weights", "commit", "look", "look", "pass"]),
        st.integers(0, 4),
        st.sampled_from([0.0, 1.0, 2.5, 100.5]),
    ),
    max_size=25,
)


@pytest.mark.parametrize("kind", ["simulated-ledger", "bittensor"])
@settings(max_examples=15)
@given(operations=OPERATIONS)
def test_a_subnet_is_what_its_history_made_it_and_every_past_metagraph_can_be_read_again(
    tmp_path_factory, kind, operations
):
    world = World(kind, tmp_path_factory.mktemp("world"))
    chains = [world.chain(index) for index in range(5)]
    seats: dict[int, tuple[str, float, bool]] = {}
    words: dict[str, str] = {}
    seen = {}
    for name, index, amount in operations:
        chain, address = chains[index], ADDRESSES[index]
        uid = next((uid for uid, seat in seats.items() if seat[0] == address), None)
        if name == "register" and uid is None:
            free = min(set(range(5)) - seats.keys())
            assert world.operator.register(address, stake=amount, validator_permit=index < 3) == free
            seats[free] = address, amount, index < 3
        elif name == "look":
            graph = chain.metagraph()
            known = [each for each in graph.neurons if each.hotkey in ADDRESSES]  # Bittensor keeps empty places
            assert {each.uid: (each.hotkey, each.stake, each.validator_permit) for each in known} == seats
            assert [each.commitment for each in known] == [words.get(each.hotkey) for each in known]
            assert chain.commitments() == words
            incentive = sum(each.incentive for each in graph.neurons)
            assert incentive == 0.0 or incentive == pytest.approx(1.0)
            seen[graph.block] = graph
        elif name == "pass" or uid is None:
            chain.clock.sleep_until(chain.clock.now() + amount)
        elif name == "deregister" and address not in words:
            world.operator.deregister(address)
            del seats[uid]
        elif name == "stake":
            world.operator.set_stake(address, amount)
            seats[uid] = address, amount, index < 3
        elif name == "commit":
            words[address] = f"{amount}".ljust(128, ".")
            chain.set_commitment(words[address])
        elif name == "weights" and index < 3:
            chain.set_weights({each: amount + each + 1 for each in seats})
    fresh = world.chain()
    assert [fresh.metagraph(block) for block in seen] == list(seen.values())
    for chain in world.opened:
        chain.close()


def test_a_registration_is_told_from_the_next_one_of_its_uid_and_from_a_swap(world):
    world.operator.register(ADDRESSES[0], stake=1.0, validator_permit=True)
    world.operator.register(ADDRESSES[1], stake=2.0)
    before = world.chain().metagraph()
    world.operator.set_stake(ADDRESSES[0], 7.0)
    world.operator.deregister(ADDRESSES[1])
    world.operator.register(ADDRESSES[2], stake=3.0)
    after = world.chain().metagraph()
    assert after.by_uid(0).registered_at == before.by_uid(0).registered_at
    first, again = before.by_uid(1), after.by_uid(1)
    assert again.hotkey == ADDRESSES[2], "the freed uid was used again"
    assert first.registered_at < again.registered_at <= after.block, "it is another registration"
    assert before.before_swap(again) is None
    assert before.before_swap(replace(first, hotkey=ADDRESSES[4])) == first


def test_roles_are_what_the_hotkeys_announced_and_stake_changes_none(world):
    """A stranger's stake gives a miner a permit, and makes no validator of it."""
    for index, (stake, permit) in enumerate(((5.0, True), (0.0, False), (9.0, True), (4.0, True))):
        world.operator.register(ADDRESSES[index], stake=stake, validator_permit=permit)
    for index, role in enumerate((Role.VALIDATOR, Role.MINER, Role.VALIDATOR)):
        world.chain(index).set_role(role)
    before = world.chain().metagraph()
    assert [neuron.role for neuron in before.neurons] == [Role.VALIDATOR, Role.MINER, Role.VALIDATOR, None]
    assert [neuron.uid for neuron in before.validators()] == [2, 0]

    world.operator.set_stake(ADDRESSES[1], 100.0, validator_permit=True)
    graph = world.chain().metagraph()
    assert graph.by_uid(1).validator_permit
    assert [neuron.uid for neuron in graph.validators()] == [2, 0]
    assert [neuron.uid for neuron in graph.miners()] == [1]
    assert [neuron.uid for neuron in replace(graph, validator_min_stake=5.5).validators()] == [2]

    # A role holds until another one is announced; without a permit it makes no validator.
    world.operator.set_stake(ADDRESSES[0], 5.0, validator_permit=False)
    world.chain(1).set_role(Role.VALIDATOR)
    graph = world.chain().metagraph()
    assert [neuron.uid for neuron in graph.validators()] == [1, 2]
    assert graph.miners() == ()
    assert world.chain().metagraph(before.block) == before


def test_a_commitment_of_another_form_is_refused(world):
    world.operator.register(ADDRESSES[0])
    chain = world.chain(0)
    for data in ("", "a" * 127, "a" * 129, "a" * 127 + "é"):
        with raising(PermanentError, Reason.CHAIN_REFUSED, "128 ASCII"):
            chain.set_commitment(data)
    assert chain.commitments() == {}


def test_writes_need_a_hotkey_its_registration_and_weights_a_permit(world):
    world.operator.register(ADDRESSES[0], validator_permit=True)
    world.operator.register(ADDRESSES[2])
    for chain, reason in ((world.chain(1), Reason.CHAIN_REFUSED), (world.chain(), Reason.BAD_WALLET)):
        writes = (chain.set_commitment, "a" * 128), (chain.set_weights, {0: 1.0}), (chain.set_role, Role.MINER)
        for write in (partial(*each) for each in writes):
            with raising(PermanentError, reason):
                write()
    with raising(PermanentError, Reason.CHAIN_REFUSED, "permit"):
        world.chain(2).set_weights({0: 1.0})
    with raising(PermanentError, Reason.CHAIN_REFUSED, "permit"):
        world.chain(2).check_weights({0: 1.0})
    world.chain(0).check_weights({0: 1.0})
    assert chain.commitments() == chain.weights() == {}


def test_weights_are_read_back_as_shares(world):
    for address in ADDRESSES[:4]:
        world.operator.register(address, stake=10.0, validator_permit=address == ADDRESSES[0])
    chain = world.chain(0)
    assert chain.weights() == {}
    assert (chain.weights_schedule().reveal_epochs, chain.weights_schedule().hidden) == (0, {})
    chain.set_weights({3: 3.0, 1: 1.0, 2: 0.0})
    weights = world.chain().weights()
    assert list(weights) == [0]
    assert list(weights[0]) == [1, 3]  # a zero is left out
    assert weights[0][1] == pytest.approx(0.25, abs=ROUNDING)
    assert math.fsum(weights[0].values()) == pytest.approx(1.0)


def test_weights_that_mean_nothing_are_refused(world):
    world.operator.register(ADDRESSES[0], validator_permit=True)
    world.operator.register(ADDRESSES[1])
    chain = world.chain(0)
    for weights in ({}, {0: 0.0}, {0: -1.0, 1: 2.0}, {0: math.nan}, {0: math.inf}, {7: 1.0}, {-1: 1.0}, {70_000: 1.0}):
        for call in (chain.set_weights, chain.check_weights):
            with raising(PermanentError, Reason.CHAIN_REFUSED):
                call(weights)
    assert chain.weights() == {}


def test_a_stop_request_ends_a_wait(world):
    chain = world.chain()
    target, started = chain.block() + 100_000, chain.clock.now()
    interrupt.request_stop()
    with pytest.raises(interrupt.StoppedError):
        chain.wait_for_block(target)
    assert chain.clock.now() < started + 100_000 * 0.05
