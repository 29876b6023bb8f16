import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import yaml

from templar.data.corpus import Document, split_rows
from templar.data.tokenizer import load_tokenizer
from templar.datasets.page_writer import Uploaded, build_dataset, upload_dataset
from templar.errors import PermanentError, Reason, TransientError
from tests.support.datasets import contents, numbered_documents, rows_of
from tests.support.errors import raising
from tests.support.memory_store import MemoryStore


def test_the_same_documents_give_the_same_bytes(tmp_path):
    documents = numbered_documents("alpha", num_documents=9, num_lines=30)
    build_dataset(documents, tmp_path / "first", vocab_size=300)
    build_dataset(reversed(documents), tmp_path / "second", vocab_size=300)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_the_layout(small_root):
    root = small_root
    metadata = yaml.safe_load((root / "_metadata.yaml").read_text())
    assert [entry["config_name"] for entry in metadata["configs"]] == ["default", "alpha", "beta"]
    assert metadata["configs"][1]["data_files"] == [
        {"split": "train", "path": "alpha/train/*.parquet"},
        {"split": "held_out", "path": "alpha/held_out/*.parquet"},
    ]
    sizes = json.loads((root / "_shard_sizes.json").read_text())
    assert set(sizes) == {"alpha", "alpha/held_out", "beta", "beta/held_out"}
    entry = sizes["beta"]
    assert [shard["path"] for shard in entry["shards"]] == [
        f"beta/train/000_{number:05d}.parquet" for number in range(len(entry["shards"]))
    ]
    footers = [pq.read_metadata(root / shard["path"]) for shard in entry["shards"]]
    assert max(footer.num_rows for footer in footers) == 25
    assert max(footer.row_group(0).num_rows for footer in footers) == 7


def test_every_document_is_in_one_split_whole_and_in_order(tmp_path):
    documents = numbered_documents("alpha", num_documents=20, num_lines=30)
    build_dataset(documents, tmp_path / "dataset", vocab_size=300, row_chars=100, held_out_fraction=0.2)
    train, held_out = (rows_of(tmp_path / "dataset", f"alpha/{split}") for split in ("train", "held_out"))
    by_split = {"train": "".join(train), "held_out": "".join(held_out)}
    found = {document.name: [s for s, text in by_split.items() if document.text in text] for document in documents}
    assert all(len(splits) == 1 for splits in found.values())
    assert [sum(splits == [split] for splits in found.values()) for split in by_split] == [16, 4]
    expected = [
        row for document in documents if found[document.name] == ["train"] for row in split_rows(document.text, 100)
    ]
    assert train == expected


def test_a_name_is_held_out_in_every_config(tmp_path):
    code = numbered_documents("code", num_documents=20, num_lines=30)
    prose = [Document("prose", document.name, document.text.upper()) for document in code[::2]]
    build_dataset([*code, *prose], tmp_path / "dataset", vocab_size=300, held_out_fraction=0.15)

    def names(folder):
        text = "".join(rows_of(tmp_path / "dataset", folder)).lower()
        return {document.name for document in code if f"document {int(document.name[:3])} line" in text}

    assert names("prose/held_out") == names("code/held_out") & {document.name for document in prose}
    assert not names("code/train") & names("prose/held_out")
    assert not names("prose/train") & names("code/held_out")


def test_a_document_larger_than_the_held_out_part_is_trained_on(tmp_path):
    documents = numbered_documents("alpha", num_documents=10, num_lines=20)
    documents.append(Document("alpha", "large.txt", "large\n" * 5000))
    build_dataset(documents, tmp_path / "dataset", vocab_size=300, held_out_fraction=0.1)
    held_out = "".join(rows_of(tmp_path / "dataset", "alpha/held_out"))
    assert 0 < len(held_out) <= 0.1 * sum(len(document.text) for document in documents)
    assert "large\n" not in held_out


def test_the_tokenizer_has_seen_the_training_text_alone(tmp_path):
    documents = numbered_documents("alpha", num_documents=8, num_lines=30)
    build_dataset(documents, tmp_path / "first", vocab_size=300, held_out_fraction=0.2)
    held_out = "".join(rows_of(tmp_path / "first", "alpha/held_out"))
    changed = [
        replace(document, text=document.text.replace("document", "DOCUMENT")) if document.text in held_out else document
        for document in documents
    ]
    assert changed != documents
    build_dataset(changed, tmp_path / "second", vocab_size=300, held_out_fraction=0.2)
    first, second = (contents(tmp_path / name) for name in ("first", "second"))
    assert first["alpha/held_out/000_00000.parquet"] != second["alpha/held_out/000_00000.parquet"]
    assert first["tokenizer.json"] == second["tokenizer.json"]
    assert load_tokenizer(str(tmp_path / "first")).vocab_size <= 300


@pytest.mark.parametrize(
    "name", ["_metadata.yaml", "_shard_sizes.json", "_shards.json", "alpha/train/000_00000.parquet"]
)
def test_upload_never_replaces_another_dataset(small_root, name):
    """Neither its description nor an object of it, of another length or of the same one."""
    own = small_root / name
    for there in (b"another one", bytes(own.stat().st_size) if own.exists() else b"1"):
        store = MemoryStore()
        store.put(f"there/{name}", there)
        with raising(PermanentError, Reason.OBJECT_DIFFERS, name):
            upload_dataset(small_root, store, "there")
        assert [info.key for info in store.list()] == [f"there/{name}"]
        assert store.get(f"there/{name}", max_bytes=100000) == there


def test_an_upload_that_failed_goes_on(small_root):
    """Without sending anything again; the description comes last, so a reader finds nothing before."""
    puts, failing = list[str](), ["beta"]

    class Failing(MemoryStore):
        def put_file(self, key, path):
            if any(word in key for word in failing):
                raise TransientError(Reason.STORE_BUSY, "later")
            puts.append(key)
            super().put_file(key, path)

    store = Failing()
    with raising(TransientError, Reason.STORE_BUSY):
        upload_dataset(small_root, store, "there")
    assert not [key for key in puts if "/_" in key]
    failing.clear()
    sent, files = len(puts), contents(small_root)
    assert upload_dataset(small_root, store, "there") == Uploaded(len(files), sent, sum(map(len, files.values())))
    assert {info.key: store.get(info.key, max_bytes=10**7) for info in store.list()} == {
        f"there/{name}": data for name, data in files.items()
    }
    assert puts[-2:] == ["there/_shard_sizes.json", "there/_metadata.yaml"]
    assert len(puts) == len(files)
    assert upload_dataset(small_root, store, "there").num_already_there == len(files)


@pytest.mark.parametrize("kind", ["lossy", "busy"])
def test_an_upload_that_another_writer_spoils_is_not_described(small_root, kind):
    path = "there/alpha/train/000_00000.parquet"

    class Spoilt(MemoryStore):
        def put_file(self, key, path):
            self.put(key, bytes(path.stat().st_size)) if kind == "lossy" else super().put_file(key, path)

        def list(self, prefix=""):
            found = list(super().list(prefix))
            if kind == "busy":
                self.put(path, b"theirs")
            return iter(found)

    store = Spoilt()
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        upload_dataset(small_root, store, "there")
    assert store.head("there/_metadata.yaml") is None
    assert kind == "lossy" or store.get(path, max_bytes=100) == b"theirs"


@pytest.mark.parametrize("limit", ["MAX_METADATA_BYTES", "MAX_SHARD_SIZES_BYTES"])
def test_a_description_larger_than_readers_accept_is_refused(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(f"templar.datasets.page_writer.{limit}", 100)
    documents = numbered_documents("alpha", num_documents=4, num_lines=10)
    with raising(PermanentError, Reason.OBJECT_TOO_LARGE, "at most"):
        build_dataset(documents, tmp_path / "dataset", vocab_size=300)
    assert not (tmp_path / "dataset").exists()
