"""`templar dataset verify`, and the page's commands that copy a dataset with rclone."""

import os
import re
import shlex
import subprocess
from functools import partial
from uuid import uuid4

import pytest

from deployments import verify_dataset as command
from deployments.s3_endpoint import create_bucket_with_keys
from templar.data.pages.metadata import METADATA_FILE, SHARD_SIZES_FILE
from templar.datasets.page_writer import upload_dataset
from tests.support.commands import contents, installed, write_env
from tests.support.datasets import PREFIX
from tests.support.servers import REPOSITORY, store_at

READ = ("R2_DATASET_ACCOUNT_ID", "R2_DATASET_READ_ACCESS_KEY_ID", "R2_DATASET_READ_SECRET_ACCESS_KEY")
PARQUET = "alpha/train/000_00001.parquet"


@pytest.fixture
def call(monkeypatch, run_main):
    for name in (*READ, "R2_DATASET_BUCKET_NAME", "R2_DATASET_BUCKET_LIST", "TEMPLAR_STORAGE", "DATASET_BINS_PATH"):
        monkeypatch.delenv(name, raising=False)
    return partial(run_main, command.main)


def test_a_folder(call, small_root, tmp_path):
    folder = tmp_path / "copy"
    for path, data in contents(small_root).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    count = len(contents(folder)) - 2
    status, out, _ = call(folder)
    assert (status, out.count("\n")) == (0, 1)
    assert out.startswith(f"copy: {count} objects, ")
    assert out.endswith(", all as described\n")
    (folder / PARQUET).write_bytes(bytes(len((folder / PARQUET).read_bytes())))
    (folder / "beta/held_out/000_00000.parquet").unlink()
    status, out, _ = call(folder, "--workers", 1)
    assert status == 1
    *lines, last = out.splitlines()
    assert sorted(lines) == [
        f"copy/{PARQUET}: has other bytes than the dataset",
        "copy/beta/held_out/000_00000.parquet: is missing",
    ]
    assert last.endswith(", 2 of them damaged or missing: copy these again")


def documented(theirs, ours):
    """The page's two copies, between two remotes and folders."""
    page = (REPOSITORY / "docs" / "dataset.md").read_text()
    lines = re.findall(r"^\$ (rclone copy .*)$", page, re.MULTILINE)
    assert len(lines) == 2
    named = (line.replace("theirs:<bucket>/dataset", theirs).replace("ours:<bucket>/dataset", ours) for line in lines)
    return [[installed("rclone"), *shlex.split(line)[1:]] for line in named]


def test_a_copy_from_one_vendor_to_another(call, small_root, moto, rclone, tmp_path):
    """The description goes last, nothing is overwritten, a copy that was cut off goes on, and damage is named."""
    bucket = uuid4().hex
    keys = create_bucket_with_keys(moto.admin, bucket)
    upload_dataset(small_root, store_at(moto.admin.endpoint_url, bucket, keys.write), PREFIX)
    target = rclone.root / bucket / PREFIX
    target.parent.mkdir()
    environment = os.environ | {"RCLONE_CONFIG": "", "RCLONE_S3_NO_CHECK_BUCKET": "true"}
    remotes = (("THEIRS", moto.admin.endpoint_url, keys.read), ("OURS", rclone.writable.endpoint_url, rclone.write_key))
    for name, url, key in remotes:
        values = {"TYPE": "s3", "PROVIDER": "Other", "ENDPOINT": url}
        values |= {"ACCESS_KEY_ID": key.access_key_id, "SECRET_ACCESS_KEY": key.secret_access_key}
        environment |= {f"RCLONE_CONFIG_{name}_{field}": value for field, value in values.items()}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False)
    data, description = documented(f"theirs:{bucket}/{PREFIX}", f"ours:{bucket}/{PREFIX}")
    ours = {"TEMPLAR_STORAGE": rclone.read_only.endpoint_url, "DATASET_BINS_PATH": PREFIX}
    ours |= dict(zip(READ, (bucket, rclone.read_key.access_key_id, rclone.read_key.secret_access_key), strict=True))
    verify = partial(call, "--from-env", "--env-file", write_env(tmp_path / "ours.env", ours))

    wanted = contents(small_root)
    assert run(data).returncode == 0
    assert contents(target).keys() == wanted.keys() - {METADATA_FILE, SHARD_SIZES_FILE}
    status, _, err = verify()
    assert status == 1
    assert f"[dataset_missing] {bucket}/{PREFIX}/{METADATA_FILE}: there is no such object" in err
    (target / PARQUET).unlink()  # as after a kill
    assert [run(each).returncode for each in (data, description)] == [0, 0]
    assert contents(target) == wanted
    status, out, err = verify()
    assert status == 0
    assert out.startswith(f"{bucket}/{PREFIX}: ")
    assert rclone.read_key.secret_access_key not in out + err

    other = bytes(len(wanted[PARQUET]))
    (target / PARQUET).write_bytes(other)
    status, out, _ = verify()
    assert status == 1
    assert f"{bucket}/{PREFIX}/{PARQUET}: has other bytes than the dataset\n" in out
    again = run(data)
    assert again.returncode != 0
    assert "immutable file modified" in again.stderr
    assert contents(target)[PARQUET] == other


def test_there_is_no_dataset(call, tmp_path):
    for folder, words in ((tmp_path / "none", "[bucket_missing]"), (tmp_path, f"[dataset_missing] {tmp_path.name}/")):
        status, _, err = call(folder)
        assert (status, words in err) == (1, True)
