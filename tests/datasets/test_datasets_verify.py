"""Every damaged or missing object of a dataset is named, with any damage, and no other one."""

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from templar.data.pages.metadata import METADATA_FILE, SHARD_SIZES_FILE
from templar.data.shards.manifest import INDEX_FILE
from templar.data.tokenizer import save_tokenizer, train_embedded_tokenizer
from templar.datasets import verify
from templar.datasets.build_dataset import build
from templar.datasets.documents import TextSource
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout
from templar.datasets.verify import CheckedObject, verify_dataset
from templar.errors import PermanentError, Reason, TransientError
from tests.support.datasets import PREFIX, contents, numbered_documents
from tests.support.errors import raising
from tests.support.memory_store import MemoryStore
from tests.support.shards import flipped

DESCRIPTION = {METADATA_FILE, SHARD_SIZES_FILE, INDEX_FILE}
BESIDE = {"README.md", "card.json", "tokenizer.json", "tokenizer_config.json"}
"""Training can do without them."""
DAMAGES: list[Callable[[bytes], bytes | None]] = [
    lambda data: None,
    lambda data: data[:-1],
    lambda data: data + b"1",
    lambda data: flipped(data, -1),
    lambda data: flipped(data, 0),
    lambda data: flipped(data, len(data) // 2),
]


@pytest.fixture(scope="module", params=list(DatasetLayout))
def files(request, tmp_path_factory):
    """A dataset of each layout: several files, shards of several blocks, tokenizer and card."""
    folder = tmp_path_factory.mktemp("dataset")
    (folder / "alpha").mkdir()
    for document in numbered_documents("alpha", num_documents=10, num_lines=13):
        (folder / "alpha" / document.name).write_text(document.text)
    sizes = {"sequence_length": 16, "samples_per_shard": 20, "block_bytes": 512, "row_chars": 40, "shard_rows": 25}
    wanted = BuildSettings(request.param, 0.2, vocab_size=300, **sizes)
    return contents(build(BuildRequest((TextSource("alpha", folder / "alpha"),), folder / "out", wanted)).root)


def store_of(files):
    store = MemoryStore("bucket")
    for path, data in files.items():
        store.put(f"{PREFIX}/{path}", data)
    return store


def problems(files):
    return {each.path: each.problem for each in verify_dataset(store_of(files), PREFIX) if each.problem}


@pytest.mark.parametrize("piece", [300, 700])  # shorter and longer than a block, and no multiple of one
def test_a_whole_dataset(files, monkeypatch, piece):
    """Every object is right, and its bytes are read once, a piece at a time."""
    monkeypatch.setattr(verify, "PIECE_BYTES", piece)
    store, seen, progress = store_of(files), list[CheckedObject](), list[float]()
    found = verify_dataset(store, PREFIX, on_checked=seen.append, on_progress=progress.append)
    assert {each.path for each in found} == files.keys() - DESCRIPTION - {"README.md"}
    assert sorted(seen, key=lambda each: each.path) == found
    assert not [each for each in found if each.problem or not each.has_digest]
    assert {each.path: each.size for each in found} == {each.path: len(files[each.path]) for each in found}
    assert (progress[-1], progress) == (100, sorted(progress))
    lengths = [read.length for read in store.reads if read.operation == "get_range"]
    data = [len(files[path]) for path in files if path.endswith((".npy", ".bin", ".parquet"))]
    assert max(lengths) == min(piece, max(data))
    assert sum(lengths) == sum(data)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_damaged_objects_are_named_and_no_other(files, data):
    checked = sorted(files.keys() - DESCRIPTION - BESIDE)
    chosen = data.draw(st.dictionaries(st.sampled_from(checked), st.sampled_from(DAMAGES), min_size=1, max_size=4))
    damaged = {path: change(files[path]) for path, change in chosen.items()}
    found = problems({path: new for path, new in (files | damaged).items() if new is not None})
    manifests = {path.removesuffix("json") for path in chosen if path.endswith("json")}
    unread = {path for path in chosen if f"{path[:-3].replace('sample_ids', 'train')}" in manifests}
    assert found.keys() == chosen.keys() - unread
    assert all((problem == "is missing") is (damaged[path] is None) for path, problem in found.items())


def test_the_wrong_block_is_named(files):
    path = next(path for path in sorted(files) if path.endswith((".npy", ".parquet")) and "train" in path)
    last = (len(files[path]) - 1) // 512
    which = f" in 1 of {last + 1} blocks, first in block {last}" if path.endswith(".npy") else ""
    assert problems(files | {path: flipped(files[path], -1)}) == {path: f"has other bytes than the dataset{which}"}


def test_a_failing_store_is_no_damage(files):
    store = store_of(files)
    store.fail = lambda read: TransientError(Reason.STORE_BUSY, "later") if read.operation == "get_range" else None
    with raising(TransientError, Reason.STORE_BUSY):
        verify_dataset(store, PREFIX)
    store.fail = lambda read: PermanentError(Reason.ACCESS_DENIED, "no") if read.operation == "get_range" else None
    with raising(PermanentError, Reason.ACCESS_DENIED):
        verify_dataset(store, PREFIX)


def test_without_its_description_there_is_no_dataset(files):
    for name in DESCRIPTION & files.keys():
        with raising(PermanentError, Reason.DATASET_MISSING, "there is no such object"):
            verify_dataset(store_of({path: data for path, data in files.items() if path != name}), PREFIX)
        with raising(PermanentError, Reason.DATASET_MALFORMED, name):
            verify_dataset(store_of(files | {name: b"["}), PREFIX)


def test_pages_without_a_digest(small_root):
    """The reference's form: lengths alone can be compared, if they are given, and that is said."""
    files = contents(small_root)
    for fields in ({"sha256"}, {"sha256", "size_bytes"}):
        sizes = json.loads(files[SHARD_SIZES_FILE])
        for split in sizes.values():
            split["shards"] = [{k: v for k, v in shard.items() if k not in fields} for shard in split["shards"]]
        bare = files | {SHARD_SIZES_FILE: json.dumps(sizes).encode()}
        pages = [path for path in bare if path.endswith(".parquet")]
        found = verify_dataset(store_of(bare), PREFIX)
        assert sorted(each.path for each in found if not each.has_digest) == sorted(pages)
        assert not [each for each in found if each.problem]
        longer = problems(bare | {pages[0]: files[pages[0]] + b"1"})
        assert list(longer) == ([] if "size_bytes" in fields else pages[:1])
        del bare[pages[0]]
        assert problems(bare) == {pages[0]: "is missing"}


def test_tokenizer_and_card_of_another_dataset(tmp_path, files):
    save_tokenizer(train_embedded_tokenizer(["other texts"], 260), tmp_path)
    other = files | {"tokenizer.json": (tmp_path / "tokenizer.json").read_bytes()}
    assert problems(other) == {"tokenizer.json": "is not the tokenizer of the dataset"}
    card = json.loads(files["card.json"]) | {"digest": "0" * 64}
    assert problems(files | {"card.json": json.dumps(card).encode()}) == {"card.json": "is the card of another dataset"}
    damaged = {"card.json": json.dumps(card | {"tokenizer": {}}).encode()}
    assert "tokenizer.digest" in problems(files | damaged)["card.json"]
    assert problems(files | {"card.json": b"{", "tokenizer.json": b"{"}).keys() == {"card.json", "tokenizer.json"}
    assert problems({path: data for path, data in files.items() if path not in BESIDE}) == {}
