"""Small sharded datasets for tests: generated tokens in shards whose every byte is known."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from templar.canonical import sha256_hex
from templar.data.shards.block_file import NAMES_LOCK
from templar.data.shards.manifest import INDEX_FILE, ShardIndex
from templar.data.shards.rotation import LOCK_FILE
from templar.data.shards.shard_writer import ShardLayout, write_split

PREFIX = "dataset"
TOKENIZER = "0" * 64


@dataclass(frozen=True)
class Shards:
    """A dataset and the samples of its training split."""

    files: dict[str, bytes]  # by name
    samples: tuple[NDArray[Any], ...]  # of each shard of the split `train`
    index: ShardIndex

    def names(self, *numbers):
        """Names of the files of some shards of the split `train`, their manifests included."""
        parts = [(f"train_{each:06d}.json", f"train_{each:06d}.npy", f"sample_ids_{each:06d}.bin") for each in numbers]
        return sorted(name for names in parts for name in names)

    def size(self, *numbers):
        return sum(self.index.splits["train"][number].num_bytes for number in numbers)

    def put(self, store):
        for name, data in self.files.items():
            store.put(f"{PREFIX}/{name}", data)

    def wrong_files(self, folder):
        """Files with a final name that have other bytes than the dataset, as one bit is enough to make them."""
        return [
            path.name
            for path in sorted(folder.iterdir())
            if path.name in self.files and sha256_hex(path.read_bytes()) != sha256_hex(self.files[path.name])
        ]


def generated(count, length, dtype, seed=1):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (count, length), dtype=dtype, endpoint=True)


def write_shards(
    root, *, num_samples=120, samples_per_shard=40, length=100, dtype="uint16", block_bytes=512, num_held_out=5, seed=1
):
    """Write a dataset into a folder, which is made."""
    root.mkdir(parents=True)
    splits = {"train": generated(num_samples, length, dtype, seed), "held_out": generated(num_held_out, length, dtype)}
    layout = ShardLayout(dtype, length, samples_per_shard, block_bytes)
    entries = {split: write_split(root, split, [samples], layout) for split, samples in splits.items()}
    index = ShardIndex(version=1, dtype=dtype, sequence_length=length, tokenizer=TOKENIZER, splits=entries)
    (root / INDEX_FILE).write_bytes(index.canonical())
    files = {path.name: path.read_bytes() for path in sorted(root.iterdir())}
    starts = range(0, num_samples, samples_per_shard)
    return Shards(files, tuple(splits["train"][start : start + samples_per_shard] for start in starts), index)


def on_disk(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in {LOCK_FILE, NAMES_LOCK})


def flipped(data, place):
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def block_hashes(data, block_bytes):
    starts = range(0, len(data), block_bytes)
    return tuple(hashlib.sha256(data[start : start + block_bytes]).hexdigest() for start in starts)
