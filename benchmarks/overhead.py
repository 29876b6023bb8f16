"""Measure what Prefect costs per window: a miner window whose training and waiting are no-ops, resident and cold.

    python -m benchmarks.overhead [--quick]

A real Prefect server and real workers run the real `miner-window` flow, every step of it, for a neuron that uploads
noise on simulated time. Seconds are from the creation of the run, as the window clock creates it, to its end. The last
line is JSON; `resident_seconds` and `cold_seconds` are medians.
"""

import asyncio
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from dotenv import dotenv_values
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from rich.console import Console

from benchmarks.command import command_line, figures_table
from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.local.plan import LocalNeuron, LocalPlan
from deployments.local.prepare import (
    announce_bucket,
    prepare_buckets,
    prepare_chain,
    prepare_dataset,
    prepare_folder,
    publish_network,
    write_environments,
)
from deployments.processes import PROJECT_ROOT, Child, free_port, start_child, wait_until_ready
from deployments.register import deploy_window, ensure_pool, register, worker_command
from deployments.schedules import HOUSEKEEPING_POOL
from templar.chain.ledger import Ledger
from templar.hparams import load_hparams
from templar.timeline import first_block
from templar.window import drive_window

NEURON = "lazy"
POLL_SECONDS = 0.2
RUN_PATIENCE_SECONDS = 120.0
WARM_UP_WINDOWS = 2  # not counted: the first window of a process also imports the model and starts the neuron


class Bench:
    """A network of one neuron, and the server it reports to."""

    def __init__(self, folder: Path) -> None:
        self.plan = LocalPlan(
            folder=folder / "network",
            num_honest=0,
            bad_actors=(NEURON,),
            prefect_port=free_port(),
            directory_store=True,
        )
        self.hparams = load_hparams(self.plan.preset, path=self.plan.hparams_path)
        self.block: Neuron
        self.first_window = 0

    def prepare(self, num_windows: int) -> None:
        """Everything but the server: text, chain, buckets, genesis, and an aggregator's words on all windows."""
        prepare_folder(self.plan)
        prepare_chain(self.plan, self.hparams)
        prepare_dataset(self.plan, self.hparams)
        write_environments(self.plan, prepare_buckets(self.plan))
        members = {neuron.role: neuron for neuron in self.plan.running}
        aggregator, self.block = self._block(members["aggregator"]), self._block(members["miner"])
        for block in (aggregator, self.block):
            announce_bucket(block)
        self.first_window = publish_network(self.plan, aggregator, opens_in_seconds=0).start.start_window
        node = self.at_window(self.first_window, aggregator).build("aggregator")
        for window in range(self.first_window, self.first_window + num_windows):
            drive_window(node, window)
        node.stop()

    def at_window(self, window: int, block: Neuron | None = None) -> Neuron:
        """A neuron's block, the miner's if not given, with a simulated clock that starts when a window opens."""
        block = block or self.block
        ledger = Ledger(self.plan.ledger)
        opening = first_block(window, self.hparams.windows)
        start = ledger._parameters.time(opening)
        ledger.close()
        subnet = block.subnet.model_copy(update={"network": f"ledger:{self.plan.ledger}?clock={start}"})
        return block.model_copy(update={"subnet": subnet})

    @contextmanager
    def worker(self, pool: str, kind: str) -> Iterator[Child]:
        """A worker process for the time of a measurement."""
        command = worker_command(pool, kind)
        log = self.plan.folder / "logs" / f"{kind}.log"
        child = start_child(f"{kind} worker", command, log=log, env=self.plan.server.environment(), cwd=PROJECT_ROOT)
        try:
            yield child
        finally:
            child.stop()

    def _block(self, neuron: LocalNeuron) -> Neuron:
        values = dotenv_values(self.plan.env_file(neuron.name))
        return neuron_from_environment({name: value for name, value in values.items() if value is not None})


async def measure(
    bench: Bench, deployment: str, windows: range, *, warm_up: int, each_afresh: bool
) -> tuple[float, ...]:
    """Run windows one after the other; seconds from creation to end of all but the first ones."""
    runs: list[FlowRun] = []
    async with get_client() as client:
        for window in windows:
            if each_afresh:
                await bench.at_window(window).asave(NEURON, overwrite=True)
            run = await arun_deployment(
                deployment,
                parameters={"window": window, "neuron": NEURON},
                timeout=0,
                as_subflow=False,
                idempotency_key=f"{deployment}/{window}",
            )
            runs.append(await _finished(client, run.id))
    return tuple(map(_seconds, runs[warm_up:]))


async def _finished(client: PrefectClient, run_id: UUID) -> FlowRun:
    for _ in range(int(RUN_PATIENCE_SECONDS / POLL_SECONDS)):
        run = await client.read_flow_run(run_id)
        if run.state is not None and run.state.is_final():
            if not run.state.is_completed() or run.state.name != "Completed":
                raise RuntimeError(f"run {run.name} ended {run.state.name}: {run.state.message}")
            return run
        await asyncio.sleep(POLL_SECONDS)
    raise RuntimeError(f"run {run_id} did not end within {RUN_PATIENCE_SECONDS:g} s")


def _seconds(run: FlowRun) -> float:
    if run.created is None or run.end_time is None:
        raise RuntimeError(f"run {run.name} has no times")
    return (run.end_time - run.created).total_seconds()


def run(num_resident: int, num_cold: int) -> dict[str, float]:
    """Measure both; the figures of the last line."""
    with tempfile.TemporaryDirectory(prefix="templar-bench-") as folder:
        bench = Bench(Path(folder))
        bench.prepare(WARM_UP_WINDOWS + num_resident + num_cold)
        service = bench.plan.server.service(bench.plan.server.environment())
        server = start_child(service.name, service.command, log=service.log, env=service.environment, cwd=PROJECT_ROOT)
        try:
            wait_until_ready(server, bench.plan.server.healthy, timeout_seconds=RUN_PATIENCE_SECONDS)
            with temporary_settings({PREFECT_API_URL: bench.plan.server.api_url, PREFECT_HOME: bench.plan.server.home}):
                resident, cold = _measure_both(bench, num_resident, num_cold)
        finally:
            server.stop()
    _print(resident, cold)
    return {
        "resident_seconds": round(statistics.median(resident), 3),
        "cold_seconds": round(statistics.median(cold), 3),
    }


def _measure_both(bench: Bench, num_resident: int, num_cold: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    first, warm_up = bench.first_window, WARM_UP_WINDOWS
    windows = range(first, first + warm_up + num_resident)
    register(NEURON, bench.at_window(first))
    with get_client(sync_client=True) as client:
        ensure_pool(client, HOUSEKEEPING_POOL, "process")
    with bench.worker(f"neuron-{NEURON}", "resident"):
        resident = asyncio.run(measure(bench, f"miner-window/{NEURON}", windows, warm_up=warm_up, each_afresh=False))
    deploy_window(NEURON, "miner", HOUSEKEEPING_POOL, name="cold")
    later = range(windows.stop, windows.stop + num_cold)
    with bench.worker(HOUSEKEEPING_POOL, "process"):
        cold = asyncio.run(measure(bench, "miner-window/cold", later, warm_up=0, each_afresh=True))
    return resident, cold


def _print(resident: Sequence[float], cold: Sequence[float]) -> None:
    title = "a miner window without training and waiting"
    table = figures_table(title, "worker", "windows", "median s", "min s", "max s")
    for name, seconds in (("resident", resident), ("cold", cold)):
        times = [f"{value:.2f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]
        table.add_row(name, str(len(seconds)), *times)
    Console().print(table)


def main() -> None:
    """Parse the command line, measure, print."""
    arguments = command_line("overhead", __doc__, quick="few windows, within a minute").parse_args()
    print(json.dumps(run(4, 1) if arguments.quick else run(20, 20)))


if __name__ == "__main__":
    main()
