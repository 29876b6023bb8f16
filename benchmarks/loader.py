"""Measure how fast training data gets from documents to batches, relative to what the machine and the endpoint can do.

    python -m benchmarks.loader [--quick] [--others PYTHON]

All figures are medians of pairs of measurements that follow each other. The dataset is one shard of random tokens with
2048 per sample; the endpoint is `rclone serve s3` on this machine.

- `shard_memcpy_fraction`: rate of reading 64 MiB of random samples of a verified shard that is on the disk, over that
  of copying as many bytes, with cold caches.
- `s3_rate_fraction`: rate at which the shard comes to the disk, verified, over that of a raw client that reads the same
  ranges with as many connections and drops them, from an endpoint that gives 2 Gbit/s.
- `first_batch_fraction`: time from opening the dataset to the first batch of a window, 16 sequences, on an empty disk,
  over that for the whole shard. Its bar is for the full size: the first batch does not get smaller with the shard.
- `streaming_first_fraction`: the same for the first shuffled batch of a `StreamingLoader`.
- `streaming_x_litdata`, `streaming_x_mosaic`: tokens per second of a second epoch of a `StreamingLoader`, shuffled,
  from the disk, over those of litData and of MosaicML Streaming on the same tokens: the smaller of the figures without
  workers and with two. `PYTHON` is an interpreter that has both packages (`benchmarks/loader_others.py`).

The last line is JSON: these figures, those they are computed from, and whether every bar holds.
"""

import http.client
import json
import math
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks import loader_others
from benchmarks.command import command_line, figures_table, finish, seconds
from lab.gauntlet.endpoints import random_key, start_rclone
from templar.data.assignment import Assignment
from templar.data.sampling import sample_order
from templar.data.shards.block_file import Transfer
from templar.data.shards.manifest import INDEX_FILE, ShardIndex, ShardManifest
from templar.data.shards.shard_dataset import Shard, ShardedDataset
from templar.data.shards.shard_writer import ShardLayout, write_split
from templar.datasets.streaming import StreamingDataset, StreamingLoader
from templar.datasets.token_parts import best_fit
from templar.store.s3 import S3Store
from templar.store.s3_client import make_client
from templar.store.s3_protocol import S3Settings

MIB = 2**20
LIMIT = "238M"  # MiB per second of the endpoint for `s3_rate_fraction`, as rclone takes it: 2 Gbit/s
BARS = {
    "shard_memcpy_fraction": 0.6,
    "s3_rate_fraction": 0.8,
    "first_batch_fraction": 0.05,
    "streaming_first_fraction": 0.05,
    "streaming_x_litdata": 1.0,
    "streaming_x_mosaic": 1.0,
}
AT_MOST = frozenset({"first_batch_fraction", "streaming_first_fraction"})
COMPARED = {"streaming_x_litdata": "litdata", "streaming_x_mosaic": "mosaic"}  # figure -> the other reader
SEQUENCE_LENGTH = 2048
SAMPLE_BYTES = 2 * SEQUENCE_LENGTH
PIECE_SAMPLES = 4096
SAMPLES_PER_PAGE = 64
BUCKET = "dataset"
MEAN_TOKENS = 600
READ_SAMPLES = 16_384  # samples of a read, and of the copy that it is compared with: 64 MiB
BATCH_SIZE = 16  # sequences of the first batch: as in the preset `local`; micro-batches of the others have fewer
STREAMED_BATCH, WORKERS = 64, (0, 2)  # of the comparison with others
_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement."""

    shard_bytes: int = 1000 * MIB
    packed_tokens: int = 10_000_000
    repetitions: int = 5  # of each pair
    window_bytes: int = 128 * MIB  # of the window whose first batch is read; half of the shard at most
    compared_bytes: int = 256 * MIB  # of the tokens that other readers read, too


FULL = Sizes()
QUICK = Sizes(shard_bytes=128 * MIB, packed_tokens=3_000_000, repetitions=3, window_bytes=32 * MIB)


# The dataset, in a folder and behind an S3 endpoint of this machine.


@dataclass(frozen=True)
class Endpoint:
    """An S3 endpoint that serves a folder, and the key that opens it."""

    url: str
    key_id: str
    secret: str

    def client(self) -> Any:
        """A boto3 client with the key."""
        return make_client(
            "s3", endpoint_url=self.url, access_key_id=self.key_id, secret_access_key=self.secret, settings=S3Settings()
        )

    def open(self, folder: Path, transfer: Transfer = Transfer()) -> Shard:  # noqa: B008 - frozen
        """The shard, opened anew: index and manifest are read, its blocks come to lie in `folder`."""
        return ShardedDataset(self.connect(), "", folder=folder, transfer=transfer).shard(0)

    def connect(self) -> list[S3Store]:
        """The store with the dataset."""
        return [S3Store(BUCKET, endpoint_url=self.url, access_key_id=self.key_id, secret_access_key=self.secret)]


def write_dataset(bucket: Path, num_samples: int) -> None:
    """Write a dataset of one shard into a folder."""
    random = np.random.default_rng(0)
    pieces = (
        random.integers(0, 2**16, (min(PIECE_SAMPLES, num_samples - start), SEQUENCE_LENGTH), dtype=np.uint16)
        for start in range(0, num_samples, PIECE_SAMPLES)
    )
    bucket.mkdir()
    entries = write_split(bucket, "train", pieces, ShardLayout("uint16", SEQUENCE_LENGTH, num_samples))
    index = ShardIndex(
        version=1, dtype="uint16", sequence_length=SEQUENCE_LENGTH, tokenizer="0" * 64, splits={"train": entries}
    )
    (bucket / INDEX_FILE).write_bytes(index.canonical())


def window_order(num_samples: int, num_pages: int) -> NDArray[np.int64]:
    """The samples of a window: some pages of the shard, as an assignment names them."""
    pages = np.random.default_rng(1).permutation(num_samples // SAMPLES_PER_PAGE)[:num_pages]
    return sample_order(Assignment(0, 0, tuple(pages.tolist()), "0" * 64), SAMPLES_PER_PAGE)


@contextmanager
def serving(root: Path, *options: str) -> Iterator[Endpoint]:
    """Serve the folders in `root` as buckets, by `rclone serve s3` with some more options; nobody writes."""
    key = random_key()
    options = ("--read-only", "--dir-cache-time", "5m", *options)
    with (
        tempfile.TemporaryDirectory() as logs,
        closing(start_rclone(root, [key], Path(logs, "rclone.log"), *options)) as server,
    ):
        yield Endpoint(server.endpoint_url, key.access_key_id, key.secret_access_key)


# Without a network: packing, and reading a shard that is on the disk.


def cut_documents(num_tokens: int) -> dict[str, float]:
    """Shares of documents that end in another sample than they begin in, in both ways to pack, and of lost tokens.

    The lengths are lognormal, `MEAN_TOKENS` on average.
    """
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, num_tokens // MEAN_TOKENS).astype(np.int64) + 1
    offsets = np.concatenate([[0], lengths.cumsum()])
    num_samples, kept, *_ = best_fit(lengths.tolist(), SEQUENCE_LENGTH)
    cut = (lengths > SEQUENCE_LENGTH) | (np.array(kept) < lengths % SEQUENCE_LENGTH)
    return {
        "cut_as_stream": float(((offsets[1:] - 1) // SEQUENCE_LENGTH != offsets[:-1] // SEQUENCE_LENGTH).mean()),
        "cut_by_best_fit": float(cut.mean()),
        "lost_by_best_fit": float(1 - num_samples * SEQUENCE_LENGTH / offsets[-1]),
    }


def reading(shard: Shard, repetitions: int) -> float:
    """Rate of reading random samples of a verified shard, over that of copying as many bytes; the median of pairs.

    Each has cold caches, and this process has touched the samples' pages of the file before.
    """
    count = min(READ_SAMPLES, shard.manifest.num_samples // 2)
    out: NDArray[Any] = np.zeros((count, shard.manifest.sequence_length), shard.manifest.dtype)
    source, other = np.ones_like(out), np.zeros(2**23)
    copy = partial(np.copyto, out, source)
    read = partial(shard.read, np.random.default_rng(2).permutation(shard.manifest.num_samples)[:count], out)
    copy()
    read()
    return statistics.median(_cold(other, copy) / _cold(other, read) for _ in range(repetitions))


def _cold(other: NDArray[np.float64], work: Callable[[], object]) -> float:
    """The same after 64 MB of other memory have been written."""
    other += 1.0
    return seconds(work)


# From the endpoint: rates, and the time to the first batch.


@dataclass(frozen=True)
class Rates:
    """Medians of pairs of measurements."""

    raw: float  # bytes per second of the raw client
    ours: float  # bytes per second of the download, to the disk
    fraction: float  # of the pairs' quotients


class RawClient:
    """Reads a shard's files by ranges and drops the bytes: the best rate of the endpoint.

    Same ranges and as many connections as `Shard.download`; signed URLs, Python's own HTTP client, no checks.
    """

    def __init__(self, endpoint: Endpoint, manifest: ShardManifest) -> None:
        client = endpoint.client()
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


def first_batch(endpoint: Endpoint, folder: Path, num_pages: int, repetitions: int) -> list[float]:
    """Seconds from opening the dataset to a window's first batch and to a loader's, and for the whole shard.

    They are medians, on an empty disk. The first measurement does not count, because it
    includes work that a process does only once.
    """
    works = (partial(_read_batch, endpoint, num_pages), partial(_stream_batch, endpoint), partial(_download, endpoint))
    found: list[list[float]] = [[] for _ in works]
    for _ in range(repetitions + 1):
        for work, taken in zip(works, found, strict=True):
            with empty_folder(folder) as path:
                taken.append(seconds(partial(work, path)))
    return [statistics.median(taken[1:]) for taken in found]


def _read_batch(endpoint: Endpoint, num_pages: int, folder: Path) -> None:
    shard = endpoint.open(folder)
    shard.read(window_order(shard.manifest.num_samples, num_pages)[:BATCH_SIZE])


def _stream_batch(endpoint: Endpoint, folder: Path) -> None:
    next(iter(StreamingLoader(StreamingDataset(endpoint.connect, cache=folder), BATCH_SIZE)))


def _download(endpoint: Endpoint, folder: Path) -> None:
    endpoint.open(folder).download()


# Beside other readers.


def over_others(python: Path, bucket: Path, folder: Path, num_samples: int) -> dict[str, float]:
    """Tokens per second of a second epoch over those of each other reader: the smallest of the numbers of workers."""
    tokens = folder / "tokens.bin"
    dataset = StreamingDataset(bucket, cache=folder / "cache")
    with tokens.open("wb") as file:
        for sample in range(0, num_samples, PIECE_SAMPLES):
            numbers = np.arange(sample, min(sample + PIECE_SAMPLES, num_samples))
            file.write(dataset.__getitems__(numbers).astype(np.uint16).tobytes())
    found = dict.fromkeys(COMPARED, math.inf)
    for workers in WORKERS:
        loader = StreamingLoader(dataset, STREAMED_BATCH, num_workers=workers)
        ours = [loader_others.rate(loader) for _ in range(2)][-1]
        for figure, name in COMPARED.items():
            with empty_folder(folder) as path:
                words = [str(each) for each in (name, tokens, path / "data", SEQUENCE_LENGTH, STREAMED_BATCH, workers)]
                command = [str(python), "-W", "ignore", loader_others.__file__, *words]
                answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)  # noqa: S603
            theirs = json.loads(answer.stdout.splitlines()[-1])[-1]
            found[figure] = min(found[figure], ours / theirs)
    return found


# Everything.


def measure(sizes: Sizes, folder: Path, others: Path | None) -> dict[str, float]:
    """The figures; `folder` is empty, on a disk with room for four shards."""
    bucket = folder / BUCKET
    num_samples = sizes.shard_bytes // SAMPLE_BYTES
    num_pages = min(sizes.window_bytes, sizes.shard_bytes // 2) // SAMPLE_BYTES // SAMPLES_PER_PAGE
    write_dataset(bucket, num_samples)
    figures = cut_documents(sizes.packed_tokens)
    with serving(folder) as endpoint:
        first, streamed, whole = first_batch(endpoint, folder, num_pages, sizes.repetitions)
        with empty_folder(folder) as path:
            shard = endpoint.open(path)
            shard.download()
            read = reading(shard, 3 * sizes.repetitions)
    with serving(folder, "--bwlimit", LIMIT) as endpoint:
        rates = download_rates(endpoint, folder, sizes.repetitions)
    if others is not None:
        count = min(num_samples, sizes.compared_bytes // SAMPLE_BYTES)
        write_dataset(folder / "compared", count)
        figures |= over_others(others, folder / "compared", folder, count)
    return figures | {
        "shard_memcpy_fraction": read,
        "s3_rate_fraction": rates.fraction,
        "s3_raw_mb_per_second": rates.raw / 1e6,
        "s3_mb_per_second": rates.ours / 1e6,
        "first_batch_fraction": first / whole,
        "streaming_first_fraction": streamed / whole,
        "first_batch_seconds": first,
        "download_seconds": whole,
    }


def holds(figures: dict[str, float], bars: dict[str, float]) -> bool:
    """Whether every bar holds."""
    return all((figures[name] < bar) if name in AT_MOST else (figures[name] >= bar) for name, bar in bars.items())


def run(*, quick: bool, others: Path | None) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    sizes = QUICK if quick else FULL
    left_out = (AT_MOST if quick else frozenset()) | (COMPARED.keys() if others is None else frozenset())
    bars = {name: bar for name, bar in BARS.items() if name not in left_out}
    with tempfile.TemporaryDirectory(prefix="templar-loader-") as name:
        figures = measure(sizes, Path(name), others)
    title = f"a shard of {sizes.shard_bytes / MIB:.0f} MiB{' (--quick; otherwise 1000)' if quick else ''}"
    table = figures_table(title, "figure", "measured", "bar")
    for name, figure in figures.items():
        bar = f"{'below' if name in AT_MOST else 'at least'} {bars[name]:g}" if name in bars else ""
        table.add_row(name, f"{figure:.3f}" if figure < 10 else f"{figure:.1f}", bar)
    Console().print(table)
    rounded: dict[str, Any] = {name: round(figure, 4) for name, figure in figures.items()}
    return rounded | {"shard_mib": round(sizes.shard_bytes / MIB), "holds": holds(figures, bars)}


def main() -> int:
    """Parse the command line, measure, print."""
    parser = command_line("loader", __doc__, quick="a smaller shard, fewer repetitions, within a minute")
    parser.add_argument(
        "--others", type=Path, metavar="PYTHON", help="an interpreter with litData and MosaicML Streaming"
    )
    arguments = parser.parse_args()
    return finish(run(quick=arguments.quick, others=arguments.others))


if __name__ == "__main__":
    raise SystemExit(main())
