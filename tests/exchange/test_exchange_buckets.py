import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.buckets import REFRESH_SECONDS, Buckets, OwnBucket
from templar.interrupt import StoppedError
from templar.store.address import ADDRESS_CHARACTERS, BucketAddress, decode_address, encode_address
from templar.store.base import ObjectStore
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import ScriptedStore
from tests.support.subnet import member

ALICE, BOB, CAROL = member(1), member(2), member(3)
BLOCK_SECONDS = 12.0


class CommitmentChain(Ledger):
    """A ledger whose commitments a test writes down. `fail` is raised by every read of them."""

    def __init__(self, folder: Path) -> None:
        path = folder / "ledger.sqlite"
        create_ledger(path, netuid=7, block_seconds=BLOCK_SECONDS, genesis_time=1000.0, seed=1)
        super().__init__(path, clock=SimulatedClock(1000.0), durable=False)
        self.table: dict[str, str] = {}
        self.reads = 0
        self.committed: list[str] = []
        self.fail: Exception | None = None

    def commitments(self) -> dict[str, str]:
        self.reads += 1
        if self.fail is not None:
            raise self.fail
        return dict(self.table)

    def set_commitment(self, data: str) -> None:
        self.committed.append(data)
        self.table[ALICE.hotkey.address] = data


def address(account: str, secret: str = "secret") -> BucketAddress:
    return BucketAddress(account, "key-id", secret)


def committed(account: str, secret: str = "secret") -> str:
    return encode_address(address(account, secret))


class Opened:
    """Opens a store in memory for every address and remembers them."""

    def __init__(self) -> None:
        self.stores: list[tuple[BucketAddress, ScriptedStore]] = []

    def __call__(self, wanted: BucketAddress) -> ObjectStore:
        store = ScriptedStore(MemoryStore(wanted.bucket))
        self.stores.append((wanted, store))
        return store


@pytest.fixture
def chain(tmp_path: Path) -> CommitmentChain:
    chain = CommitmentChain(tmp_path)
    chain.table[BOB.hotkey.address] = committed("bob")
    return chain


@pytest.fixture
def opened() -> Opened:
    return Opened()


@pytest.fixture
def buckets(chain: CommitmentChain, opened: Opened) -> Buckets:
    own = OwnBucket(address("alice"), MemoryStore("alice"))
    return Buckets(chain, opened, own=own, hotkey=ALICE.hotkey.address)


def rejection(call: Callable[[], object]) -> RejectedError:
    with pytest.raises(RejectedError) as caught:
        call()
    return caught.value


# Reading others.


def test_a_bucket_is_opened_once_from_its_commitment(buckets: Buckets, opened: Opened) -> None:
    store = buckets.reader(BOB.neuron)
    assert buckets.reader(BOB.neuron) is store
    assert [wanted for wanted, _ in opened.stores] == [address("bob")]


def test_who_committed_nothing_has_no_bucket(buckets: Buckets) -> None:
    error = rejection(lambda: buckets.reader(CAROL.neuron))
    assert error.reason is Reason.COMMITMENT_MISSING
    assert CAROL.hotkey.address in str(error)


@given(st.text(st.characters(codec="ascii"), min_size=ADDRESS_CHARACTERS, max_size=ADDRESS_CHARACTERS))
@settings(max_examples=50, deadline=None)
@example("x" * ADDRESS_CHARACTERS)
@example("X" * ADDRESS_CHARACTERS)
def test_a_commitment_is_a_bucket_or_malformed(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    chain, opened = CommitmentChain(tmp_path_factory.mktemp("chain")), Opened()
    chain.table[BOB.hotkey.address] = text
    try:
        Buckets(chain, opened).reader(BOB.neuron)
        outcome = encode_address(opened.stores[0][0])
    except RejectedError as error:
        outcome = error.reason
    assert outcome in (text, Reason.COMMITMENT_MALFORMED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 127,
        "../" + "x" * 125,
        committed("bob")[:-1] + "\n",
        committed("bob").replace("bob", "BOB"),
        committed("bob").replace("bob~", "b/b~"),
        "~" * 128,
        committed("bob") + "~",
    ],
)
def test_malformed_commitments_are_told_apart_from_missing_ones(
    buckets: Buckets, chain: CommitmentChain, opened: Opened, text: str
) -> None:
    chain.table[BOB.hotkey.address] = text
    assert rejection(lambda: buckets.reader(BOB.neuron)).reason is Reason.COMMITMENT_MALFORMED
    assert opened.stores == []


def test_a_secret_stays_out_of_messages(buckets: Buckets, chain: CommitmentChain) -> None:
    chain.table[BOB.hotkey.address] = committed("bob", "s3cr3t").replace("bob", "BOB")
    assert "s3cr3t" not in str(rejection(lambda: buckets.reader(BOB.neuron)))


def test_a_malformed_commitment_can_be_mended(buckets: Buckets, chain: CommitmentChain) -> None:
    chain.table[BOB.hotkey.address] = "X" * 128
    rejection(lambda: buckets.reader(BOB.neuron))
    chain.table[BOB.hotkey.address] = committed("bob")
    buckets.refresh()
    assert buckets.reader(BOB.neuron).name == "bob"


# When commitments are read again.


def test_commitments_are_read_again_when_they_are_old(buckets: Buckets, chain: CommitmentChain) -> None:
    buckets.reader(BOB.neuron)
    assert chain.reads == 1
    chain.clock.sleep_until(1000.0 + REFRESH_SECONDS - 0.001)
    buckets.reader(BOB.neuron)
    assert chain.reads == 1
    chain.clock.sleep_until(1000.0 + REFRESH_SECONDS)
    buckets.reader(BOB.neuron)
    buckets.reader(BOB.neuron)
    assert chain.reads == 2


def test_a_missing_commitment_is_looked_for_once_per_block(buckets: Buckets, chain: CommitmentChain) -> None:
    for _ in range(3):
        rejection(lambda: buckets.reader(CAROL.neuron))
    assert chain.reads == 1
    chain.table[CAROL.hotkey.address] = committed("carol")
    chain.clock.sleep_until(1000.0 + BLOCK_SECONDS - 0.001)
    rejection(lambda: buckets.reader(CAROL.neuron))
    assert chain.reads == 1
    chain.clock.sleep_until(1000.0 + BLOCK_SECONDS)
    assert buckets.reader(CAROL.neuron).name == "carol"
    assert chain.reads == 2


def test_a_changed_commitment_opens_the_new_bucket_and_closes_the_old(
    buckets: Buckets, chain: CommitmentChain, opened: Opened
) -> None:
    old = buckets.reader(BOB.neuron)
    chain.table[BOB.hotkey.address] = committed("bobs-other")
    assert buckets.reader(BOB.neuron) is old
    chain.clock.sleep_until(1000.0 + REFRESH_SECONDS)
    assert buckets.reader(BOB.neuron).name == "bobs-other"
    assert [store.closed for _, store in opened.stores] == [1, 0]


def test_a_rotated_key_opens_the_bucket_anew(buckets: Buckets, chain: CommitmentChain, opened: Opened) -> None:
    buckets.reader(BOB.neuron)
    chain.table[BOB.hotkey.address] = committed("bob", "rotated")
    buckets.refresh()
    buckets.reader(BOB.neuron)
    assert [wanted for wanted, _ in opened.stores] == [address("bob"), address("bob", "rotated")]
    assert [store.closed for _, store in opened.stores] == [1, 0]


def test_a_withdrawn_commitment_is_missing(buckets: Buckets, chain: CommitmentChain) -> None:
    buckets.reader(BOB.neuron)
    del chain.table[BOB.hotkey.address]
    buckets.refresh()
    assert rejection(lambda: buckets.reader(BOB.neuron)).reason is Reason.COMMITMENT_MISSING


def test_known_commitments_hold_while_the_chain_is_down(buckets: Buckets, chain: CommitmentChain) -> None:
    store = buckets.reader(BOB.neuron)
    chain.fail = TransientError(Reason.CHAIN_UNREACHABLE, "for a test")
    chain.clock.sleep_until(1000.0 + REFRESH_SECONDS)
    assert buckets.reader(BOB.neuron) is store
    assert buckets.reader(BOB.neuron) is store
    assert chain.reads == 2
    with pytest.raises(TransientError):
        buckets.reader(CAROL.neuron)
    chain.fail = None
    chain.table[BOB.hotkey.address] = committed("bobs-other")
    chain.clock.sleep_until(1000.0 + REFRESH_SECONDS + BLOCK_SECONDS)
    assert buckets.reader(BOB.neuron).name == "bobs-other"


def test_nothing_is_known_before_the_chain_was_reached(buckets: Buckets, chain: CommitmentChain) -> None:
    chain.fail = TransientError(Reason.CHAIN_UNREACHABLE, "for a test")
    with pytest.raises(TransientError):
        buckets.reader(BOB.neuron)
    chain.fail = None
    assert buckets.reader(BOB.neuron).name == "bob"


def test_a_stop_request_ends_the_waiting(buckets: Buckets, chain: CommitmentChain) -> None:
    chain.fail = StoppedError(Reason.STOPPED, "for a test")
    with pytest.raises(StoppedError):
        buckets.reader(BOB.neuron)


def test_many_threads_ask_the_chain_once(chain: CommitmentChain, opened: Opened) -> None:
    members = [member(10 + index) for index in range(8)]
    chain.table.update({each.hotkey.address: committed(each.account) for each in members})
    buckets, start = Buckets(chain, opened), threading.Barrier(8)

    def read(index: int) -> str:
        start.wait()
        return buckets.reader(members[index].neuron).name

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [each.account for each in members]
    assert chain.reads == 1
    assert len(opened.stores) == 8


def test_closing_gives_every_connection_back(buckets: Buckets, chain: CommitmentChain, opened: Opened) -> None:
    chain.table[CAROL.hotkey.address] = committed("carol")
    buckets.reader(BOB.neuron)
    buckets.reader(CAROL.neuron)
    buckets.close()
    assert [store.closed for _, store in opened.stores] == [1, 1]
    assert buckets.reader(BOB.neuron).name == "bob"


# The own bucket.


def test_the_own_bucket_needs_no_commitment(buckets: Buckets, chain: CommitmentChain, opened: Opened) -> None:
    assert buckets.reader(ALICE.neuron) is buckets.own
    assert chain.reads == 0
    assert opened.stores == []


def test_a_reader_has_no_bucket_of_its_own(chain: CommitmentChain, opened: Opened) -> None:
    buckets = Buckets(chain, opened)
    with pytest.raises(PermanentError) as caught:
        _ = buckets.own
    assert caught.value.reason is Reason.BAD_ENVIRONMENT
    assert buckets.announce() is False
    assert chain.committed == []
    assert buckets.reader(BOB.neuron).name == "bob"


def test_the_own_bucket_is_announced_once(buckets: Buckets, chain: CommitmentChain) -> None:
    assert buckets.announce() is True
    assert decode_address(chain.committed[0]) == address("alice")
    assert buckets.announce() is False
    assert len(chain.committed) == 1


def test_a_changed_address_is_announced_again(chain: CommitmentChain, opened: Opened) -> None:
    chain.table[ALICE.hotkey.address] = committed("alice", "old")
    own = OwnBucket(address("alice", "new"), MemoryStore("alice"))
    buckets = Buckets(chain, opened, own=own, hotkey=ALICE.hotkey.address)
    assert buckets.announce() is True
    assert decode_address(chain.table[ALICE.hotkey.address]) == address("alice", "new")
