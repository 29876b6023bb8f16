from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar import PROTOCOL_VERSION
from templar.agreement.decisions import Majority, decided_roster, majority, publish_decision, read_decision
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Decision, Roster
from templar.exchange.publish import PublishOutcome
from templar.exchange.signed import seal
from tests.support.errors import raising
from tests.support.scripted_store import ScriptedStore, failing
from tests.support.subnet import BIRTHDAY, GENESIS, NETUID, RULES, Subnet, signed_anyhow

WINDOW = 3
A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
REFUSED = PermanentError(Reason.ACCESS_DENIED, "for a test")
MISSING = PermanentError(Reason.BUCKET_MISSING, "for a test")
ERRORS = {"busy": BUSY, "refused": REFUSED, "missing": MISSING, "odd": RuntimeError("no error of the project's")}
votes = st.sampled_from([A, B, None, "absent", *ERRORS])


class Scene:
    """Validators with these stakes; the next window has closed, so no further decision counts."""

    def __init__(self, folder: Path, *stakes: float, closed: bool = True) -> None:
        self.subnet = Subnet(folder, stakes=stakes, num_miners=1)
        self.reader = self.subnet.exchange()
        self.subnet.clock.sleep_until(BIRTHDAY + (WINDOW + 1) * RULES.seconds + 10)
        if closed:
            self.close()

    def close(self) -> None:
        """The window after the decided one closes."""
        self.subnet.clock.sleep_until(BIRTHDAY + (WINDOW + 2) * RULES.seconds)

    def decide(self, index: int, roster: str | None) -> None:
        exchange = self.subnet.exchange(self.subnet.validators[index])
        publish_decision(exchange, WINDOW, roster, deadline=float("inf"))

    def store(self, index: int) -> ScriptedStore:
        return self.subnet.store(self.subnet.validators[index])

    def key(self, index: int) -> str:
        return window_key(Kind.DECISION, WINDOW, self.subnet.validators[index].uid)

    def majority(self) -> Majority:
        return majority(self.reader, WINDOW)

    def undecided(self) -> str:
        with pytest.raises(TransientError) as caught:
            self.majority()
        assert caught.value.reason is Reason.DECISION_MISSING
        return str(caught.value)


# Publishing.


def test_a_decision_is_published_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 100.0)
    exchange = scene.subnet.exchange(scene.subnet.validators[0])
    for expected in (PublishOutcome.STORED, PublishOutcome.ALREADY_THERE):
        assert publish_decision(exchange, WINDOW, A, deadline=float("inf")).outcome is expected
    decision = read_decision(scene.reader, scene.subnet.validators[0].neuron, WINDOW)
    assert (decision.roster, decision.window, decision.uid) == (A, WINDOW, 1)


@pytest.mark.parametrize(("first", "second"), [(A, B), (None, A)])
def test_a_decision_stands(tmp_path: Path, first: str | None, second: str | None) -> None:
    scene = Scene(tmp_path, 100.0)
    scene.decide(0, first)
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        scene.decide(0, second)
    assert scene.majority().roster == first


def test_nobody_decides_after_the_deadline(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 100.0)
    exchange = scene.subnet.exchange(scene.subnet.validators[0])
    with raising(PermanentError, Reason.NO_TIME_LEFT):
        publish_decision(exchange, WINDOW, A, deadline=scene.subnet.clock.now())
    assert read_decision(scene.reader, scene.subnet.validators[0].neuron, WINDOW) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"window": WINDOW + 1}, Reason.WRONG_WINDOW),
        ({"uid": 2}, Reason.WRONG_IDENTITY),
        ({"roster": "no"}, Reason.MALFORMED),
    ],
)
def test_an_illegal_decision_is_rejected(tmp_path: Path, changes: dict[str, object], reason: Reason) -> None:
    scene = Scene(tmp_path, 100.0)
    author = scene.subnet.validators[0]
    body = {"protocol": PROTOCOL_VERSION, "netuid": NETUID, "genesis": GENESIS, "window": WINDOW, "roster": A}
    body |= {"uid": 1, "hotkey": author.hotkey.address} | changes
    scene.store(0).inner.put(scene.key(0), signed_anyhow(Kind.DECISION, body, author.hotkey))
    with raising(RejectedError, reason):
        read_decision(scene.reader, author.neuron, WINDOW)
    assert "no validator" in scene.undecided()


# The majority of stake.


def test_miners_decide_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 10.0)
    scene.decide(0, A)
    miner = scene.subnet.miners[0]
    body = Decision(netuid=NETUID, genesis=GENESIS, uid=2, hotkey=miner.hotkey.address, window=WINDOW, roster=B)
    scene.subnet.store(miner).inner.put(window_key(Kind.DECISION, WINDOW, 2), seal(body, miner.hotkey).encode())
    assert scene.majority().uids == (1,)


@given(st.lists(st.tuples(st.integers(0, 9), votes), min_size=1, max_size=6), st.booleans())
@settings(max_examples=40)
def test_the_majority_is_that_of_the_stake_even_if_the_unheard_were_against_it(
    tmp_path_factory: pytest.TempPathFactory, validators: list[tuple[int, str | None]], closed: bool
) -> None:
    """A bucket that refuses is left out; one that fails is unheard, and so is a validator that may still decide."""
    scene = Scene(tmp_path_factory.mktemp("scene"), *(stake * 10.0 for stake, _ in validators), closed=closed)
    for index, (_, vote) in enumerate(validators):
        if vote in (A, B, None):
            scene.decide(index, vote)
        elif vote in ERRORS:
            scene.store(index).before = failing(ERRORS[vote])

    def stake_of(*wanted: str | None) -> float:
        return sum(stake * 10.0 for stake, vote in validators if vote in wanted)

    unheard = stake_of("busy", "odd") if closed else stake_of("busy", "odd", "absent")
    total = stake_of(A, B, None)
    winners = [roster for roster in (A, B, None) if 2 * stake_of(roster) > total + unheard]
    if winners:
        (winner,) = winners
        ranks = sorted((-stake, uid) for uid, (stake, vote) in enumerate(validators, 1) if vote == winner)
        expected = Majority(winner, stake_of(winner), total, unheard, tuple(uid for _, uid in ranks))
        assert scene.majority() == expected
    else:
        said = scene.undecided()
        assert "no validator" in said or f"{unheard:g} is unheard" in said


def test_a_store_that_failed_or_a_validator_that_was_to_decide_may_be_heard_later(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 100.0, 10.0, closed=False)
    scene.decide(1, B)
    assert "100 is unheard" in scene.undecided()
    scene.close()
    assert scene.majority() == Majority(B, 10.0, 10.0, 0.0, (2,))
    scene.decide(0, A)
    scene.store(0).before = failing(BUSY, times=1)
    assert "100 is unheard" in scene.undecided()
    assert scene.majority().roster == A


# The roster that was decided.


def roster_of(scene: Scene, index: int, previous: str | None = None) -> Roster:
    """An empty roster in a validator's bucket."""
    author = scene.subnet.validators[index]
    roster = Roster(
        netuid=NETUID,
        genesis=GENESIS,
        uid=author.uid,
        hotkey=author.hotkey.address,
        window=WINDOW,
        previous=previous,
        peer_list=None,
        entries=(),
        aggregate_sha256=A,
        aggregate_bytes=0,
    )
    scene.store(index).inner.put(window_key(Kind.ROSTER, WINDOW, author.uid), seal(roster, author.hotkey).encode())
    return roster


def test_the_decided_roster_is_found_in_its_publishers_bucket(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 100.0, 60.0, 50.0)
    roster_of(scene, 0)
    second = roster_of(scene, 1)
    scene.decide(1, second.digest)
    scene.decide(2, second.digest)
    assert decided_roster(scene.reader, WINDOW) == (second, scene.subnet.validators[1].neuron)


def test_a_null_window_has_no_roster(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 100.0)
    roster_of(scene, 0)
    scene.decide(0, None)
    assert decided_roster(scene.reader, WINDOW) is None


def spoil(scene: Scene) -> list[Callable[[], object]]:
    """Ways in which a roster that was decided cannot be read now."""
    key = window_key(Kind.ROSTER, WINDOW, 1)

    def fail_with(error: TemplarError) -> None:
        scene.store(0).before = failing(error, "get", key=key)

    return [
        lambda: roster_of(scene, 0, previous=B),
        lambda: scene.store(0).inner.put(key, b"{}"),
        lambda: scene.store(0).inner.delete([key]),
        lambda: fail_with(BUSY),
        lambda: fail_with(REFUSED),
    ]


@pytest.mark.parametrize("way", range(5))
def test_a_decided_roster_that_cannot_be_read_now_is_no_null_window(tmp_path: Path, way: int) -> None:
    scene = Scene(tmp_path, 100.0, 10.0)
    scene.decide(0, roster_of(scene, 0).digest)
    spoil(scene)[way]()
    with raising(TransientError, Reason.ROSTER_MISSING):
        decided_roster(scene.reader, WINDOW)


def test_the_time_of_a_roster_is_no_matter_any_more(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 100.0)
    roster = roster_of(scene, 0)
    scene.decide(0, roster.digest)
    scene.subnet.clock.sleep_until(scene.subnet.clock.now() + 100_000)
    assert roster_of(scene, 0) == roster
    scene.store(0).inner.put(aggregate_key(WINDOW), b"")
    assert decided_roster(scene.reader, WINDOW) == (roster, scene.subnet.validators[0].neuron)
