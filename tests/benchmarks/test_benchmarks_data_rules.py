"""The reference's data rules: its recorded vectors, what holds of every input, and our rules beside them."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.reference.data_rules import (
    miner_samples,
    pack_samples,
    pool_digest,
    rows_read,
    sample_id,
    select_pages,
    window_seed,
)
from templar.data.pages.metadata import PageShard
from templar.data.pages.parquet import ParquetShards
from templar.data.replicas import Replicas
from templar.data.sampling import pack
from tests.support.memory_store import MemoryStore

EOS = 2
PAGES_PER_WINDOW = 6

# The 104 crawls of the recorded dataset (FineWeb-edu-score-2), as Common Crawl names them: year and week.
CRAWL_WEEKS = {
    2013: "20 48",
    2014: "10 15 23 35 41 42 49 52",
    2015: "06 11 14 18 22 27 32 35 40 48",
    2016: "07 18 22 26 30 36 40 44 50",
    2017: "04 09 13 17 22 26 30 34 39 43 47 51",
    2018: "05 09 13 17 22 26 30 34 39 43 47 51",
    2019: "04 09 13 18 22 26 30 35 39 43 47 51",
    2020: "05 10 16 24 29 34 40 45 50",
    2021: "04 10 17 21 25 31 39 43 49",
    2022: "05 21 27 33 40 49",
    2023: "06 14 23 40 50",
    2024: "10 18 22 26 30 33 38 42 46 51",
}
CRAWLS = [f"CC-MAIN-{year}-{week}" for year, weeks in CRAWL_WEEKS.items() for week in weeks.split()]
# Rows of a crawl. Only that of 2024-51 is known. The others are the most that the recorded pages allow (1 to 59 counts
# fit), so they prove nothing of the row they were found by; that of 2019-26 fits two rows.
CRAWL_ROWS = {
    "2013-20": 51_901_215,
    "2014-42": 49_250_158,
    "2015-40": 38_228_215,
    "2017-17": 80_702_654,
    "2017-22": 60_332_389,
    "2018-39": 60_923_255,
    "2019-04": 60_777_634,
    "2019-26": 58_555_427,
    "2019-43": 60_223_616,
    "2020-16": 66_011_531,
    "2021-39": 72_614_398,
    "2022-49": 89_452_358,
    "2024-51": 54_733_797,
}
RECORDED_PAGES = {
    (0, 0): "2022-49,56977660 2019-04,16396970 2017-17,3306667 2014-42,813986 2015-40,31089787 2020-16,60252300",
    (7, 765_000): ("2013-20,1317415 2019-26,53340073 2019-26,48820446 2021-39,1546165 2019-43,52047830 2024-51,546903"),
    (1, 0): "2018-39,31181787",
    (255, 765_000): "2017-22,34187624",
}
FOUR_CONFIGS = dict.fromkeys("dbca", 60_000_101)

# -- Pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("uid", "window"), RECORDED_PAGES)
def test_recorded_pages(uid: int, window: int) -> None:
    assert len(CRAWLS) == 104
    rows = {crawl: CRAWL_ROWS.get(crawl.removeprefix("CC-MAIN-"), 10**6) for crawl in reversed(CRAWLS)}
    recorded = [page.split(",") for page in RECORDED_PAGES[uid, window].split()]
    pages = select_pages(rows, seed=uid, offset=window * PAGES_PER_WINDOW, count=len(recorded))
    assert pages == [(f"CC-MAIN-{crawl}", int(row)) for crawl, row in recorded]


# -- Rows of a page ---------------------------------------------------------------------------------------------------


def exact_rows(offset: int, group_sizes: list[int]) -> range:
    """Where our reader finds the page: in a file whose rows are their own numbers."""
    texts = [str(row) for row in range(sum(group_sizes))]
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, pa.schema([("text", pa.string())])) as writer:
        for size in group_sizes:
            writer.write_table(pa.table({"text": [texts.pop(0) for _ in range(size)]}))
    store = MemoryStore()
    store.put("000_00000.parquet", buffer.getvalue())
    shard = PageShard(path="000_00000.parquet", num_rows=sum(group_sizes))
    read = [int(text) for text in ParquetShards(Replicas([store]), "").read_rows(shard, offset, 100)]
    assert read == list(range(read[0], read[-1] + 1))
    return range(read[0], read[-1] + 1)


@pytest.mark.parametrize(
    ("groups", "offset", "read"),
    [
        # A page that crosses groups is moved back into its first one.
        ([300, 300, 300], 201, range(200, 300)),
        ([300, 300, 300], 299, range(200, 300)),
        # Groups of 300 are taken for groups of 275: rows 290.. are looked for in the second group.
        ([300, 300, 300, 200], 290, range(315, 415)),
        ([300, 300, 300, 200], 550, range(600, 700)),
        # A large last group: of mean size 400, and so rows 300.. are looked for in the first group.
        ([300, 300, 600], 310, range(200, 300)),
        ([300, 300, 600], 1100, range(900, 1000)),
        # 901 rows are 3 * 300 + 1: the last is not reached, and is taken for the last group's first.
        ([300, 300, 301], 900, range(600, 700)),
    ],
)
def test_pages_that_the_reference_reads_elsewhere(groups: list[int], offset: int, read: range) -> None:
    assert rows_read(offset, groups) == read
    if offset + 100 <= sum(groups):
        assert exact_rows(offset, groups) == range(offset, offset + 100) != read


# -- Packing ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(3, 9), min_size=1, max_size=12), max_size=12),
    ended=st.booleans(),
    sequence_length=st.integers(1, 9),
    batch_size=st.integers(1, 4),
)
def test_our_packing_gives_the_same_sequences(
    documents: list[list[int]], ended: bool, sequence_length: int, batch_size: int
) -> None:
    # The reference's tokeniser adds the end token where it is missing; ours comes with one or without.
    buffer = [token for document in documents for token in [*document, EOS]]
    batches, rest = pack_samples(buffer, sequence_length=sequence_length, eos_id=EOS, batch_size=batch_size)
    ours = [np.array([*document, EOS] if ended else document, dtype=np.int32) for document in documents]
    packed = pack(ours, sequence_length, EOS)
    in_batches = batches.reshape(-1, sequence_length)
    np.testing.assert_array_equal(packed[: len(in_batches)], in_batches)
    # What we have beyond that is what the reference drops of a last batch.
    assert 0 <= len(packed) - len(in_batches) < batch_size
    assert packed[len(in_batches) :].ravel().tolist() == rest[: len(rest) // sequence_length * sequence_length]


# -- Samples ----------------------------------------------------------------------------------------------------------


def test_recorded_seeds_samples_and_ids() -> None:
    seeds = {(1, 0): 1000003, (42, 0): 42000126, (42, 51802): 41948324, (255, 51802): 255052519}
    seeds[5000, 0] = 5_000_015_000 - 2**32  # the product is cut to 32 bits
    assert {key: window_seed(*key) for key in seeds} == seeds
    samples = miner_samples(10_000, uid=42, window=51802, count=5 * 32)
    assert samples[:10].tolist() == [915, 6169, 2976, 7741, 9678, 4981, 7167, 8238, 3085, 9873]
    assert len(set(samples.tolist())) == 160
    ranks = [miner_samples(10_000, uid=42, window=51802, count=160, rank=rank, num_ranks=2) for rank in range(2)]
    assert ranks[0][:5].tolist() == [915, 2976, 9678, 7167, 3085]
    np.testing.assert_array_equal(np.stack(ranks, axis=1).ravel(), samples)
    ids = samples.astype(np.uint64) * np.uint64(7) + np.uint64(3)
    assert pool_digest(ids) == pool_digest(np.flip(ids)) == "dbdbb4e7611f1ba77e1de18729f0b8f2"
    for dtype in (np.uint32, np.int64, ">u4"):
        assert sample_id(np.arange(8, dtype=dtype)) == 1540592555457660432
