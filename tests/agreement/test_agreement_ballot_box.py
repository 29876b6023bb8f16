"""Words as they are read: from any bucket, carried by anybody, and only those that count."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.adversary.faults import FaultyStore
from templar.agreement.ballot_box import (
    STAMP_SECONDS,
    WORDS_PER_AUTHOR,
    BallotBox,
    decided_roster,
    decided_value,
    own_may_have_expired,
    read_ballots,
)
from templar.agreement.ballot_rules import (
    CORE_WORDS,
    WORDS_PER_PLACE,
    Said,
    Stakes,
    chosen,
    convicting,
    highest_lock,
    newest_open,
)
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import NULL_WINDOW, Decision, Roster, SignedWord, Word
from templar.exchange.signed import seal
from tests.support.errors import raising
from tests.support.scripted_store import failing
from tests.support.subnet import BIRTHDAY, GENESIS, NETUID, RULES, Subnet, fields_of, signed_anyhow

WINDOW = 3
STEPS = ("vote", "lock")
A, B = "aa" * 32, "bb" * 32
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
REFUSED = PermanentError(Reason.ACCESS_DENIED, "for a test")
ERRORS = [BUSY, REFUSED, PermanentError(Reason.BUCKET_MISSING, "for a test"), RuntimeError("no error of the project's")]


class Scene:
    """Validators with these stakes, after a window."""

    def __init__(self, folder, *stakes, quorum=RULES.quorum):
        overrides = {"windows": {**RULES.model_dump(), "quorum": quorum}}
        self.subnet = Subnet(folder, stakes=stakes, num_miners=1, overrides=overrides)
        self.reader = self.subnet.exchange()
        self.subnet.clock.sleep_until(BIRTHDAY + (WINDOW + 1) * RULES.seconds + 10)

    def store(self, index):
        return self.subnet.store(self.subnet.validators[index])

    def box(self, index=0):
        """What a validator holds of the window."""
        return BallotBox(self.subnet.exchange(self.subnet.validators[index]), WINDOW)

    def sign(self, said, hotkey=None, *, window=WINDOW):
        """A word of the validator that it names, signed by it unless another key is given."""
        author = self.subnet.members[said.uid].hotkey
        fields = {"netuid": NETUID, "genesis": GENESIS, "uid": said.uid, "window": window, **said.spoken}
        sealed = seal(Word(**fields, hotkey=(hotkey or author).address), hotkey or author)
        return SignedWord(**said._asdict(), signature=sealed.signature)

    def carry(self, index, words, author=None):
        """Put words into a validator's bucket, as its decision object."""
        owner = author or self.subnet.validators[index]
        body = Decision(**owner.signing, window=WINDOW, words=tuple(words))
        self.subnet.put(owner, window_key(Kind.DECISION, WINDOW, owner.uid), body)

    def decide(self, value, *indices, ballot=0):
        """Let these validators vote for a value and lock it, each in its own bucket."""
        words = [self.sign(word) for index in indices for word in agreed(index + 1, value, ballot)]
        for index in indices:
            self.carry(index, [word for word in words if word.uid == index + 1])
        return words

    def read(self):
        return read_ballots(self.reader, WINDOW, until_decided=False)


def agreed(uid, value, ballot=0):
    return [Said(ballot, "vote", uid, value), Said(ballot, "lock", uid, value, ballot)]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([A, B, NULL_WINDOW, None])), min_size=1, max_size=6),
    st.sampled_from([1 / 2, 2 / 3]),
)
@settings(max_examples=30)
def test_only_more_than_half_of_all_announced_stake_decides(tmp_path_factory, validators, quorum):
    """Or than another share, if the network says so. Silence never shrinks the stake, nor does a bucket that fails."""
    stakes = (10.0 * stake for stake, _ in validators)
    scene = Scene(tmp_path_factory.mktemp("scene"), *stakes, quorum=quorum)
    for index, (_, value) in enumerate(validators):
        if value is None:
            scene.store(index).before = failing(ERRORS[index % len(ERRORS)])
        else:
            scene.decide(value, index)
    total = sum(stake for stake, _ in validators)
    sums = {each: sum(stake for stake, value in validators if value == each) for each in (A, B, NULL_WINDOW)}
    winner = next((value for value, stake in sums.items() if stake > quorum * total), None)
    ballots = scene.read()
    assert ballots.value == winner
    if winner is None:
        with raising(TransientError, Reason.DECISION_MISSING, "ask again later"):
            decided_value(ballots)


def test_a_validators_bucket_shows_the_words_of_all_that_it_read_and_a_miners_shows_none(tmp_path):
    scene = Scene(tmp_path, 40.0, 35.0, 25.0)
    words = scene.decide(A, 0, 2)
    for index in (0, 2):
        scene.store(index).before = failing(BUSY)
    scene.carry(0, words, scene.subnet.miners[0])
    assert scene.read().value is None
    scene.carry(1, words)
    assert scene.read().value == A


@pytest.mark.parametrize("illegal", ["foreign key", "another window", "no validator", "a vote that names a ballot"])
def test_words_that_no_validator_signed_for_the_window_are_left_out(tmp_path, illegal):
    scene = Scene(tmp_path, 40.0, 35.0, 25.0)
    miner = scene.subnet.miners[0]
    first, second = (Said(0, "lock", uid, A, 0) for uid in (1, 2))
    forged = {
        "foreign key": scene.sign(second, miner.hotkey),
        "another window": scene.sign(second, window=WINDOW - 1),
        "no validator": scene.sign(Said(0, "lock", miner.uid, A, 0)),
        "a vote that names a ballot": scene.sign(second).model_copy(update={"step": "vote"}),
    }[illegal]
    scene.carry(2, [scene.sign(first), forged])
    ballots = scene.read()
    assert ballots.value is None
    assert ballots.words == {first}


@pytest.mark.parametrize("changes", [{"window": WINDOW + 1}, {"uid": 2}, {"words": [{}]}, {"words": "no"}])
def test_an_illegal_object_says_nothing_and_hides_nobody(tmp_path, changes):
    scene = Scene(tmp_path, 40.0, 35.0, 25.0)
    scene.decide(A, 1, 2)
    author = scene.subnet.validators[0]
    body = Decision(netuid=NETUID, genesis=GENESIS, uid=1, hotkey=author.hotkey.address, window=WINDOW, words=())
    illegal = signed_anyhow(Kind.DECISION, fields_of(body) | changes, author.hotkey)
    scene.subnet.put(author, window_key(Kind.DECISION, WINDOW, 1), illegal)
    ballots, clock = scene.read(), scene.subnet.clock
    assert (ballots.value, ballots.answered) == (A, {1, 2, 3})
    for _ in range(8):
        clock.sleep_until(clock.now() + 1)
        ballots.look()
    reads = [scene.store(index).count("get") for index in range(3)]
    assert reads[0] == reads[1], "nobody can make the others read the same bytes again and again"


def test_own_words_that_this_node_fails_to_parse_are_never_taken_for_read(tmp_path, monkeypatch):
    """Else it might sign otherwise than it has signed before."""
    scene = Scene(tmp_path, 60.0, 40.0)
    scene.decide(A, 0)
    monkeypatch.setattr("templar.agreement.ballot_box.unseal", Mock(side_effect=MemoryError))
    ballots, clock = scene.box(), scene.subnet.clock
    for _ in range(8):
        ballots.look()
        clock.sleep_until(clock.now() + 1)
    assert ballots.answered == {2}


def test_double_words_count_and_convict_their_author(tmp_path):
    scene = Scene(tmp_path, 45.0, 45.0, 10.0)
    liar = [scene.sign(word) for value in (A, B) for word in agreed(3, value)]
    scene.decide(A, 0)
    scene.carry(1, liar[:2])
    assert scene.read().value == A, "as long as one face is known"
    scene.carry(2, liar)
    ballots = scene.read()
    assert ballots.value == A, "and when both are"
    (pair,) = ballots.proofs
    assert [word.uid for word in pair] == [3, 3]
    assert {ballots.sealed(word).body.hotkey for word in pair} == {scene.subnet.validators[2].hotkey.address}


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_decisions_that_of_the_lowest_ballot_stands(tmp_path, first):
    """The liar has locked both; it is no matter which of them was read first."""
    scene = Scene(tmp_path, 45.0, 45.0, 10.0)
    sides = [[*agreed(1, B), *agreed(3, B)], [*agreed(2, A, 1), *agreed(3, A, 1)]]
    ballots = BallotBox(scene.reader, WINDOW)
    ballots.add(map(scene.sign, sides[first]))
    assert ballots.decided == [(0, B), (1, A)][first]
    ballots.add(map(scene.sign, sides[1 - first]))
    assert ballots.decided == (0, B)


def test_a_lock_that_forgets_a_higher_one_counts_and_convicts():
    words = [*agreed(1, A), Said(1, "vote", 1, None), Said(1, "lock", 1, None)]
    assert convicting(words) == ((words[1], words[3]),)
    stakes = Stakes({1: 60.0, 2: 40.0}, 0.5)
    assert newest_open(words, stakes) == newest_open({*words} - {words[1]}, stakes) == 2


def test_a_flood_of_words_is_bounded(tmp_path):
    scene = Scene(tmp_path, 40.0, 35.0, 25.0)
    scene.carry(2, map(scene.sign, [Said(ballot, "vote", 3, A) for ballot in range(950, 1000)]))
    words = scene.decide(A, 0, 1)
    ballots = scene.read()
    assert ballots.value == A
    assert len([word for word in ballots.words if word.uid == 3]) <= WORDS_PER_AUTHOR
    scene.store(2).inner.delete([window_key(Kind.DECISION, WINDOW, 3)])
    ballots = scene.read()
    for number in range(50):
        ballots.add([scene.sign(Said(0, "vote", 3, f"{number:064x}"))])
    assert len(ballots.signed) == len(words) + WORDS_PER_PLACE
    assert ballots.value == A


def test_a_validator_keeps_its_lock_and_the_votes_behind_it_while_it_only_votes(tmp_path):
    """It skips the locks of ballots that others have opened; its next lock must name the old one all the same."""
    scene = Scene(tmp_path, 40.0, 35.0, 25.0)
    ballots = scene.box()
    words = [Said(0, "vote", uid, A) for uid in (1, 2, 3)]
    words += [Said(0, "lock", 1, A, 0), Said(0, "lock", 2, None), Said(0, "lock", 3, None)]
    for ballot in range(1, 9):
        words += [Said(ballot, "vote", 1, A), *(Said(ballot, step, uid, None) for step in STEPS for uid in (2, 3))]
    for word in words:
        ballots.add([scene.sign(word)])
    assert highest_lock(ballots.own, 1) == (0, A)
    assert chosen(ballots.words, ballots.stakes, 0) == A
    assert ballots.proofs == ()
    assert len(ballots.words) <= 3 * CORE_WORDS


def test_a_bucket_that_fails_is_not_read_again_at_once(tmp_path):
    scene = Scene(tmp_path, 40.0, 60.0)
    scene.store(0).before = failing(BUSY)
    ballots, clock, looks = BallotBox(scene.reader, WINDOW), scene.subnet.clock, []
    for _ in range(3):
        ballots.look()
        ballots.look()
        looks.append(scene.store(0).count("head", window_key(Kind.DECISION, WINDOW, 1)))
        clock.sleep_until(clock.now() + RULES.poll_seconds)
    assert looks == [1, 2, 2], "the pause doubles"


def test_colluding_authors_push_no_honest_word_out_of_an_object(tmp_path, monkeypatch):
    """Five of eleven sign all that they can; an object has just room for the core and the own words."""
    scene = Scene(tmp_path, *[10.0] * 11)
    monkeypatch.setattr("templar.agreement.ballot_box.MAX_WORDS", CORE_WORDS * 11)
    ballots = scene.box()
    honest = [Said(0, "vote", uid, A) for uid in range(1, 6)] + [Said(0, "vote", 6, B)]
    honest += [Said(0, "lock", uid, None) for uid in range(1, 7)]
    honest += [Said(1, "vote", uid, NULL_WINDOW) for uid in range(1, 7)]
    flood = []
    for number, uid, ballot in itertools.product(range(4), range(7, 12), range(3)):
        flood += agreed(uid, f"{number:064x}", ballot)
    ballots.add(map(scene.sign, flood))
    for said in honest:
        ballots.add([scene.sign(said)])
        ballots.add(map(scene.sign, flood))
    assert len(ballots.words) > CORE_WORDS * 11
    assert newest_open(ballots.words, ballots.stakes) == 1
    scene.carry(0, ballots.signed)  # it is legal
    again = scene.read()
    assert {said for said in honest if said.ballot or said.step == "lock"} <= again.words
    assert newest_open(again.words, again.stakes) == 1
    ballots.add(scene.sign(Said(1, "lock", uid, NULL_WINDOW, 1)) for uid in range(1, 7))
    scene.carry(0, ballots.signed)
    assert scene.read().decided == (1, NULL_WINDOW)


@pytest.mark.parametrize("ahead", [-30.0, 0.0, 30.0])
def test_an_object_is_read_again_until_its_stamp_cannot_be_anothers(tmp_path, ahead):
    """The store's clock may be behind or ahead, or go back: then it gives a stamp a second time."""
    scene = Scene(tmp_path, 60.0, 40.0)
    clock, author = scene.subnet.clock, scene.subnet.validators[0]
    stamp = int(clock.now() + ahead)  # of all objects
    store = FaultyStore(scene.store(0), shown=lambda info: replace(info, last_modified=stamp))
    ballots = BallotBox(scene.subnet.exchange(views={author.account: store}), WINDOW)
    scene.carry(0, [scene.sign(Said(0, "lock", 1, B, 0))])
    ballots.look()
    assert ballots.value == B
    scene.carry(0, [scene.sign(Said(0, "lock", 1, A, 0))])  # as long, and in the same second
    ballots.look()
    assert ballots.decided == (0, A)
    clock.sleep_until(clock.now() + 30 + STAMP_SECONDS + 2)
    reads = scene.store(0).count("get")
    for _ in range(3):
        ballots.look()
    assert scene.store(0).count("get") == reads + 1, "then it is settled"
    scene.carry(0, [scene.sign(word) for word in agreed(1, A)])
    ballots.look()
    assert scene.store(0).count("get") == reads + 2, "another size is another object's"


def roster_of(scene, index, previous=None):
    """A roster in a validator's bucket."""
    author = scene.subnet.validators[index]
    fields = {"window": WINDOW, "previous": previous, "peer_list": None, "entries": (), "aggregate_bytes": 0}
    roster = Roster(**author.signing, **fields, aggregate_sha256=A, plan=None)
    scene.subnet.put(author, window_key(Kind.ROSTER, WINDOW, author.uid), roster)
    return roster


def test_the_decided_roster_is_found_in_its_publishers_bucket_whenever_it_was_stored(tmp_path):
    scene = Scene(tmp_path, 100.0, 60.0, 50.0)
    roster_of(scene, 0)
    second = roster_of(scene, 1)
    scene.decide(second.digest, 1, 2)
    assert scene.read().value == second.digest
    for _ in range(2):
        assert decided_roster(scene.reader, WINDOW) == (second, scene.subnet.validators[1].neuron)
        scene.subnet.clock.sleep_until(scene.subnet.clock.now() + 100_000)
        assert roster_of(scene, 1) == second
        scene.store(1).inner.put(aggregate_key(WINDOW), b"")


def test_a_null_window_has_no_roster(tmp_path):
    scene = Scene(tmp_path, 100.0)
    roster_of(scene, 0)
    scene.decide(NULL_WINDOW, 0)
    assert decided_roster(scene.reader, WINDOW) is None


KEY = window_key(Kind.ROSTER, WINDOW, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scene: roster_of(scene, 0, previous=B),
        lambda scene: scene.store(0).inner.put(KEY, b"{}"),
        lambda scene: scene.store(0).inner.delete([KEY]),
        lambda scene: setattr(scene.store(0), "before", failing(BUSY, "get", key=KEY)),
        lambda scene: setattr(scene.store(0), "before", failing(REFUSED, "get", key=KEY)),
    ],
)
def test_a_decided_roster_that_cannot_be_read_now_is_no_null_window(tmp_path, spoil):
    scene = Scene(tmp_path, 100.0, 10.0)
    scene.decide(roster_of(scene, 0).digest, 0)
    spoil(scene)
    with raising(TransientError, Reason.ROSTER_MISSING):
        decided_roster(scene.reader, WINDOW)


def test_a_chain_that_is_away_says_nothing_of_the_own_bucket():
    def away():
        raise TransientError(Reason.CHAIN_UNREACHABLE, "away")

    exchange = SimpleNamespace(chain=SimpleNamespace(block=away), buckets=SimpleNamespace(own=None), hparams=None)
    with raising(TransientError, Reason.CHAIN_UNREACHABLE):
        own_may_have_expired(exchange, 7)  # type: ignore[arg-type]
