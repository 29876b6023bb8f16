"""Purge, temporary clean-up, access check and local clean-up, from parameters to final states."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.client.schemas.objects import State
from pydantic import SecretStr

from blocks import BucketCredentials, StorageEndpoint
from flows.bucket_purge import bucket_purge
from flows.local_cleanup import local_cleanup
from flows.temporary_cleanup import temporary_cleanup
from flows.validate_storage_access import validate_storage_access
from tasks import housekeeping as task_module
from templar.store.directory import DirectoryStore
from tests.support.flow_network import rows_of_table, run_flow, saved
from tests.support.prefect_server import RunningPrefectServer
from tests.support.prepared import PreparedNetwork
from tests.support.servers import Server, random_key, start_rclone

pytestmark = pytest.mark.usefixtures("prefect_api")
NAME = "cleaner"
SECRET = "a" * 64


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, prefect_server: RunningPrefectServer) -> PreparedNetwork:
    """A network that was started, and its aggregator, which published the genesis."""
    network = PreparedNetwork(tmp_path_factory.mktemp("cleaner"))
    with prefect_server.configured():
        network.at("aggregator", network.first_window).save(NAME)
    return network


@pytest.fixture
def store(network: PreparedNetwork) -> Iterator[DirectoryStore]:
    """The aggregator's bucket, with objects of an old version."""
    store = DirectoryStore(network.bucket("aggregator"))
    for window in range(3):
        store.put(f"gradient-{window}-1-v0.2.8.pt", b"12345")
        store.put(f"gradient-{window}-1-v0.2.82.pt", b"12345")
    yield store
    store.delete([info.key for info in store.list("gradient-")])


def run(flow: Flow[..., Any], neuron: str = NAME, **parameters: Any) -> State[Any]:
    return run_flow(flow, neuron, **parameters)


@pytest.fixture
def other(network: PreparedNetwork, store: DirectoryStore) -> dict[str, Any]:
    """Parameters of a neuron that names the bucket as that of an account, with a saved key."""
    BucketCredentials(access_key_id="id", secret_access_key=SecretStr(SECRET)).save("of-account", overwrite=True)
    name = saved(network.at("lazy", network.first_window))
    return {"neuron": name, "bucket": "account", "account": store.name, "credentials": "of-account"}


class TestPurge:
    def test_it_only_counts_unless_the_buckets_name_is_repeated(
        self, store: DirectoryStore, prefect_server: RunningPrefectServer
    ) -> None:
        before = {info.key for info in store.list()}
        old = {"mode": "version", "version": "0.2.8"}
        state = run(bucket_purge, **old)
        assert state.is_completed()
        assert ": 3 objects meant, 0 deleted, 15 bytes" in str(state.message)
        (row,) = rows_of_table(prefect_server, f"purge-{NAME}")
        assert row == {"kind": "gradient", "found": 3, "kept": 0, "num_bytes": 15, "deleted": 0, "failed": 0}
        state = run(bucket_purge, mode="wipe", dry_run=False, confirm_bucket="another-bucket")
        assert state.is_failed()
        assert "[not_confirmed] confirm_bucket is " in str(state.message)
        assert {info.key for info in store.list()} == before
        state = run(bucket_purge, **old, dry_run=False, confirm_bucket=store.name)
        assert ": 3 objects meant, 3 deleted, 15 bytes" in str(state.message)
        assert before - {info.key for info in store.list()} == {f"gradient-{each}-1-v0.2.8.pt" for each in range(3)}

    def test_what_does_not_go_together_is_named(self) -> None:
        state = run(bucket_purge, mode="prefix")
        assert state.is_failed()
        assert "[bad_parameters] prefix: mode 'prefix' needs it" in str(state.message)

    def test_the_form_says_what_there_is_and_takes_nothing_else(self) -> None:
        properties = bucket_purge.parameters.properties
        assert properties["mode"]["enum"] == ["version", "aggregates", "older_than", "prefix", "suffix", "wipe"]
        assert properties["bucket"]["enum"] == ["neuron", "gradients", "aggregator", "dataset", "account"]
        assert properties["dry_run"]["default"] is True
        assert all(item["description"] for item in properties.values())
        for parameters in ({"mode": "everything"}, {"mode": "older_than", "hours": -1}, {}):
            with pytest.raises(Exception, match=r"mode|hours"):
                asyncio.run(bucket_purge(**parameters))

    def test_an_account_is_opened_with_a_saved_key(self, store: DirectoryStore, other: dict[str, Any]) -> None:
        named = {"dry_run": False, "confirm_bucket": store.name}
        state = run(bucket_purge, mode="prefix", prefix="gradient-", **other, **named)
        assert ": 6 objects meant, 6 deleted, 30 bytes" in str(state.message)
        assert SECRET not in str(state.message)


class TestTemporary:
    KEY = "access-check-0123456789abcdef"

    @pytest.fixture(autouse=True)
    def _probe(self, store: DirectoryStore) -> None:
        """What a check left that died."""
        store.put(self.KEY, b"12")
        os.utime(Path(store._root) / self.KEY, (1000, 1000))

    def test_probes_of_checks_that_died_go(self, store: DirectoryStore, prefect_server: RunningPrefectServer) -> None:
        assert ": 1 objects abandoned, 0 deleted" in str(run(temporary_cleanup, dry_run=True).message)
        assert ": 1 objects abandoned, 1 deleted" in str(run(temporary_cleanup).message)
        assert store.head(self.KEY) is None
        assert [row["kind"] for row in rows_of_table(prefect_server, f"temporary-{NAME}")] == ["probe"]

    def test_another_bucket_is_only_counted_until_its_name_is_repeated(
        self, store: DirectoryStore, other: dict[str, Any]
    ) -> None:
        assert ": 1 objects abandoned, 0 deleted" in str(run(temporary_cleanup, **other).message)
        refused = run(temporary_cleanup, **other, dry_run=False)
        assert refused.is_failed()
        assert "[not_confirmed] confirm_bucket is ''" in str(refused.message)
        assert store.head(self.KEY) is not None
        state = run(temporary_cleanup, **other, dry_run=False, confirm_bucket=store.name)
        assert ": 1 objects abandoned, 1 deleted" in str(state.message)
        assert store.head(self.KEY) is None


class TestAccess:
    def test_a_directory_store_says_that_keys_mean_nothing(
        self, store: DirectoryStore, prefect_server: RunningPrefectServer
    ) -> None:
        before = list(store.list())
        state = run(validate_storage_access)
        assert state.is_completed()
        assert "cannot be told: own read key: put (a directory store looks at no keys)" in str(state.message)
        assert list(store.list()) == before
        found = {(row["key"], row["right"]): row["does"] for row in rows_of_table(prefect_server, f"access-{NAME}")}
        assert found["own write key", "put"] == "yes"
        assert found["own read key", "put"] == "cannot be told"
        assert found["dataset read key", "get"] == "yes"

    @pytest.fixture
    def server(self, network: PreparedNetwork) -> Iterator[Server]:
        self.key = random_key()
        server = start_rclone(network.plan.folder / "buckets", self.key)
        yield server
        server.stop()

    def test_a_read_key_that_writes_fails_the_run(
        self, network: PreparedNetwork, store: DirectoryStore, server: Server, prefect_server: RunningPrefectServer
    ) -> None:
        block = network.block("aggregator")
        key = BucketCredentials(
            access_key_id=self.key.access_key_id, secret_access_key=SecretStr(self.key.secret_access_key)
        )
        endpoint = StorageEndpoint(url=server.endpoint_url, max_attempts=1)
        bucket = block.bucket.model_copy(update={"endpoint": endpoint, "read": key, "write": key})
        name = saved(block.model_copy(update={"bucket": bucket}))
        before = {info.key for info in store.list()}
        state = run(validate_storage_access, name)
        assert state.is_failed()
        assert "[read_key_writes] bucket " in str(state.message)
        assert self.key.secret_access_key not in str(state.message)
        assert {info.key for info in store.list()} == before
        problems = {
            (row["key"], row["right"]): row["problem"] for row in rows_of_table(prefect_server, f"access-{name}")
        }
        assert problems["own read key", "put"] == "read_key_writes"
        assert problems["own write key", "put"] == ""


class TestLocal:
    def test_litter_goes_and_what_a_restart_needs_stays(
        self,
        network: PreparedNetwork,
        prefect_server: RunningPrefectServer,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        home = Path(network.block("aggregator").home)
        for name in ("publishing/3/model.safetensors", "snapshots/.writing-1-1/model.safetensors", "journal.sqlite"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(b"x" * 5000)
        monkeypatch.setattr(task_module, "kernel_folder", lambda: home / "kernels" / "none")
        assert ", 0 removed, 0 bytes of them" in str(run(local_cleanup).message)
        now = time.time()
        monkeypatch.setattr(task_module.time, "time", lambda: now + 90_000)
        assert ", 2 removed, 16384 bytes of them" in str(run(local_cleanup, dry_run=True).message)
        state = run(local_cleanup)
        assert state.is_completed()
        assert ", 2 removed, 16384 bytes of them" in str(state.message)
        assert not (home / "publishing").exists()
        assert (home / "journal.sqlite").exists()
        found = {row["room"]: row["removed"] for row in rows_of_table(prefect_server, f"local-{NAME}")}
        assert (found["snapshots"], found["publishing"]) == (1, 1)
