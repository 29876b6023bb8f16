"""Servers that tests share, one per process, and networks in memory. Heavy imports wait until they are asked for."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as there is work for: torch's threads would only contend
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine fails no test: nothing is timed. Where CI is set, examples are the same in every run.
settings.register_profile(
    "templar", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("templar")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay: no garbage collection looks through them, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


PREFECT = frozenset({"blocks", "deployments", "flows", "tasks", "test_clouds.py", "test_window.py"})
"""Where tests with a Prefect server are: the Makefile's variable of this name has the same."""


def pytest_collection_modifyitems(items):
    """Mark every test that wants a Prefect server, by its fixtures; what is long is slow as well.

    Processes begin with the tests that ask for the most time.
    """
    for item in items:
        if "prefect_server" in getattr(item, "fixturenames", ()):
            item.add_marker("prefect")
        if item.get_closest_marker("prefect") and PREFECT.isdisjoint((item.path.name, item.path.parent.name)):
            raise pytest.UsageError(f"{item.nodeid} has a Prefect server: name its folder in both PREFECT")
        if item.get_closest_marker("long"):
            item.add_marker("slow")
    if "PYTEST_XDIST_WORKER" in os.environ:
        limits = {item: item.get_closest_marker("timeout") for item in items}
        items.sort(key=lambda item: float(limits[item].args[0]) if limits[item] else 0.0, reverse=True)


DRAWN = frozenset({"adversary", "benchmarks", "docs", "simulate"})
"""Folders of tests whose networks draw their publishers."""


@pytest.fixture(scope="module", autouse=True)
def by_rank(request):
    """Elsewhere publishers follow the order of their stake, so that a test can say which rank somebody has."""
    module = sys.modules.get("templar.exchange.network_view")
    if module is None or request.path.parent.name in DRAWN:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "drawn_by_stake", lambda validators, seed, count: tuple(validators[:count]))
        yield


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    from tests.support.prefect_server import RunningPrefectServer

    with RunningPrefectServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    """The embedded S3 endpoint; a test makes buckets of its own there."""
    from tests.support.servers import moto_endpoint

    with moto_endpoint(tmp_path_factory.mktemp("moto")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    """`rclone serve s3`; a test makes folders of its own there."""
    from tests.support.servers import rclone_endpoints

    with rclone_endpoints(tmp_path_factory.mktemp("rclone")) as endpoints:
        yield endpoints


@pytest.fixture
def prefect_api(prefect_server):
    """The same server, as the one that this process talks to."""
    with prefect_server.configured():
        yield prefect_server


@pytest.fixture
def folder():
    """An empty folder, in memory where there is some, for tests that write many small files."""
    from templar.store.files import memory_folder

    with tempfile.TemporaryDirectory(prefix="templar-test-", dir=memory_folder()) as name:
        yield Path(name)


def building(new_folder):
    """Builds networks from numbers, members and the windows that they run first, and stops them at the end."""
    from tests.support.network import Network

    networks: list[Network] = []

    def start(*numbers, windows=(), **members):
        networks.append(Network(new_folder(), *numbers, **members))
        if windows:
            networks[-1].run(windows)
        return networks[-1]

    yield start
    for network in networks:
        network.stop()


@pytest.fixture
def build(folder):
    """Builds a network in memory for one test."""
    yield from building(lambda: folder)


@pytest.fixture(scope="module")
def build_shared(tmp_path_factory):
    """Builds networks that the tests of a module share."""
    yield from building(lambda: tmp_path_factory.mktemp("network"))


@pytest.fixture
def network(build):
    """An aggregator, a validator and two miners, started; window 1 has not come yet."""
    return build()


@pytest.fixture
def no_pauses(monkeypatch):
    """A read that every store fails is repeated at once; `test_data_replicas` tests the pauses."""
    monkeypatch.setattr("templar.data.replicas.PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="session")
def small_root(tmp_path_factory):
    """The folder of `small_dataset`, which no test changes."""
    from tests.support.datasets import small_dataset
    from tests.support.memory_store import MemoryStore

    return small_dataset(tmp_path_factory.mktemp("small") / "dataset", MemoryStore())


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """Six windows of a network that keeps three, and checkpoints of windows 2, 4 and 6."""
    from templar.housekeeping.maintenance import publish_newest_checkpoint
    from tests.support.network import Network, tiny

    storage = {"checkpoint_frequency": 2, "checkpoints_kept": 1, "retention_windows": 3}
    old_network = Network(tmp_path_factory.mktemp("old"), tiny(storage=storage))
    for window in (2, 4, 6):
        old_network.run([window - 1, window])
        publish_newest_checkpoint(old_network.config("aggregator-1"))
    return old_network
