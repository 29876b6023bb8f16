"""The files that describe a sharded dataset: malformed ones are refused, and the message names file and field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from templar.data.shards.manifest import (
    INDEX_FILE,
    MOST_BLOCKS,
    SMALLEST_BLOCK_BYTES,
    ShardIndex,
    block_bytes_for,
    parse_index,
    parse_manifest,
)
from templar.errors import PermanentError, Reason
from tests.support.errors import raising

ORIGIN = "ds/train_000001.json"


def refused(parse, *words):
    with raising(PermanentError, Reason.DATASET_MALFORMED, *words, "build the dataset and upload it again") as caught:
        parse()
    return str(caught.value)


def changed(data, change):
    content = json.loads(data)
    change(content)
    return json.dumps(content).encode()


def put(*path, value):
    """Sets a field, however deep."""

    def change(content):
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return change


class TestIndex:
    def test_a_malformed_field_is_named(self, shards):
        for split, words in (("../train", "splits"), ("train", "splits: train without a shard")):
            data = changed(shards.files[INDEX_FILE], put("splits", split, value=[]))
            refused(lambda data=data: parse_index(data, "ds/_shards.json"), "ds/_shards.json: ", words)

    @given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
    def test_a_flipped_bit_is_refused_or_changes_the_digest(self, shards, place, bit):
        data = bytearray(shards.files[INDEX_FILE])
        data[place % len(data)] ^= 1 << bit
        try:
            index = parse_index(bytes(data), "x")
        except PermanentError as error:
            assert error.reason is Reason.DATASET_MALFORMED  # noqa: PT017 - either outcome is right
        else:
            assert index.digest != shards.index.digest


class TestManifest:
    def parsed(self, shards, data, number=1):
        return parse_manifest(data, ORIGIN, shards.index, "train", number)

    def test_only_the_training_split_has_sample_ids(self, shards):
        data = shards.files["held_out_000000.json"]
        manifest = parse_manifest(data, "x", shards.index, "held_out", 0)
        assert manifest.files == (manifest.tokens,)
        ids = json.loads(shards.files["train_000001.json"])["sample_ids"]
        with_ids = changed(data, put("sample_ids", value=ids))
        refused(lambda: parse_manifest(with_ids, "x", shards.index, "held_out", 0), "sample_ids")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (put("data_offset", value=130), ("tokens.size", "40 samples make")),
            (put("tokens", "name", value="train_000002.npy"), ("tokens.name", "train_000001.npy")),
            (lambda content: content["tokens"]["blocks"].pop(), ("tokens", "train_000001.npy", "do not make")),
            (lambda content: content["sample_ids"]["blocks"].append("0" * 64), ("sample_ids_000001.bin", "do not")),
            (put("sample_ids", value=None), ("sample_ids",)),
            (put("sample_ids", "name", value="sample_ids_000002.bin"), ("sample_ids", "sample_ids_000001.bin")),
        ],
    )
    def test_malformed_fields_are_named(self, shards, change, words):
        data = changed(shards.files["train_000001.json"], change)
        refused(lambda: self.parsed(shards, data), f"{ORIGIN}: ", *words)

    @pytest.mark.parametrize(
        ("field", "index"),
        [
            ("dtype", {"dtype": "uint32"}),
            ("sequence_length", {"sequence_length": 50}),
            ("index", {"number": 2}),
            ("split", {"split": "held_out"}),
            ("num_samples", {"entry": {"num_samples": 39}}),
            ("num_bytes", {"entry": {"num_bytes": 1}}),
        ],
    )
    def test_a_manifest_must_match_the_index(self, shards, field, index):
        content = json.loads(shards.index.canonical())
        content["splits"]["held_out"] = content["splits"]["train"]
        entry, split, number = index.pop("entry", {}), index.pop("split", "train"), index.pop("number", 1)
        content["splits"]["train"][1].update(entry)
        other = ShardIndex.model_validate_json(json.dumps({**content, **index}))
        data, named = shards.files["train_000001.json"], [repr(value) for value in (index | entry).values()]
        refused(
            lambda: parse_manifest(data, ORIGIN, other, split, number), f"{ORIGIN}: {field} is ", INDEX_FILE, *named
        )


@given(size=st.integers(1, 2**45))
def test_few_blocks_make_a_small_manifest(size):
    block_bytes = block_bytes_for(size)
    assert block_bytes >= SMALLEST_BLOCK_BYTES
    assert block_bytes & (block_bytes - 1) == 0
    assert -(-size // block_bytes) <= MOST_BLOCKS
    assert block_bytes == SMALLEST_BLOCK_BYTES or -(-size // (block_bytes // 2)) > MOST_BLOCKS
