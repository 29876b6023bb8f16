from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.adversary.chains import UnevenLedger, UnreachableChain
from templar.chain.base import NeuronInfo, Role
from templar.errors import PermanentError, Reason
from templar.exchange import network_view
from templar.exchange.network_view import NetworkView, drawn_by_stake
from templar.timeline import WindowTimes
from tests.support.errors import raising
from tests.support.subnet import BIRTHDAY, GENESIS, NETUID, NETWORK, RULES, Subnet, member
from tests.support.uneven_ledger import schedule_of

BLOCKS = RULES.blocks_per_window


@pytest.fixture
def subnet(tmp_path):
    return Subnet(tmp_path, stakes=(50.0, 200.0, 50.0, 10.0), num_miners=2)


def test_miners_announced_it_and_are_not_the_burn_uid(subnet):
    assert subnet.hparams.weights.burn_uid == 0
    subnet.ledger(subnet.members[0]).set_role(Role.MINER)
    subnet.chain.register(member(7).hotkey.address)
    assert [neuron.uid for neuron in subnet.exchange().miners(1)] == [5, 6]


def test_a_strangers_stake_makes_no_publisher_of_a_miner(subnet):
    """Anybody can stake enough on a miner's hotkey for a permit and the first rank: it stays a miner all the same."""
    exchange, victim = subnet.exchange(), subnet.miners[0]
    subnet.chain.set_stake(victim.hotkey.address, 1000.0, validator_permit=True)
    assert [neuron.uid for neuron in exchange.miners(1)] == [5, 6]
    assert RULES.roster_ranks == 3
    assert [neuron.uid for neuron in exchange.publishers(1)] == [2, 1, 3]  # equal stake: the lower uid first


def test_a_validator_needs_the_least_stake_of_the_network(tmp_path):
    subnet = Subnet(tmp_path, stakes=(50.0, 9.5, 10.0), overrides={"peers": {"validator_min_stake": 10.0}})
    exchange = subnet.exchange()
    assert [neuron.uid for neuron in exchange.publishers(1)] == [1, 3]
    assert exchange.newest_metagraph().validators() == exchange.metagraph(1).validators()


def neurons(stakes):
    return [
        NeuronInfo(uid, f"hotkey-{uid}", stake, True, 0.0, None, Role.VALIDATOR) for uid, stake in enumerate(stakes)
    ]


@given(st.lists(st.floats(0, 1e9), max_size=8), st.integers(0, 10), st.text())
def test_publishers_are_drawn_once_each_by_what_every_node_knows(stakes, count, seed):
    validators = neurons(stakes)
    drawn = drawn_by_stake(validators, seed, count)
    assert len(drawn) == len(set(drawn)) == min(count, len(stakes))
    assert drawn == drawn_by_stake(validators, seed, len(stakes))[:count]
    assert set(drawn) <= set(validators)


@pytest.mark.parametrize("parts", [1, 3])
def test_stake_is_drawn_first_as_often_as_its_share_however_it_is_split(parts):
    """A holder of 24 % beside eleven validators of 6.9 %: within four deviations of 2,000 draws."""
    validators = neurons([24.0 / parts] * parts + [76 / 11] * 11)
    first = [drawn_by_stake(validators, f"block {number}", 3)[0].uid for number in range(2000)]
    share = sum(uid < parts for uid in first) / len(first)
    assert abs(share - 0.24) < 4 * (0.24 * 0.76 / 2000) ** 0.5


def test_publishers_of_a_window_are_drawn_by_its_first_block(subnet, monkeypatch):
    monkeypatch.setattr(network_view, "drawn_by_stake", drawn_by_stake)
    exchange = subnet.exchange()
    for window in (1, 2, 3):
        subnet.clock.sleep_until(BIRTHDAY + window * BLOCKS)
        seed = subnet.chain.block_hash(window * BLOCKS)
        assert exchange.publishers(window) == drawn_by_stake(exchange.announced(window), seed, RULES.roster_ranks)


def test_ranks_are_those_at_the_opening_of_the_window(subnet):
    exchange = subnet.exchange()
    before = exchange.publishers(1)
    subnet.chain.set_stake(subnet.validators[3].hotkey.address, 1000.0)
    assert exchange.publishers(1) == before
    assert [neuron.uid for neuron in exchange.publishers(2)] == [4, 2, 1]
    assert subnet.clock.now() == pytest.approx(BIRTHDAY + 2 * BLOCKS)


def test_an_author_has_its_uid_of_the_window(subnet):
    alice = subnet.miners[0]
    exchange = subnet.exchange(alice)
    mine = {"netuid": NETUID, "genesis": GENESIS, "uid": 5, "hotkey": alice.hotkey.address}
    assert exchange.author(1) == mine
    subnet.chain.deregister(subnet.validators[0].hotkey.address)
    subnet.chain.deregister(alice.hotkey.address)
    subnet.chain.register(alice.hotkey.address)
    assert exchange.author(2) == mine | {"uid": 1}
    assert exchange.author(1) == mine


def test_who_is_not_registered_is_told_so(subnet):
    with raising(PermanentError, Reason.NOT_REGISTERED, "register"):
        replace(subnet.exchange(), signer=member(77).hotkey).identity(1)
    with raising(PermanentError, Reason.NOT_REGISTERED):  # it only reads
        subnet.exchange().author(1)


def test_times_are_those_of_the_first_blocks(subnet):
    times = subnet.exchange().acting_times(2)
    assert times == subnet.exchange().times(2) == WindowTimes(2, BIRTHDAY + 2 * BLOCKS, BIRTHDAY + 3 * BLOCKS, RULES)
    assert subnet.clock.now() == pytest.approx(BIRTHDAY + 3 * BLOCKS)
    assert times.close == int(BIRTHDAY) + 3 * BLOCKS


def test_expected_times_do_not_wait(subnet):
    subnet.clock.sleep_until(BIRTHDAY + 2 * BLOCKS + 5)
    times = subnet.exchange().expected_times(2)
    assert (times.opened, times.closed) == pytest.approx((BIRTHDAY + 2 * BLOCKS, BIRTHDAY + 3 * BLOCKS))
    later = subnet.exchange().expected_times(7)
    assert (later.opened, later.closed) == pytest.approx((BIRTHDAY + 7 * BLOCKS, BIRTHDAY + 8 * BLOCKS))
    assert subnet.clock.now() == pytest.approx(BIRTHDAY + 2 * BLOCKS + 5)


def uneven(subnet, *gaps, finality_lag=0, replaced=MappingProxyType({})):
    schedule = schedule_of(BIRTHDAY, RULES.block_seconds, gaps, lag=finality_lag, replaced=replaced)
    chain = UnevenLedger(subnet.ledger_path, clock=subnet.clock, durable=False, schedule=schedule)
    return chain, NetworkView(chain, subnet.buckets(), NETWORK, subnet.hparams)


def test_acting_times_are_those_of_the_blocks_at_the_head(subnet):
    chain, exchange = uneven(subnet, *[1.75] * 2 * BLOCKS, finality_lag=10)
    times = exchange.acting_times(0)
    assert times.closed == BIRTHDAY + 1.75 * BLOCKS
    assert chain.block() == BLOCKS - 10, "the closing block is not final yet"
    assert exchange.expected_times(0).closed == times.closed - 0.75 * 10
    assert exchange.chain_now() == chain.block_time(chain.head(), finalized=False) == times.closed
    assert exchange.settled_times(times) == times == exchange.times(0)
    assert chain.block() == BLOCKS


def test_a_close_that_moves_is_seen_before_it_is_final_and_after_an_outage(subnet):
    gaps, close = [*[1.0] * (BLOCKS - 1), 3.0], BIRTHDAY + BLOCKS
    chain, exchange = uneven(subnet, *gaps, finality_lag=10, replaced={BLOCKS: [(2.0, -0.75)]})
    times, now = exchange.acting_times(0), subnet.clock.now()
    assert times.closed == close
    assert exchange.settled_times(times).closed == close + 2
    assert subnet.clock.now() < close + 3
    for last in (times.reveal_interval.last, times.settles):
        outage = UnreachableChain(chain, since=now, seconds=last + 0.5 - now, every=1000.0)
        assert replace(exchange, chain=outage).settled_times(times).closed == close + 2
    for_good = UnreachableChain(chain, since=now, seconds=1000.0, every=1000.0)
    assert replace(exchange, chain=for_good).settled_times(times) == times


def test_an_estimate_that_changes_is_no_close_that_moved(subnet):
    gaps = [*[1.0] * (BLOCKS - 5), 1.25, 0.75]
    chain, exchange = uneven(subnet, *gaps, finality_lag=4)
    times = exchange.acting_times(0)
    assert times.closed == BIRTHDAY + BLOCKS + 0.25, "estimated from a final block that came late"
    assert exchange.settled_times(times).closed == BIRTHDAY + BLOCKS
    assert chain.block() >= BLOCKS


def test_an_endpoint_that_shows_the_close_too_early_is_not_believed(subnet):
    chain, exchange = uneven(subnet, finality_lag=10, replaced={BLOCKS: [(4.0, 0.0)]})
    close = BIRTHDAY + BLOCKS
    subnet.clock.sleep_until(close - 4)
    chain.head = lambda: BLOCKS
    assert exchange.acting_times(0).closed == close


@given(st.lists(st.sampled_from([0.0, 0.001, 0.6, 1.0, 1.4, 3.0, 12.0]), min_size=BLOCKS, max_size=2 * BLOCKS))
@settings(max_examples=12, deadline=None)
def test_the_settling_block_is_the_first_at_or_after_the_settling_second(tmp_path_factory, gaps):
    subnet = Subnet(tmp_path_factory.mktemp("subnet"))
    chain, exchange = uneven(subnet, *gaps)
    times = exchange.times(0)
    block = exchange.settling_block(times)
    assert chain.block_time(block) >= times.settles
    assert chain.block_time(block - 1) < times.settles
    assert subnet.clock.now() >= chain.block_time(block)
    assert exchange.settling_block(times) == block
