"""Hostile stores and chains keep the contract, except where they say otherwise."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.adversary import faults
from lab.adversary.chains import (
    BlockSchedule,
    PrunedChain,
    ReorganisingChain,
    SkewedChain,
    StaleChain,
    UnevenLedger,
    UnreachableChain,
    difficult_blocks,
)
from lab.hotkeys import hotkey_from_seed
from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import PermanentError, Reason, TransientError
from templar.store.directory import DirectoryStore
from tests.support.errors import raising, refusal
from tests.support.uneven_ledger import schedule_of

START = 1_000_000.0
KEY, BODY = "gradient-1", b"0123456789"


@pytest.fixture
def clock():
    return SimulatedClock(START)


@pytest.fixture
def store(tmp_path, clock):
    """A bucket with one object."""
    (tmp_path / "bucket").mkdir()
    store = DirectoryStore(tmp_path / "bucket", clock=clock.now)
    store.put(KEY, BODY)
    return store


def test_a_failing_store_fails_every_call_from_its_time_on(store, clock):
    view = faults.failing(faults.FORBIDDEN, since_seconds=10)(store, clock, None)
    assert view.get(KEY, max_bytes=100) == BODY
    clock.sleep_until(START + 10)
    for call in (
        lambda: view.head(KEY),
        lambda: view.get(KEY, max_bytes=100),
        lambda: view.get_range(KEY, 0, 1),
        lambda: list(view.list()),
    ):
        refusal(call, PermanentError, Reason.ACCESS_DENIED)


def test_a_slow_store_takes_its_time_and_may_give_no_answer(store, clock):
    assert faults.slow(2.5)(store, clock, None).get(KEY, max_bytes=100) == BODY
    assert clock.now() == START + 2.5
    with pytest.raises(TransientError, match="no answer"):
        faults.slow(1, then=faults.TIMED_OUT)(store, clock, None).head(KEY)
    assert clock.now() == START + 3.5


@pytest.fixture
def ledger(tmp_path, clock):
    """A second per block."""
    path, hotkey = tmp_path / "ledger.sqlite", hotkey_from_seed(bytes(32))
    create_ledger(path, netuid=1, block_seconds=1, genesis_time=START, seed=1)
    ledger = Ledger(path, hotkey=hotkey, clock=clock, durable=False)
    ledger.register(hotkey.address, stake=1, validator_permit=True)
    return ledger


def test_an_endpoint_that_comes_and_goes(ledger, clock):
    view = UnreachableChain(ledger, since=START + 10, seconds=3, every=20)
    for second, is_up in ((9, True), (10, False), (12, False), (13, True), (29, True), (31, False)):
        clock.sleep_until(START + second)
        if is_up:
            assert view.block() == second
            continue
        for question in (view.block, view.head, view.metagraph, view.commitments, view.weights):
            refusal(question, TransientError, Reason.CHAIN_UNREACHABLE)


def test_an_endpoint_that_is_behind_learns_of_everything_later(ledger, clock):
    view = StaleChain(ledger, blocks=3)
    assert view.block() == view.head() == 0
    view.wait_for_block(7)
    assert clock.now() == START + 10
    assert (view.block(), view.head(), view.metagraph().block) == (7, 7, 7)


def test_a_head_that_goes_back_leaves_what_is_final_alone(ledger, clock):
    view = ReorganisingChain(ledger, depth=3)
    view.wait_for_block(10)
    assert [view.head() for _ in range(5)] == [13, 13, 11, 10, 13]
    assert [view.block() for _ in range(5)] == [10] * 5
    view.wait_for_block(12, finalized=False)
    assert clock.now() == START + 10


def test_an_endpoint_that_prunes_knows_old_blocks_but_not_who_was_registered(ledger, clock):
    view = PrunedChain(ledger, kept=5)
    view.wait_for_block(20)
    assert view.metagraph(15) == ledger.metagraph(15)
    assert (view.block_hash(3), view.block_time(3)) == (ledger.block_hash(3), ledger.block_time(3))
    with raising(PermanentError, Reason.BLOCK_UNKNOWN, "block 14 is pruned"):
        view.metagraph(14)


@given(st.integers(), st.sampled_from([1.0, 12.0]))
@settings(max_examples=25, deadline=None)
def test_a_difficult_chain_is_final_once_and_its_head_goes_back_by_three_blocks_at_most(seed, slot_seconds):
    schedule, again = (BlockSchedule(START, difficult_blocks(seed, slot_seconds)) for _ in range(2))
    final, head, newest = 0, 0, 0
    for step in range(1200):
        now = START + step * slot_seconds / 3
        final, before = schedule.finalized(now), final
        head = schedule.head(now)
        newest = max(newest, head)
        assert before <= final <= head
        assert head >= newest - 3
        assert schedule.shown(head, now) <= now < schedule.shown(head + 1, now)
        assert schedule.shown(final, now) == schedule.time(final), "what is final is never replaced"
        assert schedule.time(head + 1) - schedule.time(head) > 0
        assert schedule.next_change(head + 2, now) > now
    assert newest > 1200 / 3 / 2
    assert [again.time(number) for number in range(newest)] == [schedule.time(number) for number in range(newest)]


def test_a_ledger_with_a_schedule_waits_for_heads_and_for_final_blocks(ledger, clock):
    schedule = schedule_of(START, 1.0, [1.0, 1.0, 4.0], lag=2, replaced={3: [(3.0, -1.0)]})
    uneven = UnevenLedger(ledger._log.path, clock=clock, durable=False, schedule=schedule)
    uneven.wait_for_block(3, finalized=False)
    assert (clock.now(), uneven.head(), uneven.block()) == (START + 3, 3, 0)
    assert uneven.block_time(3, finalized=False) == START + 3
    for question in (uneven.block_hash, uneven.block_time):
        with raising(PermanentError, Reason.BLOCK_UNKNOWN, "block 3 is not there"):
            question(3)
    clock.sleep_until(START + 5)
    assert uneven.head() == 2, "the head went back"
    uneven.wait_for_block(3)
    assert (clock.now(), uneven.block(), uneven.block_time(3)) == (START + 8, 3, START + 6)
    assert uneven.block_hash(3) == ledger.block_hash(3)


def test_a_wrong_clock_is_wrong_by_the_same_all_the_time(ledger, clock):
    view = SkewedChain(ledger, 30)
    assert view.clock.now() == START + 30
    view.clock.sleep_until(START + 35)
    assert clock.now() == START + 5
    assert view.block() == 5
    assert view.clock.compute(lambda: 7) == 7
