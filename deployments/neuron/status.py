"""Report what runs, and how each neuron's newest windows went: of `templar neuron start` and of the local network."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from prefect.client.schemas.objects import FlowRun
from prefect.settings import temporary_settings
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.neuron.folder import Address, NeuronFolder
from deployments.neuron.streaks import MOST_READ, newest_windows, streak_of
from deployments.prefect_server import SERVER_NAME, repeated_errors
from deployments.processes import ProcessEntry, ProcessRecord, holder_of, program
from deployments.schedules import stalled
from deployments.work_pool import is_outage

NUM_WINDOWS = 5
_COLUMNS = ("window", "state", "message")


def status_of(folder: NeuronFolder) -> dict[str, Any]:
    """The knowledge of a neuron: whether all of it runs, its processes, its server, its newest windows."""
    address, running = folder.address, folder.record.running()
    server_is_own = address is not None and address.home is not None
    expected = {"worker", "housekeeping worker", "window clock", *([SERVER_NAME] if server_is_own else [])}
    windows = _read_server([folder.name], address)
    supervisor = holder_of(folder.lock)
    return {
        "runs": supervisor is not None and expected <= {entry.name for entry in running},
        "supervisor": None if supervisor is None else supervisor.pid,
        "processes": _processes(running),
        "missing": sorted(expected - {entry.name for entry in running}),
        "api_url": None if address is None else address.api_url,
        "windows": windows.newest[folder.name],
        "warnings": list(windows.warnings),
        "services": list(windows.services),
        "problem": windows.problem,
    }


def show_neuron_status(name: str, found: Mapping[str, Any], console: Console) -> None:
    """Print what `status_of` found."""
    runs = "runs" if found["runs"] else "does not run" if found["supervisor"] is None else "is being started again"
    console.print(f"neuron {name!r} {runs}; Prefect API: {found['api_url'] or 'unknown'}", soft_wrap=True)
    _show_processes(found["processes"], console)
    _show_windows(found["windows"], found["problem"], console)
    show_warnings([*found["warnings"], *found["services"]], console)
    if found["windows"]:
        _show_where_more_is(str(found["api_url"]), console)


def status_of_network(
    record: ProcessRecord, address: Address | None, neurons: Sequence[str], *, newest: str
) -> dict[str, Any]:
    """Return what is known of a network that one record has: its processes, and the newest windows of each neuron.

    Args:
        record: Its processes.
        address: Its Prefect server; None if it has not been started.
        neurons: Their names.
        newest: The process that is started last: without it the network is still coming up.
    """
    entries = record.entries()
    running = [entry for entry in entries if entry.identity.alive]
    windows = _read_server(neurons, address if running else None)
    return {
        "runs": len(running) == len(entries) and newest in {entry.name for entry in running},
        "processes": _processes(running),
        "missing": [entry.name for entry in entries if entry not in running],
        "api_url": None if address is None else address.api_url,
        "neurons": windows.newest,
        "warnings": list(windows.warnings),
        "services": list(windows.services),
        "problem": windows.problem,
    }


def is_green(found: Mapping[str, Any]) -> bool:
    """Whether all of a neuron or network runs, and its Prefect server does by itself what it should."""
    return bool(found["runs"]) and not found["services"]


def service_problems(neurons: Sequence[str], address: Address) -> list[str]:
    """Return a line for each thing that the Prefect server of some neurons should do by itself and does not.

    Raises:
        Exception: What Prefect's client raises, such as an outage of the server.
    """
    with temporary_settings(address.settings):
        problems = [each.line for each in stalled(neurons)]
    errors = {} if address.log is None else repeated_errors(address.log)
    return problems + [f"{address.log} repeats an error: {what} ({count} times)" for what, count in errors.items()]


def show_network_status(found: Mapping[str, Any], console: Console) -> None:
    """Print what `status_of_network` found."""
    if not found["processes"]:
        console.print("nothing is running: `make up` brings the network up")
        return
    if found["missing"]:
        runs = f"has lost {', '.join(found['missing'])}: `make down`, then `make up`"
    else:
        runs = "runs" if found["runs"] else "is coming up"
    console.print(f"the local network {runs}; Prefect API: {found['api_url'] or 'unknown'}", soft_wrap=True)
    _show_processes(found["processes"], console)
    for name, windows in found["neurons"].items():
        console.print(f"neuron {name!r}")
        _show_windows(windows, found["problem"], console)
    show_warnings([*found["warnings"], *found["services"]], console)
    if found["api_url"]:
        _show_where_more_is(str(found["api_url"]), console)


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what goes wrong with neurons, a red line each."""
    for line in warnings:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Server:
    """The records of a Prefect server about some neurons."""

    newest: Mapping[str, list[dict[str, str]]]  # name -> the windows that have begun, the newest first
    warnings: Sequence[str] = ()  # a line per neuron that missed several in a row
    services: Sequence[str] = ()  # a line per thing that the server should do by itself and does not
    problem: str = ""  # why there is nothing to see


def _read_server(neurons: Sequence[str], address: Address | None) -> _Server:
    nothing: dict[str, list[dict[str, str]]] = {name: [] for name in neurons}
    if address is None:
        return _Server(nothing)
    try:
        with temporary_settings(address.settings):
            runs = {name: newest_windows(name, MOST_READ) for name in neurons}
        services = service_problems(neurons, address)
    except Exception as error:
        if not is_outage(error):
            raise
        return _Server(nothing, problem=f"{address.api_url} does not answer: {type(error).__name__}")
    streaks = [streak_of(name, each) for name, each in runs.items()]
    return _Server(
        {name: [_row(run) for run in each[:NUM_WINDOWS]] for name, each in runs.items()},
        [streak.line for streak in streaks if streak is not None],
        services,
    )


def _row(run: FlowRun) -> dict[str, str]:
    state = run.state
    return {
        "window": run.name,
        "state": "" if state is None else str(state.name),
        "message": "" if state is None else state.message or "",
    }


def _processes(entries: Sequence[ProcessEntry]) -> list[dict[str, Any]]:
    return [{"name": entry.name, "pid": entry.pid, "log": str(entry.log)} for entry in entries]


def _show_processes(processes: Sequence[Mapping[str, Any]], console: Console) -> None:
    table = Table()
    for column in ("process", "pid", "runs for", "log"):
        table.add_column(column, overflow="fold")
    for each in processes:
        table.add_row(each["name"], str(each["pid"]), _age(each["pid"]), each["log"])
    console.print(table)


def _show_windows(windows: Sequence[Mapping[str, str]], problem: str, console: Console) -> None:
    if not windows:
        console.print(problem or "no window has begun yet")
        return
    table = Table()
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in windows:
        table.add_row(*(Text(row[column]) for column in _COLUMNS))
    console.print(table)


def _show_where_more_is(api_url: str, console: Console) -> None:
    console.print(f"more: PREFECT_API_URL={api_url} {program('prefect')} flow-run ls", soft_wrap=True)


def _age(pid: int) -> str:
    try:
        minutes, seconds = divmod(int(time.time() - psutil.Process(pid).create_time()), 60)
    except psutil.NoSuchProcess:
        return "ended"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
