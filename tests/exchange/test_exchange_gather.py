"""Gathering the reveals of a window that has closed: the report, the reserve, the time, the requests, the threads."""

import errno
import itertools
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from templar.canonical import sha256_hex
from templar.chain.clock import SystemClock
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange import gather as gather_module
from templar.exchange.gather import (
    HEAD_START_SECONDS,
    HEALTHY_REQUESTS,
    THREADS_PER_PLACE,
    Gatherer,
    Tier,
    Workers,
    ask_in_turn,
)
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules
from templar.interrupt import StoppedError
from templar.store.base import ObjectStore
from templar.store.s3_protocol import S3Settings
from tests.store.conftest import KEY, s3_store
from tests.support.errors import reason_of
from tests.support.scripted_server import Reply, s3_error, scripted_server
from tests.support.scripted_store import failing
from tests.support.subnet import ASSIGNMENT, LAYOUT, NETWORK, Bucket, Member, Subnet, payload_bytes

WINDOW = 3
BUSY = TransientError(Reason.STORE_BUSY, "for a test")
GATHER, RESERVE, OTHER = Tier.GATHER, Tier.RESERVE, Tier.OTHER
WRONG_HASH = Reason.WRONG_HASH
REVEALED = (Kind.MANIFEST, Kind.GRADIENT)
PATIENT = S3Settings(read_timeout_seconds=600.0, slowest_bytes_per_second=1e-3)
"""Nothing but the deadline of the gather ends a transfer soon."""
LONG = 600.0


class Scene:
    """A bucket for each of the miners, uids 2, 3, ...: all of them revealed in time. `views` are what readers see."""

    def __init__(self, folder, num_miners):
        self.folder = folder
        self.subnet = Subnet(folder, num_miners=num_miners)
        self.times = self.subnet.times(WINDOW)
        self.members: dict[int, Member] = {each.uid: each for each in self.subnet.miners}
        self.buckets = {uid: Bucket(each) for uid, each in self.members.items()}
        self.payloads = {uid: payload_bytes(each, WINDOW) for uid, each in self.members.items()}
        for uid, bucket in self.buckets.items():
            bucket.reveal(self.times, self.payloads[uid])
        self.views: dict[int, ObjectStore] = {uid: bucket.store for uid, bucket in self.buckets.items()}
        self.gathers = 0

    def spoil(self, *uids):
        """Their payloads do not have the committed hash."""
        for uid in uids:
            junk = bytes(len(self.payloads[uid]))
            self.buckets[uid].put(self.key(Kind.GRADIENT, uid), junk, self.times.reveal_interval.first)

    def withdraw(self, uid, *kinds):
        self.buckets[uid].memory.delete([self.key(kind, uid) for kind in kinds])

    def fail(self, uid, error=BUSY, *, until=float("inf")):
        """Make a bucket fail until some time."""

        def hook(operation, key):
            if self.subnet.clock.now() < until:
                raise error

        self.buckets[uid].store.before = hook

    def watch(self, uid, error=None):
        """When a bucket is asked; an error is the answer."""
        moments: list[float] = []

        def hook(operation, key):
            moments.append(self.subnet.clock.now())
            if error is not None:
                raise error

        self.buckets[uid].store.before = hook
        return moments

    def key(self, kind, uid):
        return window_key(kind, WINDOW, uid)

    def asked(self, uid):
        return bool(self.buckets[uid].store.calls)

    def gather(self, peers, reserve=(), others=(), *, clock=None, concurrency=1, retry_seconds=2.0, owner=None, **how):
        self.gathers += 1
        views = {self.members[uid].account: store for uid, store in self.views.items()}
        cache = PayloadCache(self.folder / f"payloads-{self.gathers}", LAYOUT)
        gatherer = Gatherer(self.subnet.buckets(owner, views), cache, clock or self.subnet.clock, concurrency)
        return gatherer.gather(
            self.neurons(peers),
            RevealRules(NETWORK, self.times, lambda uid: ASSIGNMENT),
            reserve=self.neurons(reserve),
            others=self.neurons(others),
            retry_until=self.times.settles + retry_seconds,
            **how,
        )

    def neurons(self, uids):
        return [self.members[uid].neuron for uid in uids]


def reasons(report):
    """Tier -> uid -> the reason of its outcome, None if it counts."""
    found = {}
    for outcome in report.outcomes:
        found.setdefault(outcome.tier, {})[outcome.uid] = outcome.reason
    return found


def accepted(report):
    return [submission.uid for submission in report.submissions]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path, num_miners=8)  # uids 2 to 9


def test_the_report_is_in_uid_order(scene):
    report = scene.gather([5, 2, 9, 3])
    assert [(each.uid, each.tier, each.reason) for each in report.outcomes] == [
        (uid, GATHER, None) for uid in (2, 3, 5, 9)
    ]
    assert report.window == WINDOW
    assert [each.manifest.payload_sha256 for each in report.submissions] == [
        sha256_hex(scene.payloads[uid]) for uid in (2, 3, 5, 9)
    ]


def test_the_report_counts_bytes_and_reasons(scene):
    infos = [scene.buckets[2].memory.head(scene.key(kind, 2)) for kind in (Kind.COMMIT, Kind.MANIFEST)]
    signed = sum(info.size for info in infos if info is not None)
    scene.withdraw(3, Kind.MANIFEST)
    scene.withdraw(4, Kind.COMMIT)
    scene.withdraw(5, Kind.COMMIT)
    report = scene.gather([2, 3, 4, 5])
    num_bytes = {outcome.uid: outcome.num_bytes for outcome in report.outcomes}
    assert num_bytes[2] == signed + len(scene.payloads[2])
    assert 0 < num_bytes[3] < signed
    assert "uid 3" in report.outcome(3).detail
    assert num_bytes[4] == 0
    assert report.num_bytes == sum(num_bytes.values())
    assert report.rejected == {Reason.COMMIT_MISSING: 2, Reason.MANIFEST_MISSING: 1}
    line = replace(report, seconds=2.04).summary
    assert line == "1 of 4 accepted, 2 commit_missing, 1 manifest_missing; 0.0 MB in 2.0 s"


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
def test_the_reserve_fills_the_places_of_failed_peers_in_order(scene, spoilt, reserve, others, unasked):
    scene.spoil(*spoilt)
    report = scene.gather([2, 3], reserve, others)
    tiers = {GATHER: (2, 3), RESERVE: reserve, OTHER: others}
    asked = {tier: [uid for uid in uids if uid not in unasked] for tier, uids in tiers.items()}
    assert reasons(report) == {
        tier: {uid: WRONG_HASH if uid in spoilt else None for uid in uids} for tier, uids in asked.items() if uids
    }
    assert not any(map(scene.asked, unasked))


def test_reveals_are_prefetched_at_once_and_fetched_once(scene):
    before = scene.subnet.clock.now()
    assert before < scene.times.settles
    seen = scene.watch(2)
    scene.spoil(3)
    scene.gather([2, 3])
    assert set(seen) == {before}
    assert scene.subnet.clock.now() == before, "nobody is waited for if all is known"
    assert scene.buckets[3].store.count("get", scene.key(Kind.GRADIENT, 3)) == 1, "nor is a rejected one"


def test_what_is_found_is_told_again_while_others_are_waited_for(scene):
    scene.withdraw(9, *REVEALED)
    scene.withdraw(4, Kind.COMMIT)
    begin, told = scene.subnet.clock.now(), []
    report = scene.gather([2, 3, 4], [5], [9], found=lambda report: told.append((scene.subnet.clock.now(), report)))
    assert accepted(report) == accepted(told[0][1]) == [2, 3, 5], "a miner without a commitment is not waited for"
    assert told[0][0] == begin
    pauses = [after - before for (before, _), (after, _) in itertools.pairwise(told)]
    assert {*pauses[1:]} == {scene.times.rules.poll_seconds}
    assert told[-1][0] < scene.times.settles


@pytest.mark.parametrize("kind", REVEALED)
def test_a_missing_object_is_looked_for_again_when_reveals_are_final(scene, kind):
    bucket, key = scene.buckets[3], scene.key(kind, 3)
    info = bucket.memory.head(key)
    data = bucket.memory.get(key, max_bytes=10_000)
    bucket.memory.delete([key])

    def appear(operation, called):
        if scene.subnet.clock.now() >= scene.times.settles:
            bucket.put(key, data, info.last_modified)

    bucket.store.before = appear
    report = scene.gather([2, 3])
    assert accepted(report) == [2, 3]
    assert scene.subnet.clock.now() == scene.times.settles


def test_a_reveal_that_is_too_early_is_looked_at_again(scene):
    """Its miner reveals once more if finality moves the close, perhaps after this node has looked."""
    bucket, interval = scene.buckets[3], scene.times.reveal_interval
    revealed = {scene.key(kind, 3): bucket.memory.get(scene.key(kind, 3), max_bytes=10_000) for kind in REVEALED}

    def store(seconds):
        for key, data in revealed.items():
            bucket.put(key, data, seconds)

    store(interval.first - 5)
    bucket.store.before = lambda operation, key: (
        store(interval.last) if scene.subnet.clock.now() > interval.last else None
    )
    assert accepted(scene.gather([2, 3])) == [2, 3]


def test_a_failing_store_is_asked_again_until_it_answers(scene):
    scene.spoil(4)
    for uid in (3, 5):
        scene.fail(uid, until=scene.times.settles + 1.5)
    report = scene.gather([2, 3, 4], reserve=[5, 6], retry_seconds=12.0)
    assert reasons(report) == {GATHER: {2: None, 3: None, 4: WRONG_HASH}, RESERVE: {5: None}}
    assert scene.times.settles + 1.5 <= scene.subnet.clock.now() <= scene.times.settles + 8
    assert not scene.asked(6)


def test_a_failing_store_is_given_up_at_the_deadline_and_its_place_filled(scene):
    scene.fail(3)
    report = scene.gather([2, 3], reserve=[4])
    assert reasons(report) == {GATHER: {2: None, 3: Reason.STORE_BUSY}, RESERVE: {4: None}}
    assert scene.times.settles <= scene.subnet.clock.now() <= scene.times.settles + 2
    assert len(scene.buckets[3].store.calls) < 20


def test_a_failing_store_does_not_hold_up_the_second_look_at_others(scene):
    scene.fail(3)
    scene.withdraw(4, *REVEALED)
    looked = scene.watch(4)
    report = scene.gather([3, 4])
    assert reasons(report) == {GATHER: {3: Reason.STORE_BUSY, 4: Reason.MANIFEST_MISSING}}
    assert max(looked) == scene.times.settles


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermanentError(Reason.ACCESS_DENIED, "for a test"), Reason.BUCKET_UNREADABLE),
        (TransientError(Reason.STORE_UNREACHABLE, "for a test"), Reason.STORE_UNREACHABLE),
        (RuntimeError("for\na test"), Reason.READER_FAILED),
    ],
)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_an_exploding_store_does_not_touch_the_others(scene, error, reason, concurrency):
    for uid in (3, 5):
        scene.fail(uid, error)
    report = scene.gather([2, 3, 4], reserve=[5, 6], others=[7], concurrency=concurrency)
    assert reasons(report) == {GATHER: {2: None, 3: reason, 4: None}, RESERVE: {5: reason, 6: None}, OTHER: {7: None}}
    assert report.outcome(3).detail.isprintable()


def test_a_long_message_of_a_store_is_cut(scene):
    scene.fail(2, PermanentError(Reason.STORE_REFUSED, "x" * 10_000))
    assert len(scene.gather([2]).outcome(2).detail) == 300


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_stop_request_is_no_outcome(scene, concurrency):
    scene.fail(3, StoppedError("for a test"))
    with pytest.raises(StoppedError):
        scene.gather([2, 3, 4], concurrency=concurrency)


def test_a_local_failure_is_no_verdict_on_a_peer(scene, monkeypatch):
    def refuse(path, target):
        raise OSError(errno.ENOSPC, "for a test")

    monkeypatch.setattr(Path, "replace", refuse)
    assert reason_of(lambda: scene.gather(list(scene.members))) is Reason.LOCAL_FILE


class TestSlowPeers:
    """Payloads that come a byte at a time, over HTTP and in real time."""

    @pytest.fixture(autouse=True)
    def _in_real_time(self, monkeypatch):
        monkeypatch.setattr(gather_module, "MIN_SECONDS", 1.5)  # the window's own deadline has long passed
        # A body of this model's is some hundred bytes, which even a slow peer sends in seconds.
        monkeypatch.setattr("tests.support.scripted_server.DRIP_BYTES", 1)
        monkeypatch.setattr("tests.support.scripted_server.DRIP_SECONDS", 5.0)

    @contextmanager
    def slow(self, scene, *uids):
        """These peers' payloads take hours. In the end, no thread of a gather is left."""

        def script(request):
            _, bucket, key = urlsplit(request.path).path.split("/", 2)
            memory = scene.buckets[int(bucket.removeprefix("slow-"))].memory
            info = memory.head(key)
            if info is None:
                return s3_error(404, "NoSuchKey")
            headers = {"Last-Modified": formatdate(info.last_modified, usegmt=True), "ETag": '"one"'}
            drips = key.startswith("gradient")
            body = memory.get(key, max_bytes=info.size)
            return Reply(200, body, headers, drips=drips and request.method == "GET")

        with scripted_server(script) as server:
            for uid in uids:
                scene.views[uid] = s3_store(f"slow-{uid}", server.endpoint_url, KEY, PATIENT)
            yield
            for thread in threading.enumerate():
                if thread.name.startswith("gather"):
                    thread.join()
        for uid in uids:
            scene.views[uid] = scene.buckets[uid].store

    @pytest.mark.parametrize(
        ("peers", "reserve", "others", "expected"),
        [
            ([2, 3, 4], [5, 6], [], {GATHER: {2: None, 3: Reason.TOO_SLOW, 4: None}, RESERVE: {5: None}}),
            ([2, 3], [], [4], {GATHER: {2: None, 3: Reason.TOO_SLOW}, OTHER: {4: None}}),
            # A slow one of the reserve leaves time for the next.
            ([7, 4], [3, 5], [], {GATHER: {4: None, 7: Reason.COMMIT_MISSING}, RESERVE: {3: Reason.TOO_SLOW, 5: None}}),
        ],
    )
    def test_a_slow_peer_is_cancelled_and_the_reserve_has_its_place(self, scene, peers, reserve, others, expected):
        scene.withdraw(7, Kind.COMMIT)
        with self.slow(scene, 3):
            report = scene.gather(peers, reserve, others, clock=SystemClock(), concurrency=8)
        assert reasons(report) == expected
        assert report.outcome(3).detail
        assert reserve or report.seconds >= 1.5, "without a reserve it has all of the time"
        assert accepted(scene.gather([2, 3, 4], clock=SystemClock(), concurrency=8)) == [2, 3, 4]

    def test_a_peer_that_was_never_tried_has_an_outcome(self, scene, monkeypatch):
        monkeypatch.setattr(gather_module, "THREADS_PER_PLACE", 1)
        with self.slow(scene, 2, 3):
            report = scene.gather([2, 3], others=[4], clock=SystemClock(), concurrency=2)
        outcome = report.outcome(4)
        assert (outcome.reason, outcome.num_bytes) == (Reason.TOO_SLOW, 0)
        assert "turn" in outcome.detail


class TestRequests:
    """A store that fails meets at most twice the requests of a healthy peer, however long the gather is."""

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize(("broken", "concurrency"), [(0, 1), (2, 4), (4, 1), (7, 4)])
    def test_a_store_that_fails_from_some_request_on(self, scene, broken, late, concurrency):
        if late:
            scene.subnet.clock.sleep_until(scene.times.settles + 50)
        store = scene.buckets[3].store

        def hook(operation, key):
            if len(store.calls) > broken:
                raise BUSY

        store.before = hook
        report = scene.gather([2, 3, 4], concurrency=concurrency, retry_seconds=LONG)
        assert reasons(report) == {GATHER: {2: None, 3: Reason.STORE_BUSY, 4: None}}
        assert HEALTHY_REQUESTS <= len(store.calls) <= 2 * HEALTHY_REQUESTS
        assert all(len(scene.buckets[uid].store.calls) == HEALTHY_REQUESTS for uid in (2, 4))

    def test_accepted_objects_are_not_requested_again(self, scene):
        store = scene.buckets[3].store
        store.before = failing(BUSY, "get", key=scene.key(Kind.GRADIENT, 3), times=3)
        assert accepted(scene.gather([3], retry_seconds=LONG)) == [3]
        kinds = (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT)
        assert [store.count("get", scene.key(kind, 3)) for kind in kinds] == [1, 1, 4]

    def moments(self, folder, uid, owner):
        """When a failing store was asked."""
        folder.mkdir()
        scene = Scene(folder, num_miners=3)
        moments = scene.watch(uid, BUSY)
        scene.gather([uid], owner=owner(scene.subnet), retry_seconds=LONG)
        return moments

    def test_jitter_depends_on_node_and_peer_only(self, tmp_path):
        one = self.moments(tmp_path / "1", 2, lambda subnet: subnet.validators[0])
        assert self.moments(tmp_path / "2", 2, lambda subnet: subnet.validators[0]) == one
        assert self.moments(tmp_path / "3", 2, lambda subnet: subnet.miners[2]) != one
        assert self.moments(tmp_path / "4", 3, lambda subnet: subnet.validators[0]) != one
        pauses = [after - before for before, after in itertools.pairwise(one)]
        assert all(pause > 0 for pause in pauses)
        assert len({round(pause, 6) for pause in pauses}) == len(pauses)

    def test_each_node_has_its_own_order_of_peers(self, scene):
        one, other = scene.subnet.validators[0], scene.subnet.members[0]
        orders = []
        for owner in (one, one, other):
            asked: list[int] = []
            for uid, bucket in scene.buckets.items():
                bucket.store.before = lambda operation, key, uid=uid, asked=asked: asked.append(uid)
            scene.gather(range(2, 9), others=[9], owner=owner)
            orders.append(list(dict.fromkeys(asked)))
        assert orders[0] == orders[1]
        assert orders[0][:7] != orders[2][:7]
        assert sorted(orders[0]) == list(range(2, 10))


def test_slow_calls_do_not_block_others_and_spare_ones_leave_the_last_places(monkeypatch):
    monkeypatch.setattr(gather_module, "SLOW_SECONDS", 0.0)
    released = threading.Event()
    workers = Workers(lambda uid: released.wait(), 2)
    last_places = range(2 * (THREADS_PER_PLACE - 1), 2 * THREADS_PER_PLACE)
    for uid in range(last_places.stop):
        assert workers.has_room(spare=True) is (uid not in last_places)
        assert workers.has_room()
        workers.start(uid, LONG)
    assert not workers.has_room()
    released.set()
    workers.close()


def test_the_result_of_a_cancelled_call_is_dropped():
    release, ended = threading.Event(), threading.Event()

    def work(uid):
        if uid == 1:
            release.wait()  # looks at no deadline
            ended.set()
        return uid

    workers = Workers(work, 2)
    workers.start(1, LONG)
    started = time.monotonic()
    assert workers.cancel([1], 0.05) == []
    assert time.monotonic() - started >= 0.05
    assert not workers.is_busy
    release.set()
    ended.wait()
    workers.start(2, LONG)
    assert workers.results(LONG) == [(2, 2)]  # and not what uid 1 brought
    workers.close()


def test_buckets_that_are_asked_in_turn_keep_one_another_from_nothing():
    """The first one hangs; the second is asked after a head start, and the rest is left when that is enough."""
    asked, opened = [], threading.Event()

    def work(uid):
        asked.append(uid)
        if uid == 1:
            opened.wait(60)
        return 10 * uid

    started = time.monotonic()
    answers = ask_in_turn(work, [1, 2, 3], seconds=30.0, concurrency=2)
    assert next(answers) == (2, 20)
    assert time.monotonic() - started < 10 * HEAD_START_SECONDS
    answers.close()
    opened.set()
    assert asked == [1, 2]
    asked.clear()
    assert list(ask_in_turn(work, [1, 2, 3], seconds=30.0, concurrency=1)) == [(1, 10), (2, 20), (3, 30)]


def test_buckets_whose_answers_are_all_wanted_are_asked_together(monkeypatch):
    monkeypatch.setattr(gather_module, "HEAD_START_SECONDS", LONG)
    barrier = threading.Barrier(3)
    answers = ask_in_turn(lambda uid: barrier.wait(20) >= 0, [1, 2, 3], seconds=LONG, concurrency=3, together=True)
    assert dict(answers) == dict.fromkeys([1, 2, 3], True)
