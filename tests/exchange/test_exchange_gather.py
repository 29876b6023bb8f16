import errno
from dataclasses import replace
from pathlib import Path

import pytest
from gather_cases import BUSY, GATHER, OTHER, RESERVE, WINDOW, Scene, accepted, summary

from templar.canonical import sha256_hex
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.gather import PeerOutcome
from templar.exchange.object_keys import Kind
from templar.interrupt import StoppedError
from tests.support.scripted_store import failing
from tests.support.subnet import ASSIGNMENT

WRONG_HASH = Reason.WRONG_HASH
REVEALED = (Kind.MANIFEST, Kind.GRADIENT)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, num_miners=8)  # uids 2 to 9


# The report.


def test_the_report_is_in_uid_order(scene: Scene) -> None:
    report = scene.gather([5, 2, 9, 3])
    assert summary(report) == [(uid, GATHER, None) for uid in (2, 3, 5, 9)]
    assert report.window == WINDOW
    assert [each.manifest.payload_sha256 for each in report.submissions] == [
        sha256_hex(scene.payloads[uid]) for uid in (2, 3, 5, 9)
    ]


def test_a_rejection_names_its_reason_and_says_why(scene: Scene) -> None:
    scene.buckets[3].reveal(scene.times, scene.payloads[3], committed=scene.times.commit_interval.last + 1)
    outcome = scene.gather([2, 3]).outcome(3)
    assert (outcome.submission, outcome.reason) == (None, Reason.COMMIT_LATE)
    assert "uid 3" in outcome.detail
    assert outcome.seconds >= 0


def test_the_report_counts_bytes_and_reasons(scene: Scene) -> None:
    infos = [scene.buckets[2].memory.head(scene.key(kind, 2)) for kind in (Kind.COMMIT, Kind.MANIFEST)]
    signed = sum(info.size for info in infos if info is not None)
    scene.withdraw(3, Kind.MANIFEST)
    scene.withdraw(4, Kind.COMMIT)
    scene.withdraw(5, Kind.COMMIT)
    report = scene.gather([2, 3, 4, 5])
    num_bytes = {outcome.uid: outcome.num_bytes for outcome in report.outcomes}
    assert num_bytes[2] == signed + len(scene.payloads[2])
    assert 0 < num_bytes[3] < signed
    assert num_bytes[4] == 0
    assert report.num_bytes == sum(num_bytes.values())
    assert report.rejected == {Reason.COMMIT_MISSING: 2, Reason.MANIFEST_MISSING: 1}
    line = replace(report, seconds=2.04).summary
    assert line == "1 of 4 accepted, 2 commit_missing, 1 manifest_missing; 0.0 MB in 2.0 s"


# The reserve.


@pytest.mark.parametrize(
    ("spoilt", "reserve", "others", "unasked"),
    [
        ([], [4, 5], [], [4, 5]),
        ([3], [7, 4, 5], [], [4, 5]),
        ([2, 3, 7, 4], [7, 4, 5, 6, 8], [], [8]),
        ([2], [4], [8, 9], []),
        ([2, 3, 4, 5], [4, 5], [], []),
    ],
)
def test_the_reserve_fills_the_places_of_failed_peers_in_order(
    scene: Scene, spoilt: list[int], reserve: list[int], others: list[int], unasked: list[int]
) -> None:
    scene.spoil(*spoilt)
    report = scene.gather([2, 3], reserve, others)
    tiers = dict.fromkeys((2, 3), GATHER) | dict.fromkeys(reserve, RESERVE) | dict.fromkeys(others, OTHER)
    expected = [(uid, tier, WRONG_HASH if uid in spoilt else None) for uid, tier in sorted(tiers.items())]
    assert summary(report) == [outcome for outcome in expected if outcome[0] not in unasked]
    assert not any(map(scene.asked, unasked))


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
    data = bucket.memory.get(key, max_bytes=10_000)
    bucket.memory.delete([key])

    def appear(operation: str, called: str) -> None:
        if scene.subnet.clock.now() >= scene.times.settles:
            bucket.put(key, data, info.last_modified)

    bucket.store.before = appear
    report = scene.gather([2, 3])
    assert accepted(report) == [2, 3]
    assert scene.subnet.clock.now() == scene.times.settles


def test_a_reveal_that_is_too_early_is_looked_at_again(scene: Scene) -> None:
    """Its miner reveals once more if finality moves the close, perhaps after this node has looked."""
    bucket, interval = scene.buckets[3], scene.times.reveal_interval
    revealed = {scene.key(kind, 3): bucket.memory.get(scene.key(kind, 3), max_bytes=10_000) for kind in REVEALED}

    def store(seconds: int) -> None:
        for key, data in revealed.items():
            bucket.put(key, data, seconds)

    store(interval.first - 5)
    bucket.store.before = lambda operation, key: (
        store(interval.last) if scene.subnet.clock.now() > interval.last else None
    )
    assert accepted(scene.gather([2, 3])) == [2, 3]


def test_a_rejected_reveal_is_not_fetched_again(scene: Scene) -> None:
    scene.spoil(3)
    scene.gather([3])
    assert scene.buckets[3].store.count("get", scene.key(Kind.GRADIENT, 3)) == 1


def test_a_failing_store_is_asked_again_until_it_answers(scene: Scene) -> None:
    scene.spoil(4)
    for uid in (3, 5):
        scene.fail(uid, until=scene.times.settles + 1.5)
    report = scene.gather([2, 3, 4], reserve=[5, 6], retry_seconds=12.0)
    assert summary(report) == [(2, GATHER, None), (3, GATHER, None), (4, GATHER, WRONG_HASH), (5, RESERVE, None)]
    assert scene.times.settles + 1.5 <= scene.subnet.clock.now() <= scene.times.settles + 8
    assert not scene.asked(6)


def test_a_failing_store_is_given_up_at_the_deadline_and_its_place_filled(scene: Scene) -> None:
    scene.fail(3)
    report = scene.gather([2, 3], reserve=[4])
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.STORE_BUSY), (4, RESERVE, None)]
    assert scene.times.settles <= scene.subnet.clock.now() <= scene.times.settles + 2
    assert len(scene.buckets[3].store.calls) < 20


def test_a_failing_store_does_not_hold_up_the_second_look_at_others(scene: Scene) -> None:
    scene.fail(3)
    scene.withdraw(4, *REVEALED)
    looked: list[float] = []
    scene.buckets[4].store.before = lambda operation, key: looked.append(scene.subnet.clock.now())
    report = scene.gather([3, 4])
    assert summary(report) == [(3, GATHER, Reason.STORE_BUSY), (4, GATHER, Reason.MANIFEST_MISSING)]
    assert max(looked) == scene.times.settles


def test_a_late_gather_still_looks_once(scene: Scene) -> None:
    scene.subnet.clock.sleep_until(scene.times.settles + 100)
    scene.fail(3)
    report = scene.gather([2, 3])
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.STORE_BUSY)]
    assert scene.subnet.clock.now() == scene.times.settles + 100


# Failures stay with their peer.


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermanentError(Reason.ACCESS_DENIED, "for a test"), Reason.BUCKET_UNREADABLE),
        (TransientError(Reason.STORE_UNREACHABLE, "for a test"), Reason.STORE_UNREACHABLE),
        (RuntimeError("for\na test"), Reason.READER_FAILED),
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
    failed = report.outcome(3)
    assert failed is not None
    assert failed.detail.isprintable()


def test_an_unassigned_peer_does_not_count(scene: Scene) -> None:
    report = scene.gather([2, 3], assignment=lambda uid: ASSIGNMENT if uid == 2 else None)
    assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.WRONG_ASSIGNMENT)]


def test_a_long_message_of_a_store_is_cut(scene: Scene) -> None:
    scene.fail(2, PermanentError(Reason.STORE_REFUSED, "x" * 10_000))
    outcome = scene.gather([2]).outcome(2)
    assert len(outcome.detail) == 300


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_stop_request_is_no_outcome(scene: Scene, concurrency: int) -> None:
    scene.fail(3, StoppedError("for a test"))
    with pytest.raises(StoppedError):
        scene.gather([2, 3, 4], concurrency=concurrency)


def test_a_local_failure_is_no_verdict_on_a_peer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "for a test")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(TemplarError) as caught:
        scene.gather(list(scene.members))
    assert caught.value.reason is Reason.LOCAL_FILE


# Concurrency.


def unsigned(outcome: PeerOutcome) -> PeerOutcome:
    """Without signatures and durations, which differ each time."""
    found = outcome.submission
    plain = None if found is None else replace(found, commit_signature="", manifest_signature="")
    return replace(outcome, submission=plain, seconds=0.0)


def test_the_report_does_not_depend_on_how_many_are_fetched_at_once(tmp_path: Path) -> None:
    reports = []
    for concurrency in (1, 8):
        folder = tmp_path / str(concurrency)
        folder.mkdir()
        scene = Scene(folder, num_miners=8)
        scene.spoil(3)
        scene.withdraw(5, *REVEALED)
        scene.buckets[6].reveal(scene.times, scene.payloads[6], committed=scene.times.commit_interval.first - 1)
        scene.buckets[7].store.before = failing(BUSY, times=3)
        report = scene.gather([9, 3, 5, 6], reserve=[7, 2], others=[4, 8], concurrency=concurrency, retry_seconds=24.0)
        reports.append([unsigned(outcome) for outcome in report.outcomes])
    assert reports[0] == reports[1]
    assert [outcome.uid for outcome in reports[0] if outcome.submission] == [2, 4, 7, 8, 9]
