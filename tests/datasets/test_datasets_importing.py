"""The reference's layouts become datasets that this network's readers accept, with links instead of copies."""

import io
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from templar.data.pages.page_dataset import PageDataset
from templar.data.shards.manifest import sample_ids
from templar.data.shards.shard_dataset import ShardedDataset
from templar.data.tokenizer import Tokenizer, train_embedded_tokenizer
from templar.datasets.importing import fetch_original, import_dataset
from templar.errors import PermanentError, Reason
from templar.store.directory import DirectoryStore
from tests.support.commands import contents
from tests.support.errors import raising

LENGTH = 8
FIRST, SECOND = "train_000000.npy", "train_000001.npy"
PAGES = "CC-MAIN-2/000_00001.parquet"


def put(name, data):
    """A change of a folder: another content of a file."""
    return lambda folder: (folder / name).write_bytes(data)


def array_file(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def table_file(**columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer(["a document of lines"], 260)


def tokens_of(index, count):
    return np.random.default_rng(index).integers(0, 244, (count, LENGTH), dtype=np.uint32)


@pytest.fixture
def tokens(tmp_path):
    """Two shards as the reference has them: raw tokens with raw ids, and a NumPy array with ids from `np.save`."""
    folder = tmp_path / "tokenized"
    folder.mkdir()
    tokens_of(0, 50).tofile(folder / "train_000000.npy")
    sample_ids(tokens_of(0, 50)).tofile(folder / "sample_ids_000000.bin")
    np.save(folder / "train_000001.npy", tokens_of(1, 40).reshape(-1))
    with (folder / "sample_ids_000001.bin").open("wb") as file:
        np.save(file, sample_ids(tokens_of(1, 40)))
    return folder


def read(root, split, tmp_path):
    dataset = ShardedDataset([DirectoryStore(root, writable=False)], "", folder=tmp_path / "local", split=split)
    return [dataset.shard(number).read(np.arange(dataset.num_samples(number))) for number in range(dataset.num_shards)]


class TestShards:
    def test_all_but_the_last_shard_are_linked(self, tokens, tmp_path, tokenizer):
        root = tmp_path / "dataset"
        imported = import_dataset(
            tokens, root, tokenizer=tokenizer, sequence_length=LENGTH, held_out_samples=6, workers=2
        )
        assert (imported.layout, imported.num_files, imported.num_copied) == ("shards", 2, 1)
        assert (root / "train_000000.npy").samefile(tokens / "train_000000.npy")
        first, second = read(root, "train", tmp_path)
        assert np.array_equal(first, tokens_of(0, 50))
        assert np.array_equal(second, tokens_of(1, 40)[:34])
        (held_out,) = read(root, "held_out", tmp_path)
        assert np.array_equal(held_out, tokens_of(1, 40)[34:])
        assert (root / "sample_ids_000000.bin").read_bytes() == (tokens / "sample_ids_000000.bin").read_bytes()
        assert not (tmp_path / "dataset.work").exists()

    def test_shards_of_another_prefix_come_from_a_bucket(self, tokens, tmp_path, tokenizer):
        for index in range(2):
            (tokens / f"anneal_{index:06d}.npy").write_bytes((tokens / f"train_{1 - index:06d}.npy").read_bytes())
            (tokens / f"sample_ids_{index:06d}.bin").unlink()
        (tokens / "notes.txt").write_text("not read")
        copy, root = tmp_path / "copy", tmp_path / "dataset"
        for _ in range(2):  # a second call finds what the first one fetched
            fetch_original(DirectoryStore(tmp_path, writable=False), "tokenized", copy)
        assert contents(copy).keys() == contents(tokens).keys() - {"notes.txt"}
        import_dataset(copy, root, tokenizer=tokenizer, sequence_length=LENGTH, held_out_samples=6, prefix="anneal")
        first, second = read(root, "train", tmp_path)
        assert np.array_equal(first, tokens_of(1, 40))
        assert np.array_equal(second, tokens_of(0, 50)[:44])
        with raising(PermanentError, Reason.DATASET_MISSING, "correct the folder"):
            fetch_original(DirectoryStore(tmp_path, writable=False), "nowhere", copy)

    def test_it_resumes_what_had_the_same_options(self, tokens, tmp_path, tokenizer, monkeypatch):
        for file in tokens.glob("sample_ids_*"):  # of samples of another length
            file.unlink()

        def full(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("templar.datasets.importing.describe_shards", full)
            for length in (LENGTH // 2, LENGTH):
                with pytest.raises(KeyboardInterrupt):
                    import_dataset(tokens, tmp_path / "one", tokenizer=tokenizer, sequence_length=length)
        assert not (tmp_path / "one").exists()
        import_dataset(tokens, tmp_path / "one", tokenizer=tokenizer, sequence_length=LENGTH)
        import_dataset(tokens, tmp_path / "two", tokenizer=tokenizer, sequence_length=LENGTH)
        assert (tmp_path / "one" / "_shards.json").read_bytes() == (tmp_path / "two" / "_shards.json").read_bytes()
        with raising(PermanentError, Reason.OBJECT_EXISTS):
            import_dataset(tokens, tmp_path / "one", tokenizer=tokenizer)

    @pytest.mark.parametrize(
        ("change", "reason", "words"),
        [
            (lambda folder: (folder / FIRST).unlink(), Reason.DATASET_MISSING, "has no train_000000.npy"),
            (put(FIRST, b"12345"), Reason.DATASET_MALFORMED, "--sequence-length"),
            (put(SECOND, array_file(np.zeros(80, "<i8"))), Reason.DATASET_MALFORMED, "convert it"),
            (put("sample_ids_000000.bin", b"12345678"), Reason.DATASET_MALFORMED, "are not those of train_000000.npy"),
            (put(FIRST, np.full((2, LENGTH), 300, "<u4").tobytes()), Reason.DATASET_MALFORMED, "name the tokenizer"),
            (put(SECOND, array_file(np.zeros(LENGTH, "<u4"))), Reason.DATASET_TOO_SMALL, "must leave one"),
            (
                put(SECOND, array_file(np.zeros(40 * LENGTH, "<u4"))[: -4 * LENGTH]),
                Reason.DATASET_MALFORMED,
                f"train_000001.npy: its header says {40 * LENGTH} tokens of 4 bytes, and {4 * 39 * LENGTH} bytes",
            ),
        ],
        ids=["missing", "cut off", "signed", "other ids", "other tokenizer", "too small", "header"],
    )
    def test_mistakes(self, tokens, tokenizer, change, reason, words):
        tmp_path = tokens.parent
        change(tokens)
        with raising(PermanentError, reason, words):
            import_dataset(tokens, tmp_path / "dataset", tokenizer=tokenizer, sequence_length=LENGTH)
        assert not (tmp_path / "dataset").exists()

    @pytest.mark.parametrize("vocab_size", [260, 70_000])
    def test_raw_tokens_of_the_other_type_are_refused(self, tmp_path, tokenizer, monkeypatch, vocab_size):
        """Read as uint16, tokens of uint32 would be twice the samples, every second token of them 0 or 1."""
        monkeypatch.setattr(tokenizer, "vocab_size", vocab_size)
        for type_, other in (("uint32", "uint16"), ("uint16", "uint32")):
            folder = tmp_path / f"raw-{type_}"
            folder.mkdir()
            for index in range(2):
                found = np.random.default_rng(index).integers(0, min(vocab_size, 2**16), 40 * LENGTH, np.uint32)
                found.astype(type_).tofile(folder / f"train_{index:06d}.npy")
            with raising(PermanentError, Reason.DATASET_MALFORMED, "train_00000", "--dtype"):
                import_dataset(folder, tmp_path / "x", tokenizer=tokenizer, dtype=other, sequence_length=LENGTH)  # type: ignore[arg-type]
            import_dataset(folder, tmp_path / type_, tokenizer=tokenizer, dtype=type_, sequence_length=LENGTH)  # type: ignore[arg-type]

    def test_they_need_a_tokenizer(self, tokens, tmp_path):
        with pytest.raises(ValueError, match="need the tokenizer"):
            import_dataset(tokens, tmp_path / "dataset", tokenizer=None)


@pytest.fixture
def tables(tmp_path):
    """Two configs with a `_shard_sizes.json` whose paths begin with a bucket."""
    folder, sizes = tmp_path / "fineweb", {}
    for config in ("CC-MAIN-1", "CC-MAIN-2"):
        (folder / config).mkdir(parents=True)
        for number in range(3):
            table = pa.table({"text": [f"{config} {number} {row}" for row in range(20)]})
            pq.write_table(table, folder / config / f"000_{number:05d}.parquet", row_group_size=6)
        shards = [{"path": f"bucket/fineweb/{config}/000_{number:05d}.parquet", "num_rows": 20} for number in range(3)]
        sizes[config] = {"split": "train", "shards": shards, "total_rows": 60}
    (folder / "_shard_sizes.json").write_text(json.dumps(sizes))
    return folder


class TestPages:
    @pytest.mark.parametrize("listed", [True, False])
    def test_the_last_file_of_each_config_is_held_out(self, tables, tmp_path, tokenizer, listed):
        if not listed:
            (tables / "_shard_sizes.json").unlink()
        root = tmp_path / "dataset"
        imported = import_dataset(tables, root, tokenizer=tokenizer)
        assert (imported.layout, imported.num_files, imported.num_copied) == ("pages", 6, 0)
        store = DirectoryStore(root, writable=False)
        train = PageDataset([store], "", rows_per_page=10)
        held_out = PageDataset([store], "", rows_per_page=10, split="held_out")
        assert (train.num_pages, held_out.num_pages) == (8, 4)
        assert train.read_page(1).texts[0] == "CC-MAIN-1 0 10"
        assert held_out.read_page(2).texts[0] == "CC-MAIN-2 2 0"
        assert train.beside("tokenizer.json", max_bytes=2**26) == tokenizer.to_bytes()

    @pytest.mark.parametrize(
        ("change", "reason", "words"),
        [
            (lambda folder: (folder / PAGES).unlink(), Reason.DATASET_MISSING, f"no file of 'bucket/fineweb/{PAGES}'"),
            (put(PAGES, table_file(text=["x"])), Reason.DATASET_MALFORMED, "has 1 rows, _shard_sizes.json says 20"),
            (put(PAGES, table_file(body=["x"])), Reason.DATASET_MALFORMED, "no column 'text'; there are body"),
            (
                put(PAGES, table_file(text=[*"aaaa", None, *"b" * 15])),
                Reason.DATASET_MALFORMED,
                "row 4 of column 'text'",
            ),
            (put(PAGES, b"PAR1"), Reason.DATASET_MALFORMED, "fetch the file again"),
            (put("_shard_sizes.json", b'{"x": [1]}'), Reason.DATASET_MALFORMED, "to have it written"),
        ],
        ids=["missing", "rows", "column", "null", "damaged", "sizes"],
    )
    def test_mistakes(self, tables, tmp_path, change, reason, words):
        change(tables)
        with raising(PermanentError, reason, words):
            import_dataset(tables, tmp_path / "dataset", tokenizer=None)
        assert not (tmp_path / "dataset").exists()

    def test_files_without_rows_and_leftovers_are_passed_over(self, tables, tmp_path, tokenizer, caplog):
        (tables / "_shard_sizes.json").unlink()
        import_dataset(tables, tmp_path / "one", tokenizer=tokenizer)
        config = tables / "CC-MAIN-1"
        for name in ("000_00000a.parquet", "000_00009.parquet"):
            pq.write_table(pa.table({"text": pa.array([], pa.null())}), config / name)
        for leftover in (config / "_temporary.parquet", config / ".crc.parquet", tables / "_temporary" / "a.parquet"):
            leftover.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"text": ["twice"]}), leftover)
        import_dataset(tables, tmp_path / "two", tokenizer=tokenizer)
        assert contents(tmp_path / "one") == contents(tmp_path / "two")
        assert "2 files of config 'CC-MAIN-1' have no rows" in caplog.text

    @pytest.mark.parametrize("name", ["lang=en", "my config", "default"])
    def test_a_config_that_no_node_could_read_is_named(self, tables, tmp_path, name):
        (tables / "_shard_sizes.json").unlink()
        (tables / "CC-MAIN-2").rename(tables / name)
        with raising(PermanentError, Reason.DATASET_MALFORMED, f"config '{name}'", "rename its folder"):
            import_dataset(tables, tmp_path / "dataset", tokenizer=None)

    def test_a_config_without_rows(self, tables, tmp_path):
        (tables / "_shard_sizes.json").unlink()
        for path in (tables / "CC-MAIN-2").iterdir():
            pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
        with raising(PermanentError, Reason.DATASET_TOO_SMALL, "'CC-MAIN-2' has 0 files with rows"):
            import_dataset(tables, tmp_path / "dataset", tokenizer=None)

    def test_a_huge_row_group_and_dropped_characters_are_said(self, tables, tmp_path, monkeypatch, caplog):
        monkeypatch.setattr("templar.datasets.importing.MOST_GROUP_BYTES", 50)
        words = Tokenizer(Backend(models.BPE(vocab={"1": 0, "<eos>": 1}, merges=[])))
        import_dataset(tables, tmp_path / "dataset", tokenizer=words)
        assert caplog.text.count("a node fetches a whole row group") == 6
        numbers = itertools.product((1, 2), range(3), range(20))
        rows = "".join(f"CC-MAIN-{config}{number}{row}" for config, number, row in numbers)
        assert f"does not know {len(rows.replace('1', ''))} characters" in caplog.text

    def test_neither_layout(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with raising(PermanentError, Reason.DATASET_MISSING, "neither train_000000.npy nor folders with *.parquet"):
            import_dataset(tmp_path / "empty", tmp_path / "dataset", tokenizer=None)
