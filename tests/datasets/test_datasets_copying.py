"""A copied dataset is the same dataset or none at all, after any failure on the way."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from templar.data.pages.metadata import METADATA_FILE, SHARD_SIZES_FILE
from templar.data.pages.page_dataset import PageDataset
from templar.data.shards.manifest import INDEX_FILE
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.shards.shard_writer import build_shards
from templar.data.tokenizer import TOKENIZER_FILE
from templar.datasets import copying, dataset_files
from templar.datasets.card import CARD_FILE
from templar.datasets.copying import Check, CopyOutcome, CopyReport, copy_dataset
from templar.datasets.dataset_files import Originals
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.store.base import DeleteReport, ObjectInfo, ObjectStore
from tests.support.datasets import PREFIX, contents, numbered_documents
from tests.support.errors import raising
from tests.support.memory_store import MemoryStore
from tests.support.shards import flipped

DESCRIBED = (TOKENIZER_FILE, SHARD_SIZES_FILE, METADATA_FILE)
TO = "elsewhere/copy"
pytestmark = pytest.mark.usefixtures("no_pauses")


class Target(MemoryStore):
    """Remembers the order of what is done to it, and fails on demand."""

    def __init__(self) -> None:
        super().__init__("target")
        self.writes: list[str] = []
        self.refuse: Callable[[str], TemplarError | None] = lambda key: None

    def put(self, key: str, data: bytes) -> None:
        if (error := self.refuse(key)) is not None:
            raise error
        self.writes.append(key.removeprefix(f"{TO}/"))
        super().put(key, data)

    def delete(self, keys: object) -> DeleteReport:
        names = tuple(keys)  # type: ignore[call-overload]
        self.writes += [f"-{key.removeprefix(f'{TO}/')}" for key in names]
        return super().delete(names)


@pytest.fixture
def files(small_root: Path) -> dict[str, bytes]:
    """A dataset's files by path, for a test to change."""
    return contents(small_root)


def store_of(files: dict[str, bytes], name: str = "source", prefix: str = PREFIX) -> MemoryStore:
    store = MemoryStore(name)
    for path, data in files.items():
        store.put(f"{prefix}/{path}", data)
    return store


def content(store: ObjectStore, prefix: str = TO) -> dict[str, bytes]:
    return {
        info.key.removeprefix(f"{prefix}/"): store.get(info.key, max_bytes=10**8) for info in store.list(f"{prefix}/")
    }


def copy(source: ObjectStore, target: ObjectStore, **options: object) -> CopyReport:
    return copy_dataset([source], target, PREFIX, TO, **options)  # type: ignore[arg-type]


def refused(call: Callable[[], object], reason: Reason, *words: str) -> TemplarError:
    with raising(TemplarError, reason, *words) as caught:
        call()
    return caught.value


def is_visible(store: ObjectStore) -> bool:
    """Whether a reader finds the dataset."""
    return store.head(f"{TO}/{METADATA_FILE}") is not None and bool(PageDataset([store], TO, rows_per_page=4).num_pages)


def without(files: dict[str, bytes], *fields: str) -> dict[str, bytes]:
    """The same dataset in the reference's form, whose `_shard_sizes.json` has fewer fields."""
    sizes = json.loads(files[SHARD_SIZES_FILE])
    for split in sizes.values():
        split["shards"] = [
            {name: value for name, value in shard.items() if name not in fields} for shard in split["shards"]
        ]
    return files | {SHARD_SIZES_FILE: json.dumps(sizes).encode()}


def shards_of(files: dict[str, bytes]) -> list[str]:
    return sorted(path for path in files if path.endswith(".parquet"))


class TestCopy:
    def test_everything_arrives_and_the_metadata_last(
        self, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        target, progress = Target(), list[tuple[int, int]]()
        report = copy(store_of(files), target, on_progress=lambda *seen: progress.append(seen))
        assert content(target) == files
        assert target.writes[-2:] == [SHARD_SIZES_FILE, METADATA_FILE]
        assert [each.path for each in report.objects] == sorted(files)
        assert {each.outcome for each in report.objects} == {CopyOutcome.COPIED}
        assert {each.path: each.check for each in report.objects} == {
            path: Check.READ_BACK if path in DESCRIBED else Check.SOURCE_HASH for path in files
        }
        assert {each.path: each.num_bytes for each in report.objects} == {path: len(files[path]) for path in files}
        total = sum(map(len, files.values()))
        assert progress[-1] == (total, total)
        assert progress == sorted(progress)
        assert list(tmp_path.iterdir()) == []

    def test_optional_files_may_be_longer_than_a_tokenizer(
        self, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = CARD_FILE
        longest = len(files[TOKENIZER_FILE])
        monkeypatch.setattr(dataset_files, "MAX_TOKENIZER_BYTES", longest)
        files[name] = bytes(longest + 1)
        source, target = store_of(files), Target()
        (listed,) = [file for file in Originals([source], PREFIX).inventory(1).files if file.path == name]
        assert (listed.size, listed.data) == (longest + 1, None)
        for outcome in (CopyOutcome.COPIED, CopyOutcome.ALREADY_THERE):
            (seen,) = [each for each in copy(source, target).objects if each.path == name]
            assert (seen.outcome, seen.check) == (outcome, Check.READ_BACK)
        assert content(target) == files
        target.put(f"{TO}/{name}", b"1" * (longest + 1))
        refused(lambda: copy(source, target), Reason.OBJECT_DIFFERS, name, "SHA-256")

    def test_without_hashes_all_is_read_back(self, files: dict[str, bytes]) -> None:
        target, bare = Target(), without(files, "sha256")
        report = copy(store_of(bare), target)
        assert content(target) == bare
        assert {each.check for each in report.objects} == {Check.READ_BACK}

    def test_a_failing_source_is_passed_over(self, files: dict[str, bytes]) -> None:
        broken, target = store_of(files, "broken"), Target()
        broken.fail = lambda read: TransientError(Reason.STORE_UNREACHABLE, "no answer")
        copy_dataset([broken, store_of(files)], target, PREFIX, TO)
        assert content(target) == files

    def test_an_unsound_source_is_passed_over(self, files: dict[str, bytes]) -> None:
        path = shards_of(files)[0]
        stores = [store_of(files | {path: data}, f"store-{len(data)}") for data in (b"", bytes(len(files[path])))]
        target = Target()
        copy_dataset([*stores, store_of(files)], target, PREFIX, TO)
        assert content(target) == files
        for store in stores:
            assert (
                store.name
                in refused(lambda: copy_dataset(stores, Target(), PREFIX, TO), Reason.DATASET_MALFORMED, path).message
            )
        stores[1].fail = lambda read: TransientError(Reason.STORE_BUSY, "later") if read.key.endswith(path) else None
        assert isinstance(
            refused(lambda: copy_dataset(stores, Target(), PREFIX, TO), Reason.STORE_BUSY, path), TransientError
        )


class TestAgain:
    def test_nothing_is_copied_twice(self, files: dict[str, bytes]) -> None:
        source, target = store_of(files), Target()
        copy(source, target)
        target.writes.clear()
        source.reads.clear()
        report = copy(source, target)
        assert target.writes == []
        assert not any(read.key.endswith(".parquet") for read in source.reads)
        assert {each.outcome for each in report.objects} == {CopyOutcome.ALREADY_THERE}
        assert len(report.having(Check.SIZE)) == len(shards_of(files))

    @pytest.mark.parametrize("fields", [(), ("sha256", "size_bytes")])
    def test_verify_reads_back_existing_objects(self, files: dict[str, bytes], fields: tuple[str, ...]) -> None:
        source, target = store_of(without(files, *fields)), Target()
        copy(source, target)
        report = copy(source, target, verify=True)
        assert {(each.outcome, each.check) for each in report.objects} == {(CopyOutcome.ALREADY_THERE, Check.READ_BACK)}
        path = shards_of(files)[1]
        target.put(f"{TO}/{path}", bytes(len(files[path])))
        assert len(copy(source, target).objects) == len(files)  # sizes alone cannot tell
        refused(lambda: copy(source, target, verify=True), Reason.OBJECT_DIFFERS, path, "SHA-256")
        assert content(target)[path] == bytes(len(files[path]))

    def test_a_failed_copy_resumes(self, files: dict[str, bytes]) -> None:
        position = 2
        source, target, path = store_of(files), Target(), shards_of(files)[position]
        target.refuse = lambda key: TransientError(Reason.STORE_BUSY, "later") if key.endswith(path) else None
        error = refused(lambda: copy(source, target, concurrency=1), Reason.STORE_BUSY, path)
        assert isinstance(error, TransientError)
        assert len(target.writes) == position
        assert not is_visible(target)
        target.refuse = lambda key: None
        report = copy(source, target)
        assert content(target) == files
        there = report.having(CopyOutcome.ALREADY_THERE)
        assert (len(there), {each.check for each in there}) == (position, {Check.READ_BACK})
        assert len(set(target.writes)) == len(target.writes)


class TestTargetDiffers:
    def test_nothing_is_overwritten(self, files: dict[str, bytes]) -> None:
        """Neither an object of another length nor one of the right length where the metadata are missing."""
        path = shards_of(files)[-1]
        for there, words in ((b"something else", "14 bytes"), (bytes(len(files[path])), "SHA-256")):
            target = Target()
            target.put(f"{TO}/{path}", there)
            target.writes.clear()
            with raising(PermanentError, Reason.OBJECT_DIFFERS, f"target/{TO}/{path}", words):
                copy(store_of(files), target)
            assert target.writes == []
            assert content(target) == {path: there}

    def test_an_object_that_appears_meanwhile_is_not_overwritten(self, files: dict[str, bytes]) -> None:
        class Busy(Target):
            """Another writer puts an object right after the listing."""

            def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
                found = list(super().list(prefix))
                self.put(f"{TO}/{METADATA_FILE}", b"theirs")
                return iter(found)

        target = Busy()
        refused(lambda: copy(store_of(files), target), Reason.OBJECT_DIFFERS, METADATA_FILE, "appeared")
        assert content(target)[METADATA_FILE] == b"theirs"

    def test_a_target_that_alters_objects_is_an_error(self, files: dict[str, bytes]) -> None:
        class Lossy(Target):
            def put(self, key: str, data: bytes) -> None:
                super().put(key, bytes(len(data)) if key.endswith(".parquet") else data)

        target, words = Lossy(), (".parquet", "not what was written")
        refused(lambda: copy(store_of(files), target, verify=True), Reason.OBJECT_DIFFERS, *words)
        assert not is_visible(target)


class TestSourceIsUnsound:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda data: data[:-1], ("bytes, must have",)),
            (lambda data: data + b"1", ("too long",)),
            (lambda data: bytes(len(data)), ("SHA-256", "must have")),
        ],
    )
    def test_other_bytes_than_the_metadata_say(
        self, files: dict[str, bytes], damage: Callable[[bytes], bytes], words: tuple[str, ...]
    ) -> None:
        target, path = Target(), shards_of(files)[1]
        files[path] = damage(files[path])
        error = refused(lambda: copy(store_of(files), target), Reason.DATASET_MALFORMED, path, "source", *words)
        assert isinstance(error, PermanentError)
        assert f"{TO}/{path}" not in {info.key for info in target.list()}
        assert not is_visible(target)

    @pytest.mark.parametrize("fields", [(), ("sha256", "size_bytes")])
    def test_a_file_is_missing(self, files: dict[str, bytes], fields: tuple[str, ...]) -> None:
        target, path = Target(), shards_of(files)[1]
        files = without(files, *fields)
        del files[path]
        refused(lambda: copy(store_of(files), target), Reason.DATASET_MISSING, path)
        assert not is_visible(target)

    def test_malformed_metadata_are_refused(self, files: dict[str, bytes]) -> None:
        sizes = json.loads(files[SHARD_SIZES_FILE])
        sizes["alpha"]["shards"][0]["path"] = "../secret.parquet"
        bad = files | {SHARD_SIZES_FILE: json.dumps(sizes).encode()}
        refused(lambda: copy(store_of(bad), Target()), Reason.DATASET_MALFORMED, SHARD_SIZES_FILE)
        bad = files | {METADATA_FILE: b"configs: [{config_name: default, data_files: [{split: train, path: x}]}]"}
        refused(lambda: copy(store_of(bad), Target()), Reason.DATASET_MALFORMED, METADATA_FILE, "no config")

    def test_too_little_space_for_spooled_files_is_refused(
        self, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Usage:
            free = 0

        monkeypatch.setattr(copying.shutil, "disk_usage", lambda folder: Usage)  # type: ignore[attr-defined]
        target = Target()
        refused(lambda: copy(store_of(files), target), Reason.DISK_FULL, "TMPDIR")
        assert target.writes == []


SHARDS_TO = "elsewhere"
TOKENS = "train_000001.npy"


@pytest.fixture(scope="module")
def built_shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Several small shards, each of several blocks."""
    documents, root = (
        numbered_documents("alpha", num_documents=10, num_lines=13),
        tmp_path_factory.mktemp("s") / "built",
    )
    build_shards(documents, root, vocab_size=300, sequence_length=16, samples_per_shard=20, block_bytes=512)
    return contents(root)


@pytest.fixture
def shard_source(built_shards: dict[str, bytes]) -> MemoryStore:
    return store_of(built_shards)


def copy_shards(*sources: ObjectStore, target: ObjectStore, verify: bool = False) -> CopyReport:
    return copy_dataset(sources, target, PREFIX, SHARDS_TO, verify=verify)


def damage(store: MemoryStore, name: str) -> None:
    store.put(f"{PREFIX}/{name}", flipped(store.get(f"{PREFIX}/{name}", max_bytes=10**8), -1))


@pytest.fixture
def other(shard_source: MemoryStore) -> MemoryStore:
    """Another store with the same shards."""
    return store_of(content(shard_source, PREFIX), "other")


def test_everything_arrives_and_is_the_same_dataset(shard_source: MemoryStore, tmp_path: Path) -> None:
    target = MemoryStore("target")
    report = copy_shards(shard_source, target=target)
    assert content(target, SHARDS_TO) == content(shard_source, PREFIX)
    assert {each.outcome for each in report.objects} == {CopyOutcome.COPIED}
    checks = {each.path: each.check for each in report.objects}
    assert checks[TOKENS] is Check.READ_BACK
    assert checks["train_000001.json"] is Check.SOURCE_HASH
    first = ShardedDataset([shard_source], PREFIX, folder=tmp_path / "first")
    second = ShardedDataset([target], SHARDS_TO, folder=tmp_path / "second")
    assert first.digest == second.digest
    indices = np.arange(first.num_samples(1))
    assert np.array_equal(first.shard(1).read(indices), second.shard(1).read(indices))


@pytest.mark.parametrize("name", [TOKENS, "sample_ids_000001.bin", "train_000001.json"])
def test_a_damaged_file_is_passed_over_and_never_copied(
    shard_source: MemoryStore, other: MemoryStore, name: str
) -> None:
    target = MemoryStore("target")
    damage(shard_source, name)
    with raising(PermanentError, Reason.DATASET_MALFORMED, match=name):
        copy_shards(shard_source, target=target)
    assert target.head(f"{SHARDS_TO}/{INDEX_FILE}") is None
    copy_shards(other, target=target)
    assert content(target, SHARDS_TO) == content(other, PREFIX)


@pytest.mark.parametrize("name", [TOKENS, "sample_ids_000001.bin"])
def test_a_manifest_that_is_damaged_meanwhile_is_passed_over(
    shard_source: MemoryStore, other: MemoryStore, tmp_path: Path, name: str
) -> None:
    originals = Originals([shard_source, other], PREFIX)
    file = next(file for file in originals.inventory(1).data if file.path == name)
    damage(shard_source, "train_000001.json")
    wanted = other.get(f"{PREFIX}/{name}", max_bytes=10**8)
    for _ in range(2):  # either store may be first
        originals.fetch(file, tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == wanted
    damage(other, "train_000001.json")
    with raising(PermanentError, Reason.DATASET_MALFORMED, match=r"train_000001\.json .*SHA-256"):
        originals.fetch(file, tmp_path / "file")
