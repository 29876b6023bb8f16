"""The local network without its processes: what it consists of, what it refuses, what it shows of itself."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from dotenv import dotenv_values
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.local import bringup, command, pace, prepare
from deployments.local.acting import acting_command
from deployments.local.bringup import LocalNetwork
from deployments.local.pace import SECONDS, measure_pace, rounded_pace, slowed_windows, write_slowed
from deployments.local.plan import DATASET_PREFIX, LocalPlan
from deployments.local.view import LocalView, summarise
from deployments.neuron.folder import Address
from deployments.processes import ProcessIdentity, ProcessRecord, free_port, require_free_port, start_child
from deployments.s3_endpoint import create_bucket_with_keys
from templar.agreement.genesis import find_birth
from templar.chain.base import Metagraph
from templar.errors import PermanentError, Reason
from templar.exchange.buckets import Buckets
from templar.hparams import load_hparams
from templar.store.directory import DirectoryStore
from templar.window import drive_window
from tests.support.errors import raising
from tests.support.operator import wait_until
from tests.support.prepared import PreparedNetwork
from tests.support.servers import REPOSITORY, store_at


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return PreparedNetwork(tmp_path_factory.mktemp("prepared"), num_honest=1, actors=("lazy",))


class TestFolder:
    def test_an_own_folder_is_made_anew_for_this_user_alone(self, tmp_path):
        plan = LocalPlan(tmp_path / "network")
        plan.folder.mkdir()
        for _ in range(2):
            prepare.require_own_folder(plan)
            prepare.prepare_folder(plan)
            assert [path.name for path in plan.folder.iterdir()] == [plan.marker.name]
            (plan.folder / "old").touch()
        assert stat.S_IMODE(plan.folder.stat().st_mode) == 0o700


class TestPace:
    def test_a_quiet_machine_keeps_the_presets_windows_and_a_busy_one_gets_longer_ones(self):
        assert [rounded_pace(each) for each in (0.3, 1.0, 1.2, 1.3, 1.6, 3.01)] == [1, 1, 1, 1.5, 2, 3.5]
        assert measure_pace(1) >= 1

    def test_a_measurement_that_fails_says_so(self, monkeypatch):
        monkeypatch.setattr(pace, "WORK", "raise SystemExit(1)")
        with raising(PermanentError, Reason.PROCESS_DIED, match="2 processes failed"):
            measure_pace(2)

    @given(st.floats(1, 50))
    @settings(max_examples=20, deadline=None)
    def test_no_time_of_a_slower_window_is_shorter(self, factor):
        preset = load_hparams("local")
        slower = load_hparams("local", overrides={"windows": slowed_windows(preset, factor)}).windows
        assert slower.seconds == pytest.approx(factor * preset.windows.seconds, rel=1e-3)
        assert slower.block_seconds == round(slower.block_seconds, 3)  # what the ledger keeps of it
        for name in SECONDS:
            assert getattr(slower, name) > getattr(preset.windows, name) * factor - 1
            assert getattr(slower, name) >= getattr(preset.windows, name)

    def test_the_network_gets_the_slower_preset_and_no_other_changes(self, tmp_path):
        source, target = LocalPlan(tmp_path).hparams_path, tmp_path / "hparams.json"
        slower = write_slowed(source, "local-shards", 2.0, target)
        assert slower.windows.seconds == 2 * load_hparams("local-shards").windows.seconds
        assert load_hparams("local", path=target) == load_hparams("local")
        assert slower.model_copy(update={"windows": load_hparams("local").windows}) == load_hparams("local-shards")

    def test_the_command_measures_unless_it_is_told(self, monkeypatch, tmp_path):
        monkeypatch.setattr(command, "measure_pace", float)
        plan = LocalPlan(tmp_path, num_honest=2)
        assert command.paced(plan, None).pace == 5
        assert command.paced(plan, 36.0).pace == 36 / load_hparams("local").windows.seconds


class TestActing:
    @pytest.mark.slow
    def test_in_its_process_every_miner_is_the_actor(self, tmp_path):
        told = "import sys\nfrom blocks.neuron import Neuron\nprint(Neuron.node_class(None).__name__, sys.argv[1:])"
        (tmp_path / "told.py").write_text(told)
        honest = [sys.executable, "-m", "told", "--pool", "x"]
        assert acting_command("honest", honest) == honest
        command = acting_command("lazy", honest)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)])}
        answer = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert answer.stdout == "LazyMiner ['--pool', 'x']\n", answer.stderr


class TestEnvironments:
    def test_they_are_for_this_user_alone_and_make_neurons(self, network):
        for neuron in network.plan.running:
            file = network.plan.env_file(neuron.name)
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            block = network.block(neuron.name)
            assert block.role == neuron.role
            assert block.bucket.account_id == neuron.account_id
            assert block.bucket.endpoint.max_attempts == 1  # retries are the tasks'
            assert block.wallet.open().address

    def test_a_neuron_may_have_settings_of_its_own(self, network, tmp_path):
        settings = {"default": {"TEMPLAR_RANKS": "2", "TEMPLAR_THREADS": "4"}}
        plan = replace(network.plan, folder=tmp_path, settings=settings)
        accounts = [prepare.DATASET_ACCOUNT, *(neuron.account_id for neuron in plan.running)]
        prepare.write_environments(plan, dict.fromkeys(accounts, prepare.LOCAL_KEYS))
        for neuron in plan.running:
            values = dotenv_values(plan.env_file(neuron.name))
            changes = settings.get(neuron.name, {"TEMPLAR_THREADS": "1"})
            assert {name: values.get(name) for name in changes} == changes
            assert ("TEMPLAR_RANKS" in values) == (neuron.name == "default")


@pytest.fixture(scope="module")
def view(network):
    """The view, some windows later, of one window in which an aggregator and then a miner were alone."""
    for name in ("aggregator", "default"):
        node = network.at(name, network.first_window).build(name)
        drive_window(node, network.first_window)
        node.publish_sync_proof(network.first_window)  # a miner's comes after its next reveal
        node.stop()
    block = network.at("default", network.first_window + 3)
    chain = block.subnet.open(None)
    birth = find_birth(chain, Buckets(chain, block.bucket.endpoint.open_reader), network.hparams)
    return LocalView(network.plan, block, birth)


class TestKeeping:
    def test_buckets_of_the_endpoint_outlive_it(self, network, moto, tmp_path):
        """With their times, beside the dataset, where the reader's environment leads."""
        plan = replace(network.plan, folder=tmp_path)
        shutil.copytree(network.plan.dataset, plan.dataset)
        shutil.copy(network.plan.network_env, plan.network_env)
        keys = create_bucket_with_keys(moto.admin, "joined-later")
        writer = store_at(moto.admin.endpoint_url, keys.bucket, keys.write)
        objects = {"proof-1-4-v1.json": b"{}", "checkpoint-1-4-v1/config.json": b"[]"}
        for key, data in objects.items():
            writer.put(key, data)
        moto.admin.save(plan.admin_file)
        prepare.keep_buckets(plan)
        kept = DirectoryStore(plan.buckets / keys.bucket)
        assert {info.key: kept.get(info.key, max_bytes=9) for info in kept.list()} == objects
        times = {info.key: info.last_modified for info in writer.list()}
        assert {info.key: info.last_modified for info in kept.list()} == times
        values = dotenv_values(plan.network_env)
        assert values["TEMPLAR_STORAGE"] == plan.buckets.as_uri()
        assert stat.S_IMODE(plan.network_env.stat().st_mode) == 0o600
        assert list(DirectoryStore(plan.buckets / prepare.DATASET_ACCOUNT).list(f"{DATASET_PREFIX}/"))

    def test_a_model_that_cannot_be_kept_is_no_failure(self, network, capsys):
        command.keep(LocalNetwork(network.plan, print))
        assert "the trained model was not kept: [object_missing]" in capsys.readouterr().out


class TestView:
    def test_roots_come_from_proofs(self, view, network):
        roots = view.roots(network.first_window)
        assert roots.keys() == {"aggregator", "default"}
        assert len(roots["default"]) == 64
        assert view.roots(network.first_window + 1) == {}

    def test_without_evidence_there_is_no_row(self, view, network):
        assert view.row(network.first_window) is None

    def test_a_replay_of_public_objects_ends_where_the_miner_did(self, view, network, monkeypatch):
        monkeypatch.setattr("deployments.local.view.HELD_OUT_SEQUENCES", 8)
        window = network.first_window
        node = view.replay(window, deadline=view.chain.clock.now() + 100)
        assert node.state.root == view.roots(window)["default"] != view.birth.start.root
        report = view.held_out(node)
        assert report.loss_genesis == report.loss_last > 0  # the window was null
        node.stop()


def fake_view(folder, **changes):
    """What a summary asks for after window 6, of which 5 is proven: everything is as promised but for the changes."""
    plan = LocalPlan(folder, num_honest=1, bad_actors=("lazy",))
    has: dict[str, Any] = {"genesis": "genesis", "loss": 4.0, "weights": {0: 0.5, 3: 0.5}, "observed": "last"} | changes
    roots = {neuron.name: "last" for neuron in plan.running} | has.get("roots", {})
    neurons: Any = tuple(SimpleNamespace(uid=uid, hotkey=each.name) for uid, each in enumerate(plan.neurons))
    journal = SimpleNamespace(roots=lambda first, last: {5: has["observed"]} if first == last else {})
    node = SimpleNamespace(journal=journal, stop=lambda: None)
    return SimpleNamespace(
        plan=plan,
        deadline=0.0,
        proven=lambda window: {6: 5}[window],
        names={neuron.name: neuron for neuron in plan.neurons},
        birth=SimpleNamespace(start=SimpleNamespace(root=has["genesis"], start_window=4)),
        chain=SimpleNamespace(metagraph=lambda: Metagraph(0, neurons), weights=lambda: {2: has["weights"]}),
        hparams=SimpleNamespace(windows=SimpleNamespace(seconds=0.0)),
        dense_bytes=50_000,
        roots={5: {name: root for name, root in roots.items() if root}}.__getitem__,
        replay=lambda window, deadline: {6: node}[window],
        payload_sizes={6: [1000, 3000]}.__getitem__,
        held_out=lambda _: SimpleNamespace(loss_genesis=6.0, loss_last=has["loss"], unigram=5.0),
        validator=lambda: SimpleNamespace(uid=2),
    )


def test_a_summary_has_the_figures(tmp_path):
    summary = summarise(fake_view(tmp_path), 6, 3, 0.0)
    assert all(summary.checks.values())
    assert len(summary.checks) == 6
    figures = summary.figures
    assert (figures["windows"], figures["loss_genesis"], figures["loss_last"]) == (3, 6.0, 4.0)
    assert figures["roles"] == {"0": "burn", "1": "aggregator", "2": "validator", "3": "miner", "4": "lazy"}
    assert figures["weights"] == {"0": 0.5, "1": 0.0, "2": 0.0, "3": 0.5, "4": 0.0}
    assert (figures["payload_bytes"], figures["dense_bytes"], figures["compression"]) == (2000, 50_000, 25.0)
    assert figures["state_roots"] == dict.fromkeys(("aggregator", "validator", "default", "lazy"), "last")


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"loss": 4.55}, [0, 1]),
        ({"loss": 4.45}, [1]),
        ({"roots": {"lazy": "other"}}, [2]),
        ({"roots": {"lazy": ""}}, [2]),  # it has proved none
        ({"observed": "other"}, [2]),
        ({"genesis": "last"}, [3]),
        ({"weights": {0: 0.5, 4: 0.5}}, [4, 5]),
    ],
)
def test_every_promise_of_a_summary_can_be_broken(tmp_path, changes, broken):
    summary = summarise(fake_view(tmp_path, **changes), 6, 3, 0.0)
    assert [place for place, kept in enumerate(summary.checks.values()) if not kept] == broken


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_run_waits_until_all_nodes_have_proven_their_state(tmp_path, monkeypatch, patience):
    monkeypatch.setattr("deployments.local.view.POLL_SECONDS", 0.0)
    view = fake_view(tmp_path)
    roots, asked = view.roots(5), []
    view.deadline = time.time() + patience
    view.roots = lambda window: asked.append(window) or dict(list(roots.items())[: len(asked)])  # one more each time
    LocalView.wait_until_proven(view, 5)
    assert asked == [5] * (len(roots) if patience else 1)


@pytest.fixture
def local(run_main, monkeypatch):
    """Calls the command without a measurement of the machine; its exit status and what it said on standard error."""
    monkeypatch.setattr(command, "measure_pace", lambda _: 1.0)
    before = signal.getsignal(signal.SIGTERM)

    def main(*arguments):
        status, _, err = run_main(command.main, *arguments)
        return status, err

    yield main
    signal.signal(signal.SIGTERM, before)


class TestRefusals:
    """Bad input: one clear line, exit status not 0, nothing left running and nothing changed."""

    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path / "network"

    @pytest.fixture
    def options(self, folder):
        return ("--folder", folder, "--prefect-port", free_port(), "--storage-port", free_port())

    @pytest.mark.parametrize("port", ["prefect", "storage"])
    def test_a_taken_port(self, local, folder, options, port):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            number = taken.getsockname()[1]
            status, err = local("run", *options, f"--{port}-port", number)
        assert status == 1
        assert err.startswith(f"[port_taken] port {number} on 127.0.0.1 cannot be used")
        assert f"stop what listens there, or set --{port}-port ({port.upper()}_PORT of make)" in err
        assert err.count("\n") == 1
        assert not folder.exists()

    def test_a_folder_or_file_of_something_else(self, local, folder, options):
        folder.mkdir()
        (folder / "thesis.tex").write_text("years of work")
        for place in (folder, folder / "thesis.tex"):
            status, err = local("run", *options, "--folder", place)
            assert status == 1
            assert err.startswith(f"[bad_environment] --folder {place}: it is not a local network's")
        assert [path.name for path in folder.iterdir()] == ["thesis.tex"]

    @pytest.fixture
    def running(self, folder):
        """A process that the folder's record says is a network's."""
        plan = LocalPlan(folder)
        prepare.prepare_folder(plan)
        child = start_child("worker", [sys.executable, "-c", "import signal; signal.pause()"], log=folder / "log")
        ProcessRecord(plan.processes).add(child)
        yield child
        child.stop(grace_seconds=0.0)

    def test_a_second_network_in_the_same_folder(self, local, folder, options, running):
        before = {path: path.read_bytes() for path in folder.iterdir()}
        status, err = local("up", *options)
        assert status == 1
        assert err == f"[already_running] {folder}: a network runs here already (1 processes): `make down` stops it\n"
        assert running.exit_code is None
        assert {path: path.read_bytes() for path in folder.iterdir()} == before

    def test_status_of_a_network_that_is_not_whole(self, local, folder, options, running, capsys):
        plan = LocalPlan(folder)
        for name in ("miner-2", "default"):
            plan.env_file(name).parent.mkdir(exist_ok=True)
            (folder / "env" / f"{name}.env").touch()
        command.main(["status", "--folder", str(folder), "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (found["runs"], found["missing"], found["api_url"]) == (False, [], None)  # it is coming up
        assert [entry["name"] for entry in found["processes"]] == ["worker"]
        assert found["neurons"] == {"default": [], "miner-2": []}
        record = ProcessRecord(plan.processes)
        clock = start_child(
            bringup.HOUSEKEEPING, [sys.executable, "-c", "import signal; signal.pause()"], log=folder / "log"
        )
        record.add(clock)
        Address("http://127.0.0.1:1/api", str(folder)).save(plan.address)
        assert command.main(["status", "--folder", str(folder)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "the local network runs; Prefect API: http://127.0.0.1:1/api" in shown
        assert "http://127.0.0.1:1/api does not answer" in shown
        running.stop(grace_seconds=0.0)
        clock_alone = local("status", *options)
        clock.stop(grace_seconds=0.0)
        assert clock_alone[0] == 1
        assert command.main(["status", "--folder", str(folder)]) == 1
        assert "nothing is running" in capsys.readouterr().out

    def test_down_stops_what_is_recorded(self, local, options, running):
        assert local("down", *options) == (0, "")
        assert running.handle.wait() == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.timeout(300)
@pytest.mark.parametrize("when", [pytest.param("before it is up", marks=pytest.mark.long), "while it comes up"])
def test_a_run_that_is_ended_takes_everything_down(tmp_path, when):
    plan = LocalPlan(tmp_path / "network", prefect_port=free_port(), storage_port=free_port())
    arguments = ["--folder", plan.folder, "--prefect-port", plan.prefect_port, "--storage-port", plan.storage_port]
    arguments += ["--window-seconds", 18]
    log = tmp_path / "run.log"
    child = start_child(
        "run", [sys.executable, "-m", "deployments", "run", *map(str, arguments)], log=log, cwd=REPOSITORY
    )
    seen: set[ProcessIdentity] = set()

    def recorded():
        entries = ProcessRecord(plan.processes).entries()
        seen.update(entry.identity for entry in entries)
        return len(entries)

    try:
        if when == "before it is up":
            wait_until(lambda: recorded() >= 1, "the S3 endpoint is recorded")
        else:
            wait_until(lambda: recorded() >= 4, "workers are recorded", patience_seconds=200.0)
        recorded()
        child.handle.terminate()
        assert child.handle.wait() == 130
    finally:
        child.stop()
        ProcessRecord(plan.processes).stop_all()
    assert log.read_text().splitlines()[-1] == "interrupted"
    assert seen
    assert not [identity for identity in seen if identity.alive]
    for port in (plan.prefect_port, plan.storage_port):
        require_free_port("127.0.0.1", port, remedy="none")
