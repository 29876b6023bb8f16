import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from templar import interrupt
from templar.data.corpus import Document
from templar.data.pages.page_dataset import Page, PageDataset
from templar.datasets.page_writer import build_dataset, upload_dataset
from templar.errors import PermanentError, Reason, TransientError
from tests.support.datasets import PREFIX, rows_of
from tests.support.errors import raising, stopped
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("no_pauses")
FIRST_SHARD = f"{PREFIX}/alpha/train/000_00000.parquet"


@pytest.fixture
def store(small_root):
    store = MemoryStore()
    upload_dataset(small_root, store, PREFIX)
    store.reads.clear()
    return store


def open_pages(*stores, rows_per_page=4, split="train"):
    return PageDataset(stores, PREFIX, rows_per_page=rows_per_page, split=split)


def change_shard_sizes(store, change):
    key = f"{PREFIX}/_shard_sizes.json"
    sizes = json.loads(store.get(key, max_bytes=10**6))
    change(sizes)
    store.put(key, json.dumps(sizes).encode())


def replace_shard(store, table, number=0):
    """Replace a file of the first config, and remove its listed size and hash."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    store.put(FIRST_SHARD.replace("00000", f"{number:05d}"), buffer.getvalue())

    def forget(sizes):
        for name in ("size_bytes", "sha256"):
            sizes["alpha"]["shards"][number].pop(name, None)

    change_shard_sizes(store, forget)


@pytest.mark.parametrize(("rows_per_page", "split"), [(1, "train"), (4, "train"), (10, "train"), (4, "held_out")])
def test_every_row_is_on_its_page(small_root, store, rows_per_page, split):
    """Groups of 7 rows in files of 25: pages lie across both, and nothing is shifted or out of reach."""
    dataset = open_pages(store, rows_per_page=rows_per_page, split=split)
    expected: list[Page] = []
    for config in ("alpha", "beta"):
        rows = rows_of(small_root, f"{config}/{split}")
        for first in range(0, len(rows) - rows_per_page + 1, rows_per_page):
            texts = tuple(rows[first : first + rows_per_page])
            expected.append(Page(len(expected), config, first, texts))
    assert dataset.num_pages == len(expected)
    assert [dataset.read_page(index) for index in range(dataset.num_pages)] == expected


def test_several_pages_in_the_order_asked_for(store):
    dataset = open_pages(store)
    indices = [9, 0, 30, 0, 17, *range(dataset.num_pages)]
    assert dataset.read_pages(indices, concurrency=5) == [open_pages(store).read_page(index) for index in indices]
    assert dataset.read_pages([]) == []


def test_a_page_fetches_only_its_row_groups(tmp_path):
    store = MemoryStore()
    # Digits of powers do not compress to nothing.
    documents = [
        Document(
            "alpha",
            f"{number}.txt",
            "".join(f"{pow(7, number * 400 + line + 200, 10**120):0120d}\n" for line in range(400)),
        )
        for number in range(20)
    ]
    build_dataset(documents, tmp_path / "built", vocab_size=250, row_chars=1000, rows_per_group=16, shard_rows=10_000)
    upload_dataset(tmp_path / "built", store, PREFIX)
    info = store.head(FIRST_SHARD)
    dataset = open_pages(store, rows_per_page=16)
    store.reads.clear()
    page = dataset.read_page(dataset.num_pages // 2)
    text_bytes = sum(map(len, page.texts))
    assert [read.operation for read in store.reads] == ["head", "get_range", "get_range"]
    assert store.bytes_read() < info.size / 4  # the footer is read with 64 KiB around it
    assert store.reads[-1].length < text_bytes < info.size / 20
    store.reads.clear()
    dataset.read_page(3)
    assert [read.operation for read in store.reads] == ["get_range"]
    assert store.bytes_read() < info.size / 20
    store.reads.clear()
    assert dataset.read_page(dataset.num_pages // 2) == page
    assert store.reads == []


def test_a_row_group_beyond_the_bound_is_fetched_once(store, monkeypatch):
    """Also where the pages of a window come from several such groups by turns."""
    monkeypatch.setattr("templar.data.pages.parquet.MAX_CACHED_BYTES", 100)
    texts = ["x" * 99 + str(row) for row in range(100)]
    for number in range(2):
        replace_shard(store, pa.table({"text": texts[:25]}), number)
    dataset = open_pages(store)
    dataset.read_page(0)
    size = store.bytes_read(FIRST_SHARD)
    for index in (1, 2, 3, 0):
        assert dataset.read_page(index).texts == tuple(texts[index * 4 : index * 4 + 4])
    assert store.bytes_read(FIRST_SHARD) == size
    fresh, before = open_pages(store), len(store.reads)
    assert [page.index for page in fresh.read_pages([0, 8, 1, 9, 2, 10], concurrency=1)] == [0, 8, 1, 9, 2, 10]
    assert sum(each.length for each in store.reads[before:] if each.key == FIRST_SHARD) == size


def test_the_digest_follows_the_files_and_the_pages(store):
    digests = {open_pages(store).digest, open_pages(store, rows_per_page=5).digest}
    digests.add(open_pages(store, split="held_out").digest)
    assert open_pages(store).digest in digests
    change_shard_sizes(store, lambda sizes: sizes["beta"]["shards"][0].update(sha256="0" * 64))
    digests.add(open_pages(store).digest)
    assert len(digests) == 4


@pytest.fixture
def other(small_root):
    """A second store of the dataset."""
    store = MemoryStore("other")
    upload_dataset(small_root, store, PREFIX)
    return store


def test_a_file_that_one_store_has_damaged_comes_from_the_other(store, other):
    expected = open_pages(other).read_pages(range(9))
    for key in [info.key for info in store.list(PREFIX) if not info.key.endswith("tokenizer.json")]:
        data = bytearray(store.get(key, max_bytes=1 << 30))
        data[len(data) // 2 - 40 : len(data) // 2 + 40] = bytes(80)
        store.put(key, bytes(data))
    dataset = open_pages(store, other)
    assert dataset.read_pages(range(9)) == expected
    damaged, well = dataset.endpoints
    assert (damaged.last_failure, damaged.resting, well.failures) == (Reason.DATASET_MALFORMED, False, 0)
    refused(store, Reason.DATASET_MALFORMED, PREFIX)


def test_a_file_that_one_store_lacks_comes_from_the_other(store, other):
    dataset = open_pages(store, other)
    expected = open_pages(other).read_pages(range(dataset.num_pages))
    store.delete([FIRST_SHARD])
    assert dataset.read_pages(range(dataset.num_pages)) == expected
    other.delete([FIRST_SHARD])
    with raising(PermanentError, Reason.DATASET_MISSING, match=f"{FIRST_SHARD} is not in memory, other"):
        open_pages(store, other).read_page(0)


@pytest.mark.parametrize("operation", ["head", "get_range"])
def test_a_transient_failure_is_not_cached(store, operation):
    """The store's error comes out as it went in, through the Parquet library, and the next call reads again."""
    dataset = open_pages(store)
    expected = open_pages(store).read_page(0)
    error = TransientError(Reason.STORE_UNREACHABLE, "no answer")
    store.fail = lambda read: error if read.operation == operation else None
    for _ in range(2):
        with raising(TransientError, Reason.STORE_UNREACHABLE, "no answer"):
            dataset.read_page(0)
    store.fail = lambda read: None
    assert dataset.read_page(0) == expected


def test_a_stop_ends_a_read_of_many(store):
    dataset = open_pages(store)
    store.reads.clear()
    interrupt.request_stop()
    with stopped():
        dataset.read_pages(range(dataset.num_pages))
    assert store.reads == []


def refused(store, reason, words, *, read=False, **options):
    def attempt():
        dataset = open_pages(store, **options)
        if read:
            dataset.read_page(0)

    with raising(PermanentError, reason, match=words):
        attempt()


@pytest.mark.parametrize(("name", "limit"), [("_metadata.yaml", 2**20), ("_shard_sizes.json", 2**25)])
def test_a_description_that_is_missing_too_long_or_malformed_is_refused(store, name, limit):
    store.put(f"{PREFIX}/{name}", b" " * (limit + 1))
    refused(store, Reason.DATASET_MALFORMED, f"{name}: .*at most {limit}")
    store.put(f"{PREFIX}/{name}", b"{]")
    refused(store, Reason.DATASET_MALFORMED, f"{PREFIX}/{name}: ")
    store.delete([f"{PREFIX}/{name}"])
    refused(store, Reason.DATASET_MISSING, f"{PREFIX}/{name} is not in memory")


def test_there_is_no_such_split_and_no_page(store):
    refused(store, Reason.DATASET_MISSING, "no config has a split 'validation'", split="validation")
    refused(store, Reason.DATASET_TOO_SMALL, "no config has 1000 rows", rows_per_page=1000)
    with pytest.raises(ValueError, match="rows_per_page"):
        open_pages(store, rows_per_page=0)
    for index in (-1, 10**9):
        with pytest.raises(ValueError, match=f"page {index} is not in 0"):
            open_pages(store).read_page(index)


def flipped(data, place):
    """One bit is flipped at a place in the text of the first row group."""
    column = pq.read_metadata(io.BytesIO(data)).row_group(0).column(0)
    changed = bytearray(data)
    changed[column.data_page_offset + int(place * column.total_compressed_size)] ^= 1
    return bytes(changed)


def test_a_damaged_file_is_found(store):
    data = store.get(FIRST_SHARD, max_bytes=10**6)
    for damaged, words in (
        (data[:-1], "it has .* bytes, must have"),
        (b"x" * len(data), "no Parquet footer"),
        (flipped(data, 0.0), "row group 0 cannot be decoded"),
        (flipped(data, 0.99), "row group 0 cannot be decoded"),
    ):
        store.put(FIRST_SHARD, damaged)
        refused(store, Reason.DATASET_MALFORMED, f"{FIRST_SHARD}: {words}", read=True)
    for column, words in (
        (["a"] * 24, "its row groups have 24 rows, must have 25"),
        ([*"a" * 20, None, *"b" * 4], "row 20 of column 'text' is null"),
    ):
        replace_shard(store, pa.table({"text": column}))
        refused(store, Reason.DATASET_MALFORMED, f"{FIRST_SHARD}: {words}", read=True)


def test_other_columns_are_not_fetched(store):
    texts = [f"row {number}" for number in range(25)]
    ballast = [random.Random(number).randbytes(2000) for number in range(25)]
    replace_shard(store, pa.table({"ballast": ballast, "text": texts, "number": list(range(25))}))
    dataset = open_pages(store)
    dataset.read_page(0)
    assert dataset.read_page(1).texts == tuple(texts[4:8])
    assert store.reads[-1].length < 1000 < sum(map(len, ballast)) / 10
