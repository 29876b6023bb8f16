"""Hostile stores and chains keep the contract, except where they say otherwise."""

from pathlib import Path
from typing import Any

import pytest

from templar.adversary import faults
from templar.adversary.chains import ReorganisingChain, SkewedChain, StaleChain, UnreachableChain
from templar.chain.clock import SimulatedClock
from templar.chain.hotkey import hotkey_from_seed
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import PermanentError, Reason, TransientError
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore

START = 1_000_000.0
BODY = b"0123456789"


class Bucket:
    """A bucket with one object, and its clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = SimulatedClock(START)
        folder.mkdir()
        self.inner = DirectoryStore(folder, clock=self.clock.now)
        self.inner.put("gradient-1", BODY)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path / "bucket")


def calls(view: ObjectStore) -> list[Any]:
    """Every question that a reader asks."""
    return [
        lambda: view.head("gradient-1"),
        lambda: view.get("gradient-1", max_bytes=100),
        lambda: view.get_range("gradient-1", 0, 1),
        lambda: list(view.list()),
    ]


def test_a_failing_store_fails_every_call_from_its_time_on(bucket: Bucket) -> None:
    view = faults.FailingStore(bucket.inner, faults.FORBIDDEN, clock=bucket.clock, since=START + 10)
    assert view.get("gradient-1", max_bytes=100) == BODY
    bucket.clock.sleep_until(START + 10)
    for call in calls(view):
        with pytest.raises(PermanentError) as caught:
            call()
        assert caught.value.reason is Reason.ACCESS_DENIED


def test_bodies_that_end_early(bucket: Bucket) -> None:
    with pytest.raises(PermanentError) as caught:
        faults.TruncatingStore(bucket.inner).get("gradient-1", max_bytes=100)
    assert caught.value.reason is Reason.OBJECT_TRUNCATED
    assert faults.ShorteningStore(bucket.inner).get("gradient-1", max_bytes=100) == BODY[:5]
    assert faults.ShorteningStore(bucket.inner).head("gradient-1") == bucket.inner.head("gradient-1")


def test_wrong_bytes_have_the_right_length(bucket: Bucket) -> None:
    bucket.inner.put("manifest-1", BODY)
    view = faults.CorruptingStore(bucket.inner)
    shown = view.get("gradient-1", max_bytes=100)
    assert len(shown) == len(BODY)
    assert sum(one != other for one, other in zip(shown, BODY, strict=True)) == 1
    assert view.get("manifest-1", max_bytes=100) == BODY


def test_a_stale_store_shows_an_object_late(bucket: Bucket) -> None:
    view = faults.StaleStore(bucket.inner, clock=bucket.clock, seconds=5)
    assert view.head("gradient-1") is None
    assert list(view.list()) == []
    bucket.clock.sleep_until(START + 5)
    assert view.head("gradient-1") == bucket.inner.head("gradient-1")
    assert [info.key for info in view.list()] == ["gradient-1"]


def test_a_store_that_stamps_wrongly_does_so_everywhere(bucket: Bucket) -> None:
    view, true = faults.RestampingStore(bucket.inner, -30), bucket.inner.head("gradient-1")
    shown = view.head("gradient-1")
    assert true is not None
    assert shown is not None
    assert shown.last_modified == true.last_modified - 30
    assert list(view.list()) == [shown]


def test_a_slow_store_takes_its_time_and_may_give_no_answer(bucket: Bucket) -> None:
    view = faults.SlowStore(bucket.inner, clock=bucket.clock, seconds=2.5)
    assert view.get("gradient-1", max_bytes=100) == BODY
    assert bucket.clock.now() == START + 2.5
    gone = TransientError(Reason.STORE_UNREACHABLE, "no answer")
    with pytest.raises(TransientError, match="no answer"):
        faults.SlowStore(bucket.inner, clock=bucket.clock, seconds=1, then=gone).head("gradient-1")
    assert bucket.clock.now() == START + 3.5


# Chains.


class Chains:
    """A ledger with a second per block."""

    def __init__(self, folder: Path) -> None:
        self.clock = SimulatedClock(START)
        path, hotkey = folder / "ledger.sqlite", hotkey_from_seed(bytes(32))
        create_ledger(path, netuid=1, block_seconds=1, genesis_time=START, seed=1)
        self.ledger = Ledger(path, hotkey=hotkey, clock=self.clock, durable=False)
        self.ledger.register(hotkey.address, stake=1, validator_permit=True)


@pytest.fixture
def chains(tmp_path: Path) -> Chains:
    return Chains(tmp_path)


def test_an_endpoint_that_comes_and_goes(chains: Chains) -> None:
    view = UnreachableChain(chains.ledger, since=START + 10, seconds=3, every=20)
    for second, is_up in ((9, True), (10, False), (12, False), (13, True), (29, True), (31, False)):
        chains.clock.sleep_until(START + second)
        if is_up:
            assert view.block() == second
            continue
        for question in (view.block, view.head, view.metagraph, view.commitments, view.weights):
            with pytest.raises(TransientError) as caught:
                question()
            assert caught.value.reason is Reason.CHAIN_UNREACHABLE


def test_an_endpoint_that_is_behind_learns_of_everything_later(chains: Chains) -> None:
    view = StaleChain(chains.ledger, blocks=3)
    assert view.block() == view.head() == 0
    view.wait_for_block(7)
    assert chains.clock.now() == START + 10
    assert (view.block(), view.head(), view.metagraph().block) == (7, 7, 7)


def test_a_head_that_goes_back_leaves_what_is_final_alone(chains: Chains) -> None:
    view = ReorganisingChain(chains.ledger, depth=3)
    view.wait_for_block(10)
    assert [view.head() for _ in range(5)] == [13, 13, 11, 10, 13]
    assert [view.block() for _ in range(5)] == [10] * 5
    view.wait_for_block(12, finalized=False)
    assert chains.clock.now() == START + 10


def test_a_wrong_clock_is_wrong_by_the_same_all_the_time(chains: Chains) -> None:
    view = SkewedChain(chains.ledger, 30)
    assert view.clock.now() == START + 30
    view.clock.sleep_until(START + 35)
    assert chains.clock.now() == START + 5
    assert view.block() == 5
    assert view.clock.compute(lambda: 7) == 7
