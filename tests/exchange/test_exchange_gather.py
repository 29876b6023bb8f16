import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from templar.canonical import sha256_hex
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.gather import Gatherer, GatherReport, PeerOutcome, Tier
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules
from templar.interrupt import StoppedError
from templar.timeline import WindowTimes
from tests.support.scripted_store import failing
from tests.support.subnet import ASSIGNMENT, LAYOUT, NETWORK, Bucket, Member, Subnet, payload_bytes

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


class Scene:
    """A window that has closed, with a bucket for each miner: all of them revealed in time."""

    def __init__(self, folder: Path, num_miners: int) -> None:
        self.folder = folder
        self.subnet = Subnet(folder, num_miners=num_miners)
        self.miners = self.subnet.miners
        self.times: WindowTimes = self.subnet.times(WINDOW)
        self.buckets = {each.uid: Bucket(each) for each in self.miners}
        self.payloads = {each.uid: payload_bytes(each, WINDOW) for each in self.miners}
        for each in self.miners:
            self.reveal(each.uid)
        self.caches = 0

    @property
    def uids(self) -> list[int]:
        return [each.uid for each in self.miners]

    def reveal(self, uid: int, *, committed: float | None = None, revealed: float | None = None) -> None:
        self.buckets[uid].reveal(self.times, self.payloads[uid], committed=committed, revealed=revealed)

    def spoil(self, *uids: int) -> None:
        """Their payloads do not have the committed hash."""
        for uid in uids:
            junk = bytes(len(self.payloads[uid]))
            self.buckets[uid].put(self.key(Kind.GRADIENT, uid), junk, self.times.reveal_interval.first)

    def withdraw(self, *uids: int) -> None:
        """They reveal nothing."""
        for uid in uids:
            self.buckets[uid].memory.delete([self.key(Kind.MANIFEST, uid), self.key(Kind.GRADIENT, uid)])

    def fail(self, uid: int, error: Exception = BUSY, *, until: float = float("inf")) -> None:
        """Make a bucket fail until some time."""

        def hook(operation: str, key: str) -> None:
            if self.subnet.clock.now() < until:
                raise error

        self.buckets[uid].store.before = hook

    def key(self, kind: Kind, uid: int) -> str:
        return window_key(kind, WINDOW, uid)

    def fetched(self, uid: int) -> int:
        """How often a bucket was asked for its payload's bytes."""
        return self.buckets[uid].store.count("get", self.key(Kind.GRADIENT, uid))

    def asked(self, uid: int) -> bool:
        return bool(self.buckets[uid].store.calls)

    def gather(
        self,
        peers: Sequence[int],
        reserve: Sequence[int] = (),
        others: Sequence[int] = (),
        *,
        concurrency: int = 1,
        retry_seconds: float = 2.0,
        assignment: Callable[[int], str | None] = lambda uid: ASSIGNMENT,
    ) -> GatherReport:
        self.caches += 1
        cache = PayloadCache(self.folder / f"payloads-{self.caches}", LAYOUT)
        views = {each.account: self.buckets[each.uid].store for each in self.miners}
        gatherer = Gatherer(self.subnet.buckets(views=views), cache, self.subnet.clock, concurrency)
        return gatherer.gather(
            self.neurons(peers),
            RevealRules(NETWORK, self.times, assignment),
            reserve=self.neurons(reserve),
            others=self.neurons(others),
            retry_until=self.times.settles + retry_seconds,
        )

    def neurons(self, uids: Sequence[int]) -> list[NeuronInfo]:
        members: dict[int, Member] = {each.uid: each for each in self.miners}
        return [members[uid].neuron for uid in uids]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, num_miners=8)  # uids 2 to 9


def summary(report: GatherReport) -> list[tuple[int, Tier, Reason | None]]:
    return [(outcome.uid, outcome.tier, outcome.reason) for outcome in report.outcomes]


def accepted(report: GatherReport) -> list[int]:
    return [submission.uid for submission in report.submissions]


def unsigned(outcome: PeerOutcome) -> PeerOutcome:
    """Without signatures and durations, which differ each time."""
    found = outcome.submission
    plain = None if found is None else replace(found, commit_signature="", manifest_signature="")
    return replace(outcome, submission=plain, seconds=0.0)


GATHER, RESERVE, OTHER = Tier.GATHER, Tier.RESERVE, Tier.OTHER


# The report.


def test_the_report_is_in_uid_order(scene: Scene) -> None:
    report = scene.gather([5, 2, 9, 3])
    assert summary(report) == [(uid, GATHER, None) for uid in (2, 3, 5, 9)]
    assert report.window == WINDOW
    assert [each.manifest.payload_sha256 for each in report.submissions] == [
        sha256_hex(scene.payloads[uid]) for uid in (2, 3, 5, 9)
    ]


def test_a_gather_without_submissions_is_no_failure(scene: Scene) -> None:
    scene.spoil(*scene.uids)
    report = scene.gather([2, 3, 4], reserve=[5, 6])
    assert accepted(report) == []
    assert {outcome.reason for outcome in report.outcomes} == {Reason.WRONG_HASH}
    assert len(report.outcomes) == 5


def test_a_rejection_names_its_reason_and_says_why(scene: Scene) -> None:
    scene.reveal(3, committed=scene.times.commit_interval.last + 1)
    outcome = scene.gather([2, 3]).outcome(3)
    assert outcome is not None
    assert (outcome.submission, outcome.reason) == (None, Reason.COMMIT_LATE)
    assert "uid 3" in outcome.detail
    assert outcome.seconds >= 0


# The reserve.


def test_the_reserve_is_not_asked_while_nobody_fails(scene: Scene) -> None:
    report = scene.gather([2, 3], reserve=[4, 5])
    assert accepted(report) == [2, 3]
    assert not scene.asked(4)


def test_the_reserve_fills_places_in_order(scene: Scene) -> None:
    scene.spoil(3)
    report = scene.gather([2, 3], reserve=[7, 4, 5])
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.WRONG_HASH), (7, RESERVE, None)]
    assert not scene.asked(4)


def test_a_failed_reserve_is_followed_by_the_next(scene: Scene) -> None:
    scene.spoil(2, 3, 7, 4)
    report = scene.gather([2, 3], reserve=[7, 4, 5, 6, 8])
    assert summary(report) == [
        (2, GATHER, Reason.WRONG_HASH),
        (3, GATHER, Reason.WRONG_HASH),
        (4, RESERVE, Reason.WRONG_HASH),
        (5, RESERVE, None),
        (6, RESERVE, None),
        (7, RESERVE, Reason.WRONG_HASH),
    ]
    assert not scene.asked(8)


def test_others_are_reported_and_never_fill_a_place(scene: Scene) -> None:
    scene.spoil(2)
    report = scene.gather([2, 3], reserve=[4], others=[8, 9])
    assert summary(report) == [
        (2, GATHER, Reason.WRONG_HASH),
        (3, GATHER, None),
        (4, RESERVE, None),
        (8, OTHER, None),
        (9, OTHER, None),
    ]


# Time.


def test_reveals_are_prefetched_at_once_and_fetched_once(scene: Scene) -> None:
    before = scene.subnet.clock.now()
    assert before < scene.times.settles
    seen: list[float] = []
    scene.buckets[2].store.before = lambda operation, key: seen.append(scene.subnet.clock.now())
    scene.gather([2])
    assert set(seen) == {before}
    assert scene.subnet.clock.now() == scene.times.settles


@pytest.mark.parametrize("kind", [Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT])
def test_a_missing_object_is_looked_for_again_when_reveals_are_final(scene: Scene, kind: Kind) -> None:
    bucket, key = scene.buckets[3], scene.key(kind, 3)
    info = bucket.memory.head(key)
    assert info is not None
    data = bucket.memory.get(key, max_bytes=10_000)
    bucket.memory.delete([key])

    def appear(operation: str, called: str) -> None:
        if scene.subnet.clock.now() >= scene.times.settles:
            bucket.put(key, data, info.last_modified)

    bucket.store.before = appear
    report = scene.gather([2, 3])
    assert accepted(report) == [2, 3]
    assert scene.subnet.clock.now() == scene.times.settles


def test_an_object_that_is_missing_when_reveals_are_final_is_reported(scene: Scene) -> None:
    scene.withdraw(3)
    assert summary(scene.gather([2, 3])) == [(2, GATHER, None), (3, GATHER, Reason.MANIFEST_MISSING)]
    assert scene.subnet.clock.now() == scene.times.settles


def test_a_rejected_reveal_is_not_fetched_again(scene: Scene) -> None:
    scene.spoil(3)
    scene.gather([3])
    assert scene.fetched(3) == 1


def test_a_failing_store_is_asked_again_until_it_answers(scene: Scene) -> None:
    scene.fail(3, until=scene.times.settles + 1.5)
    report = scene.gather([2, 3], reserve=[4], retry_seconds=12.0)
    assert summary(report) == [(2, GATHER, None), (3, GATHER, None)]
    assert scene.times.settles + 1.5 <= scene.subnet.clock.now() <= scene.times.settles + 6
    assert not scene.asked(4)


def test_a_failing_store_is_given_up_at_the_deadline_and_its_place_filled(scene: Scene) -> None:
    scene.fail(3)
    report = scene.gather([2, 3], reserve=[4])
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.STORE_BUSY), (4, RESERVE, None)]
    assert scene.times.settles <= scene.subnet.clock.now() <= scene.times.settles + 2
    assert len(scene.buckets[3].store.calls) < 20


def test_a_failing_store_does_not_hold_up_the_second_look_at_others(scene: Scene) -> None:
    scene.fail(3)
    scene.withdraw(4)
    looked: list[float] = []
    scene.buckets[4].store.before = lambda operation, key: looked.append(scene.subnet.clock.now())
    scene.gather([3, 4])
    assert max(looked) == scene.times.settles


def test_a_late_gather_still_looks_once(scene: Scene) -> None:
    scene.subnet.clock.sleep_until(scene.times.settles + 100)
    scene.fail(3)
    report = scene.gather([2, 3])
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.STORE_BUSY)]
    assert scene.subnet.clock.now() == scene.times.settles + 100


def test_a_failing_reserve_is_asked_again_as_well(scene: Scene) -> None:
    scene.spoil(2)
    scene.fail(3, until=scene.times.settles + 1)
    report = scene.gather([2], reserve=[3], retry_seconds=12.0)
    assert summary(report) == [(2, GATHER, Reason.WRONG_HASH), (3, RESERVE, None)]


# Failures stay with their peer.


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermanentError(Reason.ACCESS_DENIED, "for a test"), Reason.BUCKET_UNREADABLE),
        (TransientError(Reason.STORE_UNREACHABLE, "for a test"), Reason.STORE_UNREACHABLE),
        (RuntimeError("for a test"), Reason.MALFORMED),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_an_exploding_store_does_not_touch_the_others(
    scene: Scene, error: Exception, reason: Reason, concurrency: int
) -> None:
    for uid in (3, 5):
        scene.fail(uid, error)
    report = scene.gather([2, 3, 4], reserve=[5, 6], others=[7], concurrency=concurrency)
    assert summary(report) == [
        (2, GATHER, None),
        (3, GATHER, reason),
        (4, GATHER, None),
        (5, RESERVE, reason),
        (6, RESERVE, None),
        (7, OTHER, None),
    ]


def test_an_unassigned_peer_does_not_count(scene: Scene) -> None:
    report = scene.gather([2, 3], assignment=lambda uid: ASSIGNMENT if uid == 2 else None)
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.WRONG_ASSIGNMENT)]


def test_a_long_message_of_a_store_is_cut(scene: Scene) -> None:
    scene.fail(2, PermanentError(Reason.STORE_REFUSED, "x" * 10_000))
    outcome = scene.gather([2]).outcome(2)
    assert outcome is not None
    assert len(outcome.detail) == 300


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_stop_request_is_no_outcome(scene: Scene, concurrency: int) -> None:
    scene.fail(3, StoppedError("for a test"))
    with pytest.raises(StoppedError):
        scene.gather([2, 3, 4], concurrency=concurrency)


def test_a_local_failure_is_no_verdict_on_a_peer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "for a test")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(TemplarError) as caught:
        scene.gather(scene.uids)
    assert caught.value.reason is Reason.LOCAL_FILE


# Concurrency.


def test_the_report_does_not_depend_on_how_many_are_fetched_at_once(tmp_path: Path) -> None:
    reports = []
    for concurrency in (1, 8):
        folder = tmp_path / str(concurrency)
        folder.mkdir()
        scene = Scene(folder, num_miners=8)
        scene.spoil(3)
        scene.withdraw(5)
        scene.reveal(6, committed=scene.times.commit_interval.first - 1)
        scene.buckets[7].store.before = failing(BUSY, times=3)
        report = scene.gather([9, 3, 5, 6], reserve=[7, 2], others=[4, 8], concurrency=concurrency, retry_seconds=24.0)
        reports.append([unsigned(outcome) for outcome in report.outcomes])
    assert reports[0] == reports[1]
    assert [outcome.uid for outcome in reports[0] if outcome.submission] == [2, 4, 7, 8, 9]
