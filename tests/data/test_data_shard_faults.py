"""Faults of stores and disks, against a real endpoint: a fault costs time, never a wrong byte.

`rclone serve s3` stands behind a proxy that injects the fault (`tests.support.faulty_endpoint`).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from deployments.s3_endpoint import AccessKey
from templar.data import replicas
from templar.data.shards.block_file import Transfer
from templar.data.shards.manifest import INDEX_FILE
from templar.data.shards.rotation import ShardPlan, rotate
from templar.data.shards.shard_dataset import ShardedDataset
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.store.s3_protocol import S3Settings
from tests.support.errors import raising
from tests.support.faulty_endpoint import Fault, faulty_endpoint
from tests.support.servers import Server, random_key, start_rclone, store_at
from tests.support.shards import PREFIX, Shards, on_disk, write_shards

BUCKET = "dataset"
PLAN = ShardPlan((0,), 1, ())
INDEX, MANIFEST, TOKENS, IDS = INDEX_FILE, "train_000000.json", "train_000000.npy", "sample_ids_000000.bin"
IMPATIENT = S3Settings(
    connect_timeout_seconds=2.0, read_timeout_seconds=0.3, max_attempts=1, slowest_bytes_per_second=1e6
)
"""One attempt per request, so that only the dataset repeats them; slow bodies end at once."""

MEANING: dict[Fault, tuple[type[TemplarError], Reason]] = {
    "403": (PermanentError, Reason.ACCESS_DENIED),
    "404": (PermanentError, Reason.OBJECT_MISSING),
    "429": (TransientError, Reason.STORE_BUSY),
    "500": (TransientError, Reason.STORE_BUSY),
    "slow": (TransientError, Reason.STORE_UNREACHABLE),
    "truncated": (TransientError, Reason.STORE_UNREACHABLE),
    "flipped": (TransientError, Reason.DATASET_MALFORMED),
    "killed": (TransientError, Reason.STORE_UNREACHABLE),
}


@dataclass(frozen=True)
class Bucket:
    """A dataset on a real endpoint."""

    shards: Shards
    server: Server
    key: AccessKey
    root: Path


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    root, key = tmp_path_factory.mktemp("endpoint"), random_key()
    shards = write_shards(root / BUCKET / PREFIX, length=500)
    server = start_rclone(root, key)
    try:
        yield Bucket(shards, server, key, root)
    finally:
        server.stop()


@pytest.fixture
def faulty(bucket):
    with faulty_endpoint(bucket.server.endpoint_url) as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(replicas, "PAUSE_SECONDS", 0.001)


def dataset(bucket, folder, *endpoints):
    stores = [store_at(endpoint, BUCKET, bucket.key, IMPATIENT) for endpoint in endpoints]
    return ShardedDataset(stores, PREFIX, folder=folder, transfer=Transfer(part_bytes=8192, workers=2))


def complete(bucket, folder):
    """Check that the shards are there, whole, and no other files."""
    assert on_disk(folder) == bucket.shards.names(0, 1)
    assert bucket.shards.wrong_files(folder) == []


def samples_are_right(bucket, opened):
    np.testing.assert_array_equal(opened.shard(0).read(np.arange(40)), bucket.shards.samples[0])


@pytest.mark.parametrize(
    ("fault", "name"),
    [("slow", TOKENS), ("500", INDEX), ("flipped", MANIFEST), ("killed", IDS)],
)
def test_a_fault_of_the_first_requests_is_not_visible(bucket, faulty, tmp_path, fault, name):
    faulty.first(replicas.ROUNDS - 1, fault, name)
    opened = dataset(bucket, tmp_path, faulty.endpoint_url)
    rotate(opened, PLAN)
    assert faulty.num_faults == replicas.ROUNDS - 1
    complete(bucket, tmp_path)
    samples_are_right(bucket, opened)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *((fault, TOKENS) for fault in MEANING if fault not in {"slow", "500"}),
        *(("flipped", INDEX), ("404", INDEX), ("404", MANIFEST), ("500", IDS)),
    ],
)
def test_a_lasting_fault_has_its_reason_and_no_wrong_file_gets_a_name(bucket, faulty, tmp_path, fault, name):
    faulty.always(fault, name)
    family, reason = MEANING[fault]
    if fault == "404" and name in {INDEX, MANIFEST}:
        reason = Reason.DATASET_MISSING
    if (fault, name) == ("flipped", INDEX):  # nothing says what it should be
        family = PermanentError
    with raising(family, reason, name) as caught:
        rotate(dataset(bucket, tmp_path, faulty.endpoint_url), PLAN)
    assert bucket.key.secret_access_key not in str(caught.value)
    assert name not in on_disk(tmp_path)
    assert bucket.shards.wrong_files(tmp_path) == []
    faulty.well()
    rotate(dataset(bucket, tmp_path, faulty.endpoint_url), PLAN)
    complete(bucket, tmp_path)


def test_without_room_for_a_manifest_the_reason_is_the_disk_and_a_later_call_completes(bucket, tmp_path, monkeypatch):
    write = Path.write_bytes

    def refused(path, data):
        write(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    opened = dataset(bucket, tmp_path, bucket.server.endpoint_url)
    monkeypatch.setattr(Path, "write_bytes", refused)
    with raising(TransientError, Reason.DISK_FULL):
        rotate(opened, PLAN)
    monkeypatch.setattr(Path, "write_bytes", write)
    rotate(opened, PLAN)
    complete(bucket, tmp_path)
