"""One miner on two 'machines' with a checkout, a home and a Prefect server each: one is lost, the next one goes on."""

import shutil
from base64 import b64encode
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from blocks.environment import neuron_from_environment
from deployments.local.prepare import join_local
from templar.canonical import sha256_hex
from templar.errors import Reason
from templar.exchange.object_keys import Kind, parse_current_key
from templar.neuron.backup import list_backups
from templar.neuron.snapshot import PRIVATE_FILE
from templar.timeline import first_block
from tests.support.cloud_machine import Machine
from tests.support.live_network import LiveNetwork, logs_on_failure
from tests.support.repeated_steps import payload_made

pytestmark = [pytest.mark.slow, pytest.mark.prefect, pytest.mark.timeout(1500)]

HOTKEY = "cloudy"


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    storage = {"private_backup_windows": 1, "checkpoint_frequency": 30}
    live = LiveNetwork(
        tmp_path_factory.mktemp("network"),
        settings={},
        hour=timedelta(hours=1),
        num_honest=1,
        bad_actors=(),
        storage=storage,
    )
    with logs_on_failure(live), live as network:
        for neuron in network.names:
            network.pause_scheduled_work(neuron)
        yield network


@pytest.fixture
def values(network):
    """The variables of a miner that joins, as its operator's `.env` has them, and its hotkey as a secret."""
    joined = join_local(network.plan.folder, "miner", HOTKEY) | {"PREFECT_API_AUTH_STRING": "templar:only-for-a-test"}
    hotkey = Path(joined["WALLET_PATH"]) / joined["WALLET_NAME"] / "hotkeys" / HOTKEY
    return joined | {"TEMPLAR_HOTKEY": b64encode(hotkey.read_bytes()).decode()}


@pytest.fixture
def machines(tmp_path, values):
    made = []

    def make(name):
        made.append(Machine(tmp_path / name, values))
        return made[-1]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    yield make
    for machine in made:
        machine.close()


def windows_of(store, kind):
    keys = (parse_current_key(info.key) for info in store.list(f"{kind}-"))
    return sorted(key.window for key in keys if key is not None)


def payload_of(network, values, home, window):
    """The manifest of what a neuron with this folder makes of a window, on a clock of its own that begins at it."""
    block = neuron_from_environment(values | {"TEMPLAR_HOME": str(home)})
    start = network.view.chain._parameters.time(first_block(window, network.view.hparams.windows))
    subnet = block.subnet.model_copy(update={"network": f"{values['NETWORK']}?clock={start}"})
    node = block.model_copy(update={"subnet": subnet}).build("copy")
    return payload_made(node, window)


def test_the_next_machine_publishes_what_the_lost_one_would_have(network, values, machines, tmp_path):
    # 1. The first machine installs and begins without a backup.
    store = neuron_from_environment(values).bucket.open().store
    first, second = machines("a"), machines("b")
    first.setup()
    first.start()

    # 2. After a window whose payload is applied it begins no other, and the backup of that window is stored. Then it is
    #    killed.
    backup, committed = 0, partial(windows_of, store, Kind.COMMIT)
    while not (first.neuron_home / f"snapshots/{backup}" / PRIVATE_FILE).exists():
        if backup:
            first.hold_windows(held=False)
        network.wait(lambda last=backup: first.said() and max(committed(), default=0) > last, "it commits")
        first.hold_windows(held=True)
        backup = max(committed())
        network.wait(lambda window=backup: first.said() and first.has_ended(window), "the window is over")
    network.wait(lambda: first.said() and backup in dict(list_backups(store)), "the backup is stored")
    assert max(committed()) == backup
    first.kill()
    kept = shutil.copytree(first.neuron_home, tmp_path / "kept")
    shutil.rmtree(first.home)

    # 3. The second machine waits for the lost one's lease; ten minutes pass.
    second.setup()
    second.start()
    network.wait(lambda: f"waiting: [{Reason.ALREADY_RUNNING}] " in second.said(), "it waits for the lease")
    store.delete([info.key for info in store.list(Kind.LEASE)])
    network.wait(lambda: "restored from the backup of window" in second.said(), "it is restored")
    assert f"restored from the backup of window {backup}, root " in second.said()
    assert "nothing was lost" in second.said()

    # 4. It publishes, and a signal ends it in good order.
    network.wait(lambda: second.said() and max(windows_of(store, Kind.GRADIENT)) > backup, "it publishes a payload")
    window = next(each for each in windows_of(store, Kind.GRADIENT) if each > backup)
    network.wait(lambda: second.said() and second.has_ended(window), "the window is over")
    assert "TEMPLAR_HOTKEY" not in second.processes()[0].environ()
    assert second.terminate() == 0
    assert not [*store.list(Kind.LEASE)]

    # 5. The folder of the lost machine makes the same bytes, and one that begins anew makes others.
    (key,) = [info.key for info in store.list(f"{Kind.GRADIENT}-{window}-")]
    published = sha256_hex(store.get(key, max_bytes=1 << 24))
    assert published == payload_of(network, values, kept, window).payload_sha256
    assert published != payload_of(network, values, tmp_path / "anew", window).payload_sha256
