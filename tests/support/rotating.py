"""Processes that a test kills: `python -m tests.support.rotating ENDPOINT ROOT FOLDER KEY SECRET WHAT`.

WHAT is the shard to train on, or `read`. A rotation prints its progress, and `done`; a reader reads random samples of
the first two shards, compares them with the truth in ROOT, and prints `ok` after each.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from templar.data.shards.block_file import Transfer
from templar.data.shards.rotation import ShardPlan, rotate
from templar.data.shards.shard_dataset import ShardedDataset
from templar.errors import TemplarError
from templar.store.s3 import S3Store
from tests.support.shards import PREFIX

REPOSITORY = Path(__file__).parents[2]
BUCKET = "dataset"
READ = "read"


def start(endpoint, root, folder, key, what):
    command = [sys.executable, "-m", "tests.support.rotating", endpoint, str(root), str(folder)]
    command += [key.access_key_id, key.secret_access_key, what]
    # No accelerator and one thread: such a process is started many times.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)


def say(line):
    print(line, flush=True)


def read_for_ever(dataset, root):
    """Read until this process is killed, or a sample is wrong."""
    chance = np.random.default_rng(5)
    truth = []
    for number in range(2):
        tokens = np.load(root / BUCKET / PREFIX / f"train_{number:06d}.npy")
        truth.append(tokens.reshape(-1, dataset.index.sequence_length))
    while True:
        number = int(chance.integers(2))
        indices = chance.integers(0, len(truth[number]), 5)
        np.testing.assert_array_equal(dataset.shard(number).read(indices), truth[number][indices])
        say("ok")


def main():
    endpoint, root, folder, key_id, secret, what = sys.argv[1:]
    store = S3Store(BUCKET, endpoint_url=endpoint, access_key_id=key_id, secret_access_key=secret)
    # Few bytes at a time, so that there is much to interrupt.
    dataset = ShardedDataset([store], PREFIX, folder=Path(folder), transfer=Transfer(part_bytes=8192, workers=2))
    if what == READ:
        read_for_ever(dataset, Path(root))
    current = int(what)
    say("ready")
    try:
        report = rotate(
            dataset,
            ShardPlan((current,), current + 1, ()),
            on_progress=lambda percentage: say(f"{percentage:.3f}"),
        )
    except TemplarError as error:
        say(f"failed: {error}")
        sys.exit(1)
    say(f"done {report.skipped or 'well'}")


if __name__ == "__main__":
    main()
