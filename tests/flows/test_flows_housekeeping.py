"""Scheduled flows and clean-ups by hand, from a block on the server to objects in a bucket and tables.

What they do to buckets and folders is held in tests/housekeeping, tests/neuron and tests/data.
"""

import asyncio
import fcntl
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from pydantic import SecretStr

from blocks import BucketCredentials
from blocks.environment import neuron_from_environment
from deployments.s3_endpoint import create_bucket_with_keys
from flows.bucket_cleanup import bucket_cleanup
from flows.bucket_purge import bucket_purge
from flows.checkpoint import checkpoint
from flows.evaluate_checkpoint import evaluate_checkpoint
from flows.local_cleanup import local_cleanup
from flows.miner_window import miner_window
from flows.private_backup import private_backup
from flows.shard_rotation import shard_rotation
from flows.temporary_cleanup import temporary_cleanup
from flows.validate_storage_access import validate_storage_access
from tasks import housekeeping as task_module
from tasks.host import release
from templar.agreement.checkpoint import list_checkpoints
from templar.data.shards.rotation import LOCK_FILE
from templar.exchange.object_keys import START_WINDOW_KEY, Kind, parse_current_key, window_key
from templar.neuron.backup import list_backups
from templar.neuron.snapshot import PRIVATE_FILE
from templar.reports.metrics import measured_checkpoint
from templar.store.directory import DirectoryStore
from tests.support.audited import run_alone
from tests.support.flow_network import rows_of_table, run_flow, run_id, saved, task_runs
from tests.support.prepared import PreparedNetwork
from tests.support.shards import on_disk

pytestmark = pytest.mark.usefixtures("prefect_api")
NAME, CLEANER = "keeper", "cleaner"
NUM_WINDOWS = 3
RETENTION = 10
SECRET = "a" * 64
PROBE = "access-check-0123456789abcdef"


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """A network, one of whose miners ran a few windows by its flow, each of them null: no payload was there in time."""
    storage = {"retention_windows": RETENTION, "checkpoint_frequency": 3, "checkpoints_kept": 1}
    network = PreparedNetwork(tmp_path_factory.mktemp("keeper"), storage=storage)
    run_alone(network, NUM_WINDOWS, name="aggregator")
    with prefect_server.configured():
        network.at("lazy", network.first_window).save(NAME)
        network.at("aggregator", network.first_window).save(CLEANER)
        for window in range(network.first_window, network.first_window + NUM_WINDOWS):
            assert run(miner_window, window=window).is_completed()
        release(NAME)
    return network


@pytest.fixture
def last(network):
    return network.first_window + NUM_WINDOWS - 1


@pytest.fixture
def store(network):
    """The miner's bucket."""
    return DirectoryStore(network.bucket("lazy"))


def run(flow, neuron=NAME, **parameters):
    return run_flow(flow, neuron, **parameters)


def keys(store):
    return {info.key for info in store.list()}


class TestMiner:
    def test_a_block_is_all_that_a_window_needs(self, network, store):
        kinds = {key.partition("-")[0] for key in keys(store)}
        assert {"commit", "manifest", "gradient", "proof"} <= kinds
        assert (Path(network.block("lazy").home) / "snapshots").is_dir()

    def test_the_newest_snapshot_is_published(self, last, store, prefect_server):
        state = run(checkpoint)
        with prefect_server.client() as client:
            bar = client.request("GET", f"/artifacts/checkpoint-{NAME}/latest").json()
        assert (bar["type"], float(bar["data"])) == ("progress", 100.0)
        assert state.is_completed()
        assert str(state.message).startswith(f"window {last}, 0 outer steps, root ")
        assert list_checkpoints(store, 3) == [last]

    def test_without_a_snapshot_it_says_so(self, network, tmp_path):
        state = run(checkpoint, saved(network.block("lazy").model_copy(update={"home": str(tmp_path)})))
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert state.message == "[object_missing] no snapshot yet; the first window makes one"

    def test_a_backup_is_stored_once_and_says_why_not(self, network, last, store):
        block = network.block("lazy")
        state = run(private_backup)
        assert (state.name, "no payload of this miner was applied" in str(state.message)) == ("NotDue", True)
        # As if the newest payload had been applied.
        home = Path(block.home)
        (home / "snapshots" / str(last) / PRIVATE_FILE).hardlink_to(home / "spool" / f"staged-{last}.safetensors")
        state = run(private_backup)
        ((window, info),) = list_backups(store)
        assert (window, state.message) == (last, f"window {last}, {info.size} bytes, encrypted")
        state = run(private_backup)
        due = last + network.hparams.storage.private_backup_windows
        assert (state.name, f"due at window {due}" in str(state.message)) == ("NotDue", True)
        state = run(private_backup, saved(block.model_copy(update={"role": "validator"})))
        assert (state.name, state.message) == ("NotDue", "a validator has no private state")
        state = run(private_backup, saved(block.model_copy(update={"preset": "nothing"})))
        assert (state.is_failed(), "[bad_hparams]" in str(state.message)) == (True, True)

    def test_what_has_expired_is_counted_and_then_goes(self, network, store, prefect_server):
        """The first two of the miner's windows have expired, for it has worked in a later one."""
        first, window = network.first_window, network.first_window + RETENTION + 2
        newest, strangers = window_key(Kind.PROOF, window, 3), {"readme.txt", "gradient-1-3-v999.bin", START_WINDOW_KEY}
        for key in (newest, *strangers):
            store.put(key, b"{}")
        before, neuron = keys(store), saved(network.at("lazy", window))
        expired = [key for key in before if (parsed := parse_current_key(key)) and parsed.window in (first, first + 1)]
        kinds = Counter(key.partition("-")[0] for key in expired)
        assert all(kinds[kind] == 2 for kind in ("commit", "manifest", "gradient", "proof"))
        # 1. A dry run counts.
        state = run(bucket_cleanup, neuron, dry_run=True)
        assert state.is_completed()
        assert str(state.message).startswith(f"window {window}: {len(expired)} objects expired, 0 deleted, ")
        with prefect_server.client() as client:
            assert [run.name for run in task_runs(client, state, at_least=1)] == ["clean bucket"]
            assert client.read_flow_run(run_id(state)).name == f"{neuron} clean-up"
        rows = rows_of_table(prefect_server, f"cleanup-{neuron}")
        assert {row["kind"]: (row["found"], row["deleted"]) for row in rows} == {
            kind: (count, 0) for kind, count in kinds.items()
        }
        assert keys(store) == before
        # 2. Then they go, once.
        state = run(bucket_cleanup, neuron)
        assert f": {len(expired)} objects expired, {len(expired)} deleted, " in str(state.message)
        assert keys(store) == before - set(expired)
        assert ": 0 objects expired, 0 deleted" in str(run(bucket_cleanup, neuron).message)
        store.delete([newest, *strangers])

    def test_each_checkpoint_is_measured_once(self, last, store, prefect_server):
        assert run(checkpoint).is_completed()
        first, before = run(evaluate_checkpoint), keys(store)
        assert first.is_completed()
        assert str(first.message).startswith(f"1 of 1 checkpoints were measured now; window {last}: ")
        (row,) = rows_of_table(prefect_server, f"evaluation-{NAME}")
        assert row["window"] == last
        assert 0 < row["bits per byte"] < row["loss"] < row["perplexity"]
        again = run(evaluate_checkpoint)
        assert str(again.message).partition(";")[2] == str(first.message).partition(";")[2]
        assert str(again.message).startswith("0 of 1 checkpoints")
        assert keys(store) == before

    def test_tasks_are_run_on_each_checkpoint(self, network, prefect_server, monkeypatch):
        block = network.at("aggregator", network.first_window)

        def run_tasks(folder, tasks, settings):
            assert settings == block.trainer
            assert (folder / "model.safetensors").is_file()
            return [(task, "acc", 0.25) for task in tasks]

        monkeypatch.setattr(task_module, "run_tasks", run_tasks)
        assert run(evaluate_checkpoint, CLEANER, tasks=["arc_easy", "piqa"]).is_completed()
        rows = rows_of_table(prefect_server, f"evaluation-{CLEANER}")
        assert [row["tasks"] for row in rows] == ["arc_easy acc 0.2500, piqa acc 0.2500"]
        found = measured_checkpoint(Path(block.home))
        assert found is not None
        assert found.results == (("arc_easy", "acc", 0.25), ("piqa", "acc", 0.25))
        state = run(evaluate_checkpoint, saved(network.at("validator", network.first_window)))
        assert (state.name, state.is_completed()) == ("Skipped", True)


class TestRotation:
    def test_a_dataset_of_pages_needs_none(self, network):
        state = run(shard_rotation, saved(network.block("lazy")))
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert state.message == "[no_shards] the dataset consists of pages, which need no rotation"

    def test_shards_are_fetched_and_rotated(self, tmp_path):
        sharded = PreparedNetwork(tmp_path / "sharded", data={"layout": "shards"})
        name, shards = saved(sharded.block("lazy").model_copy(update={"home": str(tmp_path)})), tmp_path / "shards"
        shards.mkdir()
        with (shards / LOCK_FILE).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = run(shard_rotation, name)
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert state.message == "[already_running] another process of this neuron rotates its shards"
        (shards / "train_000003.npy").write_bytes(b"old")
        state = run(shard_rotation, name)
        assert state.name == "Completed"
        fetched = "trains on [0], on the disk [0, 1]: fetched [0, 1], deleted ['train_000003.npy'], "
        assert str(state.message).startswith(fetched)
        truth = [path for number in (0, 1) for path in sharded.plan.dataset.glob(f"[!h]*_{number:06d}.*")]
        assert on_disk(shards) == sorted(path.name for path in truth)
        assert all((shards / path.name).read_bytes() == path.read_bytes() for path in truth)
        again = run(shard_rotation, name)
        assert str(again.message).startswith("trains on [0], on the disk [0, 1]: fetched [], deleted [], ")


class TestCleaner:
    """Flows of the aggregator, which published the genesis."""

    @pytest.fixture
    def store(self, network):
        """Its bucket, with objects of an old version and what a check left that died."""
        store = DirectoryStore(network.bucket("aggregator"))
        for window in range(3):
            store.put(f"gradient-{window}-1-v0.2.8.pt", b"12345")
            store.put(f"gradient-{window}-1-v0.2.82.pt", b"12345")
        store.put(PROBE, b"12")
        os.utime(Path(store._root) / PROBE, (1000, 1000))
        yield store
        store.delete([PROBE, *(info.key for info in store.list("gradient-"))])

    @pytest.fixture
    def other(self, network, store):
        """Parameters of a neuron that names the bucket as that of an account, with a saved key."""
        BucketCredentials(access_key_id="id", secret_access_key=SecretStr(SECRET)).save("of-account", overwrite=True)
        name = saved(network.at("lazy", network.first_window))
        return {"neuron": name, "bucket": "account", "account": store.name, "credentials": "of-account"}

    def test_a_purge_only_counts_unless_the_buckets_name_is_repeated(self, store, other, prefect_server):
        before, old = keys(store), {"mode": "version", "version": "0.2.8"}
        state = run(bucket_purge, CLEANER, **old)
        assert state.is_completed()
        assert ": 3 objects meant, 0 deleted, 15 bytes" in str(state.message)
        (row,) = rows_of_table(prefect_server, f"purge-{CLEANER}")
        assert row == {"kind": "gradient", "found": 3, "kept": 0, "num_bytes": 15, "deleted": 0, "failed": 0}
        for wrong, words in (
            ({"mode": "wipe", "dry_run": False, "confirm_bucket": "another"}, "[not_confirmed] confirm_bucket is "),
            ({"mode": "prefix"}, "[bad_parameters] prefix: mode 'prefix' needs it"),
        ):
            state = run(bucket_purge, CLEANER, **wrong)
            assert (state.is_failed(), words in str(state.message)) == (True, True)
        assert keys(store) == before
        named = {"dry_run": False, "confirm_bucket": store.name}
        assert ": 3 objects meant, 3 deleted, 15 bytes" in str(run(bucket_purge, CLEANER, **old, **named).message)
        assert before - keys(store) == {f"gradient-{each}-1-v0.2.8.pt" for each in range(3)}
        state = run(bucket_purge, mode="prefix", prefix="gradient-", **other, **named)
        assert ": 3 objects meant, 3 deleted, 15 bytes" in str(state.message)
        assert SECRET not in str(state.message)

    def test_the_form_of_a_purge_says_what_there_is_and_takes_nothing_else(self):
        properties = bucket_purge.parameters.properties
        assert properties["mode"]["enum"] == ["version", "aggregates", "older_than", "prefix", "suffix", "wipe"]
        assert properties["bucket"]["enum"] == ["neuron", "gradients", "aggregator", "dataset", "page", "account"]
        assert properties["dry_run"]["default"] is True
        assert all(item["description"] for item in properties.values())
        for parameters in ({"mode": "everything"}, {"mode": "older_than", "hours": -1}, {}):
            with pytest.raises(Exception, match=r"mode|hours"):
                asyncio.run(bucket_purge(**parameters))

    def test_probes_of_checks_that_died_go(self, store, other, prefect_server):
        """Those of another bucket are only counted until its name is repeated."""
        assert ": 1 objects abandoned, 0 deleted" in str(run(temporary_cleanup, CLEANER, dry_run=True).message)
        assert ": 1 objects abandoned, 0 deleted" in str(run(temporary_cleanup, **other).message)
        refused = run(temporary_cleanup, **other, dry_run=False)
        assert (refused.is_failed(), "[not_confirmed] confirm_bucket is ''" in str(refused.message)) == (True, True)
        assert store.head(PROBE) is not None
        assert ": 1 objects abandoned, 1 deleted" in str(run(temporary_cleanup, CLEANER).message)
        assert store.head(PROBE) is None
        assert [row["kind"] for row in rows_of_table(prefect_server, f"temporary-{CLEANER}")] == ["probe"]
        store.put(PROBE, b"12")
        os.utime(Path(store._root) / PROBE, (1000, 1000))
        state = run(temporary_cleanup, **other, dry_run=False, confirm_bucket=store.name)
        assert ": 1 objects abandoned, 1 deleted" in str(state.message)
        assert store.head(PROBE) is None

    def test_a_directory_store_says_that_keys_mean_nothing(self, store, prefect_server):
        state, before = run(validate_storage_access, CLEANER), list(store.list())
        assert state.is_completed()
        assert "cannot be told: own read key: put (a directory store looks at no keys)" in str(state.message)
        assert list(store.list()) == before
        found = {(row["key"], row["right"]): row["does"] for row in rows_of_table(prefect_server, f"access-{CLEANER}")}
        assert found["own write key", "put"] == "yes"
        assert found["own read key", "put"] == "cannot be told"
        assert found["dataset read key", "get"] == "yes"

    def test_a_read_key_that_writes_fails_the_run(self, network, prefect_server, moto):
        key = create_bucket_with_keys(moto.admin, "written").write
        name = saved(neuron_from_environment(network.environment_on(moto.admin.endpoint_url, "written", key, key)))
        state = run(validate_storage_access, name)
        assert state.is_failed()
        assert "[read_key_writes] bucket " in str(state.message)
        assert key.secret_access_key not in str(state.message)
        rows = rows_of_table(prefect_server, f"access-{name}")
        problems = {(row["key"], row["right"]): row["problem"] for row in rows}
        assert problems["own read key", "put"] == "read_key_writes"
        assert problems["own write key", "put"] == ""

    def test_litter_of_a_folder_goes_and_what_a_restart_needs_stays(
        self, network, prefect_server, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        home = tmp_path / "home"
        for name in ("publishing/3/model.safetensors", "snapshots/.writing-1-1/model.safetensors", "journal.sqlite"):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_bytes(b"x" * 5000)
        monkeypatch.setattr(task_module, "kernel_folder", lambda: home / "kernels" / "none")
        neuron = saved(network.at("aggregator", network.first_window).model_copy(update={"home": str(home)}))
        assert ", 0 removed, 0 bytes of them" in str(run(local_cleanup, neuron).message)
        now = time.time()
        monkeypatch.setattr(task_module.time, "time", lambda: now + 90_000)
        assert ", 2 removed, 16384 bytes of them" in str(run(local_cleanup, neuron, dry_run=True).message)
        state = run(local_cleanup, neuron)
        assert state.is_completed()
        assert ", 2 removed, 16384 bytes of them" in str(state.message)
        assert not (home / "publishing").exists()
        assert (home / "journal.sqlite").exists()
        found = {row["room"]: row["removed"] for row in rows_of_table(prefect_server, f"local-{neuron}")}
        assert (found["snapshots"], found["publishing"]) == (1, 1)
