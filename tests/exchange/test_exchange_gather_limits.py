"""Limits of a gather: its deadline and its requests."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from gather_cases import BUSY, GATHER, OTHER, RESERVE, Scene, accepted, summary

from deployments.s3_endpoint import AccessKey
from templar.chain.clock import SystemClock
from templar.errors import Reason
from templar.exchange import gather as gather_module
from templar.exchange.gather import HEALTHY_REQUESTS
from templar.exchange.object_keys import Kind
from templar.store.s3_protocol import S3Settings
from tests.store.conftest import s3_store
from tests.support.scripted_server import Reply, Request, s3_error, scripted_server
from tests.support.subnet import Member, Subnet

KEY = AccessKey("ABCDEFGHIJKLMNOPQRST", "the-secret")
PATIENT = S3Settings(read_timeout_seconds=600.0, slowest_bytes_per_second=1e-3)
"""Nothing but the deadline of the gather ends a transfer soon."""
LONG = 600.0


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path, num_miners=8)  # uids 2 to 9


class TestSlowPeers:
    """Payloads that come a byte at a time, over HTTP and in real time."""

    @pytest.fixture(autouse=True)
    def _in_real_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gather_module, "MIN_SECONDS", 1.5)  # the window's own deadline has long passed
        # A body of this model's is some hundred bytes, which even a slow peer sends in seconds.
        monkeypatch.setattr("tests.support.scripted_server.DRIP_BYTES", 1)
        monkeypatch.setattr("tests.support.scripted_server.DRIP_SECONDS", 5.0)

    @contextmanager
    def slow(self, scene: Scene, *uids: int) -> Iterator[None]:
        """These peers' payloads take hours. In the end, no thread of a gather is left."""

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
            for thread in threading.enumerate():
                if thread.name.startswith("gather"):
                    thread.join()
        for uid in uids:
            scene.views[uid] = scene.buckets[uid].store

    def test_a_slow_peer_is_cancelled_and_the_reserve_has_its_place(self, scene: Scene) -> None:
        with self.slow(scene, 3):
            report = scene.gather([2, 3, 4], reserve=[5, 6], clock=SystemClock(), concurrency=8)
        assert summary(report) == [
            (2, GATHER, None),
            (3, GATHER, Reason.TOO_SLOW),
            (4, GATHER, None),
            (5, RESERVE, None),
        ]
        slow = report.outcome(3)
        assert slow.detail
        again = scene.gather([2, 3, 4], clock=SystemClock(), concurrency=8)
        assert accepted(again) == [2, 3, 4]

    def test_without_a_reserve_a_slow_peer_has_all_of_the_time(self, scene: Scene) -> None:
        with self.slow(scene, 3):
            report = scene.gather([2, 3], others=[4], clock=SystemClock(), concurrency=8)
        assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.TOO_SLOW), (4, OTHER, None)]
        assert report.seconds >= 1.5

    def test_slow_peers_do_not_block_the_others(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gather_module, "SLOW_SECONDS", 0.1)
        with self.slow(scene, 2, 3, 4, 5):
            report = scene.gather([2, 3, 4, 5, 6, 7], others=[8, 9], clock=SystemClock(), concurrency=2)
        assert accepted(report) == [6, 7, 8, 9]
        assert report.rejected == {Reason.TOO_SLOW: 4}

    def test_a_slow_reserve_leaves_time_for_the_next(self, scene: Scene) -> None:
        scene.withdraw(2, Kind.COMMIT)
        with self.slow(scene, 3):
            report = scene.gather([2, 4], reserve=[3, 5], clock=SystemClock(), concurrency=8)
        assert summary(report) == [
            (2, GATHER, Reason.COMMIT_MISSING),
            (3, RESERVE, Reason.TOO_SLOW),
            (4, GATHER, None),
            (5, RESERVE, None),
        ]

    def test_a_peer_that_was_never_tried_has_an_outcome(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_a_store_that_fails_from_some_request_on(
        self, scene: Scene, broken: int, late: bool, concurrency: int
    ) -> None:
        if late:
            scene.subnet.clock.sleep_until(scene.times.settles + 50)
        store, good = scene.buckets[3].store, [broken]

        def hook(operation: str, key: str) -> None:
            if not good[0]:
                raise BUSY
            good[0] -= 1

        store.before = hook
        report = scene.gather([2, 3, 4], concurrency=concurrency, retry_seconds=LONG)
        assert summary(report) == [(2, GATHER, None), (3, GATHER, Reason.STORE_BUSY), (4, GATHER, None)]
        assert HEALTHY_REQUESTS <= len(store.calls) <= 2 * HEALTHY_REQUESTS
        assert all(len(scene.buckets[uid].store.calls) == HEALTHY_REQUESTS for uid in (2, 4))

    def test_accepted_objects_are_not_requested_again(self, scene: Scene) -> None:
        store, failures = scene.buckets[3].store, [3]

        def hook(operation: str, key: str) -> None:
            if operation == "get" and key == scene.key(Kind.GRADIENT, 3) and failures[0]:
                failures[0] -= 1
                raise BUSY

        store.before = hook
        assert accepted(scene.gather([3], retry_seconds=LONG)) == [3]
        kinds = (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT)
        assert [store.count("get", scene.key(kind, 3)) for kind in kinds] == [1, 1, 4]

    def moments(self, folder: Path, uid: int, owner: Callable[[Subnet], Member]) -> list[float]:
        """When a failing store was asked."""
        folder.mkdir()
        scene = Scene(folder, num_miners=3)
        moments: list[float] = []

        def hook(operation: str, key: str) -> None:
            moments.append(scene.subnet.clock.now())
            raise BUSY

        scene.buckets[uid].store.before = hook
        scene.gather([uid], owner=owner(scene.subnet), retry_seconds=LONG)
        return moments

    def test_jitter_depends_on_node_and_peer_only(self, tmp_path: Path) -> None:
        one = self.moments(tmp_path / "1", 2, lambda subnet: subnet.validators[0])
        assert self.moments(tmp_path / "2", 2, lambda subnet: subnet.validators[0]) == one
        assert self.moments(tmp_path / "3", 2, lambda subnet: subnet.miners[2]) != one
        assert self.moments(tmp_path / "4", 3, lambda subnet: subnet.validators[0]) != one
        pauses = [after - before for before, after in itertools.pairwise(one)]
        assert all(pause > 0 for pause in pauses)
        assert len({round(pause, 6) for pause in pauses}) == len(pauses)

    def test_each_node_has_its_own_order_of_peers(self, scene: Scene) -> None:
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
