"""Scheduled flows, from a block on the server to objects in a bucket."""

import fcntl
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow
from prefect.client.schemas.objects import State

import tasks.evaluation
from flows.bucket_cleanup import bucket_cleanup
from flows.checkpoint import checkpoint
from flows.evaluate_checkpoint import evaluate_checkpoint
from flows.miner_window import miner_window
from flows.private_backup import private_backup
from flows.shard_rotation import shard_rotation
from tasks.host import release
from templar import PROTOCOL_VERSION
from templar.agreement.checkpoint import list_checkpoints
from templar.agreement.genesis import find_birth
from templar.chain.ledger import Ledger
from templar.data.shards.rotation import LOCK_FILE
from templar.exchange.buckets import Buckets
from templar.exchange.object_keys import START_WINDOW_KEY, Kind, parse_current_key, window_key
from templar.neuron.backup import list_backups
from templar.neuron.snapshot import PRIVATE_FILE
from templar.store.directory import DirectoryStore
from tests.support.audited import run_alone
from tests.support.checkpoints import fetch_checkpoint
from tests.support.flow_network import rows_of_table, run_flow, run_id, saved, task_runs
from tests.support.prefect_server import RunningPrefectServer
from tests.support.prepared import PreparedNetwork
from tests.support.shards import on_disk

pytestmark = pytest.mark.usefixtures("prefect_api")
NAME = "keeper"
NUM_WINDOWS = 3
RETENTION = 10


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, prefect_server: RunningPrefectServer) -> PreparedNetwork:
    """A network, one of whose miners ran a few windows by its flow, each of them null: no payload was there in time."""
    storage = {"retention_windows": RETENTION, "checkpoint_frequency": 3, "checkpoints_kept": 1}
    network = PreparedNetwork(tmp_path_factory.mktemp("keeper"), storage=storage)
    run_alone(network, NUM_WINDOWS, name="aggregator")
    with prefect_server.configured():
        network.at("lazy", network.first_window).save(NAME)
        for window in range(network.first_window, network.first_window + NUM_WINDOWS):
            assert run(miner_window, window=window).is_completed()
        release(NAME)
    return network


def run(flow: Flow[..., Any], neuron: str = NAME, **parameters: Any) -> State[Any]:
    return run_flow(flow, neuron, **parameters)


def objects(network: PreparedNetwork) -> set[str]:
    return {info.key for info in DirectoryStore(network.bucket("lazy")).list()}


def first_two_windows(network: PreparedNetwork) -> list[str]:
    """The objects of the miner's first two windows."""
    windows = (network.first_window, network.first_window + 1)
    return [key for key in objects(network) if (parsed := parse_current_key(key)) and parsed.window in windows]


class TestWindows:
    def test_a_block_is_all_that_a_window_needs(self, network: PreparedNetwork) -> None:
        kinds = {key.partition("-")[0] for key in objects(network)}
        assert {"commit", "manifest", "gradient", "proof"} <= kinds
        assert (Path(network.block("lazy").home) / "snapshots").is_dir()


class TestCheckpoint:
    def test_the_newest_snapshot_is_published_and_verified(
        self, network: PreparedNetwork, prefect_server: RunningPrefectServer
    ) -> None:
        state = run(checkpoint)
        with prefect_server.client() as client:
            bar = client.request("GET", f"/artifacts/checkpoint-{NAME}/latest").json()
        assert (bar["type"], float(bar["data"])) == ("progress", 100.0)
        last = network.first_window + NUM_WINDOWS - 1
        assert state.is_completed()
        assert str(state.message).startswith(f"window {last}, 0 outer steps, root ")
        chain = Ledger(network.plan.ledger)
        reader = network.block("lazy").bucket.endpoint.open_reader
        birth = find_birth(chain, Buckets(chain, reader), network.hparams)
        publisher = next(neuron for neuron in chain.metagraph().neurons if neuron.uid == 3)
        store = DirectoryStore(network.bucket("lazy"), writable=False)
        assert list_checkpoints(store, 3) == [last]
        folder = network.plan.folder / "fetched"
        manifest = fetch_checkpoint(store, publisher, last, folder, network=birth.network, model=network.hparams.model)
        assert manifest.root.startswith(str(state.message).rpartition(" ")[2])
        assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(manifest.files)

    def test_without_a_snapshot_it_says_so(self, network: PreparedNetwork, tmp_path: Path) -> None:
        block = network.block("lazy").model_copy(update={"home": str(tmp_path)})
        state = run(checkpoint, saved(block))
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert "[object_missing]" in str(state.message)
        assert "the first window makes one" in str(state.message)


class TestPrivateBackup:
    def test_it_is_stored_once_and_says_why_not(self, network: PreparedNetwork) -> None:
        home, last = Path(network.block("lazy").home), network.first_window + NUM_WINDOWS - 1
        state = run(private_backup)
        assert (state.name, "no payload of this miner was applied" in str(state.message)) == ("NotDue", True)
        # As if the newest payload had been applied.
        (home / "snapshots" / str(last) / PRIVATE_FILE).hardlink_to(home / "spool" / f"staged-{last}.safetensors")
        state = run(private_backup)
        store = DirectoryStore(network.bucket("lazy"), writable=False)
        ((window, info),) = list_backups(store)
        assert (window, state.message) == (last, f"window {last}, {info.size} bytes, encrypted")
        state = run(private_backup)
        assert (state.name, f"due at window {last + 5}" in str(state.message)) == ("NotDue", True)

    def test_a_failure_is_its_own_and_has_its_reason(self, network: PreparedNetwork, tmp_path: Path) -> None:
        block = network.block("lazy")
        state = run(private_backup, saved(block.model_copy(update={"preset": "nothing"})))
        assert state.is_failed()
        assert "[bad_hparams]" in str(state.message)

    def test_a_validator_has_none(self, network: PreparedNetwork) -> None:
        state = run(private_backup, saved(network.block("lazy").model_copy(update={"role": "validator"})))
        assert (state.name, state.message) == ("NotDue", "a validator has no private state")


class TestCleanup:
    @pytest.fixture
    def later(self, network: PreparedNetwork) -> Iterator[str]:
        """The neuron when the first two of its windows have expired, for it has worked in a later one."""
        window = network.first_window + RETENTION + 2
        newest, store = window_key(Kind.PROOF, window, 3), DirectoryStore(network.bucket("lazy"))
        store.put(newest, b"{}")
        yield saved(network.at("lazy", window))
        store.delete([newest])

    def test_a_dry_run_counts_and_nothing_else(
        self, network: PreparedNetwork, later: str, prefect_server: RunningPrefectServer
    ) -> None:
        before = objects(network)
        state = run(bucket_cleanup, later, dry_run=True)
        window = network.first_window + RETENTION + 2
        assert state.is_completed()
        kinds = Counter(key.partition("-")[0] for key in first_two_windows(network))
        assert str(state.message).startswith(f"window {window}: {kinds.total()} objects expired, 0 deleted, ")
        assert objects(network) == before
        with prefect_server.client() as client:
            assert [run.name for run in task_runs(client, state, at_least=1)] == ["clean bucket"]
            assert client.read_flow_run(run_id(state)).name == f"{later} clean-up"
        rows = {
            row["kind"]: (row["found"], row["deleted"]) for row in rows_of_table(prefect_server, f"cleanup-{later}")
        }
        assert rows == {kind: (count, 0) for kind, count in kinds.items()}
        assert all(kinds[kind] == 2 for kind in ("commit", "manifest", "gradient", "proof"))

    def test_what_has_expired_goes_and_everything_else_stays(self, network: PreparedNetwork, later: str) -> None:
        store = DirectoryStore(network.bucket("lazy"))
        strangers = {"readme.txt", "gradient-1-3-v999.bin", START_WINDOW_KEY}
        for key in strangers:
            store.put(key, b"1")
        first = network.first_window
        count = len(first_two_windows(network))
        state = run(bucket_cleanup, later)
        assert f": {count} objects expired, {count} deleted, " in str(state.message)
        left = objects(network)
        kept = window_key(Kind.GRADIENT, first + 2, 3)
        assert strangers | {kept} <= left
        ours = {key for key in left if f"v{PROTOCOL_VERSION}." in key}
        assert not [key for key in ours if key.split("-")[1:2] in ([str(first)], [str(first + 1)])]
        assert ": 0 objects expired, 0 deleted" in str(run(bucket_cleanup, later).message)
        standing_still = network.at("lazy", network.first_window + 100 * RETENTION)
        assert ": 0 objects expired, 0 deleted" in str(run(bucket_cleanup, saved(standing_still)).message)
        store.delete(strangers)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> PreparedNetwork:
    """A network that trains on shards."""
    return PreparedNetwork(tmp_path_factory.mktemp("sharded"), data={"layout": "shards"})


class TestRotation:
    def is_right(self, sharded: PreparedNetwork, home: Path) -> bool:
        """Whether the first two shards are there, byte by byte, and nothing else."""
        names = [path.name for number in (0, 1) for path in sharded.plan.dataset.glob(f"*_{number:06d}.*")]
        truth = {name: (sharded.plan.dataset / name).read_bytes() for name in names if not name.startswith("held_out")}
        return {name: (home / "shards" / name).read_bytes() for name in on_disk(home / "shards")} == truth

    def test_a_dataset_of_pages_needs_none(self, network: PreparedNetwork) -> None:
        state = run(shard_rotation, saved(network.block("lazy")))
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert state.message == "[no_shards] the dataset consists of pages, which need no rotation"

    def test_shards_are_fetched_and_rotated(self, sharded: PreparedNetwork, tmp_path: Path) -> None:
        name = saved(sharded.block("lazy").model_copy(update={"home": str(tmp_path)}))
        (tmp_path / "shards").mkdir()
        (tmp_path / "shards" / "train_000003.npy").write_bytes(b"old")
        state = run(shard_rotation, name)
        assert state.name == "Completed"
        assert str(state.message).startswith(
            "trains on [0], on the disk [0, 1]: fetched [0, 1], deleted ['train_000003.npy'], "
        )
        assert self.is_right(sharded, tmp_path)
        again = run(shard_rotation, name)
        assert str(again.message).startswith("trains on [0], on the disk [0, 1]: fetched [], deleted [], ")

    def test_while_another_process_rotates_it_says_so(self, sharded: PreparedNetwork, tmp_path: Path) -> None:
        name = saved(sharded.block("lazy").model_copy(update={"home": str(tmp_path)}))
        (tmp_path / "shards").mkdir()
        with (tmp_path / "shards" / LOCK_FILE).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = run(shard_rotation, name)
        assert (state.is_completed(), state.name) == (True, "Skipped")
        assert state.message == "[already_running] another process of this neuron rotates its shards"


class TestEvaluation:
    def test_each_checkpoint_is_measured_once(
        self, network: PreparedNetwork, prefect_server: RunningPrefectServer
    ) -> None:
        """With the held-out text of the block's own dataset."""
        assert run(checkpoint).is_completed()
        first, before = run(evaluate_checkpoint), objects(network)
        last = network.first_window + NUM_WINDOWS - 1
        assert first.is_completed()
        assert str(first.message).startswith(f"1 of 1 checkpoints were measured now; window {last}: ")
        (row,) = rows_of_table(prefect_server, f"evaluation-{NAME}")
        assert row["window"] == last
        assert 0 < row["bits per byte"] < row["loss"] < row["perplexity"]
        again = run(evaluate_checkpoint)
        assert str(again.message).partition(";")[2] == str(first.message).partition(";")[2]
        assert str(again.message).startswith("0 of 1 checkpoints")
        assert objects(network) == before

    def test_tasks_are_run_on_each_checkpoint(
        self, network: PreparedNetwork, prefect_server: RunningPrefectServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run_tasks(folder: Path, tasks: tuple[str, ...]) -> list[tuple[str, str, float]]:
            assert (folder / "model.safetensors").is_file()
            return [(task, "acc", 0.25) for task in tasks]

        monkeypatch.setattr(tasks.evaluation, "run_tasks", run_tasks)
        neuron = saved(network.at("aggregator", network.first_window))
        assert run(evaluate_checkpoint, neuron, tasks=["arc_easy", "piqa"]).is_completed()
        rows = rows_of_table(prefect_server, f"evaluation-{neuron}")
        assert [row["tasks"] for row in rows] == ["arc_easy acc 0.2500, piqa acc 0.2500"]

    def test_a_neuron_without_checkpoints_skips_it(self, network: PreparedNetwork) -> None:
        state = run(evaluate_checkpoint, saved(network.at("validator", network.first_window)))
        assert (state.name, state.is_completed()) == ("Skipped", True)
