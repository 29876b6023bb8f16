"""The window clock on simulated time, against a real server: every window once, through outages and restarts."""

import asyncio
import logging

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterIdempotencyKey,
)

from deployments import clock as clock_module
from deployments.clock import WindowClock, WindowDeployment, find_deployments
from deployments.register import deploy_window, ensure_pool, register
from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger, create_ledger
from templar.errors import Reason, TransientError
from templar.interrupt import clear_stop
from tests.support.network import tiny
from tests.support.operator import wait_until
from tests.support.prepared import PreparedNetwork

HPARAMS = tiny()
BIRTHDAY = 1_700_000_000.0
FIRST = 3
MINER, OTHER = "clock-miner", "clock-other"


@pytest.fixture(scope="module")
def network(tmp_path_factory, prefect_server):
    """Two neurons of this host, and deployments that are not for the clock."""
    network = PreparedNetwork(tmp_path_factory.mktemp("clock"))
    with prefect_server.configured(), prefect_server.client() as client:
        register(MINER, network.block("lazy"))
        register(OTHER, network.block("validator"))
        ensure_pool(client, "clock-house", "process")
        deploy_window(MINER, "validator", f"neuron-{MINER}")  # of another role
        deploy_window(MINER, "miner", "clock-house", name="clock-cold")
        deploy_window(MINER, "miner", f"neuron-{MINER}", name="clock-paused")
        client.pause_deployment(client.read_deployment_by_name("miner-window/clock-paused").id)
        wallet = network.block("lazy").wallet.model_copy(update={"hotkey": "gone"})
        register("clock-broken", network.block("lazy").model_copy(update={"wallet": wallet}))
        deploy_window("clock-nobody", "miner", f"neuron-{MINER}")
        yield network
        for deployment in client.read_deployments():
            if str(deployment.parameters.get("neuron")).startswith("clock-"):
                client.delete_deployment(deployment.id)


@pytest.fixture(autouse=True)
def _configured(prefect_api, network, monkeypatch):
    del prefect_api, network
    monkeypatch.setattr(clock_module, "RETRY_SECONDS", 0.05)
    yield
    clear_stop()


@pytest.fixture
def client(prefect_server):
    with prefect_server.client() as client:
        yield client


class Rig:
    """A chain of its own with a clock that jumps, and two deployments."""

    def __init__(self, folder, netuid):
        self.path, self.netuid = folder / "ledger.sqlite", netuid
        create_ledger(self.path, netuid=netuid, block_seconds=1.0, genesis_time=BIRTHDAY, seed=netuid)
        self.genesis = f"{netuid:064x}"
        self.shown: list[int] = []  # the windows that the clock showed
        self.deployments = [
            WindowDeployment(f"miner-window/{MINER}", MINER, "miner", "key-of-miner"),
            WindowDeployment(f"validator-window/{OTHER}", OTHER, "validator", "key-of-other"),
        ]

    def chain(self, window, kind=Ledger):
        """The chain when a window opens, or in the middle of it."""
        return kind(self.path, clock=SimulatedClock(BIRTHDAY + window * HPARAMS.windows.seconds))

    def clock(self, chain):
        return WindowClock(
            chain,
            HPARAMS,
            genesis=self.genesis,
            start_window=FIRST,
            deployments=self.deployments,
            show=self.shown.append,
        )

    def runs(self, client, window):
        keys = [f"{self.netuid}/{self.genesis}/{each.hotkey}/{each.role}/{window}" for each in self.deployments]
        return client.read_flow_runs(
            flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=keys)), limit=200
        )

    def all_runs(self, client):
        """All runs that were ever started on this chain."""
        return [run for run in runs_of_both(client) if str(run.idempotency_key).startswith(f"{self.netuid}/")]

    def events(self, client):
        """Name and window of this subnet's events, in the order of their time."""
        wanted = {"event": {"prefix": ["templar.window."]}, "resource": {"id": [f"templar.subnet.{self.netuid}"]}}
        found = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50}).json()["events"]
        assert all(event["resource"]["templar.genesis"] == self.genesis for event in found)
        ordered = sorted(found, key=lambda event: event["occurred"])
        return [(event["event"].rpartition(".")[2], event["payload"]["window"]) for event in ordered]


@pytest.fixture
def rig(tmp_path, request):
    # A subnet of its own for every test, since the server is shared.
    return Rig(tmp_path, netuid=10_000 + request.session.items.index(request.node))


def runs_of_both(client):
    theirs = DeploymentFilter(name=DeploymentFilterName(any_=[MINER, OTHER]))
    return client.read_flow_runs(deployment_filter=theirs, limit=200)


def follow(clock, until):
    async def run():
        task = asyncio.create_task(clock)
        await asyncio.to_thread(wait_until, lambda: until() or task.done(), "the clock is there")
        if task.done():
            raise AssertionError("the clock ended by itself") from task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_deployments_that_are_not_for_the_clock_are_left_out(caplog):
    async def find():
        async with get_client() as client:
            return await find_deployments(client)

    with caplog.at_level(logging.WARNING, logger=clock_module.__name__):
        found, neurons = asyncio.run(find())
    ours = {deployment.name: deployment for deployment in found if deployment.neuron.startswith("clock-")}
    assert ours.keys() == {f"miner-window/{MINER}", f"validator-window/{OTHER}"}
    miner = ours[f"miner-window/{MINER}"]
    assert (miner.role, miner.hotkey) == ("miner", neurons[MINER].wallet.open().address)
    assert "miner-window/clock-broken is left out: [bad_wallet]" in caplog.text
    assert "miner-window/clock-nobody is left out: [bad_environment]" in caplog.text


def test_every_deployment_is_started_once_per_window_and_windows_are_announced(rig, client):
    def settled():
        return len(rig.runs(client, FIRST + 2)) == 2 and ("settled", FIRST + 1) in rig.events(client)

    follow(rig.clock(rig.chain(FIRST - 2)).run(), settled)
    for window in range(FIRST, FIRST + 3):
        runs = {run.name: run for run in rig.runs(client, window)}
        assert runs.keys() == {f"{MINER} window {window}", f"{OTHER} window {window}"}
        for name, run in runs.items():
            assert run.parameters == {"window": window, "neuron": name.partition(" ")[0]}
            assert run.state.is_scheduled()
            assert run.parent_task_run_id is None
    assert min(run.parameters["window"] for run in rig.all_runs(client)) == FIRST
    events = rig.events(client)
    for window in (FIRST, FIRST + 1):
        assert [what for what, number in events if number == window] == ["opened", "closed", "settled"]
    assert all(number >= FIRST for _, number in events)
    assert rig.shown[0] == FIRST  # the later ones follow their events


def test_a_clock_that_is_restarted_resumes_and_starts_nothing_twice_and_nothing_late(rig, client):
    follow(rig.clock(rig.chain(FIRST)).run(), lambda: len(rig.runs(client, FIRST + 1)) == 2)
    before = {run.id for window in (FIRST, FIRST + 1) for run in rig.runs(client, window)}
    follow(rig.clock(rig.chain(FIRST + 1.5)).run(), lambda: len(rig.runs(client, FIRST + 4)) == 2)
    assert {run.id for window in (FIRST, FIRST + 1) for run in rig.runs(client, window)} == before
    keys = [run.idempotency_key for run in rig.all_runs(client)]
    assert len(keys) == len(set(keys))
    follow(rig.clock(rig.chain(FIRST + 20.5)).run(), lambda: len(rig.runs(client, FIRST + 21)) == 2)
    assert [len(rig.runs(client, FIRST + late)) for late in (19, 20)] == [0, 2], "it starts at the current window"


def test_an_outage_of_the_server_is_waited_out(rig, client, prefect_server, monkeypatch, caplog):
    monkeypatch.setattr(clock_module, "API_PATIENCE_SECONDS", 1.0)
    tries: list[str] = []

    def noted(record):
        if "could not be started yet" in record.getMessage():
            tries.append(record.getMessage())
        return True

    monkeypatch.setattr(clock_module.log, "filters", [noted])
    prefect_server.freeze()

    def back_and_started():
        if len(tries) == 2:
            prefect_server.thaw()
            tries.append("the server is back")
        return len(tries) > 2 and len(rig.runs(client, FIRST + 1)) == 2

    with caplog.at_level(logging.WARNING, logger=clock_module.__name__):
        follow(rig.clock(rig.chain(FIRST)).run(), back_and_started)
    assert f"window {FIRST}: miner-window/{MINER} could not be started yet" in tries[0]
    keys = [run.idempotency_key for run in rig.all_runs(client)]
    assert len(keys) == len(set(keys))
    assert len(rig.runs(client, FIRST)) == 2


class FlakyLedger(Ledger):
    """Every other question finds the chain out of reach."""

    asked = 0

    def head(self):
        self._stumble()
        return super().head()

    def wait_for_block(self, number, *, finalized=True):
        self._stumble()
        super().wait_for_block(number, finalized=finalized)

    def block_time(self, number, *, finalized=True):
        self._stumble()
        return super().block_time(number, finalized=finalized)

    def _stumble(self):
        self.asked += 1
        if self.asked % 2:
            raise TransientError(Reason.CHAIN_UNREACHABLE, "no route to the chain")


def test_neither_an_unreachable_chain_nor_a_missing_deployment_stops_the_others(rig, client, caplog):
    gone = WindowDeployment("miner-window/clock-gone", "clock-gone", "miner", "key-of-nobody")
    rig.deployments = [gone, *rig.deployments]
    with caplog.at_level(logging.WARNING, logger=clock_module.__name__):
        follow(rig.clock(rig.chain(FIRST, FlakyLedger)).run(), lambda: len(rig.runs(client, FIRST + 1)) == 2)
    assert "the chain cannot be reached: [chain_unreachable]" in caplog.text
    assert "an event could not be emitted" not in caplog.text
    assert f"window {FIRST}: miner-window/clock-gone cannot be started" in caplog.text


class TestServing:
    def ours(self, monkeypatch, *names):
        """Let the clock see none but these neurons, since the server is shared."""

        async def find(client):
            found, neurons = await find_deployments(client)
            return [deployment for deployment in found if deployment.neuron in names], neurons

        monkeypatch.setattr(clock_module, "find_deployments", find)

    def test_it_joins_the_network_of_its_neurons(self, network, client, monkeypatch):
        self.ours(monkeypatch, MINER, OTHER)

        def started():
            return [run for run in runs_of_both(client) if str(run.idempotency_key).startswith("1/")]

        follow(clock_module.serve(), lambda: len(started()) >= 2)
        runs = started()
        assert {run.parameters["neuron"] for run in runs} == {MINER, OTHER}
        assert all(run.parameters["window"] >= network.first_window for run in runs)

    def test_without_a_deployment_it_says_so(self, monkeypatch, run_main):
        self.ours(monkeypatch)
        status, _, err = run_main(clock_module.main)
        assert status == 1
        assert err.startswith("[bad_environment] no window deployment of a known neuron on this server: run ")
        assert err.count("\n") == 1
