"""Measure what a gather costs over the transfer itself: 20 peers with payloads of 5 MB behind one S3 endpoint.

    python -m benchmarks.gather [--quick]

A gather is measured against a bare loop that makes the same requests (HEAD, GET and HEAD of commitment and manifest,
HEAD and GET of the payload) with one shared boto3 client and as many threads, reads every body whole and hashes the
payloads. The two run in turn, and which goes first changes; the figures are medians. CPU is that of this process, with
all its threads; the endpoint is `rclone serve s3`, another process on this machine.

The gather is `Gatherer.gather` as a node calls it, with one boto3 client per bucket, and all checks that come before
the decoding: presence, times, sizes, canonical form, signatures, commitments, assignments and hashes. Decoding is left
out, and so is the write to the payload cache, which takes only what was decoded; `benchmarks.codec_speed` has that.

- `cpu_x`: CPU time of the gather, over that of the bare loop.
- `wall_x`: the same with wall time.

The last line is JSON: these, what is behind them, and whether every bar holds.
"""

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import figures_table, measured
from benchmarks.loader import Endpoint, serving
from lab.hotkeys import hotkey_from_seed
from templar.canonical import sha256_hex
from templar.chain.base import NeuronInfo, Role
from templar.chain.clock import SystemClock
from templar.chain.hotkey import Hotkey
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import Reason, RejectedError
from templar.exchange.buckets import Buckets
from templar.exchange.gather import Gatherer
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Manifest
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.reveal import RevealRules
from templar.exchange.signed import Network, seal
from templar.gradient.layout import Layout
from templar.hparams import load_hparams
from templar.store.address import BucketAddress, encode_address
from templar.store.s3 import S3Store
from templar.timeline import WindowTimes
from templar.training.model import parameter_shapes

PRESET = "1B"  # payloads of this model may have 5 MB
WINDOW, NETUID, CONCURRENCY = 3, 1, 8
NETWORK = Network(NETUID, "ab" * 32)
ASSIGNMENT = "cd" * 32
PATIENCE_SECONDS = 600.0
BAR = 1.3


@dataclass(frozen=True)
class Sizes:
    """The size of a measurement."""

    num_peers: int = 20
    payload_bytes: int = 5_000_000
    rounds: int = 25


FULL = Sizes()
QUICK = Sizes(rounds=9)


@dataclass(frozen=True)
class Cost:
    """The time of one run, in seconds."""

    cpu: float
    wall: float


class Undecoded(PayloadCache):
    """Checks only the hash of a payload, and keeps nothing: the measurement ends before the decoding."""

    def admit(self, data: bytes, digest: str, *, window: int, uid: int, hotkey: str) -> None:
        """Check the hash as `PayloadCache.admit` does."""
        if sha256_hex(data) != digest:
            raise RejectedError(Reason.WRONG_HASH, f"uid {uid}: the payload does not have the committed hash")


class Scene:
    """A window that has closed, whose miners all revealed in time, and a node that gathers them."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        hparams = load_hparams(PRESET)
        self.folder = folder
        self.layout = Layout.of(parameter_shapes(hparams.model), hparams.gradient, "sparseloco")
        closed = time.time() - hparams.windows.settle_delay_seconds - 10
        self.times = WindowTimes(WINDOW, closed - hparams.windows.seconds, closed, hparams.windows)
        hotkeys = [hotkey_from_seed(f"peer {uid}".encode().ljust(32)) for uid in range(sizes.num_peers)]
        for uid, hotkey in enumerate(hotkeys):
            self._reveal(uid, hotkey, sizes.payload_bytes)
        self.hotkeys = hotkeys

    def keys(self, uid: int) -> tuple[str, str, str]:
        """Return what a peer published: commitment, manifest, payload."""
        commit, manifest, payload = (
            window_key(kind, WINDOW, uid) for kind in (Kind.COMMIT, Kind.MANIFEST, Kind.GRADIENT)
        )
        return commit, manifest, payload

    def bucket(self, uid: int) -> str:
        """Name of a peer's bucket."""
        return f"peer-{uid}"

    def address(self, uid: int, endpoint: Endpoint) -> str:
        """A peer's bucket as it is committed."""
        return encode_address(BucketAddress(self.bucket(uid), endpoint.key_id, endpoint.secret))

    def peers(self, endpoint: Endpoint) -> list[NeuronInfo]:
        """The peers, with their buckets behind an endpoint."""
        return [
            NeuronInfo(uid, each.address, 0.0, False, 0.0, self.address(uid, endpoint), Role.MINER)
            for uid, each in enumerate(self.hotkeys)
        ]

    def buckets(self, endpoint: Endpoint) -> Buckets:
        """Everybody's buckets, committed on a chain."""
        path = self.folder / "ledger.sqlite"
        create_ledger(path, netuid=NETUID, block_seconds=12.0, genesis_time=time.time(), seed=1)
        for uid, hotkey in enumerate(self.hotkeys):
            ledger = Ledger(path, hotkey=hotkey, durable=False)
            ledger.register(hotkey.address)
            ledger.set_commitment(self.address(uid, endpoint))

        def open_reader(address: BucketAddress) -> S3Store:
            key, secret = address.access_key_id, address.secret_access_key
            return S3Store(address.account_id, endpoint_url=endpoint.url, access_key_id=key, secret_access_key=secret)

        return Buckets(Ledger(path, durable=False), open_reader)

    def _reveal(self, uid: int, hotkey: Hotkey, payload_bytes: int) -> None:
        folder = self.folder / self.bucket(uid)
        folder.mkdir()
        payload = os.urandom(payload_bytes)
        manifest = Manifest(
            netuid=NETUID,
            genesis=NETWORK.genesis,
            uid=uid,
            hotkey=hotkey.address,
            window=WINDOW,
            payload_sha256=hashlib.sha256(payload).hexdigest(),
            payload_bytes=len(payload),
            assignment=ASSIGNMENT,
            root_before="ef" * 32,
            steps=0,
            tokens=0,
        )
        objects = (seal(manifest.commit, hotkey).encode(), seal(manifest, hotkey).encode(), payload)
        revealed = self.times.reveal_interval.first
        for key, data, at in zip(
            self.keys(uid), objects, (self.times.commit_interval.last, revealed, revealed), strict=True
        ):
            (folder / key).write_bytes(data)
            os.utime(folder / key, (at, at))  # the endpoint's LastModified


def bare_loop(scene: Scene, endpoint: Endpoint) -> Callable[[], None]:
    """The same requests without any check."""
    client = endpoint.client()
    uids = range(len(scene.hotkeys))

    def fetch(uid: int) -> str:
        bucket = scene.bucket(uid)
        *signed, payload = scene.keys(uid)
        for key in signed:
            client.head_object(Bucket=bucket, Key=key)
            client.get_object(Bucket=bucket, Key=key)["Body"].read()
            client.head_object(Bucket=bucket, Key=key)
        client.head_object(Bucket=bucket, Key=payload)
        return hashlib.sha256(client.get_object(Bucket=bucket, Key=payload)["Body"].read()).hexdigest()

    def run() -> None:
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            if len(set(pool.map(fetch, uids))) != len(uids):
                raise RuntimeError("the endpoint did not give every payload")

    return run


def whole_gather(scene: Scene, endpoint: Endpoint) -> Callable[[], None]:
    """A node's gather, up to the decoding."""
    gatherer = Gatherer(
        scene.buckets(endpoint), Undecoded(scene.folder / "payloads", scene.layout), SystemClock(), CONCURRENCY
    )
    rules, peers = RevealRules(NETWORK, scene.times, lambda uid: ASSIGNMENT), scene.peers(endpoint)

    def run() -> None:
        report = gatherer.gather(peers, rules, retry_until=time.time() + PATIENCE_SECONDS)
        if len(report.submissions) != len(peers):
            raise RuntimeError(report.summary)

    return run


def cost(run: Callable[[], None]) -> Cost:
    """Run it once."""
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def compare(sizes: Sizes, folder: Path) -> tuple[list[Cost], list[Cost]]:
    """Every round's cost of the bare loop and of the gather."""
    buckets = folder / "buckets"
    buckets.mkdir()
    scene = Scene(buckets, sizes)
    with serving(buckets) as endpoint:
        runs = (bare_loop(scene, endpoint), whole_gather(scene, endpoint))
        for run in runs:  # the endpoint hashes a file before it answers for the first time
            run()
        costs: tuple[list[Cost], list[Cost]] = ([], [])
        for number in range(sizes.rounds):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                costs[which].append(cost(runs[which]))
    return costs


def run(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    sizes = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="templar-gather-") as name:
        bare, ours = compare(sizes, Path(name))
    title = f"{sizes.num_peers} peers, {sizes.payload_bytes / 1e6:g} MB each, {sizes.rounds} rounds"
    table = figures_table(title, "median seconds", "bare loop", "gather", "times", "bar")
    figures: dict[str, float] = {}
    for name in ("cpu", "wall"):
        before, after = (statistics.median(getattr(each, name) for each in costs) for costs in (bare, ours))
        figures |= {f"{name}_x": after / before, f"bare_{name}_seconds": before, f"gather_{name}_seconds": after}
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}", f"at most {BAR:g}")
    Console().print(table)
    rounded: dict[str, Any] = {name: round(figure, 4) for name, figure in figures.items()}
    holds = figures["cpu_x"] <= BAR and figures["wall_x"] <= BAR
    return rounded | {"num_peers": sizes.num_peers, "payload_bytes": sizes.payload_bytes, "holds": holds}


if __name__ == "__main__":
    raise SystemExit(measured("gather", __doc__, run, quick="fewer rounds"))
