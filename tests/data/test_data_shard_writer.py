from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import sha256_hex
from templar.data.shards.manifest import ShardIndex, parse_index, parse_manifest, sample_ids
from templar.data.shards.shard_writer import HEADER_BYTES, ShardLayout, build_shards, write_shard, write_split
from templar.data.tokenizer import load_tokenizer
from templar.datasets.page_writer import build_dataset
from templar.errors import PermanentError, Reason
from tests.support.datasets import contents, numbered_documents, rows_of
from tests.support.errors import raising
from tests.support.shards import block_hashes

SMALL: dict[str, Any] = {"vocab_size": 300, "sequence_length": 16, "samples_per_shard": 50, "block_bytes": 512}


def numbered_samples(count, length):
    return np.arange(count * length, dtype=np.int32).reshape(count, length) % 60000


def documents():
    return [
        *numbered_documents("alpha", num_documents=12, num_lines=20),
        *numbered_documents("beta", num_documents=9, num_lines=30),
    ]


def text_of(root, split):
    tokens = np.concatenate([np.load(file) for file in sorted(root.glob(f"{split}_*.npy"))])
    return load_tokenizer(str(root)).decode(tokens)


def test_the_known_answer_of_a_shard(tmp_path):
    samples = np.arange(8, dtype=np.int32).reshape(1, 8)
    (entry,) = write_split(tmp_path, "train", [samples], ShardLayout("uint16", 8, 4))
    files = contents(tmp_path)
    assert sorted(files) == ["sample_ids_000000.bin", "train_000000.json", "train_000000.npy"]
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '<u2', 'fortran_order': False, 'shape': (8,), }"
    assert files["train_000000.npy"] == header.ljust(127) + b"\n" + np.arange(8, dtype="<u2").tobytes()
    assert files["sample_ids_000000.bin"] == (1540592555457660432).to_bytes(8, "little")
    assert entry.manifest_sha256 == sha256_hex(files["train_000000.json"])
    assert (entry.num_samples, entry.num_bytes) == (1, HEADER_BYTES + 16 + 8)
    assert entry.manifest_sha256 == "cfeeab542a1c9057a660feda01dcbe0a07900f7a740943accc0bd8005f522151"


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 90), max_size=6),
    length=st.integers(1, 9),
    samples_per_shard=st.integers(1, 120),
    block_bytes=st.integers(512, 1100),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_every_byte_is_in_a_hashed_block_and_numpy_reads_it(
    *, tmp_path_factory, sizes, length, samples_per_shard, block_bytes, dtype
):
    root = tmp_path_factory.mktemp("shards")
    samples = numbered_samples(sum(sizes), length) + (0 if dtype == "uint16" else 10**6)
    pieces = np.split(samples, np.cumsum(sizes)[:-1]) if sizes else []
    entries = write_split(root, "train", pieces, ShardLayout(dtype, length, samples_per_shard, block_bytes))
    left = range(len(samples), 0, -samples_per_shard)
    assert [entry.num_samples for entry in entries] == [min(samples_per_shard, rest) for rest in left]
    assert len(contents(root)) == 3 * len(entries)
    if not entries:
        return
    splits = {"train": tuple(entries)}
    index = ShardIndex(version=1, dtype=dtype, sequence_length=length, tokenizer="0" * 64, splits=splits)
    for number, entry in enumerate(entries):
        manifest = (root / f"train_{number:06d}.json").read_bytes()
        assert sha256_hex(manifest) == entry.manifest_sha256
        for file in parse_manifest(manifest, "test", index, "train", number).files:
            data = (root / file.name).read_bytes()
            assert (file.size, file.block_bytes) == (len(data), block_bytes)
            assert file.blocks == block_hashes(data, block_bytes)
    read = [np.load(root / f"train_{number:06d}.npy", mmap_mode="r") for number in range(len(entries))]
    assert all(tokens.dtype == dtype and tokens.offset == HEADER_BYTES for tokens in read)
    np.testing.assert_array_equal(np.concatenate(read).reshape(-1, length), samples)
    ids = [np.fromfile(root / f"sample_ids_{number:06d}.bin", dtype="<u8") for number in range(len(entries))]
    np.testing.assert_array_equal(np.concatenate(ids), sample_ids(samples))


def test_a_failed_source_leaves_no_half_shard(tmp_path):
    def broken():
        yield numbered_samples(3, 4)
        raise KeyError("source")

    with pytest.raises(KeyError):
        write_split(tmp_path, "train", broken(), ShardLayout("uint16", 4, 2))
    assert sorted(contents(tmp_path)) == ["sample_ids_000000.bin", "train_000000.json", "train_000000.npy"]


class TestWrongInput:
    @pytest.mark.parametrize(
        ("samples", "message"),
        [
            (np.zeros((2, 5)), "shape"),
            (np.full((1, 4), 65536), "uint16"),
            (np.full((1, 4), -1), "uint16"),
            (np.zeros((4, 4)), "takes 3"),
        ],
    )
    def test_samples(self, tmp_path, samples, message):
        with pytest.raises(ValueError, match=message):
            write_shard(tmp_path, "train", 0, [samples], ShardLayout("uint16", 4, 3))
        assert contents(tmp_path) == {}

    def test_numbers(self):
        for numbers in ((0, 1, None), (1, 1, 511), (2**20, 2**20, 512)):
            with pytest.raises(ValueError, match=r"must|at least|too few"):
                ShardLayout("uint16", *numbers)


class TestBuildShards:
    def test_the_index_describes_the_files(self, tmp_path):
        root = tmp_path / "dataset"
        built = build_shards(documents(), root, held_out_fraction=0.2, **SMALL)
        assert build_shards(reversed(documents()), tmp_path / "again", held_out_fraction=0.2, **SMALL) == built
        assert contents(tmp_path / "again") == contents(root)
        assert parse_index((root / "_shards.json").read_bytes(), "test") == built
        assert built.tokenizer == load_tokenizer(str(root)).digest
        assert set(built.splits) == {"train", "held_out"}

    def test_held_out_texts_are_those_of_pages_and_never_trained_on(self, tmp_path):
        build_shards(documents(), tmp_path / "shards", held_out_fraction=0.2, **SMALL)
        build_dataset(documents(), tmp_path / "pages", vocab_size=300, held_out_fraction=0.2)
        pages = "".join(text for name in ("alpha", "beta") for text in rows_of(tmp_path / "pages", f"{name}/held_out"))
        train, held_out = (text_of(tmp_path / "shards", split) for split in ("train", "held_out"))
        for document in documents():
            label = f"{document.source} document {int(document.name[:3])} line"
            assert (label in pages) == (label in held_out) != (label in train)

    def test_too_little(self, tmp_path):
        for few, length in (([], 16), (documents()[:1], 16), (documents(), 4000)):
            with raising(PermanentError, Reason.DATASET_TOO_SMALL):
                build_shards(few, tmp_path / "dataset", **SMALL | {"sequence_length": length})
            assert not (tmp_path / "dataset").exists()
