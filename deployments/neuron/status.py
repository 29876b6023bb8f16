"""Report what runs, and how each neuron's newest windows went: of `templar neuron start` and of the local network."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prefect.client.schemas.objects import FlowRun
from prefect.settings import temporary_settings
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.neuron.folder import Address, NeuronFolder
from deployments.neuron.streaks import MOST_READ, newest_windows, streak_of
from deployments.prefect_server import SERVER_LOG, SERVER_NAME, repeated_errors
from deployments.processes import ProcessEntry, ProcessRecord, holder_of, program
from deployments.schedules import stalled
from deployments.work_pool import is_outage

NUM_WINDOWS = 5


def status_of(folder: NeuronFolder) -> dict[str, Any]:
    """The knowledge of a neuron: whether all of it runs, its processes, its server, its newest windows."""
    address, running = folder.address, folder.record.running()
    server_is_own = address is not None and address.home is not None
    expected = {"worker", "housekeeping worker", "window clock", *([SERVER_NAME] if server_is_own else [])}
    missing = sorted(expected - {entry.name for entry in running})
    found = _found(running, missing, address, [folder.name], asks=True)
    supervisor = holder_of(folder.lock)
    return {
        "runs": supervisor is not None and not missing,
        "supervisor": None if supervisor is None else supervisor.pid,
        "windows": found.pop("neurons")[folder.name],
        **found,
    }


def status_of_network(
    record: ProcessRecord, address: Address | None, neurons: Sequence[str], *, newest: str
) -> dict[str, Any]:
    """What is known of a network of one record; without its `newest` process it is still coming up."""
    entries = record.entries()
    running = [entry for entry in entries if entry.identity.alive]
    missing = [entry.name for entry in entries if entry not in running]
    runs = not missing and newest in {entry.name for entry in running}
    return {"runs": runs, **_found(running, missing, address, neurons, asks=bool(running))}


def _found(
    running: Sequence[ProcessEntry],
    missing: Sequence[str],
    address: Address | None,
    neurons: Sequence[str],
    *,
    asks: bool,
) -> dict[str, Any]:
    """The processes, and what the Prefect server knows of some neurons, unless it is not asked or does not answer."""
    found: dict[str, Any] = {
        "processes": [{"name": entry.name, "pid": entry.pid, "log": str(entry.log)} for entry in running],
        "missing": missing,
        "api_url": None if address is None else address.api_url,
        "neurons": {name: [] for name in neurons},  # the windows that have begun, the newest first
        "warnings": [],  # a line per neuron that missed several windows in a row
        "services": [],  # a line per thing that the server should do by itself and does not
        "problem": "",  # why there is nothing to see
    }
    if address is None or not asks:
        return found
    try:
        with temporary_settings(address.settings):
            runs = {name: newest_windows(name, MOST_READ) for name in neurons}
        found["services"] = service_problems(neurons, address)
    except Exception as error:
        if not is_outage(error):
            raise
        return found | {"problem": f"{address.api_url} does not answer: {type(error).__name__}"}
    streaks = [streak_of(name, each) for name, each in runs.items()]
    found["warnings"] = [streak.line for streak in streaks if streak is not None]
    found["neurons"] = {name: [_row(run) for run in each[:NUM_WINDOWS]] for name, each in runs.items()}
    return found


def is_green(found: Mapping[str, Any]) -> bool:
    """Whether all of a neuron or network runs, and its Prefect server does by itself what it should."""
    return bool(found["runs"]) and not found["services"]


def service_problems(neurons: Sequence[str], address: Address) -> list[str]:
    """A line for each thing that the Prefect server of some neurons should do by itself and does not."""
    with temporary_settings(address.settings):
        problems = [line for _, line in stalled(neurons)]
    if address.home is not None:  # a server of `neuron start` or `make up`
        log = Path(address.home, SERVER_LOG)
        errors = repeated_errors(log).items()
        problems += [f"{log} repeats an error: {what} ({count} times)" for what, count in errors]
    return problems


def show_neuron_status(name: str, found: Mapping[str, Any], console: Console) -> None:
    """Print what `status_of` found."""
    runs = "runs" if found["runs"] else "does not run" if found["supervisor"] is None else "is being started again"
    _show(f"neuron {name!r} {runs}", found, {"": found["windows"]}, console)


def show_network_status(found: Mapping[str, Any], console: Console) -> None:
    """Print what `status_of_network` found."""
    if not found["processes"]:
        console.print("nothing is running: `make up` brings the network up")
        return
    runs = "runs" if found["runs"] else "is coming up"
    if found["missing"]:
        runs = f"has lost {', '.join(found['missing'])}: unless it is started again, `make down`, then `make up`"
    windows = {f"neuron {name!r}": each for name, each in found["neurons"].items()}
    _show(f"the local network {runs}", found, windows, console)


def _show(
    headline: str,
    found: Mapping[str, Any],
    windows: Mapping[str, Sequence[Mapping[str, str]]],
    console: Console,
) -> None:
    """Print processes, then a table of windows under each title, then what goes wrong."""
    console.print(f"{headline}; Prefect API: {found['api_url'] or 'unknown'}", soft_wrap=True)
    table = folding_table("process", "pid", "runs for", "log")
    for each in found["processes"]:
        table.add_row(each["name"], str(each["pid"]), _age(each["pid"]), each["log"])
    console.print(table)
    for title, rows in windows.items():
        if title:
            console.print(title)
        table = folding_table("window", "state", "message")
        for row in rows:
            table.add_row(*map(Text, row.values()))
        console.print(table if rows else found["problem"] or "no window has begun yet")
    show_warnings([*found["warnings"], *found["services"]], console)
    if found["api_url"] and any(windows.values()):
        console.print(f"more: PREFECT_API_URL={found['api_url']} {program('prefect')} flow-run ls", soft_wrap=True)


def folding_table(*columns: str, title: str | None = None) -> Table:
    """A table whose columns break long cells into lines."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def show_warnings(warnings: Sequence[str], console: Console) -> None:
    """Print what goes wrong with neurons, a red line each."""
    for line in warnings:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _row(run: FlowRun) -> dict[str, str]:
    state = run.state
    return {
        "window": run.name,
        "state": "" if state is None else str(state.name),
        "message": "" if state is None else state.message or "",
    }


def _age(pid: int) -> str:
    try:
        minutes, seconds = divmod(int(time.time() - psutil.Process(pid).create_time()), 60)
    except psutil.NoSuchProcess:
        return "ended"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
