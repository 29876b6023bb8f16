from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from templar.chain.clock import SimulatedClock
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.lease import LOOKS, Claimant, NeuronLease, Terms
from templar.exchange.object_keys import Kind, ObjectKey
from templar.exchange.objects import Heartbeat, Lease
from templar.exchange.signed import seal, unseal
from tests.support.errors import error_of
from tests.support.memory_store import MemoryStore
from tests.support.scripted_store import ScriptedStore, failing, once
from tests.support.subnet import NETUID, RULES, member

ALICE, BOB = member(5), member(6)
BIRTHDAY = 1_700_000_000.4
TERMS = Terms(expires_after=600, lapses_after=450, renewed_after=100)
HOLDERS = ("1" * 32, "2" * 32, "3" * 32)


class Bucket:
    """Alice's bucket on simulated time, and the processes that want to run her neuron."""

    def __init__(self):
        self.clock = SimulatedClock(BIRTHDAY)
        self.store = ScriptedStore(MemoryStore("alice", clock=self.clock.now))

    def lease(self, number=0, *, role="miner", owner=ALICE, netuid=NETUID):
        claimant = Claimant(netuid, owner.uid, owner.hotkey.address, role, HOLDERS[number], f"{number}" * 8)
        return NeuronLease(self.store, self.clock, owner.hotkey, claimant, TERMS)

    def passes(self, seconds):
        self.clock.sleep_until(self.clock.now() + seconds)

    def keys(self):
        return [info.key for info in self.store.inner.list()]


@pytest.fixture
def bucket():
    return Bucket()


@pytest.fixture
def held(bucket):
    """The lease of the first process, which has entered."""
    lease = bucket.lease()
    lease.enter()
    return lease


def keys_of(number, role="miner"):
    return [str(ObjectKey(kind, role=role, holder=HOLDERS[number])) for kind in (Kind.LEASE, Kind.HEARTBEAT)]


def refusal(call):
    error = error_of(call)
    assert isinstance(error, PermanentError)
    return error


def test_terms_follow_the_windows():
    assert Terms.of(RULES) == TERMS
    slow = RULES.model_copy(update={"blocks_per_window": 300, "block_seconds": 12.0})
    assert Terms.of(slow) == Terms(10800, 8100, 1800)


def test_the_first_has_it_at_once(bucket, held):
    held.hold()
    held.check()
    assert bucket.clock.now() == BIRTHDAY
    assert bucket.keys() == keys_of(0)
    body = unseal(bucket.store.get(keys_of(0)[0], max_bytes=Lease.max_bytes), Lease).body
    assert (body.hotkey, body.role, body.holder, body.machine) == (ALICE.hotkey.address, "miner", HOLDERS[0], "0" * 8)
    assert unseal(bucket.store.get(keys_of(0)[1], max_bytes=Heartbeat.max_bytes), Heartbeat).body.confirmed == 0


def test_the_lease_is_written_once_and_the_heartbeat_now_and_then(bucket, held):
    for _ in range(10):
        bucket.passes(TERMS.renewed_after / 4)
        held.hold()
        held.check()
    assert bucket.store.count("put_if_absent") == 1
    assert bucket.store.count("put", keys_of(0)[1]) == 1 + 2
    beat = unseal(bucket.store.get(keys_of(0)[1], max_bytes=Heartbeat.max_bytes), Heartbeat).body
    assert beat.confirmed == int(BIRTHDAY) + TERMS.renewed_after
    bucket.clock._now -= 1000.0
    held.hold()
    assert bucket.store.count("put", keys_of(0)[1]) == 4, "a clock that was set back renews"
    bucket.passes(100 * TERMS.expires_after)
    held.check()  # a sleeper without a rival continues
    held.hold()


def test_what_is_left_of_a_lease_until_a_rival_may_take_it(bucket):
    lease = bucket.lease()
    assert lease.seconds_left == 0, "it is not held yet"
    lease.enter()
    bucket.passes(30)
    assert lease.seconds_left == TERMS.expires_after - 30
    bucket.passes(TERMS.renewed_after)
    lease.hold()
    assert lease.seconds_left == TERMS.expires_after
    bucket.passes(2 * TERMS.expires_after)
    assert lease.seconds_left == 0


def test_a_lease_that_is_given_back_is_gone(bucket, held):
    held.release()
    assert held.seconds_left == 0
    assert bucket.keys() == []
    assert refusal(held.hold).reason is Reason.LEASE_LOST
    bucket.lease(1).enter()
    assert bucket.keys() == keys_of(1)


def test_a_refusal_names_the_holder_and_what_to_do(bucket):
    bucket.lease().enter()
    bucket.passes(30)
    error = refusal(bucket.lease(1).enter)
    assert error.reason is Reason.ALREADY_RUNNING
    assert str(error) == (
        f"[already_running] hotkey {ALICE.hotkey.address}, miner, alice: holder 111111111111 on machine 00000000 runs "
        "this neuron since 2023-11-14 22:13:20 UTC, last seen 30 s ago; this machine is 11111111. Stop the neuron "
        "there, then it can start here at once; if that machine is gone, start again in 571 s"
    )
    assert bucket.keys() == keys_of(0), "a refused one leaves nothing"
    bucket.passes(571)
    bucket.lease(1).enter()


def test_the_same_folder_enters_again_at_once(bucket, held):
    bucket.passes(TERMS.renewed_after)
    held.hold()
    bucket.store.before = once("list", "lease", lambda: plant(bucket, 1))
    again = bucket.lease()
    again.enter()
    again.hold()
    assert refusal(bucket.lease(1).enter).reason is Reason.ALREADY_RUNNING


def plant(bucket, number):
    """Write lease and heartbeat as a process does that then dies, or has not looked yet."""
    author: dict[str, Any] = {"netuid": NETUID, "genesis": "0" * 64, "uid": ALICE.uid, "hotkey": ALICE.hotkey.address}
    author |= {"role": "miner", "holder": HOLDERS[number]}
    bodies = Lease(**author, machine="9" * 8), Heartbeat(**author, confirmed=0)
    for key, body in zip(keys_of(number), bodies, strict=True):
        bucket.store.inner.put(key, seal(body, ALICE.hotkey).encode())


def test_a_candidate_that_died_before_it_looked_is_no_holder_afterwards(bucket):
    plant(bucket, 1)
    bucket.passes(1)
    plant(bucket, 2)
    assert refusal(bucket.lease(2).enter).reason is Reason.ALREADY_RUNNING
    assert bucket.keys() == keys_of(1)


def test_of_two_that_start_together_the_earlier_one_wins(bucket):
    first, second, refusals = bucket.lease(0), bucket.lease(1), []
    other = lambda: refusals.append(refusal(second.enter))  # noqa: E731 - once
    bucket.store.before = once("list", "lease", other)
    first.enter()
    assert [error.reason for error in refusals] == [Reason.ALREADY_RUNNING]
    assert bucket.keys() == keys_of(0)


def test_a_later_rival_that_stays_keeps_a_newcomer_out(bucket):
    bucket.store.before = once("list", "lease", lambda: plant(bucket, 2))
    assert refusal(bucket.lease(0).enter).reason is Reason.ALREADY_RUNNING
    assert bucket.store.count("list") == 1 + LOOKS
    assert bucket.keys() == keys_of(2)


def test_a_replaced_sleeper_notices(bucket, held):
    successor = bucket.lease(1)
    bucket.passes(TERMS.expires_after + 1)
    successor.enter()
    assert bucket.keys() == keys_of(1), "what a dead holder left is deleted"
    for call in (held.check, held.hold):
        error = refusal(call)
        assert error.reason is Reason.LEASE_LOST
        assert "nothing more is published from here" in str(error)
    successor.hold()
    assert refusal(held.enter).reason is Reason.ALREADY_RUNNING


@pytest.mark.parametrize("survives", ["head", "delete"])
def test_a_replaced_sleeper_whose_lease_still_exists_notices(bucket, held, survives):
    successor = bucket.lease(1)
    bucket.passes(TERMS.expires_after + 1)
    busy = TransientError(Reason.STORE_BUSY, "for a test")
    bucket.store.before = failing(busy, "delete") if survives == "delete" else failing(busy, "head", key=keys_of(0)[0])
    successor.enter()
    bucket.store.before = lambda operation, key: None
    assert bucket.keys() == sorted(keys_of(0) + keys_of(1))
    assert "holder 222222222222" in str(refusal(held.hold))
    assert bucket.keys() == keys_of(1)
    bucket.passes(TERMS.renewed_after)
    successor.hold()


def test_a_late_renewal_is_no_takeover(bucket, held):
    """Silent for longer than is good, but nobody could take it for dead: a newcomer still gives way."""
    bucket.passes(TERMS.lapses_after)
    plant(bucket, 1)
    held.hold()
    bucket.passes(TERMS.lapses_after + 1)
    assert refusal(held.hold).reason is Reason.LEASE_LOST, "now it cannot know"


def test_other_roles_hotkeys_and_subnets_do_not_count(bucket):
    for number, changes in enumerate(({"role": "validator"}, {"owner": BOB}, {"netuid": NETUID + 1})):
        bucket.lease(number, **changes).enter()
    bucket.lease(0).enter()
    assert len(bucket.keys()) == 2 * 4
    bucket.passes(TERMS.expires_after + 1)
    bucket.lease(0).enter()
    assert len(bucket.keys()) == 8, "they are not this neuron's to delete"


def test_garbage_does_not_count(bucket):
    for key, data in zip(keys_of(1), (b"{}", b"x" * 5000), strict=True):
        bucket.store.put(key, data)
    bucket.lease(0).enter()
    assert bucket.keys() == sorted(keys_of(0) + keys_of(1))


def test_a_failing_store_forbids_writes_after_a_while(bucket, held):
    bucket.store.before = failing(TransientError(Reason.STORE_UNREACHABLE, "for a test"))
    held.check()
    held.hold()
    bucket.passes(TERMS.renewed_after)
    held.check()
    held.hold()  # nobody can have taken it for dead yet
    bucket.passes(TERMS.expires_after // 2)
    held.check()
    with pytest.raises(TransientError):
        held.hold()
    bucket.store.before = lambda operation, key: None
    held.hold()


@pytest.mark.parametrize("operation", ["head", "put", "put_if_absent", "list"])
@pytest.mark.parametrize("answered", [False, True])
def test_a_start_that_failed_leaves_nothing_and_can_be_repeated(bucket, operation, answered):
    hook = failing(TransientError(Reason.STORE_BUSY, "for a test"), operation, times=1)
    if answered:
        bucket.store.after = hook
    else:
        bucket.store.before = hook
    lease = bucket.lease()
    with pytest.raises(TransientError):
        lease.enter()
    assert bucket.keys() == []
    lease.enter()
    lease.hold()


# Interleavings: in every order of their requests, no two processes hold the lease at once.


def claimant(number):
    return Claimant(NETUID, 5, ALICE.hotkey.address, "miner", HOLDERS[number], "0" * 8)


class Crashed(BaseException):
    """The process is gone."""


class World:
    """The store, its time, and who held the lease when."""

    def __init__(self, *, ignores_conditions):
        self.clock = SimulatedClock(1_000_000.0)
        self.memory = MemoryStore("alice", clock=self.clock.now)
        self.ignores_conditions = ignores_conditions
        self.last: tuple[int, int] | None = None
        self.last_time = 0.0
        self.ended: set[tuple[int, int]] = set()  # what its actor knows to be over
        self.replaced: set[tuple[int, int]] = set()  # what another one has taken over
        self.violations: list[str] = []

    def holds(self, name):
        """An actor was told that it may act for the neuron."""
        now = self.clock.now()
        if self.last not in (None, name) and self.last not in self.ended:
            # One that was replaced may only come back when its successor no longer assumes that it holds the lease.
            least = TERMS.lapses_after if name in self.replaced else TERMS.expires_after - TERMS.lapses_after
            if now - self.last_time < least:
                self.violations.append(f"{name} holds it {now - self.last_time} s after {self.last}")
            self.replaced.add(self.last)
        self.last, self.last_time = name, now


class Actor:
    """A process that wants the neuron: it acts in turns, and each of its requests comes late, fails or is the last."""

    def __init__(self, world, number, plan):
        self.world, self.number, self.plan = world, number, plan
        self.lease: NeuronLease | None = None
        self.entered, self.acquisitions = False, 0
        self.began, self.requests, self.is_lost = 0.0, iter(()), False

    def now(self):
        return self.world.clock.now() + 10_000.0 * self.number  # local clocks decide nothing

    def sleep_until(self, timestamp):
        self.world.clock.sleep_until(timestamp - 10_000.0 * self.number)

    def before(self, operation, key):
        pause, fate = next(self.requests, (0, "done"))
        # Nobody stands still for longer than is assumed in the middle of looking and writing.
        latest = self.began + TERMS.expires_after - TERMS.lapses_after - 1
        self.world.clock.sleep_until(min(self.world.clock.now() + pause, latest))
        self.is_lost = fate == "lost"
        if fate == "crash":
            raise Crashed
        if fate == "fail":
            raise TransientError(Reason.STORE_BUSY, "for a test")

    def after(self, operation, key):
        if self.is_lost:
            raise TransientError(Reason.STORE_UNREACHABLE, "for a test")

    def live(self):
        for wait, action, requests in self.plan:
            self.world.clock.sleep_until(self.world.clock.now() + wait)
            self.began, self.requests = self.world.clock.now(), iter(requests)
            try:
                self.act(action)
            except TransientError:
                pass
            except (PermanentError, Crashed) as error:
                self.entered = False
                self.world.ended.add((self.number, self.acquisitions))
                self.lease = None if isinstance(error, Crashed) else self.lease

    def act(self, action):
        if self.lease is None:
            store = ScriptedStore(self.world.memory)
            store.before, store.after = self.before, self.after
            store.ignores_conditions = self.world.ignores_conditions
            self.lease = NeuronLease(store, self, ALICE.hotkey, claimant(self.number), TERMS)
        if self.entered and action == "release":
            self.entered = False
            self.world.ended.add((self.number, self.acquisitions))
            self.lease.release()
            return
        if self.entered:
            self.lease.check()
            self.lease.hold()
        else:
            self.lease.enter()
            self.entered = True
            self.acquisitions += 1
        self.world.holds((self.number, self.acquisitions))


requests = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0.25, 1, 7, 148]), st.sampled_from(["done"] * 12 + ["fail"] * 2 + ["lost", "crash"])
    ),
    max_size=12,
)
turns = st.lists(
    st.tuples(
        st.sampled_from([0, 0.5, 1, 50, 101, 449, 451, 599, 601, 2000]),
        st.sampled_from(["act"] * 9 + ["release"]),
        requests,
    ),
    max_size=8,
)


@given(st.tuples(*[turns] * len(HOLDERS)), st.booleans())
@settings(max_examples=100)
@example(
    plans=([(0, "act", []), (601, "act", [(0, "done"), (148, "done")])], [(602, "act", [(0.25, "done")] * 8)], []),
    ignores_conditions=False,
)  # a holder that slept renews while another one takes over
def test_no_two_hold_it_at_once(plans, ignores_conditions):
    world = World(ignores_conditions=ignores_conditions)
    world.clock.run([Actor(world, number, plan).live for number, plan in enumerate(plans)])
    assert not world.violations
    world.clock.sleep_until(world.clock.now() + TERMS.expires_after + 1)
    NeuronLease(world.memory, SimulatedClock(0.0), ALICE.hotkey, claimant(0), TERMS).enter()
    assert len(list(world.memory.list())) == 2, "and what the others left is gone"
