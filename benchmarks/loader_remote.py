"""The measurements of `benchmarks.loader` against an S3 endpoint: rates, the time to the first batch, memory."""

import http.client
import multiprocessing
import statistics
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.loader_local import seconds
from benchmarks.loader_shard import BUCKET, Endpoint, window_order
from templar.data.shards.block_file import Transfer
from templar.data.shards.manifest import ShardManifest
from templar.store.s3_client import make_client
from templar.store.s3_protocol import S3Settings

BATCH_SIZE = 16  # sequences of the first batch: as in the preset `local`; micro-batches of the others have fewer
_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class Rates:
    """Medians of pairs of measurements."""

    raw: float  # bytes per second of the raw client
    ours: float  # bytes per second of the download, to the disk
    fraction: float  # of the pairs' quotients


@dataclass(frozen=True)
class Memory:
    """The bytes that reading a window in batches adds to a process."""

    peak: int  # most resident bytes, less those before
    mapped: int  # those of them that are pages of the shard's file, which the kernel takes back when it needs them


class RawClient:
    """Reads a shard's files by ranges and drops the bytes: the best rate of the endpoint.

    Same ranges and as many connections as `Shard.download`; signed URLs, Python's own HTTP client, no checks.
    """

    def __init__(self, endpoint: Endpoint, manifest: ShardManifest) -> None:
        client = make_client(
            "s3",
            endpoint_url=endpoint.url,
            access_key_id=endpoint.key_id,
            secret_access_key=endpoint.secret,
            settings=S3Settings(),
        )
        transfer = Transfer()
        self._threads = transfer.workers
        self._host = urlsplit(endpoint.url).netloc
        self._ranges: list[tuple[str, int, int]] = []
        for file in manifest.files:
            url = urlsplit(client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": file.name}, 86_400))
            step = max(transfer.part_bytes // file.block_bytes, 1) * file.block_bytes
            self._ranges += [
                (f"{url.path}?{url.query}", start, min(start + step, file.size)) for start in range(0, file.size, step)
            ]

    def read(self) -> None:
        """Read everything once."""
        local = threading.local()
        connections: list[http.client.HTTPConnection] = []

        def prepare() -> None:
            local.connection = http.client.HTTPConnection(self._host)
            local.buffer = memoryview(bytearray(_BUFFER_BYTES))
            connections.append(local.connection)

        def fetch(part: tuple[str, int, int]) -> None:
            path, start, end = part
            local.connection.request("GET", path, headers={"Range": f"bytes={start}-{end - 1}"})
            answer = local.connection.getresponse()
            received = 0
            while count := answer.readinto(local.buffer):
                received += count
            assert received == end - start, f"{answer.status}: {received} bytes instead of {end - start}"

        with ThreadPoolExecutor(self._threads, initializer=prepare) as pool:
            list(pool.map(fetch, self._ranges))
        for connection in connections:
            connection.close()


@contextmanager
def empty_folder(folder: Path) -> Iterator[Path]:
    """A new folder in a folder, removed in the end."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def download_rates(endpoint: Endpoint, folder: Path, repetitions: int) -> Rates:
    """The rates of the shard's download and of the raw client, measured in alternating order."""
    with empty_folder(folder) as path:
        manifest = endpoint.open(path).manifest
    client = RawClient(endpoint, manifest)
    client.read()  # the endpoint hashes a file before it answers for the first time
    raw, ours = [], []
    for repetition in range(repetitions):
        for is_raw in (True, False) if repetition % 2 == 0 else (False, True):
            if is_raw:
                raw.append(seconds(client.read))
            else:
                with empty_folder(folder) as path:
                    ours.append(seconds(endpoint.open(path).download))
    fractions = [before / after for before, after in zip(raw, ours, strict=True)]
    size = manifest.num_bytes
    return Rates(size / statistics.median(raw), size / statistics.median(ours), statistics.median(fractions))


def first_batch(endpoint: Endpoint, folder: Path, num_pages: int, repetitions: int) -> tuple[float, float]:
    """Seconds from opening the dataset to a window's first batch, and for the whole shard: medians, on an empty disk.

    The first measurement does not count, because it includes work that a process does only once.
    """
    first, whole = [], []
    for _ in range(repetitions + 1):
        with empty_folder(folder) as path:
            first.append(seconds(partial(_read_batch, endpoint, path, num_pages)))
        with empty_folder(folder) as path:
            whole.append(seconds(partial(_download, endpoint, path)))
    return statistics.median(first[1:]), statistics.median(whole[1:])


def memory(endpoint: Endpoint, folder: Path, *, num_pages: int, setting: int) -> Memory:
    """The memory that reading a window adds to a fresh process, of which `setting` bytes may stay mapped."""
    context = multiprocessing.get_context("spawn")
    with empty_folder(folder) as path, ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_read_window, endpoint, path, num_pages, setting).result()


def _read_batch(endpoint: Endpoint, folder: Path, num_pages: int) -> None:
    shard = endpoint.open(folder)
    shard.read(window_order(shard.manifest.num_samples, num_pages)[:BATCH_SIZE])


def _download(endpoint: Endpoint, folder: Path) -> None:
    endpoint.open(folder).download()


def _read_window(endpoint: Endpoint, folder: Path, num_pages: int, setting: int) -> Memory:
    shard = endpoint.open(folder, Transfer(mapped_bytes=setting))
    order = window_order(shard.manifest.num_samples, num_pages)
    before, mapped_before = _status("VmRSS"), _status("RssFile")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    for start in range(0, len(order), BATCH_SIZE):
        shard.read(order[start : start + BATCH_SIZE])
    return Memory(_status("VmHWM") - before, _status("RssFile") - mapped_before)


def _status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
