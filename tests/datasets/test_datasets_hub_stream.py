"""Datasets that are streamed from a repository of Hugging Face's form on this machine."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from templar.datasets import hub_stream
from templar.datasets.build_dataset import build
from templar.datasets.documents import find_inputs, read_texts, source_from_text
from templar.datasets.hub_stream import HubSplit, find_shards, parse_hub_split
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout
from templar.errors import PermanentError, Reason, TransientError
from tests.support.datasets import contents, numbered_documents
from tests.support.errors import raising

CARD = """---
configs:
- config_name: {config}
  data_files:
  - split: train
    path: {config}/train-*
  - split: test
    path: {config}/test-*
---
# A repository
"""


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No look at the hub, and nothing of one test's repository in the next one's."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub_stream._open.cache_clear()
    yield
    hub_stream._open.cache_clear()


@pytest.fixture
def repository(tmp_path):
    """A repository with a config `tables` of Parquet files; beside it, one with the same rows as JSON lines."""
    root, lines = tmp_path / "repository", tmp_path / "lines"
    for folder, config in ((root, "tables"), (lines, "lines")):
        (folder / config).mkdir(parents=True)
        (folder / "README.md").write_text(CARD.format(config=config))
    for name in ("train-0", "train-1", "test-0"):
        table = pa.table({"id": list(range(11)), "text": texts(name)})
        pq.write_table(table, root / "tables" / f"{name}.parquet", row_group_size=4)
        (lines / "lines" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return root


def texts(name):
    return [document.text for document in numbered_documents(name, num_documents=11, num_lines=9)]


def source(repository, query="config=tables", column="text"):
    return source_from_text(f"mine=hf:{repository}?{query}", column=column)


def documents(wanted):
    return [document for file in find_inputs(wanted) for document in read_texts(file)]


def request(repository, root, layout=DatasetLayout.SHARDS):
    settings = BuildSettings(layout, 0.2, vocab_size=300, sequence_length=16, samples_per_shard=100, row_chars=100)
    return BuildRequest((source(repository),), root, settings)


class TestReading:
    @pytest.mark.parametrize("config", ["tables", "lines"])
    def test_the_rows_of_a_split_in_order(self, repository, config):
        root = repository if config == "tables" else repository.with_name("lines")
        expected = [
            (f"train-{index:05d}-of-00002#{row}", text)
            for index in range(2)
            for row, text in enumerate(texts(f"train-{index}"))
        ]
        assert documents(source(root, f"config={config}")) == expected

    def test_a_shard_is_known_by_its_bytes(self, repository):
        before = find_shards(HubSplit(str(repository), "tables"))
        pq.write_table(pa.table({"text": ["other"]}), repository / "tables" / "train-1.parquet")
        after = find_shards(HubSplit(str(repository), "tables"))
        assert [one.sha256 == two.sha256 for one, two in zip(before, after, strict=True)] == [True, False]

    def test_what_a_failed_job_has_left_is_passed_over(self, tmp_path):
        for name in ("a.parquet", "_temporary/0/a.parquet", "b/_c.parquet", ".d.parquet"):
            (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"text": [name]}), tmp_path / "data" / name)
        (tmp_path / "_link").symlink_to(tmp_path / "data")
        for folder in ("data", "_link"):
            assert [text for _, text in documents(source(tmp_path / folder, "split=train"))] == ["a.parquet"]

    def test_how_a_split_is_written(self):
        split = parse_hub_split("hf:org/name?config=c&split=s&revision=r")
        assert split == HubSplit("org/name", "c", "s", "r")
        assert parse_hub_split(str(split)) == split
        assert source_from_text("hf:org/name").name == "name"
        for wrong in ("hf:", "hf:x?splits=y", "hf:x?split="):
            with pytest.raises(ValueError, match="write hf:PATH"):
                parse_hub_split(wrong)


class TestBuilding:
    @pytest.mark.parametrize("layout", list(DatasetLayout))
    def test_a_build_is_found_again_and_repeats_its_bytes(self, repository, tmp_path, layout):
        one = build(request(repository, tmp_path / "one", layout))
        assert build(request(repository, tmp_path / "two", layout), workers=1).card == one.card
        assert contents(tmp_path / "one") == contents(tmp_path / "two")
        assert build(request(repository, tmp_path / "one", layout)) == one
        assert str(tmp_path) not in (one.root / "card.json").read_text()
        assert sum(one.card.total(split).documents for split in ("train", "held_out")) == 22

    def test_an_endpoint_that_dies_at_the_end_of_a_shard(self, repository, tmp_path, monkeypatch):
        """The error says which shard and row; the same command completes the build, with the same bytes."""
        whole = build(request(repository, tmp_path / "whole"))
        batches = hub_stream._batches

        def dying(shard, column):
            for batch in batches(shard, column):
                yield batch.slice(0, 10)
                raise ConnectionError("the endpoint closed the connection")

        monkeypatch.setattr(hub_stream, "_batches", dying)
        with raising(TransientError, Reason.STORE_UNREACHABLE, match=r"train-0000\d-of-00002, row 10: cannot be read"):
            build(request(repository, tmp_path / "built"))
        assert not (tmp_path / "built").exists()
        monkeypatch.setattr(hub_stream, "_batches", batches)
        assert build(request(repository, tmp_path / "built")).card == whole.card
        assert contents(tmp_path / "built") == contents(whole.root)


class TestMistakes:
    @pytest.mark.parametrize(
        ("folder", "query"), [("", "config=none"), ("", "config=tables&split=none"), ("nowhere", "")]
    )
    def test_there_is_no_such_split(self, repository, folder, query):
        with raising(PermanentError, Reason.DATASET_MISSING, "correct path, config or split", "none" if query else ""):
            find_inputs(source(repository / folder, query))

    @pytest.mark.parametrize("config", ["tables", "lines"])
    def test_there_is_no_such_column(self, repository, config):
        root = repository if config == "tables" else repository.with_name("lines")
        with raising(PermanentError, Reason.DATASET_MALFORMED, "no column 'body'; there are id, text: name one"):
            documents(source(root, f"config={config}", column="body"))
        with raising(PermanentError, Reason.DATASET_MALFORMED, "holds int64, not strings"):
            documents(source(root, f"config={config}", column="id"))

    def test_a_null(self, repository):
        pq.write_table(pa.table({"text": ["a", None]}), repository / "tables" / "train-1.parquet")
        with raising(PermanentError, Reason.DATASET_MALFORMED, "train-00001-of-00002: row 1 of column 'text' is null"):
            documents(source(repository))

    def test_a_damaged_file(self, repository):
        path = repository / "tables" / "train-1.parquet"
        find_inputs(source(repository))
        path.write_bytes(path.read_bytes()[:-100] + b"x" * 100)
        with raising(PermanentError, Reason.DATASET_MALFORMED, "cannot be decoded"):
            documents(source(repository))

    def test_the_library_is_missing(self, repository, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, "pip install -e '.[datasets]'"):
            find_inputs(source(repository))
