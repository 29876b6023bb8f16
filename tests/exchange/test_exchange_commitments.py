"""Commitments that a node saw before the close."""

from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.commitments import GUARDS, LOOKS_PER_GUARD, Observed, observe_commitments
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal
from tests.support.scripted_store import failing
from tests.support.subnet import RULES, Subnet, commit_to, manifest_of, payload_bytes

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


@pytest.fixture
def subnet(tmp_path):
    return Subnet(tmp_path, num_miners=3)


@pytest.fixture
def exchange(subnet):
    """The network as its validator sees it."""
    return subnet.exchange(subnet.validators[0])


def key_of(miner):
    return window_key(Kind.COMMIT, WINDOW, miner.uid)


def commit(subnet, miner, *, seed=0):
    """Store a miner's commitment now; the digest that it names."""
    manifest = manifest_of(miner, WINDOW, payload_bytes(miner, WINDOW, seed=seed))
    subnet.store(miner).put(key_of(miner), seal(commit_to(manifest), miner.hotkey).encode())
    return manifest.digest


@pytest.fixture
def committed(subnet):
    for each in subnet.miners:
        commit(subnet, each)


def times(exchange):
    return exchange.expected_times(WINDOW)


def observe(exchange):
    return observe_commitments(exchange, WINDOW, concurrency=1)


def test_each_commitment_is_read_once_shortly_before_the_close(subnet, exchange):
    digests = {miner.hotkey.address: commit(subnet, miner) for miner in subnet.miners}
    before = {miner.uid: subnet.store(miner).count("get", key_of(miner)) for miner in subnet.miners}
    assert observe(exchange) == Observed(WINDOW, digests)
    assert subnet.clock.now() == times(exchange).close - GUARDS * RULES.commit_guard_seconds
    for miner in subnet.miners:
        assert subnet.store(miner).count("get", key_of(miner)) - before[miner.uid] == 1
        assert subnet.store(miner).count("head", key_of(miner)) == 0


def test_what_is_stored_after_the_close_was_not_seen(subnet, exchange):
    punctual, late, silent = subnet.miners
    digest = commit(subnet, punctual)
    seen: list[Observed] = []

    def reveal_late():
        subnet.clock.sleep_until(times(exchange).closed)
        commit(subnet, late)

    subnet.clock.run([lambda: seen.append(observe(exchange)), reveal_late])
    assert seen == [Observed(WINDOW, {punctual.hotkey.address: digest})]
    looks = subnet.store(silent).count("get", key_of(silent))
    assert 2 <= looks <= GUARDS * LOOKS_PER_GUARD + 2


def test_a_commitment_in_the_last_second_that_counts_is_seen(subnet, exchange):
    miner, seen = subnet.miners[0], []

    def commit_last():
        subnet.clock.sleep_until(times(exchange).commit_interval.last + 0.9)
        commit(subnet, miner)

    subnet.clock.run([lambda: seen.append(observe(exchange)), commit_last])
    assert set(seen[0].digests or {}) == {miner.hotkey.address}


@pytest.mark.parametrize("error", [BUSY, PermanentError(Reason.ACCESS_DENIED, "for a test")])
@pytest.mark.usefixtures("committed")
def test_a_store_that_fails_for_a_moment_is_asked_again_and_a_failing_one_stops_nobody(subnet, exchange, error):
    flaky, broken, honest = subnet.miners
    subnet.store(flaky).before = failing(error, "get", times=1)
    subnet.store(broken).before = failing(error, "get")
    assert set(observe(exchange).digests or {}) == {flaky.hotkey.address, honest.hotkey.address}


def test_a_bucket_that_hangs_is_not_asked_again_before_every_other_one(subnet, exchange):
    """One read after the other, each of which hangs for longer than the pause until its next look."""
    pause, reads = RULES.commit_guard_seconds / LOOKS_PER_GUARD, list[int]()

    def hang(operation, key, *, uid):
        if operation == "get":
            reads.append(uid)
            subnet.clock.sleep_until(subnet.clock.now() + pause + 0.1)
            raise BUSY

    for miner in subnet.miners:
        subnet.store(miner).before = partial(hang, uid=miner.uid)
    assert observe(exchange) == Observed(WINDOW, {})
    assert sorted(reads[: len(subnet.miners)]) == [miner.uid for miner in subnet.miners]


@pytest.mark.parametrize("data", [b"", b"{}", b"x" * 10_000])
def test_what_is_no_commitment_was_not_seen(subnet, exchange, data):
    for miner in subnet.miners:
        subnet.store(miner).put(key_of(miner), data)
    stolen = seal(commit_to(manifest_of(subnet.miners[1], WINDOW, b"")), subnet.miners[1].hotkey).encode()
    subnet.store(subnet.miners[0]).put(key_of(subnet.miners[0]), stolen)
    assert observe(exchange) == Observed(WINDOW, {})


@pytest.mark.usefixtures("committed")
def test_who_comes_after_the_close_has_not_looked(subnet, exchange):
    subnet.clock.sleep_until(times(exchange).closed)
    assert observe(exchange) == Observed(WINDOW, None)
    assert not any(subnet.store(miner).count("get", key_of(miner)) for miner in subnet.miners)


@pytest.mark.usefixtures("committed")
def test_what_is_read_after_the_close_by_the_clock_or_by_the_chain_does_not_count(exchange, monkeypatch, tmp_path):
    """By this machine's clock there is time left, and the chain shows the closing block; then the other way around."""
    monkeypatch.setattr(exchange.chain, "head", lambda: 10_000)
    assert observe(exchange) == Observed(WINDOW, None)

    subnet = Subnet(tmp_path / "other", num_miners=1)
    exchange, (miner,) = subnet.exchange(subnet.validators[0]), subnet.miners
    commit(subnet, miner)
    monkeypatch.setattr(exchange.chain, "head", lambda: 0)
    subnet.store(miner).after = lambda *call: subnet.clock.sleep_until(times(exchange).reveal_interval.first)
    assert observe(exchange) == Observed(WINDOW, None)


@pytest.mark.usefixtures("committed")
def test_who_could_not_look_at_every_bucket_has_not_looked(subnet, exchange, monkeypatch):
    """The chain shows the closing block too early: for a moment, and from the second read on."""
    head, wrong = exchange.chain.head, set[int]()
    calls = count()
    monkeypatch.setattr(exchange.chain, "head", lambda: 10_000 if next(calls) in wrong else head())
    wrong.add(2)
    assert len(observe(exchange).digests or {}) == len(subnet.miners)

    subnet.clock.sleep_until(exchange.expected_times(WINDOW).close - 1)
    calls = count()
    wrong.update(range(2, 10_000))
    assert observe(exchange) == Observed(WINDOW, None)


@pytest.mark.usefixtures("committed")
def test_a_chain_that_fails_for_a_moment_costs_a_look_and_one_that_is_down_all_of_them(subnet, exchange, monkeypatch):
    head, failures = exchange.chain.head, [1]

    def fail():
        if failures and failures.pop():
            raise TransientError(Reason.CHAIN_UNREACHABLE, "for a test")
        return head()

    monkeypatch.setattr(exchange.chain, "head", fail)
    assert len(observe(exchange).digests or {}) == len(subnet.miners)
    failures += [1] * 10_000
    assert observe(exchange) == Observed(WINDOW, None)
    assert subnet.clock.now() >= times(exchange).reveal_interval.first


@given(digests=st.none() | st.dictionaries(st.text(max_size=50), st.text("0123456789abcdef", max_size=64), max_size=5))
def test_an_observation_survives_the_journal(digests):
    assert Observed.from_json(Observed(WINDOW, digests).to_json()) == Observed(WINDOW, digests)
