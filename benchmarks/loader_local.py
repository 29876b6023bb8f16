"""The measurements of `benchmarks.loader` without a network: packing, and reading a shard that is on the disk."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.loader_shard import SEQUENCE_LENGTH
from templar.data.sampling import pack_flat
from templar.data.shards.shard_dataset import Shard

EOS = 0
MEAN_TOKENS = 600
READ_SAMPLES = 16_384  # samples of a read, and of the copy that it is compared with: 64 MiB


@dataclass(frozen=True)
class Reading:
    """Rates of reading random samples, over that of copying as many bytes."""

    again: float  # of samples whose pages of the file this process has touched before
    first: float  # of samples that this process reads for the first time


def documents(num_tokens: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Tokens of documents of lognormal lengths, `MEAN_TOKENS` on average, and offsets; half of them end with EOS."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, num_tokens // MEAN_TOKENS).astype(np.int64) + 1
    offsets = np.concatenate([[0], lengths.cumsum()])
    tokens = random.integers(1, 50_000, offsets[-1], dtype=np.int32)
    tokens[offsets[1::2] - 1] = EOS
    return tokens, offsets


def pack_naively(
    tokens: NDArray[np.int32], offsets: NDArray[np.int64], sequence_length: int, eos_id: int
) -> NDArray[np.int32]:
    """Packing as `templar.data.sampling` describes it, with lists."""
    stream: list[int] = []
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        document = tokens[start:stop].tolist()
        while document and document[-1] == eos_id:
            document.pop()
        if document:
            stream += document
            stream.append(eos_id)
    whole = len(stream) // sequence_length * sequence_length
    return np.array(stream[:whole], dtype=np.int32).reshape(-1, sequence_length)


def packing_ratio(num_tokens: int, repetitions: int) -> float:
    """Return how many times faster packing is than with lists, on the same tokens and offsets: the median of pairs."""
    tokens, offsets = documents(num_tokens)
    packed = pack_flat(tokens, offsets, SEQUENCE_LENGTH, EOS)
    assert np.array_equal(packed, pack_naively(tokens, offsets, SEQUENCE_LENGTH, EOS))
    del packed
    ratios = []
    for _ in range(repetitions):
        naive = seconds(lambda: pack_naively(tokens, offsets, SEQUENCE_LENGTH, EOS))
        ratios.append(naive / seconds(lambda: pack_flat(tokens, offsets, SEQUENCE_LENGTH, EOS)))
    return statistics.median(ratios)


def reading(shard: Shard, repetitions: int) -> Reading:
    """Rates of reading a shard that is on the disk and verified; medians of pairs, each with cold caches."""
    random = np.random.default_rng(2)
    count = min(READ_SAMPLES, shard.manifest.num_samples // 2)
    out: NDArray[Any] = np.zeros((count, shard.manifest.sequence_length), shard.manifest.dtype)
    source, other = np.ones_like(out), np.zeros(2**23)
    copy = partial(np.copyto, out, source)
    chosen = random.permutation(shard.manifest.num_samples)
    first = []
    copy()
    for start in range(0, len(chosen) - count + 1, count)[:repetitions]:  # each sample once
        read = partial(shard.read, chosen[start : start + count], out)
        first.append(_cold(other, copy) / _cold(other, read))
    again = [_cold(other, copy) / _cold(other, read) for _ in range(repetitions)]
    return Reading(statistics.median(again), statistics.median(first))


def seconds(work: Callable[[], object]) -> float:
    """Return how long some work takes."""
    gc.collect()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _cold(other: NDArray[np.float64], work: Callable[[], object]) -> float:
    """The same after 64 MB of other memory have been written."""
    other += 1.0
    return seconds(work)
