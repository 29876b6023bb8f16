import json

import pytest

from templar.data.pages.metadata import parse_metadata, parse_shard_sizes, sizes_key
from templar.errors import PermanentError, Reason
from tests.support.errors import raising

METADATA = b"""
license: odc-by
configs:
- config_name: default
  data_files:
  - {split: train, path: "data/*/*"}
- config_name: zulu
  data_files:
  - {split: train, path: zulu/train/*}
- config_name: alpha
  extra_of_the_hub: 1
  data_files:
  - {split: train, path: [alpha/train/0, alpha/train/1]}
  - {split: held_out, path: alpha/held_out/*}
"""


def sizes(**changes):
    entry = {
        "split": "train",
        "shards": [{"path": "alpha/train/0.parquet", "num_rows": 3}, {"path": "alpha/train/1.parquet", "num_rows": 2}],
        "total_rows": 5,
    }
    return {"alpha": {**entry, **changes}}


def parse(content, configs=("alpha",), split="train"):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_shard_sizes(data, "bucket/_shard_sizes.json", configs, split)


def test_configs_of_a_split_without_default_and_sorted():
    metadata = parse_metadata(METADATA, "_metadata.yaml")
    assert metadata.configs_with("train") == ("alpha", "zulu")
    assert metadata.configs_with("held_out") == ("alpha",)
    assert metadata.configs_with("test") == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * 600, "not plain YAML"),
        (b"a: &a [1]\nb: *a\nconfigs: []", "aliases are not allowed"),
        (b"configs: 1" + b":0" * 200 + b".0", "not plain YAML"),  # a number with the base 60
        (b"!!python/object/apply:os.getcwd []", "not plain YAML"),
        (b"configs: [{config_name: ../a, data_files: [{split: a, path: b}]}]", r"configs\.0\.config_name"),
        (
            b"configs: [{config_name: a, data_files: [{split: a, path: b}]},"
            b" {config_name: a, data_files: [{split: a, path: b}]}]",
            "listed twice: a",
        ),
    ],
)
def test_malformed_metadata_is_refused_by_field(data, words):
    with raising(PermanentError, Reason.DATASET_MALFORMED, "bucket/_metadata.yaml", match=words):
        parse_metadata(data, "bucket/_metadata.yaml")


def test_other_splits_have_a_key_of_their_own():
    assert sizes_key("alpha", "train") == "alpha"
    assert parse({"alpha/held_out": sizes(split="held_out")["alpha"]}, split="held_out")["alpha"].total_rows == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "alpha: is missing"),
        (sizes(total_rows=6), "alpha: .*total_rows is 6 but the shards have 5"),
        (sizes(split="held_out"), r"alpha\.split: is 'held_out', must be 'train'"),
        (
            sizes(shards=[{"path": "b/../../a.parquet", "num_rows": 5}]),
            r"shards\.0\.path: .*below the dataset's folder",
        ),
        (sizes(shards=[{"path": "a.npy", "num_rows": 5}]), r"shards\.0\.path"),
        (sizes(shards=[{"path": "a.parquet", "num_rows": 2}] * 2, total_rows=4), "list a path twice"),
    ],
)
def test_malformed_sizes_are_refused_by_field(content, words):
    with raising(PermanentError, Reason.DATASET_MALFORMED, "bucket/_shard_sizes.json", match=words):
        parse(content)
