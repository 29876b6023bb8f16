"""`templar neuron doctor` finds what is wrong with a neuron and names the remedy; with a sound one nothing is wrong."""

import json
import os
import shutil
import time
from functools import partial
from itertools import count
from types import SimpleNamespace
from uuid import uuid4

import pytest

from deployments import prefect_server
from deployments.local.wallets import create_wallet
from deployments.neuron import doctor
from deployments.neuron.folder import HOME_LOCK
from deployments.processes import free_port, sole_process
from templar.chain.base import Role, SubnetRules
from templar.chain.clock import SystemClock
from templar.chain.ledger import Ledger
from templar.exchange.lease import Claimant, NeuronLease, Terms
from templar.housekeeping.access import AccessReport
from templar.neuron.configuration import GENESIS_FILE
from templar.store.directory import DirectoryStore
from tests.support.commands import write_env
from tests.support.prepared import PreparedNetwork

DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    network = PreparedNetwork(tmp_path_factory.mktemp("doctor"))
    create_wallet(network.plan.wallets, "local", "stranger")
    (network.plan.wallets / "local" / "hotkeys" / "locked").write_bytes(b"$NACL" + bytes(72))
    lazy = network.block("lazy")
    lazy.subnet.open(lazy.wallet).set_role(Role.MINER)
    return network


@pytest.fixture
def examine(network, tmp_path, run_main, monkeypatch):
    """Looks at the network's lazy miner with changed variables; verdict and text by topic."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def call(**changes):
        values = network.environment("lazy") | {"TEMPLAR_HOME": str(tmp_path / "home")} | changes
        file = write_env(tmp_path / ".env", values)
        status, out, err = run_main(doctor.main, "--name", f"never-{uuid4().hex[:8]}", "--env-file", file, "--json")
        assert err == ""
        lines = json.loads(out)
        assert status == int(any(line["verdict"] == "bad" for line in lines))
        return {line["topic"]: (line["verdict"], line["text"]) for line in lines}

    return call


def test_a_sound_neuron_has_only_what_its_first_start_mends(examine, network):
    store = DirectoryStore(network.bucket("lazy"))
    before = [info.key for info in store.list()]
    found = examine()
    assert [info.key for info in store.list()] == before, "no probe is left"
    assert {topic for topic, (verdict, _) in found.items() if verdict == "bad"} == set()
    assert found["Prefect database"] == ("good", "a SQLite file")
    doubtful = {topic for topic, (verdict, _) in found.items() if verdict == "doubtful"}
    assert doubtful == {"Prefect server", "processes"}
    looked_at = {"settings", "disk", "device", "bucket keys", "bandwidth", "clock", "chain", "registration", "lease"}
    assert looked_at | {"network", "dataset"} <= set(found)


def test_the_settings_of_the_subnet_are_looked_at(examine, monkeypatch):
    monkeypatch.setattr(Ledger, "rules", lambda _: SubnetRules(435, "Null", True, True, False, 0, 50, 65535))
    found = examine()
    assert found["consensus"][0] == "bad"
    assert "epoch_consensus" in found["consensus"][1]
    assert found["largest weight"] == ("good", "one uid may get everything")
    assert found["backups"] == ("good", "none in the bucket yet")


def shifted(seconds):
    return SimpleNamespace(time=lambda: time.time() + seconds, perf_counter=time.perf_counter)


@pytest.mark.parametrize(
    ("changes", "topic", "words"),
    [
        ({"WALLET_HOTKEY": "nobody"}, "settings", "nobody"),
        ({"WALLET_HOTKEY": ""}, "settings", "WALLET_HOTKEY"),
        ({"TEMPLAR_PRESET": "none-such"}, "settings", "none-such"),
        ({"R2_GRADIENTS_READ_ACCESS_KEY_ID": ""}, "settings", "R2_GRADIENTS_READ_ACCESS_KEY_ID"),
        ({"TEMPLAR_DEVICE": "cuda:77"}, "device", "cuda:77"),
        ({"TEMPLAR_MICRO_BATCH": "1000003"}, "device", "1000003"),
        ({"TEMPLAR_ROLE": "validator", "TEMPLAR_DEVICE": "cuda", "TEMPLAR_RANKS": "99"}, "device", "TEMPLAR_RANKS"),
        ({"TEMPLAR_HOSTS": "2", "TEMPLAR_RENDEZVOUS": "192.0.2.1:29500"}, "device", "192.0.2.1:29500"),
        ({"TEMPLAR_PRESET": "150M"}, "chain", "12 s"),
        ({"NETWORK": "ledger:/nowhere/ledger.sqlite"}, "chain", "/nowhere"),
        ({"WALLET_HOTKEY": "stranger"}, "registration", "not registered"),
        ({"TEMPLAR_ROLE": "validator"}, "role", "permit"),
        ({"TEMPLAR_GENESIS": "f" * 64}, "network", "ffff"),
        ({"DATASET_BINS_PATH": "elsewhere"}, "dataset", "elsewhere"),
        ({"WALLET_HOTKEY": "locked"}, "settings", "encrypted: set WALLET_HOTKEY_PASSWORD_FILE"),
        ({"WALLET_HOTKEY_PASSWORD_FILE": "/none"}, "wallet", "is not there: correct WALLET_HOTKEY_PASSWORD_FILE"),
        ({DATABASE: "postgresql+asyncpg://u:hush@127.0.0.1:{port}/p"}, "Prefect database", f"{DATABASE}: "),
        ({"PREFECT_API_URL": "http://127.0.0.1:{port}/api"}, "Prefect server", "does not answer"),
    ],
)
def test_a_wrong_variable_is_found(examine, changes, topic, words):
    found = examine(**{name: value.replace("{port}", str(free_port())) for name, value in changes.items()})
    verdict, text = found[topic]
    assert (verdict, words in text, "hush" in text) == ("bad", True, False)


@pytest.mark.parametrize(
    ("answers", "host", "expected"),
    [
        ({"health", "admin/version"}, "127.0.0.1", ("doubtful", "asks for no password")),
        ({"health", "admin/version"}, "prefect.example", ("bad", "let the server listen on loopback alone")),
        ({"health"}, "prefect.example", ("good", "asks for a password")),
    ],
)
def test_a_server_that_shows_everybody_the_keys(examine, monkeypatch, answers, host, expected):
    """The key is in the server's database; nobody asks here with a password."""
    url = f"http://{host}:4200/api"
    for module in (doctor, prefect_server):
        monkeypatch.setattr(module, "http_serves", lambda address: address.removeprefix(f"{url}/") in answers)
    verdict, text = examine(PREFECT_API_URL=url)["Prefect server"]
    assert verdict == expected[0]
    assert expected[1] in text


HOURS = SimpleNamespace(time=time.time, perf_counter=partial(next, count(0.0, 3600.0)))
OTHER_RELEASES = {"prefect": "0.1"}


@pytest.mark.parametrize(
    "case",
    [
        ("bucket keys", "bad", "[objects_left] a/b: ", doctor, "check_access", lambda _: AccessReport(left=("a/b",))),
        ("clock", "bad", "ahead of", doctor, "time", shifted(3.0)),
        ("clock", "bad", "behind", doctor, "time", shifted(-3.0)),
        ("chain", "bad", "", doctor, "time", shifted(3600.0)),
        ("bandwidth", "doubtful", "too slow for this preset", doctor, "time", HOURS),
        ("disk", "bad", "TEMPLAR_HOME", shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)),
        (
            "versions",
            "doubtful",
            "prefect 0.1, not",
            doctor.metadata,
            "version",
            lambda name: OTHER_RELEASES.get(name, "1"),
        ),
    ],
)
def test_a_fault_of_the_machine_is_found(examine, monkeypatch, case):
    topic, expected, words, target, name, value = case
    monkeypatch.setattr(target, name, value)
    verdict, text = examine()[topic]
    assert (verdict, words in text) == (expected, True)


def test_a_neuron_that_runs_on_another_machine(examine, network):
    block, store = network.block("lazy"), DirectoryStore(network.bucket("lazy"))
    chain, hotkey = block.subnet.open(block.wallet), block.wallet.open()
    uid = chain.metagraph().by_hotkey(hotkey.address).uid
    elsewhere = Claimant(chain.netuid, uid, hotkey.address, Role.MINER.value, "b" * 32, "cafecafe")
    lease = NeuronLease(store, SystemClock(), hotkey, elsewhere, Terms.of(block.hparams().windows))
    lease.enter()
    verdict, text = examine()["lease"]
    lease.release()
    assert (verdict, "on machine cafecafe runs this neuron since" in text) == ("bad", True)
    assert "stop it there first" in text


def test_a_password_that_others_read(examine, tmp_path):
    (tmp_path / "password").write_text("a word")
    (tmp_path / "password").chmod(0o644)
    verdict, text = examine(WALLET_HOTKEY_PASSWORD_FILE=str(tmp_path / "password"))["wallet"]
    assert (verdict, f"chmod 600 {tmp_path / 'password'}" in text) == ("doubtful", True)


def test_a_device_without_room_is_doubtful_while_the_neuron_itself_runs(examine, monkeypatch):
    monkeypatch.setattr("templar.training.device.available_bytes", lambda: 1000)
    verdict, text = examine()["device"]
    assert (verdict, "GiB for it: set TEMPLAR_" in text) == ("bad", True)
    monkeypatch.setattr(doctor, "holder_of", lambda path: SimpleNamespace(pid=os.getpid()))
    verdict, text = examine()["device"]
    assert (verdict, f"process {os.getpid()} is this neuron" in text) == ("doubtful", True)


def test_a_folder_that_others_read(examine, tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    verdict, text = examine()["disk"]
    assert (verdict, "chmod 700" in text) == ("doubtful", True)


def test_a_folder_of_another_neuron(examine, tmp_path):
    with sole_process(tmp_path / "home" / HOME_LOCK, str):
        verdict, text = examine()["processes"]
    assert (verdict, f"process {os.getpid()}): give each neuron a folder" in text) == ("bad", True)


def test_a_folder_of_another_network(examine, tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / GENESIS_FILE).write_text("e" * 64)
    verdict, text = examine(TEMPLAR_GENESIS="f" * 64)["network"]
    assert (verdict, "eeee" in text) == ("bad", True)


def test_another_role_and_another_bucket_on_chain(examine, network):
    lazy = network.block("lazy")
    chain = lazy.subnet.open(lazy.wallet)
    neuron = chain.metagraph().by_hotkey(lazy.wallet.open().address)
    assert neuron is not None
    assert neuron.commitment is not None
    chain.set_role(Role.VALIDATOR)
    chain.set_commitment("0" * len(neuron.commitment))
    try:
        found = examine()
    finally:
        chain.set_role(Role.MINER)
        chain.set_commitment(neuron.commitment)
    assert found["role"][0] == found["read access on chain"][0] == "doubtful"
