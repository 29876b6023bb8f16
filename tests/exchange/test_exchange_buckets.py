import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.buckets import (
    ACTIVE_CHECK_SECONDS,
    ANNOUNCE_TRIES,
    RECOMMIT_BLOCKS,
    Buckets,
    OwnBucket,
    bucket_digest,
)
from templar.store.address import BucketAddress, decode_address, encode_address
from templar.store.base import ObjectStore
from templar.timeline import window_of
from tests.support.errors import error_of, raising, reason_of
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import ScriptedStore
from tests.support.subnet import RULES, Subnet, member

ALICE, BOB, CAROL = member(1), member(2), member(3)
BLOCK_SECONDS = 12.0


class CommitmentChain(Ledger):
    """A ledger whose commitments a test writes down. `fail` is raised by every read of them."""

    def __init__(self, folder):
        path = folder / "ledger.sqlite"
        create_ledger(path, netuid=7, block_seconds=BLOCK_SECONDS, genesis_time=1000.0, seed=1)
        super().__init__(path, clock=SimulatedClock(1000.0), durable=False)
        self.table: dict[str, str] = {}
        self.reads = 0
        self.committed: list[str] = []
        self.fail: Exception | None = None

    def commitments(self):
        self.reads += 1
        if self.fail is not None:
            raise self.fail
        return dict(self.table)

    def set_commitment(self, data):
        self.committed.append(data)
        self.table[ALICE.hotkey.address] = data


def address(account, secret="secret"):
    return BucketAddress(account, "key-id", secret)


def committed(account, secret="secret"):
    return encode_address(address(account, secret))


class Opened:
    """Opens a store in memory for every address and remembers them."""

    def __init__(self):
        self.stores: list[tuple[BucketAddress, ScriptedStore]] = []

    def __call__(self, wanted):
        store = ScriptedStore(MemoryStore(wanted.account_id))
        self.stores.append((wanted, store))
        return store


@pytest.fixture
def chain(tmp_path):
    chain = CommitmentChain(tmp_path)
    chain.table[BOB.hotkey.address] = committed("bob")
    return chain


@pytest.fixture
def opened():
    return Opened()


@pytest.fixture
def buckets(chain, opened):
    own = OwnBucket(address("alice"), MemoryStore("alice"))
    return Buckets(chain, opened, own=own, hotkey=ALICE.hotkey.address)


def later(chain, blocks):
    """Let time pass until so many blocks after the first."""
    chain.clock.sleep_until(1000.0 + blocks * BLOCK_SECONDS)


def seen(chain, who):
    """A member in a metagraph of now."""
    return replace(who.neuron, commitment=chain.table.get(who.hotkey.address))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, Reason.COMMITMENT_MISSING),
        ("", Reason.COMMITMENT_MALFORMED),
        ("X" * 128, Reason.COMMITMENT_MALFORMED),
        (committed("bob").replace("bob", "BOB"), Reason.COMMITMENT_MALFORMED),
        (committed("bob") + "~", Reason.COMMITMENT_MALFORMED),
    ],
)
def test_a_missing_and_a_malformed_commitment_name_no_bucket(buckets, chain, opened, text, reason):
    chain.table = {} if text is None else {BOB.hotkey.address: text}
    with raising(RejectedError, reason, BOB.hotkey.address):
        buckets.reader(seen(chain, BOB))
    assert bucket_digest(seen(chain, BOB)) is None
    assert opened.stores == []


def test_what_proves_itself_is_read_in_the_bucket_that_a_neuron_names_now(buckets, chain):
    """Words of a validator that came, or moved, in mid-window are found all the same."""
    pause = ACTIVE_CHECK_SECONDS / BLOCK_SECONDS
    before = seen(chain, CAROL)
    assert reason_of(lambda: buckets.newest_reader(before)) is Reason.COMMITMENT_MISSING
    for step, (text, named) in enumerate(
        [(committed("carol"), "carol"), (committed("moved"), "moved"), ("X" * 128, None)], start=1
    ):
        chain.table[CAROL.hotkey.address] = text
        later(chain, step * pause)
        if named is not None:
            assert buckets.newest_reader(before).name == named
    at_window = replace(before, commitment=committed("carol"))
    assert buckets.newest_reader(at_window).name == "carol", "a commitment that names nothing changes nothing"
    assert reason_of(lambda: buckets.reader(before)) is Reason.COMMITMENT_MISSING, "for all else there is none"
    chain.fail = TransientError(Reason.CHAIN_UNREACHABLE, "for a test")
    later(chain, 9 * pause)
    assert buckets.newest_reader(at_window).name == "carol"


# The account is that of the metagraph, for every reader.


def test_every_reader_of_a_window_reads_the_account_of_its_first_block(tmp_path):
    """An early, a late and a fresh reader read one bucket, though the author commits another one meanwhile."""
    subnet = Subnet(tmp_path)
    author, reader = subnet.validators[0], subnet.miners[0]
    early = subnet.exchange(reader)
    window, key = window_of(early.chain.block(), RULES) + 1, "key"
    subnet.store(author).put(key, b"shown")
    subnet.store(subnet.miners[1]).put(key, b"shown to others")

    def read(exchange, window=window):
        publisher = exchange.metagraph(window).by_hotkey(author.hotkey.address)
        return exchange.buckets.reader(publisher).get(key, max_bytes=20)

    assert read(early) == b"shown"
    subnet.ledger(author).set_commitment(encode_address(subnet.miners[1].address))
    early.buckets.refresh()
    late = subnet.exchange(subnet.miners[2])
    late.buckets.refresh()
    own = subnet.exchange(author)
    assert [read(each) for each in (early, late, subnet.exchange(), own)] == [b"shown"] * 4

    # The next window reads the other account, the author's own node included.
    assert [read(each, window + 1) for each in (early, late, own)] == [b"shown to others"] * 3
    assert [read(each) for each in (early, late, own)] == [b"shown"] * 3


def test_a_changed_account_is_another_bucket_and_the_oldest_is_closed(buckets, chain, opened):
    infos = []
    for name in ("bob", "second", "third"):
        chain.table[BOB.hotkey.address] = committed(name)
        infos.append(seen(chain, BOB))
    assert [buckets.reader(info).name for info in infos] == ["bob", "second", "third"]
    assert [store.closed for _, store in opened.stores] == [1, 0, 0]
    assert [buckets.reader(info).name for info in infos] == ["bob", "second", "third"]
    buckets.close()
    assert all(store.closed for _, store in opened.stores)


def test_many_threads_open_each_bucket_once(chain, opened):
    members = [member(10 + index) for index in range(2)]
    buckets, start = Buckets(chain, opened), threading.Barrier(8)

    def read(index):
        start.wait()
        return buckets.reader(members[index % 2].neuron).name

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [each.account for each in members] * 4
    assert len(opened.stores) == 2


def test_the_own_bucket_is_read_where_the_chain_names_it(buckets, chain, opened):
    assert reason_of(lambda: buckets.reader(seen(chain, ALICE))) is Reason.COMMITMENT_MISSING
    chain.table[ALICE.hotkey.address] = committed("alice", "an-older-secret")
    assert buckets.reader(seen(chain, ALICE)) is buckets.own
    assert opened.stores == []
    chain.table[ALICE.hotkey.address] = committed("alices-old")
    assert buckets.reader(seen(chain, ALICE)).name == "alices-old", "what everybody reads"


def test_a_reader_has_no_bucket_of_its_own(chain, opened):
    buckets = Buckets(chain, opened)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT):
        _ = buckets.own
    assert buckets.announce() is False
    assert chain.committed == []
    assert buckets.reader(seen(chain, BOB)).name == "bob"


def test_the_own_bucket_is_given_out_only_while_its_condition_holds(buckets, chain):
    store = buckets.own
    buckets.announce()

    def refuse():
        raise PermanentError(Reason.LEASE_LOST, "for a test")

    buckets.write_while(refuse)
    with pytest.raises(PermanentError):
        _ = buckets.own
    assert buckets.reader(seen(chain, ALICE)) is store, "reading it takes no permission"
    buckets.write_while(None)
    assert buckets.own is store


def test_the_own_bucket_is_announced_once_and_again_if_it_was_overwritten(buckets, chain):
    assert [buckets.announce(), buckets.announce(), buckets.keep_announced()] == [True, False, False]
    assert [decode_address(data) for data in chain.committed] == [address("alice")]
    chain.table[ALICE.hotkey.address] = committed("stranger")
    later(chain, RECOMMIT_BLOCKS)
    assert buckets.keep_announced() is True
    assert decode_address(chain.table[ALICE.hotkey.address]) == address("alice")
    assert len(chain.committed) == 2


def test_a_commitment_that_is_fought_over_is_made_now_and_then(buckets, chain):
    made = []
    for block in range(3 * RECOMMIT_BLOCKS):
        chain.table[ALICE.hotkey.address] = committed("stranger")
        later(chain, block)
        if buckets.keep_announced():
            made.append(block)
    assert len(made) == 3
    assert all(later - earlier >= RECOMMIT_BLOCKS for earlier, later in pairwise(made))
    assert chain.reads <= 3 * RECOMMIT_BLOCKS * BLOCK_SECONDS / ACTIVE_CHECK_SECONDS + 2 * len(made)


def test_a_chain_that_refuses_the_commitment_is_not_asked_at_every_window(buckets, chain, monkeypatch):
    refusals = []

    def refuse(data):
        refusals.append(data)
        raise TransientError(Reason.CHAIN_RATE_LIMITED, "for a test")

    monkeypatch.setattr(chain, "set_commitment", refuse)
    with pytest.raises(TransientError):
        buckets.keep_announced()
    for _ in range(3):
        assert buckets.keep_announced() is False
    assert len(refusals) == 1


@pytest.mark.parametrize("lands", [1, 3, None])
def test_an_announcement_of_unknown_fate_is_read_back_and_made_again(buckets, chain, monkeypatch, lands):
    commit, unknown = chain.set_commitment, TransientError(Reason.CHAIN_FATE_UNKNOWN, "for a test")
    sent = []

    def lose(data):
        sent.append(data)
        if len(sent) == lands:
            commit(data)
        raise unknown

    monkeypatch.setattr(chain, "set_commitment", lose)
    if lands is None:
        assert error_of(buckets.announce) is unknown
    else:
        assert buckets.announce() is True
    assert len(sent) == (lands or ANNOUNCE_TRIES)
    monkeypatch.undo()
    assert buckets.keep_announced() is (lands is None), "what did not land may be sent again at once"


# A key that is rotated.


class Rotating:
    """Bob's bucket behind keys of which only one opens it."""

    def __init__(self):
        self.memory = MemoryStore("bob")
        self.memory.put("key", b"bytes")
        self.valid = "secret"
        self.opened: list[str] = []

    def __call__(self, wanted):
        self.opened.append(wanted.secret_access_key)
        store = ScriptedStore(self.memory)

        def check(operation, key):
            del operation, key
            if wanted.secret_access_key != self.valid:
                raise PermanentError(Reason.ACCESS_DENIED, "for a test")

        store.before = check
        return store

    def rotate(self, chain, secret, *, committed_too=True):
        self.valid = secret
        if committed_too:
            chain.table[BOB.hotkey.address] = committed("bob", secret)


@pytest.fixture
def bob():
    return Rotating()


@pytest.fixture
def store(chain, bob):
    """Bob's bucket as another one reads it."""
    return Buckets(chain, bob).reader(seen(chain, BOB))


READS: list[Callable[[ObjectStore, Path], object]] = [
    lambda store, folder: store.get("key", max_bytes=10),
    lambda store, folder: store.get_range("key", 1, 2),
    lambda store, folder: store.read_into("key", 0, memoryview(bytearray(5))),
    lambda store, folder: store.get_file("key", folder / "file", max_bytes=10),
    lambda store, folder: store.head("key"),
    lambda store, folder: [info.key for info in store.list("k")],
]


@pytest.mark.parametrize("read", READS)
def test_a_read_survives_a_key_rotation(chain, bob, tmp_path, read):
    buckets, old = Buckets(chain, bob), seen(chain, BOB)
    store = buckets.reader(old)
    before = read(store, tmp_path)
    bob.rotate(chain, "rotated")
    later(chain, 1)
    assert read(store, tmp_path) == before
    for info in (old, seen(chain, BOB)):
        assert read(buckets.reader(info), tmp_path) == before
    assert (chain.reads, bob.opened) == (1, ["secret", "rotated"])


@pytest.mark.parametrize("text", [committed("bobs-other", "rotated"), "X" * 128, None])
def test_a_refused_bucket_is_not_exchanged_for_another_account(chain, bob, store, text):
    """Nor for a commitment that was broken or withdrawn."""
    bob.rotate(chain, "rotated", committed_too=False)
    later(chain, 1)
    chain.table = {} if text is None else {BOB.hotkey.address: text}
    with raising(PermanentError, Reason.ACCESS_DENIED):
        store.head("key")
    assert bob.opened == ["secret"]


def test_a_listing_without_end_is_a_failing_store(bob, store, monkeypatch):
    monkeypatch.setattr("templar.exchange.buckets.MAX_LISTED", 3)
    for number in range(2):
        bob.memory.put(f"key{number}", b"")
    assert len(list(store.list())) == 3
    bob.memory.put("one more", b"")
    with raising(TransientError, Reason.STORE_BUSY):
        list(store.list())


def test_a_bucket_that_refuses_for_good_is_looked_up_once_per_block(chain, bob, store):
    bob.rotate(chain, "rotated", committed_too=False)
    for block in range(1, 4):
        later(chain, block)
        for _ in range(5):
            with raising(PermanentError, Reason.ACCESS_DENIED):
                store.head("key")
        assert chain.reads == block
    bob.rotate(chain, "rotated")
    later(chain, 4)
    chain.fail = TransientError(Reason.CHAIN_UNREACHABLE, "for a test")
    with raising(PermanentError, Reason.ACCESS_DENIED):
        store.head("key")
    chain.fail = None
    assert store.head("key") is not None


def test_other_failures_do_not_ask_the_chain(chain, store):
    later(chain, 1)
    for call in (lambda: store.get("key", max_bytes=1), lambda: store.get("no-key", max_bytes=1)):
        with pytest.raises(PermanentError):
            call()
    assert chain.reads == 0
    assert store.name == "bob"
    store.put("other", b"1")
    assert store.put_if_absent("other", b"2") is False
    assert store.delete(["other"]).deleted == ("other",)
