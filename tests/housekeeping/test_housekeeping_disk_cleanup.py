"""The files that a clean-up removes from a neuron's folder, and that no restart needs them."""

import errno
import os
import shutil
import tempfile
import time
from uuid import uuid4

import pytest

from templar.agreement.state import StateMark
from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network as NetworkId
from templar.housekeeping.disk_cleanup import LocalRules, clean_local
from templar.neuron.snapshot import PRIVATE_FILE, Snapshots
from tests.support.commands import contents
from tests.support.errors import raising
from tests.support.network import tiny

DAY = 86_400


@pytest.fixture(scope="module")
def network(build_shared):
    """A network after six windows, whose first miner was stopped."""
    network = build_shared(tiny(storage={"snapshots_kept": 2}), windows=range(1, 7))
    network.kill(network.miners[0])
    return network


def stopped(network):
    return next(member.name for member in network.members if member.name not in network.nodes)


def home_of(network, name):
    return network.aggregator.home.parent / name


@pytest.fixture
def home(network, tmp_path):
    """A copy of the stopped miner's folder."""
    return shutil.copytree(home_of(network, stopped(network)), tmp_path / "home")


@pytest.fixture(autouse=True)
def temporary(network, tmp_path, monkeypatch):
    """A place for temporary folders that is this test's own; the network's text is elsewhere."""
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    return root


def rules(network, *, later=0, hours=24):
    return LocalRules(network.aggregator.birth.network, network.hparams.storage, hours, time.time() + later)


def clean(network, home, *, later=2 * DAY, dry_run=False):
    return clean_local(home, rules(network, later=later), kernels=None, dry_run=dry_run)


def litter(home):
    """What processes that died leave behind; the paths."""
    names = [
        "snapshots/.writing-3-77/model.safetensors",
        "snapshots/.writing-2-77-gone/mark.json",
        "spool/.payload-3.bin.part",
        "spool/payload-1.bin",
        "spool/staged-1.safetensors",
        "payloads/1/0a",
        "payloads/2/0b",
        "genesis.part/model.safetensors",
        "checkpoint/model.safetensors",
        "checkpoint.part/model.safetensors",
        "publishing/3/model.safetensors",
        ".tokenizer.json.part",
        ".gone-0011/file",
    ]
    for name in names:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 5000)
    return names


def test_abandoned_files_are_removed_and_their_bytes_counted(network, home):
    before = contents(home)
    names = litter(home)
    old = {name for name in names if not name.startswith(("spool/payload-1", "spool/staged-1", "payloads/"))}
    report = clean(network, home)
    left = contents(home)
    assert not old & set(left)
    assert set(before) - set(left) <= {name for name in before if name.startswith(("genesis/", "payloads/", "spool/"))}
    assert report.failed == ()
    freed = {row.room: (row.removed, row.freed) for row in report.rows}
    assert freed["snapshots"] == (2, 2 * 8192)
    assert freed["half-written files"] == (2, 2 * 8192)
    assert report.total("freed") >= 5000 * len(old)
    assert report.total("num_bytes") > report.total("freed")
    assert clean(network, home).total("removed") == 0


def test_private_state_stays_and_a_file_of_two_names_is_counted_once(network, home):
    """The live state may be older than every snapshot, and only the neuron knows which it is."""
    half = home / "private" / f".9-{'d' * 64}.safetensors.part"
    half.write_bytes(b"half")
    before = contents(home / "private")
    assert len(before) > 1
    once = clean(network, home, dry_run=True).total("num_bytes")
    (home / "private" / f"0-{'e' * 64}.safetensors").hardlink_to(home / "snapshots" / "6" / PRIVATE_FILE)
    report = clean(network, home)
    assert report.total("num_bytes") == once
    row = next(row for row in report.rows if row.room == "private state")
    assert (row.removed, half.exists()) == (1, False)
    assert len(contents(home / "private")) == len(before)


def test_young_files_stay_and_a_stamp_makes_nothing_old(network, home):
    for name in litter(home):
        os.utime(home / name, (1000, 1000))
    before = contents(home)
    assert (clean(network, home, later=3600).total("removed"), contents(home)) == (0, before)


def test_files_that_may_be_read_stay_for_a_day(network, home, temporary):
    """An upload or a copy reads for hours, which moves no change time."""
    litter(home)
    for name in ("templar-dataset-abc", "templar-preview-abc"):
        (temporary / name).mkdir()
        (temporary / name / "file").write_bytes(b"1")
    for later, left in ((20 * 3600, True), (25 * 3600, False)):
        clean_local(home, rules(network, later=later, hours=1), kernels=None, dry_run=False)
        assert not (home / "checkpoint").exists()
        assert (home / "publishing").exists() is left
        assert (temporary / "templar-dataset-abc").exists() is left
        assert (temporary / "templar-preview-abc").exists() is left


def test_windows_before_the_oldest_snapshot_go(network, home):
    oldest = min(Snapshots(home / "snapshots", network.aggregator.birth.network, kept=2).windows())
    limit = oldest - 2 - network.hparams.storage.snapshot_frequency
    for folder in ("payloads", "spool"):
        shutil.rmtree(home / folder, ignore_errors=True)
        (home / folder).mkdir()
    for window in (oldest - 3, oldest - 2, oldest):
        (home / "payloads" / str(window)).mkdir()
    for window in (limit - 1, limit, oldest):
        (home / "spool" / f"staged-{window}.safetensors").write_bytes(b"1")
    clean(network, home)
    assert sorted(path.name for path in (home / "payloads").iterdir()) == sorted(map(str, (oldest - 2, oldest)))
    kept = {f"staged-{window}.safetensors" for window in (limit, oldest)}
    assert {path.name for path in (home / "spool").iterdir()} == kept


def foreign_snapshot(network, home):
    """Another network's snapshots in the folder, with one of window 900."""
    other = Snapshots(home / "snapshots", NetworkId(9, "ab" * 32), kept=2)
    other.begin(dict(network.aggregator.state.params), StateMark(900, 1, "cd" * 32, "ef" * 32, False), None)
    other.wait()
    return other


def test_snapshots_of_another_network_stay_for_a_week(network, home):
    own = Snapshots(home / "snapshots", network.aggregator.birth.network, kept=2)
    foreign_snapshot(network, home)
    before = own.windows()
    clean(network, home, later=6 * DAY)
    assert own.windows() == before
    clean(network, home, later=8 * DAY)
    assert own.windows() == tuple(window for window in before if window != 900)


def test_without_a_snapshot_of_its_own_another_networks_stays(network, tmp_path):
    other = foreign_snapshot(network, tmp_path)
    clean(network, tmp_path, later=365 * DAY)
    assert other.windows() == (900,)


def test_only_folders_of_commands_are_removed(network, home, temporary):
    for name in ("templar-dataset-abc", "templar-preview-abc", "somebody-elses", "templar-other"):
        (temporary / name).mkdir()
        (temporary / name / "file").write_bytes(b"1")
    (temporary / "templar-dataset-link").symlink_to(temporary / "somebody-elses")
    clean(network, home)
    assert {path.name for path in temporary.iterdir()} == {"somebody-elses", "templar-other", "templar-dataset-link"}


@pytest.mark.parametrize("form", ["{}", "kernels-{}"])
def test_kernels_of_other_releases_go(network, home, tmp_path, form):
    root = tmp_path / "cache"
    names = [form.format(uuid4().hex[:16]) for _ in range(3)]
    for name in (*names, "kernels", "source.cpython-311.pyc"):
        (root / name).mkdir(parents=True)
        (root / name / "compiled.nbi").write_bytes(b"1")
    clean_local(home, rules(network, later=2 * DAY), kernels=root / names[0], dry_run=False)
    assert {path.name for path in root.iterdir()} == {names[0], "kernels", "source.cpython-311.pyc"}


def test_failed_removals_are_named(network, home, monkeypatch):
    litter(home)

    def refuses(path):  # root, which tests may run as, is refused nothing
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuses)
        report = clean(network, home)
    assert (str(home / "publishing"), "Permission denied") in report.failed
    assert report.summary.startswith("[local_file] ")
    assert f"{len(report.failed)} failed, the first: " in report.summary
    assert clean(network, home, later=4 * DAY).failed == ()
    assert not list(home.glob(".gone-*"))


@pytest.mark.parametrize("hours", [0.5, float("nan")])
def test_hours_leave_time_for_slow_writers(network, hours):
    with raising(PermanentError, Reason.BAD_PARAMETERS):
        rules(network, hours=hours)


def test_neither_a_restart_nor_a_running_neuron_misses_a_file(network):
    state, name = network.aggregator.state.root, stopped(network)
    litter(home_of(network, name))
    clean(network, home_of(network, name), later=365 * DAY)
    assert network.restart(name).state.root == state
    for node in network.nodes.values():
        clean(network, node.home, later=365 * DAY)
    network.run([7, 8])
    assert len(network.roots(8)) == 1
