"""Limits of a gather: its deadline and its requests."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deployments.s3_endpoint import AccessKey
from templar.chain.base import Clock
from templar.chain.clock import SystemClock
from templar.errors import Reason, TransientError
from templar.exchange import gather as gather_module
from templar.exchange.gather import HEALTHY_REQUESTS, Gatherer, GatherReport, Tier
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules
from templar.store.base import ObjectStore
from templar.store.s3_protocol import S3Settings
from tests.store.conftest import s3_store
from tests.support.scripted_server import Reply, Request, s3_error, scripted_server
from tests.support.subnet import (
    ASSIGNMENT,
    LAYOUT,
    NETWORK,
    Bucket,
    Member,
    Subnet,
    payload_bytes,
)

WINDOW = 3
KEY = AccessKey("ABCDEFGHIJKLMNOPQRST", "the-secret")
PATIENT = S3Settings(read_timeout_seconds=600.0, slowest_bytes_per_second=1e-3)
"""Nothing but the deadline of the gather ends a transfer soon."""


class Scene:
    """A window that has closed; everybody's bucket is in memory unless it is replaced."""

    def __init__(self, folder: Path, num_miners: int) -> None:
        self.folder = folder
        self.subnet = Subnet(folder, num_miners=num_miners)
        self.times = self.subnet.times(WINDOW)
        self.members: dict[int, Member] = {each.uid: each for each in self.subnet.miners}
        self.buckets = {each.uid: Bucket(each) for each in self.subnet.miners}
        self.payloads = {each.uid: payload_bytes(each, WINDOW) for each in self.subnet.miners}
        for uid, bucket in self.buckets.items():
            bucket.reveal(self.times, self.payloads[uid])
        self.views: dict[int, ObjectStore] = {uid: bucket.store for uid, bucket in self.buckets.items()}
        self.gathers = 0

    def key(self, kind: Kind, uid: int) -> str:
        return window_key(kind, WINDOW, uid)

    def gather(
        self,
        peers: Sequence[int],
        *,
        reserve: Sequence[int] = (),
        others: Sequence[int] = (),
        clock: Clock | None = None,
        concurrency: int = 8,
        retry_seconds: float = 600.0,
        owner: Member | None = None,
    ) -> GatherReport:
        self.gathers += 1
        views = {self.members[uid].account: store for uid, store in self.views.items()}
        gatherer = Gatherer(
            self.subnet.buckets(owner, views),
            PayloadCache(self.folder / f"payloads-{self.gathers}", LAYOUT),
            clock or self.subnet.clock,
            concurrency,
        )
        return gatherer.gather(
            [self.members[uid].neuron for uid in peers],
            RevealRules(NETWORK, self.times, lambda uid: ASSIGNMENT),
            reserve=[self.members[uid].neuron for uid in reserve],
            others=[self.members[uid].neuron for uid in others],
            retry_until=self.times.settles + retry_seconds,
        )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, num_miners=10)  # uids 2 to 11


def summary(report: GatherReport) -> list[tuple[int, Tier, Reason | None]]:
    return [(outcome.uid, outcome.tier, outcome.reason) for outcome in report.outcomes]


def accepted(report: GatherReport) -> list[int]:
    return [submission.uid for submission in report.submissions]


GATHER, RESERVE, OTHER = Tier.GATHER, Tier.RESERVE, Tier.OTHER


class TestSlowPeers:
    """Payloads that come a few bytes at a time, over HTTP and in real time."""

    @pytest.fixture(autouse=True)
    def _short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gather_module, "MIN_SECONDS", 1.5)  # the window's own deadline has long passed

    @contextmanager
    def slow(self, scene: Scene, *uids: int) -> Iterator[None]:
        """These peers' payloads take hours."""

        def script(request: Request) -> Reply:
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
        for uid in uids:
            scene.views[uid] = scene.buckets[uid].store

    @pytest.fixture
    def slow_scene(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
        # A body of this model's is some hundred bytes, which even a slow peer sends in seconds.
        monkeypatch.setattr("tests.support.scripted_server.DRIP_BYTES", 1)
        monkeypatch.setattr("tests.support.scripted_server.DRIP_SECONDS", 5.0)
        return Scene(tmp_path, num_miners=10)

    def test_a_slow_peer_is_cancelled_and_the_reserve_has_its_place(self, slow_scene: Scene) -> None:
        scene = slow_scene
        with self.slow(scene, 3):
            report = scene.gather([2, 3, 4], reserve=[5, 6], clock=SystemClock())
        assert summary(report) == [
            (2, GATHER, None),
            (3, GATHER, Reason.TOO_SLOW),
            (4, GATHER, None),
            (5, RESERVE, None),
        ]
        slow = report.outcome(3)
        assert slow is not None
        assert slow.detail
        self.assert_threads_end()
        again = scene.gather([2, 3, 4], clock=SystemClock())
        assert accepted(again) == [2, 3, 4]

    def test_without_a_reserve_a_slow_peer_has_all_of_the_time(self, slow_scene: Scene) -> None:
        with self.slow(slow_scene, 3):
            report = slow_scene.gather([2, 3], others=[4], clock=SystemClock())
        assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.TOO_SLOW), (4, OTHER, None)]
        assert report.seconds >= 1.5
        self.assert_threads_end()

    def test_slow_peers_do_not_block_the_others(self, slow_scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gather_module, "SLOW_SECONDS", 0.1)
        with self.slow(slow_scene, 2, 3, 4, 5):
            report = slow_scene.gather([2, 3, 4, 5, 6, 7], others=[8, 9], clock=SystemClock(), concurrency=2)
        assert accepted(report) == [6, 7, 8, 9]
        assert report.rejected == {Reason.TOO_SLOW: 4}
        self.assert_threads_end()

    def test_a_slow_reserve_leaves_time_for_the_next(self, slow_scene: Scene) -> None:
        scene = slow_scene
        scene.buckets[2].memory.delete([scene.key(Kind.COMMIT, 2)])
        with self.slow(scene, 3):
            report = scene.gather([2, 4], reserve=[3, 5], clock=SystemClock())
        assert summary(report) == [
            (2, GATHER, Reason.COMMIT_MISSING),
            (3, RESERVE, Reason.TOO_SLOW),
            (4, GATHER, None),
            (5, RESERVE, None),
        ]

    def test_a_peer_that_was_never_tried_has_an_outcome(
        self, slow_scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gather_module, "THREADS_PER_PLACE", 1)
        with self.slow(slow_scene, 2, 3):
            report = slow_scene.gather([2, 3], others=[4], clock=SystemClock(), concurrency=2)
        outcome = report.outcome(4)
        assert outcome is not None
        assert (outcome.reason, outcome.num_bytes) == (Reason.TOO_SLOW, 0)
        assert "turn" in outcome.detail

    def assert_threads_end(self) -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("gather"):
                thread.join()


class TestRequests:
    """A store that fails meets at most twice the requests of a healthy peer, however long the gather is."""

    BUSY = TransientError(Reason.STORE_BUSY, "for a test")

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize(("broken", "concurrency"), [(0, 1), (2, 4), (4, 1), (7, 4)])
    def test_a_store_that_fails_from_some_request_on(
        self, scene: Scene, broken: int, late: bool, concurrency: int
    ) -> None:
        if late:
            scene.subnet.clock.sleep_until(scene.times.settles + 50)
        store, good = scene.buckets[3].store, [broken]

        def hook(operation: str, key: str) -> None:
            if not good[0]:
                raise self.BUSY
            good[0] -= 1

        store.before = hook
        report = scene.gather([2, 3, 4], concurrency=concurrency)
        assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.STORE_BUSY), (4, GATHER, None)]
        assert HEALTHY_REQUESTS <= len(store.calls) <= 2 * HEALTHY_REQUESTS
        assert all(len(scene.buckets[uid].store.calls) == HEALTHY_REQUESTS for uid in (2, 4))

    def test_accepted_objects_are_not_requested_again(self, scene: Scene) -> None:
        store, failures = scene.buckets[3].store, [3]

        def hook(operation: str, key: str) -> None:
            if operation == "get" and key == scene.key(Kind.GRADIENT, 3) and failures[0]:
                failures[0] -= 1
                raise self.BUSY

        store.before = hook
        assert accepted(scene.gather([3], concurrency=1)) == [3]
        assert store.count("get", scene.key(Kind.COMMIT, 3)) == 1
        assert store.count("get", scene.key(Kind.MANIFEST, 3)) == 1
        assert store.count("get", scene.key(Kind.GRADIENT, 3)) == 4

    def moments(self, folder: Path, uid: int, owner: Callable[[Subnet], Member]) -> list[float]:
        """When a failing store was asked."""
        folder.mkdir()
        scene = Scene(folder, num_miners=3)
        moments: list[float] = []

        def hook(operation: str, key: str) -> None:
            moments.append(scene.subnet.clock.now())
            raise self.BUSY

        scene.buckets[uid].store.before = hook
        scene.gather([uid], concurrency=1, owner=owner(scene.subnet))
        return moments

    def test_jitter_depends_on_node_and_peer_only(self, tmp_path: Path) -> None:
        one = self.moments(tmp_path / "1", 2, lambda subnet: subnet.validators[0])
        assert self.moments(tmp_path / "2", 2, lambda subnet: subnet.validators[0]) == one
        assert self.moments(tmp_path / "3", 2, lambda subnet: subnet.miners[2]) != one
        assert self.moments(tmp_path / "4", 3, lambda subnet: subnet.validators[0]) != one
        pauses = [after - before for before, after in itertools.pairwise(one)]
        assert all(pause > 0 for pause in pauses)
        assert len({round(pause, 6) for pause in pauses}) == len(pauses)

    def test_each_node_has_its_own_order_of_peers(self, tmp_path: Path) -> None:
        orders = []
        for number, owner in enumerate(("validator", "validator", "another")):
            (tmp_path / str(number)).mkdir()
            scene = Scene(tmp_path / str(number), num_miners=10)
            asked: list[int] = []
            for uid, bucket in scene.buckets.items():
                bucket.store.before = lambda operation, key, uid=uid, asked=asked: asked.append(uid)
            member = scene.subnet.validators[0] if owner == "validator" else scene.subnet.members[0]
            scene.gather(range(2, 11), others=[11], concurrency=1, owner=member)
            orders.append(list(dict.fromkeys(asked)))
        assert orders[0] == orders[1]
        assert orders[0][:9] != orders[2][:9]
        assert sorted(orders[0]) == list(range(2, 12))


class TestReport:
    def test_the_report_counts_bytes_and_reasons(self, scene: Scene) -> None:
        sizes = {kind: scene.buckets[2].memory.head(scene.key(kind, 2)) for kind in (Kind.COMMIT, Kind.MANIFEST)}
        signed = sum(info.size for info in sizes.values() if info is not None)
        scene.buckets[3].memory.delete([scene.key(Kind.MANIFEST, 3)])
        scene.buckets[4].memory.delete([scene.key(Kind.COMMIT, 4)])
        scene.buckets[5].memory.delete([scene.key(Kind.COMMIT, 5)])
        report = scene.gather([2, 3, 4, 5])
        num_bytes = {outcome.uid: outcome.num_bytes for outcome in report.outcomes}
        assert num_bytes[2] == signed + len(scene.payloads[2])
        assert 0 < num_bytes[3] < signed
        assert num_bytes[4] == 0
        assert report.num_bytes == sum(num_bytes.values())
        assert report.rejected == {Reason.COMMIT_MISSING: 2, Reason.MANIFEST_MISSING: 1}
        line = replace(report, seconds=2.04).summary
        assert line == "1 of 4 accepted, 2 commit_missing, 1 manifest_missing; 0.0 MB in 2.0 s"
