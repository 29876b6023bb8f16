"""A network whose Prefect server has its database in PostgreSQL, and is killed and started again in mid-window."""

import os
import signal
from collections.abc import Iterator

import pytest
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType

from deployments.prefect_server import DATABASE_URL, SERVER_NAME
from deployments.processes import require_free_port
from templar.errors import PermanentError
from templar.window import Missed
from tests.support.live_network import LiveNetwork, logs_on_failure
from tests.support.postgresql import PostgreSQL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_WINDOWS = 3
WINDOWS = {"blocks_per_window": 30}
"""Long enough for a server that starts again beside other programs."""
UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


@pytest.fixture(scope="module")
def postgresql() -> Iterator[PostgreSQL]:
    with PostgreSQL() as postgresql:
        yield postgresql


@pytest.fixture(scope="module")
def network(postgresql: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNetwork]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATABASE_URL, postgresql.url)
        with LiveNetwork(tmp_path_factory.mktemp("live"), directory_store=True, windows=WINDOWS) as network:
            yield network


def is_free(port: int) -> bool:
    """Whether the kernel has closed the sockets of a process that listened on a port."""
    try:
        require_free_port("127.0.0.1", port, remedy="wait")
    except PermanentError:
        return False
    return True


def test_windows_go_on_while_the_server_is_killed_and_comes_back(network: LiveNetwork, postgresql: PostgreSQL) -> None:
    windows = range(network.first_window, network.first_window + NUM_WINDOWS)
    runs = [(name, window) for window in windows for name in sorted(network.names)]
    with logs_on_failure(network):
        # 1. The server is killed in the middle of the second window, and is started again.
        network.wait(lambda: "claimed" in network.steps("default", windows[1]), "the second window is under way")
        server = network.process(SERVER_NAME)
        os.kill(server.pid, signal.SIGKILL)
        network.wait(lambda: not server.alive and is_free(network.plan.prefect_port), "the server is dead")
        network.record.add(network.plan.server.start())
        # 2. All three windows end at every neuron, with one state after each.
        roots = [network.wait_for_proofs(window) for window in windows]
        assert len(set(roots)) == NUM_WINDOWS
        for name, window in runs:
            network.wait(lambda name=name, window=window: network.state(name, window).is_final(), "its run has ended")
            unreported = {"Crashed"} if window == windows[1] else set()  # its process could not tell how it ended
            assert network.state(name, window).name in {"Completed", *Missed, *unreported}, (name, window)
        # 3. The kill left no run open.
        of_type = FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))
        open_runs = network.client.read_flow_runs(flow_run_filter=FlowRunFilter(state=of_type))
        assert not {run.name for run in open_runs} & {f"{name} window {window}" for name, window in runs}
        # 4. The runs are in PostgreSQL, and no SQLite file was made.
        assert int(postgresql.query("SELECT count(*) FROM flow_run", "prefect")) >= len(runs)
        assert not [*network.plan.server.home.glob("prefect.db*")]
