"""Slots and ballots of a small network: what validators vote for, and what everybody who reads their words applies."""

import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from lab.adversary.chains import SkewedChain, UnreachableChain
from templar.agreement.ballot_box import READ_SECONDS, BallotBox, find_roster, read_ballots
from templar.agreement.roster import draft_roster, publish_copy, publish_roster
from templar.agreement.roster_judge import Judge
from templar.agreement.voter import LOOK_SECONDS, Voter, await_decision, settled
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import NULL_WINDOW
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.signed import check_signature
from templar.interrupt import StoppedError
from tests.support.errors import raising
from tests.support.scripted_store import ScriptedStore, failing
from tests.support.subnet import LAYOUT, RULES, Subnet, fields_of, gathered, signed_anyhow

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
DENIED = PermanentError(Reason.ACCESS_DENIED, "for a test")
STAKES = (40.0, 35.0, 25.0)
"""Any two of the three validators are a quorum, and all three may publish."""


def no_roster(rank, slot):
    """Nothing is published."""


def no_check(roster):
    """Everything is legal."""


class Scene:
    """A window that has closed, and everybody who takes part in the ballots on it, or only reads them."""

    def __init__(self, folder, stakes=STAKES):
        self.subnet, self.folder = Subnet(folder, stakes=stakes, num_miners=3), folder
        self.clock, self.times = self.subnet.clock, self.subnet.times(WINDOW)
        self.late = self.times.settle_until + 60
        self.kept = {}  # uid -> the words that its validator stored
        self.found = {}  # uid -> how it settled the window
        self.caches = 0

    def again(self):
        """The same, in which nothing has happened."""
        folder = self.folder / "again"
        folder.mkdir()
        return Scene(folder)

    def validator(self, rank):
        return self.subnet.validators[rank]

    def store(self, rank):
        return self.subnet.store(self.validator(rank))

    def exchange(self, rank, views=None):
        return self.subnet.exchange(self.validator(rank), views)

    def key(self, rank, kind=Kind.ROSTER):
        return window_key(kind, WINDOW, self.validator(rank).uid)

    def put(self, rank, roster):
        """Store a roster, or bytes, now, as its publisher may sign it."""
        self.subnet.put(self.validator(rank), self.key(rank), roster)

    def cache(self):
        self.caches += 1
        return PayloadCache(self.folder / f"payloads-{self.caches}", LAYOUT)

    def publish(self, author, miners, rank, slot):
        """Publish a roster of these miners, all by default, with all that belongs to it."""
        cache, exchange = self.cache(), self.subnet.exchange(author)
        submissions = gathered(cache, self.subnet.miners if miners is None else miners, WINDOW)
        options = {"previous": None, "peer_list": None, "cache": cache, "durable": False}
        draft = draft_roster(exchange, WINDOW, submissions, spool=self.folder / f"spool-{author.uid}", **options)
        publish_roster(exchange, draft, slot)
        return draft.roster

    def published(self):
        """The first rank's roster and aggregate, which it has published."""
        roster = self.publish(self.validator(0), None, 0, self.times.roster_slot(0))
        return roster, self.store(0).inner.get(aggregate_key(WINDOW), max_bytes=10_000)

    def publishing(self, author, miners=None):
        """What makes a validator publish its roster in its ballot."""
        return lambda rank, slot: self.publish(author, miners, rank, slot) and None

    def keep(self, uid, text):
        self.kept[uid] = text

    def settle(
        self, member, publish=no_roster, *, exchange=None, views=None, check=no_check, deadline=None, is_whole=None
    ):
        """Take part if the member is a validator, else only read; from the close on with `is_whole`.

        Raises:
            TransientError: `decision_missing`.
        """
        exchange = exchange or self.subnet.exchange(member, views)
        ballots, judge = BallotBox(exchange, WINDOW), Judge(exchange, self.times, self.cache(), check)
        voter, awaits = None, {} if is_whole is None else {"is_whole": lambda: is_whole}
        if member.permit:
            kept, keep = self.kept.get(member.uid), partial(self.keep, member.uid)
            voter = Voter(ballots, judge, publish_own=publish, kept=kept, keep=keep, **awaits)
        exchange.chain.clock.sleep_until((self.times.settles if is_whole is None else self.times.close) + 1)
        await_decision(ballots, self.times, voter, deadline=deadline or self.times.settle_until)
        if voter is not None:
            voter.show(at_once=True)
        return settled(judge, ballots)

    def live(self, member, publish=no_roster, **how):
        """A participant that settles the window."""

        def act():
            self.found[member.uid] = self.settle(member, publish, **{"deadline": self.late} | how)

        return act

    def ranks(self, *publishing, silent=(), **how):
        """All validators but the silent ones; some of them publish a roster in their ballots."""
        return [
            self.live(member, self.publishing(member) if rank in publishing else no_roster, **how)
            for rank, member in enumerate(self.subnet.validators)
            if rank not in silent
        ]

    def run(self, *participants, **how):
        """Let them act at once, with a reader; what all of them found."""
        reader = self.subnet.miners[0]
        self.clock.run([*participants, self.live(reader, **how)])
        assert len({(each.digest, each.window) for each in self.found.values()}) == 1
        return self.found[reader.uid]

    def at(self, moment, act):
        def later():
            self.clock.sleep_until(moment)
            act()

        return later


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def publisher_of(settlement):
    """The rank of the publisher: the first rank has uid 1."""
    return settlement.roster.uid - 1


def passed_over(settlement):
    return [(each.uid, each.reason) for each in settlement.passed_over]


@pytest.mark.parametrize(("publishing", "silent", "rank"), [((0, 1, 2), (), 0), ((1, 2), (), 1), ((1, 2), (0,), 1)])
def test_the_next_rank_takes_over_when_the_slot_of_a_silent_one_has_ended(scene, publishing, silent, rank):
    found = scene.run(*scene.ranks(*publishing, silent=silent))
    assert (publisher_of(found), len(found.uids)) == (rank, 3)
    assert passed_over(found) == [(1, Reason.ROSTER_MISSING)][:rank]
    assert scene.clock.now() <= scene.times.roster_slot(rank).last + rank, "the second word costs less than a slot"
    assert not [later for later in range(rank + 1, 3) if scene.store(later).inner.head(scene.key(later))]


def test_without_any_roster_the_window_is_null_soon_after_the_last_slot(scene):
    found = scene.run(*scene.ranks())
    assert (found.roster, len(found.passed_over)) == (None, 3)
    assert scene.times.null_after < scene.clock.now() <= scene.times.null_after + 1.5 * RULES.roster_slot_seconds


def test_an_empty_roster_is_decided_as_a_null_window_at_once(scene):
    first = scene.live(scene.validator(0), scene.publishing(scene.validator(0), ()))
    found = scene.run(first, *scene.ranks(silent=(0,)))
    assert found.roster is None
    assert found.sealed is not None
    assert scene.clock.now() <= scene.times.roster_slot(0).last
    assert read_ballots(scene.subnet.exchange(), WINDOW).value == NULL_WINDOW


def test_a_quorum_that_is_away_is_waited_for_and_nothing_is_decided_without_it(scene):
    with raising(TransientError, Reason.DECISION_MISSING, "uids [1, 2]"):
        scene.settle(scene.validator(2))
    assert scene.clock.now() <= scene.times.settle_until
    looks = 2 * RULES.roster_ranks * RULES.roster_slot_seconds / RULES.poll_seconds
    for rank in (0, 1):
        asked = scene.store(rank).count("head", scene.key(rank, Kind.DECISION))
        assert looks / 2 < asked <= looks + 1, "polling is bounded"
    assert {word.ballot for word in read_ballots(scene.subnet.exchange(), WINDOW).words} == {0}, "no ballot goes on"
    assert scene.run(*scene.ranks(0)).roster is None, "a roster of the first rank comes too late now"
    assert scene.clock.now() < scene.late


def test_late_words_are_waited_for_and_the_next_rank_has_its_time_then(scene):
    """The first two validators lose their chain as the slots begin: the second one's roster still counts."""
    lives = []
    for rank in (0, 1):
        exchange, member = scene.exchange(rank), scene.validator(rank)
        chain = UnreachableChain(exchange.chain, since=scene.times.settles, seconds=14.0, every=1e6)
        lives.append(scene.live(member, scene.publishing(member), exchange=replace(exchange, chain=chain)))
    assert publisher_of(scene.run(*lives, *scene.ranks(silent=(0, 1)))) == 1
    assert scene.store(1).inner.head(scene.key(1)).last_modified > scene.times.null_after


@pytest.mark.parametrize("seconds", [30.0, -30.0])
def test_a_wrong_clock_makes_no_window_null(scene, seconds):
    """Half a minute ahead, every slot seems to be over when the first one begins."""
    exchange = scene.exchange(0)
    skewed = replace(exchange, chain=SkewedChain(exchange.chain, seconds))
    lives = [scene.live(scene.validator(0), exchange=skewed, deadline=1e12), *scene.ranks(1, silent=(0,))]
    assert publisher_of(scene.run(*lives)) == 1


@pytest.mark.parametrize("missing", [(), (1,), (1, 2), (0,)])
def test_before_the_settling_second_only_those_vote_to_whom_nobody_is_missing(scene, missing):
    """Two of the three are a quorum; a validator that misses a reveal finds what the others decided."""
    lives = [
        scene.live(member, scene.publishing(member) if rank == 0 else no_roster, is_whole=rank not in missing)
        for rank, member in enumerate(scene.subnet.validators)
    ]
    assert publisher_of(scene.run(*lives, is_whole=True)) == 0
    assert (scene.clock.now() < scene.times.settles) is (missing in ((), (1,)))
    began = scene.times.settles if 0 in missing else scene.times.close
    assert scene.store(0).inner.head(scene.key(0)).last_modified == began + 1


def test_nobody_votes_for_none_before_the_settling_second(scene):
    def refuse(rank, slot):
        raise PermanentError(Reason.OBJECT_DIFFERS, "for a test")

    said = []
    look = scene.at(
        scene.times.settles,
        lambda: said.extend(read_ballots(scene.subnet.exchange(), WINDOW, until_decided=False).words),
    )
    first = scene.live(scene.validator(0), refuse, is_whole=True)
    found = scene.run(look, first, *scene.ranks(1, silent=(0,), is_whole=True), is_whole=True)
    assert (publisher_of(found), said) == (1, [])


# What counts, to the second (docs/protocol.md 8).


@pytest.mark.parametrize(
    ("end", "offset", "counts"),
    [("first", -0.001, False), ("first", 0.0, True), ("last", 0.999, True), ("last", 1.0, False)],
)
def test_a_roster_of_the_first_rank_counts_in_its_slot(scene, end, offset, counts):
    slot, again = scene.times.roster_slot(0), scene.again()
    roster, aggregate = scene.published()

    def put():
        again.store(0).inner.put(aggregate_key(WINDOW), aggregate)
        again.put(0, roster)

    found = again.run(again.at(getattr(slot, end) + offset, put), *again.ranks())
    assert (found.roster is not None) is counts
    reasons = [each.reason for each in found.passed_over][:1]
    assert reasons == ([] if counts else [Reason.ROSTER_EARLY if offset < 0 else Reason.ROSTER_LATE])


def test_no_publisher_is_judged_before_its_slot_has_ended(scene):
    """An early reader and a late one see the same: the aggregate comes three seconds after the roster."""
    slot, again = scene.times.roster_slot(0), scene.again()
    roster, aggregate = scene.published()
    put = partial(again.store(0).inner.put, aggregate_key(WINDOW))
    found = again.run(
        again.at(slot.last - 3, lambda: again.put(0, roster)),
        again.at(slot.last - 1.5, lambda: put(aggregate[:-1])),
        again.at(slot.last, lambda: put(aggregate)),
        *again.ranks(1),
    )
    assert publisher_of(found) == 0


@pytest.mark.parametrize("illegal", [DENIED, {"window": WINDOW - 1}, {"aggregate_bytes": 1}])
@pytest.mark.parametrize("mended", [True, False])
def test_what_is_illegal_until_the_slot_ends_does_not_count(scene, illegal, mended):
    roster, _ = scene.published()
    until = scene.times.settles + 3 if mended else scene.times.null_after

    def refuse(operation, key):
        if key == scene.key(0) and scene.clock.now() < until:
            raise DENIED

    if illegal is DENIED:
        scene.store(0).before = refuse
    else:
        scene.put(0, signed_anyhow(Kind.ROSTER, fields_of(roster) | illegal, scene.validator(0).hotkey))
    found = scene.run(scene.at(until, lambda: scene.put(0, roster)), *scene.ranks(1))
    assert publisher_of(found) == (0 if mended else 1)


def test_a_rejected_roster_is_kept_with_the_reason(scene):
    def check(roster):
        if roster.uid == 1:
            raise RejectedError(Reason.BAD_SIGNATURE, "for a test")

    scene.run(*scene.ranks(0, 1, check=check))
    found = scene.found[2]
    assert (publisher_of(found), passed_over(found)) == (1, [(1, Reason.BAD_SIGNATURE)])
    check_signature(found.passed_over[0].sealed)


@pytest.mark.parametrize("fault", [BUSY, DENIED, RuntimeError("no error of the project's")])
def test_a_bucket_that_fails_for_all_hides_no_words_and_stops_nobody(scene, fault):
    """The first rank's bucket is dead from the beginning; its validator still votes, and is not needed."""
    view = ScriptedStore(scene.store(0).inner)
    view.before = failing(fault)
    views = {scene.validator(0).account: view}
    scene.run(*scene.ranks(0, silent=(1, 2)), *scene.ranks(1, 2, silent=(0,), views=views), views=views)
    assert {publisher_of(each) for each in scene.found.values()} == {1}


@pytest.mark.parametrize("error", [PermanentError(Reason.NO_TIME_LEFT, "for a test"), BUSY])
def test_a_publisher_that_cannot_publish_leaves_it_to_the_next_rank(scene, error):
    tries = Counter()

    def publish(rank, slot):
        tries[rank] += 1
        raise error

    assert publisher_of(scene.run(scene.live(scene.validator(0), publish), *scene.ranks(1, silent=(0,)))) == 1
    assert (tries[0] == 1) is isinstance(error, PermanentError), "a store that fails is asked again in the slot"


def test_a_stop_is_passed_on(scene):
    def publish(rank, slot):
        raise StoppedError("for a test")

    with pytest.raises(StoppedError):
        scene.settle(scene.validator(0), publish)


class Killed(BaseException):
    """The process dies."""


@pytest.mark.parametrize("dies_at", range(4))
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("lost_disk", [True, False])
def test_a_validator_that_dies_between_storing_and_using_a_word_never_signs_another(
    scene, monkeypatch, dies_at, stored, lost_disk
):
    """It dies before or after a word is stored; after a lost disk, its own bucket has what others may have read."""
    victim, words, real = scene.validator(1), [], scene.keep

    def keep(uid, text):
        words.extend([text] * (uid == victim.uid))
        dies = uid == victim.uid and len(words) == dies_at + 1
        if stored or not dies:
            real(uid, text)
        if dies:
            raise Killed

    def lives_twice():
        try:
            scene.live(victim)()
        except Killed:
            scene.clock.sleep_until(scene.clock.now() + 1.3)
            if lost_disk:
                scene.kept.pop(victim.uid, None)
            scene.live(victim, scene.publishing(victim))()

    monkeypatch.setattr(scene, "keep", keep)
    scene.run(lives_twice, *scene.ranks(2, silent=(1,)))
    ballots = read_ballots(scene.subnet.exchange(), WINDOW, until_decided=False)
    assert ballots.proofs == ()
    assert ballots.value is not None


def test_a_word_that_the_disk_did_not_take_is_not_known(scene):
    scene.published()
    member, kept = scene.validator(1), []

    def keep(text):
        kept.append(text)
        if len(kept) == 1:
            raise TransientError(Reason.LOCAL_FILE, "no room")

    exchange = scene.subnet.exchange(member)
    judge = Judge(exchange, scene.times, scene.cache(), no_check)
    voter = Voter(BallotBox(exchange, WINDOW), judge, publish_own=no_roster, kept=None, keep=keep)
    scene.clock.sleep_until(scene.times.settles + 1)
    voter.ballots.look()
    with pytest.raises(TransientError):
        voter.act()
    assert voter.ballots.own == frozenset()
    voter.act()
    assert voter.ballots.own
    voter.close()


# Slow buckets, in real time and with threads.


class Gate:
    """Keeps requests for some keys waiting until it is opened."""

    def __init__(self, *keys):
        self.opened, self._keys = threading.Event(), keys

    def __call__(self, operation, key):
        if key in self._keys:
            assert self.opened.wait(60)


def acts(voter):
    """Read and act once; the seconds that it took."""
    started = time.monotonic()
    voter.ballots.look()
    voter.act()
    return time.monotonic() - started


def first_words(voter):
    """Let it act until it has a word; all that it has."""
    until = time.monotonic() + 20
    while not voter.ballots.own and time.monotonic() < until:
        acts(voter)
    voter.close()
    return {(word.step, word.value) for word in voter.ballots.own}


@pytest.mark.parametrize("after_slot", [False, True])
def test_a_slow_bucket_of_a_publisher_does_not_hold_up_the_voter(scene, after_slot):
    roster, _ = scene.published()
    scene.clock.sleep_until(scene.times.settles + 1)
    gate = scene.store(0).before = Gate(scene.key(0))
    exchange = scene.exchange(1)
    judge = Judge(exchange, scene.times, scene.cache(), concurrency=4)
    voter = Voter(BallotBox(exchange, WINDOW), judge, publish_own=no_roster, kept=None, keep=lambda text: None)
    try:
        assert acts(voter) < LOOK_SECONDS + 2
        if after_slot:
            scene.clock.sleep_until(scene.times.roster_slot(0).last + 2)
            assert acts(voter) < LOOK_SECONDS + 2
        assert voter.ballots.own == frozenset(), "a look that began in the slot is waited for"
    finally:
        gate.opened.set()
    assert first_words(voter) == {("vote", roster.digest)}


def test_a_slow_bucket_costs_a_settlement_no_other_buckets_time(scene):
    """The publisher's roster hangs after the decision; a copy of it is read meanwhile."""
    scene.run(*scene.ranks(0, 1, 2))
    sealed = scene.found[2].sealed
    publish_copy(scene.exchange(1), sealed, deadline=1e12)
    gate = scene.store(0).before = Gate(scene.key(0))
    started = time.monotonic()
    try:
        ballots = read_ballots(scene.subnet.exchange(), WINDOW)
        found, publisher = find_roster(ballots, sealed.body.digest, concurrency=4)
    finally:
        gate.opened.set()
    assert (found.body, publisher.uid) == (sealed.body, 1)
    assert time.monotonic() - started < READ_SECONDS
