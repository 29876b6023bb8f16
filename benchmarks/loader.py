"""Measure how fast training data gets from documents to batches, relative to what the machine and the endpoint can do.

    python -m benchmarks.loader [--quick]

All figures are medians of pairs of measurements that follow each other. The dataset is one shard of random tokens with
2048 per sample; the endpoint is `rclone serve s3` on this machine.

- `packing_x`: packing of documents of 600 tokens on average, over the same with Python lists.
- `shard_memcpy_fraction`: rate of reading 64 MiB of random samples of a verified shard that is on the disk, over that
  of copying as many bytes, with cold caches; `shard_first_fraction`, if the process reads these samples anew.
- `s3_rate_fraction`: rate at which the shard comes to the disk, verified, over that of a raw client that reads the same
  ranges with as many connections and drops them, from an endpoint that gives 2 Gbit/s. `s3_loopback_fraction`, if it
  gives what it can: then server, client, SHA-256 and disk share the cores of one machine, and hashing alone costs more
  of them than the raw client and the server together.
- `first_batch_fraction`: time from opening the dataset to the first batch of a window, 16 sequences, on an empty disk,
  over that for the whole shard. Its bar is for the full size: the first batch does not get smaller with the shard.
- `peak_mib`: the resident memory that reading a window from the endpoint in batches adds, and `mapped_mib`, the pages
  of the shard's file in it, beside `setting_mib`, the limit of the pages that stay mapped.

The last line is JSON: these figures, those they are computed from, and whether every bar holds.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import loader_local as local
from benchmarks import loader_remote as remote
from benchmarks.command import measured
from benchmarks.loader_shard import BUCKET, SAMPLE_BYTES, SAMPLES_PER_PAGE, serving, write_dataset

MIB = 2**20
LIMIT = "238M"  # MiB per second of the endpoint for `s3_rate_fraction`, as rclone takes it: 2 Gbit/s
BARS = {
    "packing_x": 20.0,
    "shard_memcpy_fraction": 0.6,
    "s3_rate_fraction": 0.8,
    "first_batch_fraction": 0.05,
}
AT_MOST = frozenset({"first_batch_fraction"})


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement."""

    shard_bytes: int = 1000 * MIB
    packed_tokens: int = 10_000_000
    repetitions: int = 5  # of each pair
    window_bytes: int = 128 * MIB  # of the window whose memory is measured; half of the shard at most
    setting: int = 32 * MIB  # bytes of the shard that may stay mapped


FULL = Sizes()
QUICK = Sizes(shard_bytes=128 * MIB, packed_tokens=3_000_000, repetitions=3, window_bytes=32 * MIB, setting=8 * MIB)


def measure(sizes: Sizes, folder: Path) -> dict[str, float]:
    """The figures; `folder` is empty, on a disk with room for three shards."""
    bucket = folder / BUCKET
    num_samples = sizes.shard_bytes // SAMPLE_BYTES
    num_pages = min(sizes.window_bytes, sizes.shard_bytes // 2) // SAMPLE_BYTES // SAMPLES_PER_PAGE
    write_dataset(bucket, num_samples)
    figures = {"packing_x": local.packing_ratio(sizes.packed_tokens, sizes.repetitions)}
    with serving(folder) as endpoint:
        loopback = remote.download_rates(endpoint, folder, sizes.repetitions)
        first, whole = remote.first_batch(endpoint, folder, num_pages, sizes.repetitions)
        memory = remote.memory(endpoint, folder, num_pages=num_pages, setting=sizes.setting)
        with remote.empty_folder(folder) as path:
            shard = endpoint.open(path)
            shard.download()
            reading = local.reading(shard, 3 * sizes.repetitions)
    with serving(folder, "--bwlimit", LIMIT) as endpoint:
        rates = remote.download_rates(endpoint, folder, sizes.repetitions)
    return figures | {
        "shard_memcpy_fraction": reading.again,
        "shard_first_fraction": reading.first,
        "s3_rate_fraction": rates.fraction,
        "s3_raw_mb_per_second": rates.raw / 1e6,
        "s3_mb_per_second": rates.ours / 1e6,
        "s3_loopback_fraction": loopback.fraction,
        "s3_loopback_mb_per_second": loopback.ours / 1e6,
        "first_batch_fraction": first / whole,
        "first_batch_seconds": first,
        "download_seconds": whole,
        "peak_mib": memory.peak / MIB,
        "mapped_mib": memory.mapped / MIB,
        "setting_mib": sizes.setting / MIB,
    }


def holds(figures: dict[str, float], bars: dict[str, float]) -> bool:
    """Whether every bar holds."""
    return all((figures[name] < bar) if name in AT_MOST else (figures[name] >= bar) for name, bar in bars.items())


def run(*, quick: bool) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    sizes = QUICK if quick else FULL
    bars = {name: bar for name, bar in BARS.items() if not quick or name not in AT_MOST}
    with tempfile.TemporaryDirectory(prefix="templar-loader-") as name:
        figures = measure(sizes, Path(name))
    table = Table(title=f"a shard of {sizes.shard_bytes / MIB:.0f} MiB{' (--quick; otherwise 1000)' if quick else ''}")
    for column in ("figure", "measured", "bar"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, figure in figures.items():
        bar = f"{'below' if name in AT_MOST else 'at least'} {bars[name]:g}" if name in bars else ""
        table.add_row(name, f"{figure:.3f}" if figure < 10 else f"{figure:.1f}", bar)
    Console().print(table)
    rounded: dict[str, Any] = {name: round(figure, 4) for name, figure in figures.items()}
    return rounded | {"shard_mib": round(sizes.shard_bytes / MIB), "holds": holds(figures, bars)}


def main() -> int:
    """Parse the command line, measure, print; 0 if the bars hold."""
    return measured("loader", __doc__, lambda quick: run(quick=quick), quick="a smaller shard, fewer repetitions")


if __name__ == "__main__":
    raise SystemExit(main())
