"""`templar dataset copy`: it copies a dataset, and each mistake is one line of text."""

from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from deployments import copy_dataset as command
from deployments.s3_endpoint import create_bucket_with_keys
from templar.data.pages.metadata import METADATA_FILE
from templar.data.pages.page_dataset import PageDataset
from tests.support.commands import Call, contents, write_env
from tests.support.datasets import PREFIX, small_dataset
from tests.support.memory_store import MemoryStore
from tests.support.servers import MotoEndpoint, store_at

WRITE = ("R2_DATASET_WRITE_ACCESS_KEY_ID", "R2_DATASET_WRITE_SECRET_ACCESS_KEY")
READ = ("R2_DATASET_ACCOUNT_ID", "R2_DATASET_READ_ACCESS_KEY_ID", "R2_DATASET_READ_SECRET_ACCESS_KEY")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, run_main: Call) -> Call:
    for name in (*WRITE, *READ, "R2_DATASET_BUCKET_NAME", "R2_DATASET_BUCKET_LIST", "TEMPLAR_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    return partial(run_main, command.main)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_dataset(tmp_path_factory.mktemp("built") / "dataset", MemoryStore())


def test_from_folder_to_folder(call: Call, dataset: Path, tmp_path: Path) -> None:
    status, out, _ = call("--from", dataset, "--to", tmp_path / "some" / "copy")
    assert status == 0
    copy = contents(tmp_path / "some" / "copy")
    assert copy == contents(dataset)
    assert not (tmp_path / "some" / "copy" / ".incoming").exists()
    *table, last = out.strip().splitlines()
    assert last.startswith(f"the dataset is in copy: {len(copy)} objects")
    assert f"{len(copy)} written" in last
    assert f"0 already there; {len(copy)} checked by hash" in last
    assert any("alpha/train" in line for line in table)
    status, out, _ = call("--from", dataset, "--to", tmp_path / "some" / "copy")
    assert status == 0
    assert f"0 written (0 bytes), {len(copy)} already there" in out
    assert "by size alone (--verify compares hashes)" in out
    _, out, _ = call("--from", dataset, "--to", tmp_path / "some" / "copy", "--verify")
    assert f"{len(copy)} checked by hash" in out


def test_what_differs_is_left_alone(call: Call, dataset: Path, tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(b"mine")
    status, out, err = call("--from", dataset, "--to", tmp_path)
    assert (status, out) == (1, "")
    assert "[object_differs]" in err
    assert METADATA_FILE in err
    assert contents(tmp_path) == {METADATA_FILE: b"mine"}


def test_the_documented_command(call: Call, dataset: Path, moto: MotoEndpoint, tmp_path: Path) -> None:
    """From the network's bucket into an operator's own, with its published read keys."""
    theirs, ours = (create_bucket_with_keys(moto.admin, uuid4().hex) for _ in range(2))
    upload = ("--env-file", tmp_path / "theirs", "--to-account", theirs.bucket)
    values = {"TEMPLAR_STORAGE": moto.admin.endpoint_url}
    for name, keys in (("theirs", theirs), ("ours", ours)):
        values |= dict(zip(WRITE, (keys.write.access_key_id, keys.write.secret_access_key), strict=True))
        write_env(tmp_path / name, values)
        values |= dict(zip(READ, (keys.bucket, keys.read.access_key_id, keys.read.secret_access_key), strict=True))
    status, _, err = call("--from", dataset, *upload)
    assert (status, "Traceback" in err) == (0, False)
    target = ("--env-file", tmp_path / "ours", "--to-account", ours.bucket, "--to-prefix", "text")
    status, out, err = call("--from-env", *target, "--verify")
    assert status == 0
    assert f"the dataset is in {ours.bucket}/text" in out
    for secret in (theirs.read.secret_access_key, ours.write.secret_access_key):
        assert secret not in out + err
    first, second = (
        PageDataset([store_at(moto.admin.endpoint_url, keys.bucket, keys.read)], prefix, rows_per_page=4)
        for keys, prefix in ((theirs, PREFIX), (ours, "text"))
    )
    assert first.digest == second.digest


class TestMistakes:
    def test_every_missing_variable_is_named(self, call: Call) -> None:
        status, _, err = call("--from-env", "--to-account", "mine")
        assert status == 1
        assert err.startswith("[bad_environment]")
        for name in (*READ, *WRITE):
            assert name in err
        assert err.count("\n") == 1

    def test_only_what_is_used_must_be_set(self, call: Call, dataset: Path, tmp_path: Path) -> None:
        _, _, err = call("--from", dataset, "--to-account", "mine")
        assert WRITE[0] in err
        assert READ[0] not in err
        _, _, err = call("--from-env", "--to", tmp_path)
        assert READ[0] in err
        assert WRITE[0] not in err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--from-env", "--to-account", "../x"], "lower-case letters"),
            (["--from-env", "--to-account", "mine", "--to-storage", "s3://user:hush@host"], "a storage is r2"),
        ],
    )
    def test_the_command_line(self, call: Call, arguments: list[str], words: str) -> None:
        status, _, err = call(*arguments)
        assert status == 2
        assert words in err
        assert "hush" not in err

    def test_there_is_no_dataset(self, call: Call, tmp_path: Path) -> None:
        status, _, err = call("--from", tmp_path / "nothing", "--to", tmp_path / "copy")
        assert status == 1
        assert str(tmp_path / "nothing") in err
        (tmp_path / "empty").mkdir()
        status, _, err = call("--from", tmp_path / "empty", "--to", tmp_path / "copy")
        assert status == 1
        assert "[dataset_missing] _metadata.yaml is not in empty" in err
