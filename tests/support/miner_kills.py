"""Kill a miner again and again while it publishes: `python -m tests.support.miner_kills FOLDER KILLS`.

The buckets lie behind the S3 endpoint that the environment names. The miner runs in forked processes over the same
folder; while it compresses, commits and uploads it is killed at a random Python call, until the window is published.
Then the aggregator has its window, and the miner ends its own.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file

from templar.canonical import sha256_hex
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Manifest
from templar.exchange.signed import unseal
from templar.gradient.codec.wire import decode
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner
from templar.simulate.world import Member, World
from templar.store.address import BucketAddress
from templar.store.base import ObjectInfo
from templar.store.s3 import S3Store
from templar.store.s3_protocol import S3Settings
from templar.window import Action, drive_window, open_window
from tests.support.killing import KillRun, kill_after, main
from tests.support.network import tiny

T = TypeVar("T")

NUM_WINDOWS = 2
SHORTEST_JUMP_SECONDS = 1.0
TYPICAL_CALLS = 80_000
"""About how many Python calls it takes to compress, commit and upload; after the first window it is known."""
SLOW = {"blocks_per_window": 60, "block_seconds": 60.0, "time_window_delta_seconds": 600}
"""Windows so long that nobody is ever late, however slow the machine: time jumps over what nobody needs."""


class JumpingClock:
    """Real time, but for jumps over what somebody waits for; all processes share the jumps, in a file.

    A jump happens on a whole second of real time and is whole seconds long, so stamps in whole seconds stay true.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def now(self) -> float:
        return self.at(time.time())

    def at(self, real: float) -> float:
        """The time that it was at an instant of real time."""
        return real + sum(length for since, length in self._jumps() if real >= since)

    def sleep_until(self, timestamp: float) -> None:
        while 0 < (left := timestamp - self.now()) < SHORTEST_JUMP_SECONDS:
            time.sleep(left)
        if left <= 0:
            return
        since = math.floor(time.time()) + 1
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps([*self._jumps(), (since, math.ceil(left))]))
        part.replace(self._path)
        while time.time() < since:
            time.sleep(since - time.time())

    def compute(self, work: Callable[[], T]) -> T:
        return work()

    def _jumps(self) -> list[tuple[int, float]]:
        return json.loads(self._path.read_text()) if self._path.exists() else []


class JumpingStore(S3Store):
    """A bucket whose stamps are read as the jumping clock's."""

    def __init__(self, bucket: str, clock: JumpingClock) -> None:
        super().__init__(
            bucket,
            endpoint_url=os.environ["ENDPOINT"],
            access_key_id=os.environ["KEY_ID"],
            secret_access_key=os.environ["SECRET"],
            settings=S3Settings(),
        )
        self._jumping = clock

    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return None if info is None else self._moved(info)

    def list(self, prefix: str = "") -> Any:
        return (self._moved(info) for info in super().list(prefix))

    def _moved(self, info: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(info.key, info.size, math.floor(self._jumping.at(info.last_modified)))


class KillStage:
    """Buckets behind the endpoint, on jumping time."""

    gather_concurrency = 1

    def __init__(self, folder: Path, buckets: Path) -> None:
        self._buckets = buckets
        self.clock = JumpingClock(folder / "jumps.json")
        self.genesis_time = 4_000_000_000.4  # ahead of every machine's clock, so that all runs begin with a jump
        self.clock.sleep_until(self.genesis_time)

    def open_store(self, bucket: str) -> JumpingStore:
        (self._buckets / bucket).mkdir(parents=True, exist_ok=True)
        return JumpingStore(bucket, self.clock)

    def open_reader(self, address: BucketAddress) -> JumpingStore:
        return JumpingStore(address.bucket, self.clock)

    def address_of(self, member: Member) -> BucketAddress:
        return BucketAddress(member.account_id, "key", "secret")

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        for participant in participants:
            participant()


@dataclass(frozen=True)
class WindowReport:
    """Digests and figures of a window; `calls` are the Python calls from compression to the reveal."""

    window: int
    calls: int
    kills: int
    manifest: str
    applied: tuple[int, ...]
    roots: tuple[str, str]
    """Root of the miner and of the aggregator."""
    private: str


class MinerKills(KillRun):
    """A network whose miner dies while it publishes."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        super().__init__(folder, kills, seed)
        stage = KillStage(folder, Path(os.environ["BUCKETS"]))
        self._world = World(folder, tiny(windows=SLOW), seed=1, actors=("honest",), num_validators=1, stage=stage)
        self._left = kills
        self._calls = TYPICAL_CALLS

    def run(self) -> None:
        """Windows until all kills are spent, and one more."""
        window = 1
        while True:
            more = self._left > 0 or window < NUM_WINDOWS
            print(json.dumps(asdict(self._window(window))), flush=True)
            if not more:
                return
            window += 1

    def _window(self, window: int) -> WindowReport:
        kills, share = 0, math.ceil(self.kills / NUM_WINDOWS)
        while True:  # one that was killed has less to do: early points are likelier than late ones
            point = int(self._calls * self.random.random() ** 3)
            kill_at = point if self._left > 0 and kills < share else None
            answer = self.forked(lambda kill_at=kill_at: self._publish(window, kill_at))  # type: ignore[misc]
            self._look(window)
            if answer is not None:
                break
            kills, self._left = kills + 1, self._left - 1
        self._calls = answer["calls"]
        decided = self._must(lambda: self._aggregate(window))
        ended = self._must(lambda: self._end(window))
        return WindowReport(
            window,
            answer["calls"],
            kills,
            ended["manifest"],
            tuple(decided["applied"]),
            (ended["root"], decided["root"]),
            ended["private"],
        )

    def _publish(self, window: int, kill_at: int | None) -> dict[str, Any]:
        miner = self._started(Miner)
        assert open_window(miner, window).action is Action.RUN
        assert miner.fetch_pages(window).units
        assert miner.train(window).reason is None
        count = kill_after(kill_at)
        miner.compress(window)
        assert miner.commit(window).in_time
        assert miner.upload(window).in_time
        sys.setprofile(None)
        return {"calls": count()}

    def _aggregate(self, window: int) -> dict[str, Any]:
        aggregator = self._started(Aggregator)
        assert drive_window(aggregator, window).action is Action.RUN
        return {"applied": aggregator.settle(window).uids, "root": aggregator.state.root}

    def _end(self, window: int) -> dict[str, Any]:
        miner = self._started(Miner)
        assert open_window(miner, window).action is Action.RUN
        miner.gather(window)
        miner.apply(miner.settle(window))
        miner.publish_sync_proof(window)
        manifest = miner._manifest(window).digest
        miner.finish(window)
        private = self.folder / "private.safetensors"
        miner._private.save(private)
        tensors = sorted(load_file(private).items())
        digest = sha256_hex(b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors))
        return {"root": miner.state.root, "manifest": manifest, "private": digest}

    def _started(self, kind: type[Any]) -> Any:
        role = "honest" if kind is Miner else "aggregator"
        return self._world.node(next(member for member in self._world.members if member.role == role))

    def _must(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        answer = self.forked(work)
        assert answer is not None, "nobody kills this one"
        return answer

    def _look(self, window: int) -> None:
        """Check that the window's objects are whole, legal and unchanged."""
        miner = next(member for member in self._world.members if member.role == "honest")
        store, found = self._world.stage.open_store(miner.account_id), {}
        objects = dict(self._seen)
        for kind in (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT):
            key = window_key(kind, window, miner.uid)
            objects.pop(key, None)
            if store.head(key) is not None:
                objects[key] = found[kind] = store.get(key, max_bytes=1 << 20)
        self.check_unchanged(objects)
        commit = unseal(found[Kind.COMMIT], Commit).body if Kind.COMMIT in found else None
        manifest = unseal(found[Kind.MANIFEST], Manifest).body if Kind.MANIFEST in found else None
        if manifest is not None:
            assert commit is not None, "a manifest before the commitment"
            assert commit.commitment == manifest.digest
        if (payload := found.get(Kind.GRADIENT)) is not None:
            assert manifest is not None, "a payload before the manifest"
            assert (manifest.payload_sha256, manifest.payload_bytes) == (sha256_hex(payload), len(payload))
            header = decode(payload, self._layout()).header
            assert (header.window, header.uid, header.hotkey) == (window, miner.uid, miner.hotkey.address)
        store.close()

    def _layout(self) -> Any:
        from templar.gradient.layout import Layout
        from templar.training.model import parameter_shapes

        hparams = self._world.hparams
        return Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)


if __name__ == "__main__":
    main(MinerKills)
