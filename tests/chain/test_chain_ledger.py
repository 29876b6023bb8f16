import hashlib
import math
import sqlite3
import time
from collections import ChainMap
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.hotkeys import hotkey_from_seed
from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger, create_ledger
from templar.chain.ledger_state import LedgerParameters
from templar.errors import PermanentError, Reason, TransientError
from tests.chain.conftest import START
from tests.support.errors import refusal
from tests.support.kill_points import WRITER_SEED, run_and_kill

KEYS = [hotkey_from_seed(number.to_bytes(32)) for number in range(8)]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "chain" / "ledger.db"
    create_ledger(path, netuid=3, block_seconds=2.0, genesis_time=START, seed=1)
    return path


# Blocks.


@given(
    genesis_milliseconds=st.integers(0, 4 * 10**12),
    block_milliseconds=st.sampled_from([1, 50, 250, 1000, 1100, 12000]),
    number=st.integers(0, 10**7),
)
@settings(max_examples=60)
@example(2179787079061, 100, 8362450)  # the division alone would find the block too late
@example(1614677933528, 12000, 704719)  # and here too early
def test_a_block_exists_from_its_very_instant_on(genesis_milliseconds, block_milliseconds, number):
    parameters = LedgerParameters(1, block_milliseconds, genesis_milliseconds, 0)
    instant = parameters.time(number)
    assert parameters.newest(instant) == number
    assert parameters.newest(math.nextafter(instant, -math.inf)) == number - 1
    assert round(instant * 1000) == genesis_milliseconds + number * block_milliseconds


def test_hashes_are_a_pure_function_of_the_ledger_and_the_number():
    parameters = LedgerParameters(3, 1000, 0, 1)
    assert parameters.hash(5) == "0x" + hashlib.sha256(b"templar.ledger.block:3:1:5").hexdigest()


def test_before_genesis_there_is_no_block(path, tmp_path):
    clock = SimulatedClock(START - 100)
    ledger = Ledger(path, clock=clock, hotkey=KEYS[0])
    for read in (ledger.block, ledger.head, ledger.metagraph, ledger.commitments, ledger.weights):
        refusal(read, TransientError, Reason.BLOCK_UNKNOWN, "100.000 s")
    refusal(lambda: ledger.block_time(0), PermanentError, Reason.BLOCK_UNKNOWN)
    ledger.register(KEYS[0].address, stake=2.0)
    ledger.set_commitment("x" * 128)
    assert clock.now() == START - 100  # setting up a network does not wait for genesis
    ledger.wait_for_block(0)
    assert clock.now() == START
    assert ledger.metagraph(0).by_hotkey(KEYS[0].address).stake == 2.0
    assert ledger.commitments() == {KEYS[0].address: "x" * 128}


def test_a_clock_that_is_set_back_takes_no_block_away(path, clock):
    ledger = Ledger(path, clock=clock)
    clock.sleep_until(START + 20)
    assert ledger.block() == 10
    clock._now = START + 4
    assert ledger.block() == 10
    assert ledger.block_time(10) == START + 20


# Changes and the blocks that they belong to.


def test_changes_belong_to_genesis_until_it_is_read_and_then_to_the_next_block(path, clock):
    ledger, other = Ledger(path, clock=clock), Ledger(path, clock=clock)
    assert [ledger.register(key.address) for key in KEYS[:3]] == [0, 1, 2]
    assert clock.now() == START
    assert [neuron.uid for neuron in ledger.metagraph(0).neurons] == [0, 1, 2]
    ledger.register(KEYS[3].address)
    assert ledger.block() == 1
    assert len(ledger.metagraph(0).neurons) == 3
    clock.sleep_until(START + 7)  # block 3
    ledger.register(KEYS[4].address)
    assert clock.now() == START + 8
    assert ledger.block() == 4
    assert [len(other.metagraph(number).neurons) for number in (3, 4)] == [4, 5]


def test_a_block_that_was_read_takes_no_change(path, clock):
    ahead, behind = Ledger(path, clock=SimulatedClock(START + 20)), Ledger(path, clock=SimulatedClock(START + 10))
    seen = ahead.metagraph()  # block 10, by a clock that is ahead
    behind.register(KEYS[0].address)
    assert behind.block() == 11
    assert Ledger(path, clock=behind.clock).metagraph(10) == seen
    assert seen.neurons == ()
    assert len(behind.metagraph(11).neurons) == 1


def test_double_registrations_and_illegal_stakes_are_refused(path, clock):
    ledger = Ledger(path, clock=clock)
    ledger.register(KEYS[0].address)
    refusal(lambda: ledger.register(KEYS[0].address), PermanentError, Reason.CHAIN_REFUSED, "registered already")
    for stake in (-1.0, math.nan, math.inf):
        refusal(lambda stake=stake: ledger.register(KEYS[1].address, stake=stake), PermanentError, Reason.CHAIN_REFUSED)
        refusal(lambda stake=stake: ledger.set_stake(KEYS[0].address, stake), PermanentError, Reason.CHAIN_REFUSED)
    for call in (lambda: ledger.deregister(KEYS[1].address), lambda: ledger.set_stake(KEYS[1].address, 1.0)):
        refusal(call, PermanentError, Reason.CHAIN_REFUSED, KEYS[1].address, "not registered")
    assert [neuron.hotkey for neuron in ledger.metagraph().neurons] == [KEYS[0].address]


# Weights and incentive.


def subnet(path, clock, stakes):
    """Validators with these stakes as uids 0, 1, ..., then four miners."""
    ledgers = [Ledger(path, hotkey=key, clock=clock, durable=False) for key in KEYS]
    for key, stake in zip(KEYS, stakes, strict=False):
        ledgers[0].register(key.address, stake=stake, validator_permit=True)
    for key in KEYS[len(stakes) : len(stakes) + 4]:
        ledgers[0].register(key.address)
    return ledgers


def incentives(ledger):
    return {neuron.uid: neuron.incentive for neuron in ledger.metagraph().neurons if neuron.incentive}


def test_incentive_is_the_stake_weighted_mean_of_the_weights(path, clock):
    one, other, *_ = subnet(path, clock, [100.0, 300.0])
    one.set_weights({2: 1.0})
    assert incentives(one) == {2: 1.0}
    other.set_weights({2: 1.0, 3: 1.0})
    assert incentives(one) == pytest.approx({2: 0.25 + 0.375, 3: 0.375})
    one.set_weights({4: 3.0, 5: 1.0})
    assert incentives(other) == pytest.approx({2: 0.375, 3: 0.375, 4: 0.25 * 0.75, 5: 0.25 * 0.25}, abs=1e-4)
    one.set_stake(KEYS[1].address, 0.0)
    assert incentives(one) == pytest.approx({4: 0.75, 5: 0.25}, abs=1e-4)
    one.deregister(KEYS[0].address)
    assert incentives(other) == {}  # nobody with stake has weights
    assert list(other.weights()) == [1]


def test_a_weight_is_for_the_miner_not_for_the_next_one_with_its_uid(path, clock):
    ledger, *_ = subnet(path, clock, [100.0])
    ledger.set_weights({1: 1.0, 2: 1.0})
    ledger.deregister(KEYS[1].address)
    assert incentives(ledger) == {2: 1.0}
    assert ledger.register(KEYS[6].address) == 1
    assert incentives(ledger) == {2: 1.0}
    ledger.set_weights({1: 1.0, 2: 1.0})
    assert incentives(ledger) == {1: 0.5, 2: 0.5}


# The file.


def test_a_ledger_is_created_once_and_whole(path, tmp_path):
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    before = path.read_bytes()
    again = {"netuid": 9, "block_seconds": 1.0, "genesis_time": 0.0, "seed": 0}
    refusal(lambda: create_ledger(path, **again), PermanentError, Reason.BAD_STATE_FILE, path, "exists already")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    refusal(lambda: create_ledger(path / "x", **again), PermanentError, Reason.BAD_STATE_FILE, "cannot be created")
    gone = tmp_path / "gone.db"
    refusal(lambda: Ledger(gone), PermanentError, Reason.CHAIN_UNREACHABLE, gone, "start the local network")
    for change in ({"block_seconds": 0.0001}, {"netuid": -1}):
        with pytest.raises(ValueError, match=next(iter(change))):
            create_ledger(gone, **(again | change))
    assert not gone.exists()


def test_a_file_that_is_no_ledger_of_this_version_is_named(path):
    def run(statement):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)

    for spoil in (
        lambda: run("PRAGMA user_version = 99"),
        lambda: path.unlink() or run("CREATE TABLE changes (id INTEGER)"),
        lambda: path.write_bytes(b"no database" * 100),
        lambda: path.write_bytes(b""),
    ):
        spoil()
        refusal(lambda: Ledger(path), PermanentError, Reason.BAD_STATE_FILE, path, "remove it")


def test_a_refused_change_leaves_nothing_behind(path, clock):
    ledger = Ledger(path, hotkey=KEYS[0], clock=clock)
    ledger.register(KEYS[0].address)
    for _ in range(3):
        refusal(lambda: ledger.set_weights({0: 1.0}), PermanentError, Reason.CHAIN_REFUSED)
    ledger.set_commitment("a" * 128)  # the write lock was given back
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT id, kind FROM changes").fetchall() == [(1, "register"), (2, "commit")]
    connection.close()


def test_a_ledger_works_again_after_it_was_closed(path, clock):
    ledger = Ledger(path, clock=clock)
    ledger.register(KEYS[0].address)
    ledger.close()
    ledger.register(KEYS[1].address)
    assert len(ledger.metagraph().neurons) == 2
    ledger.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # the last one tidies up


# Several processes.


@pytest.fixture
def quick(tmp_path):
    """A ledger on real time, with blocks of 10 ms."""
    path = tmp_path / "ledger.db"
    create_ledger(path, netuid=3, block_seconds=0.01, genesis_time=time.time(), seed=1)
    return path


def check_file(path):
    """The file is sound, ids have no gaps and blocks never fall."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = connection.execute("SELECT id, block FROM changes ORDER BY id").fetchall()
    connection.close()
    assert [id_ for id_, _ in rows] == list(range(1, len(rows) + 1))
    assert [block for _, block in rows] == sorted(block for _, block in rows)
    return len(rows)


def write(path, first):
    """Register two hotkeys, and commit under each of them in turn; uid by address."""
    keys = [hotkey_from_seed(number.to_bytes(32)) for number in (first, first + 1)]
    ledgers = {key.address: Ledger(path, hotkey=key) for key in keys}
    uids = {address: ledger.register(address) for address, ledger in ledgers.items()}
    for number in range(8):
        for ledger in ledgers.values():
            ledger.set_commitment(f"{number}".ljust(128, "."))
    return uids


def test_processes_write_at_once(quick):
    with ProcessPoolExecutor(3) as pool:
        registered = dict(ChainMap(*pool.map(partial(write, quick), (10, 20, 30))))
    assert sorted(registered.values()) == list(range(6))
    assert check_file(quick) == 6 + 3 * 2 * 8
    ledger = Ledger(quick)
    assert {neuron.hotkey: neuron.uid for neuron in ledger.metagraph().neurons} == registered
    assert ledger.commitments() == dict.fromkeys(registered, "7".ljust(128, "."))


def test_a_killed_writer_leaves_the_ledger_sound(quick):
    writer = hotkey_from_seed(WRITER_SEED)
    for after in (4, 5):
        last = run_and_kill("ledger", quick, after=after)
        check_file(quick)
        # What was acknowledged is there; the one that was cut off may be, whole, or may not.
        assert int(Ledger(quick).commitments()[writer.address].rstrip(".")) in (last, last + 1)
    Ledger(quick, hotkey=writer).set_commitment("a" * 128)
