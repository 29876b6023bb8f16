"""Report what runs and how each neuron's newest windows went: of `templar neuron start` and of the local network.

Windows are the final states of the neuron's window runs, on its Prefect server. Windows in a row in which a neuron
published or scored nothing are a streak. It is told once it has `FIRST_TOLD` windows, and again whenever it is twice as
long as when it was told last.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName, FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import temporary_settings
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deployments.automations import CRASHED, REMEDIES
from deployments.clock import WINDOW_FLOWS
from deployments.neuron.folder import Address, NeuronFolder
from deployments.prefect_server import SERVER_LOG, SERVER_NAME, repeated_errors
from deployments.processes import ProcessEntry, ProcessRecord, holder_of, program
from deployments.schedules import stalled
from deployments.work_pool import is_outage
from tasks.alerts import Alert, of_missed
from templar.errors import Reason
from templar.window import Missed

log = logging.getLogger(__name__)
FIRST_TOLD = 3  # windows in a row
SPARE = 5  # runs that are read besides: some count for nothing
MOST_READ = 200  # most runs that a Prefect server lists in one answer
LOOK_SECONDS = 10.0
_DONE = {Missed.NOTHING_PUBLISHED: "published nothing", Missed.NOTHING_SCORED: "scored nothing"}
_CODE = re.compile(r"\[([a-z_]+)\]")
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
        "processes": [{"name": entry.name, "pid": entry.identity.pid, "log": str(entry.log)} for entry in running],
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
    headline: str, found: Mapping[str, Any], windows: Mapping[str, Sequence[Mapping[str, str]]], console: Console
) -> None:
    """Print processes, then a table of windows under each title, then what goes wrong."""
    console.print(f"{headline}; Prefect API: {found['api_url'] or 'unknown'}", soft_wrap=True)
    processes = ((each["name"], each["pid"], _age(each["pid"]), each["log"]) for each in found["processes"])
    console.print(folding_table("process", "pid", "runs for", "log", rows=processes))
    for title, rows in windows.items():
        if title:
            console.print(title)
        table = folding_table("window", "state", "message", rows=(row.values() for row in rows))
        console.print(table if rows else found["problem"] or "no window has begun yet")
    for line in (*found["warnings"], *found["services"]):
        show_warning(line, console)
    if found["api_url"] and any(windows.values()):
        console.print(f"more: PREFECT_API_URL={found['api_url']} {program('prefect')} flow-run ls", soft_wrap=True)


def folding_table(
    *columns: str, rows: Iterable[Iterable[object]] = (), title: str | None = None, right: Collection[str] = ()
) -> Table:
    """A table whose columns break long cells into lines; those in `right` are right-justified.

    A cell is text as it stands, rich's own `Text`, or None, which is empty.
    """
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text("" if cell is None else str(cell)) for cell in row))
    return table


def show_warning(line: str, console: Console) -> None:
    """Print what goes wrong with a neuron, in red."""
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


# Streaks.


@dataclass(frozen=True)
class Streak:
    """Windows in a row in which a neuron did not do what it owed; `state` is that of the newest."""

    neuron: str
    windows: int
    state: State[None]

    @property
    def line(self) -> str:
        """Neuron, count, reason and remedy."""
        reason, name = reason_in(self.state.message), str(self.state.name)
        done = _DONE.get(Missed(name), name) if name in set(Missed) else "took no part"
        code = f" [{reason}]" if reason else ""
        what = f"neuron {self.neuron!r} {done} in {self.windows} windows in a row{code}"
        if self.state.is_crashed():
            remedy = CRASHED
        elif name == "CatchingUp":
            remedy = REMEDIES[Alert.BEHIND]
        elif reason is None:
            remedy = REMEDIES[Alert.WINDOW_MISSED]
        else:
            *_, raised = of_missed(reason, "")  # the most particular one is the last
            remedy = REMEDIES[raised.alert]
        return f"{what}: {remedy.format(neuron=self.neuron)}"


def newest_windows(name: str, limit: int) -> list[FlowRun]:
    """The newest window runs of a neuron that have begun, on the server that is set, the newest first."""
    with get_client(sync_client=True) as client:
        return client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=list(WINDOW_FLOWS))),
            flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[f"neuron:{name}"])),
            sort=FlowRunSort.START_TIME_DESC,
            limit=limit,
        )


def streak_of(neuron: str, runs: Iterable[FlowRun]) -> Streak | None:
    """The streak that goes on, from the newest runs, the newest first; None if it has fewer than `FIRST_TOLD` windows.

    A window that several runs took counts once. A run that is not over, was cancelled, or found nothing to do in its
    window neither ends a streak nor counts.
    """
    names: list[str] = []
    newest: State[None] | None = None
    for run in runs:
        state = run.state
        if state is None or not state.is_final() or state.is_cancelled():
            continue
        is_late = state.name == "Skipped" and reason_in(state.message) is Reason.WINDOW_PASSED
        if not (state.is_failed() or state.is_crashed() or state.name == "CatchingUp" or is_late):
            if state.name == "Skipped":
                continue
            break
        newest = newest or state
        if run.name not in names:
            names.append(run.name)
    return Streak(neuron, len(names), newest) if newest is not None and len(names) >= FIRST_TOLD else None


class Teller:
    """Tells of the streaks of some neurons; `say` gets each line."""

    def __init__(self, neurons: Sequence[str], say: Callable[[str], None]) -> None:
        self._told = dict.fromkeys(neurons, 0)
        self._say = say

    def look(self) -> None:
        """Read the newest runs, and tell what is new; what Prefect's client raises is raised."""
        for neuron, told in self._told.items():
            few = min(MOST_READ, 2 * max(FIRST_TOLD, told) + SPARE)
            streak = streak_of(neuron, newest_windows(neuron, few))
            if streak is None:
                self._told[neuron] = 0
            elif told == 0 or streak.windows >= 2 * told:
                streak = streak_of(neuron, newest_windows(neuron, MOST_READ)) or streak  # its whole length
                self._told[neuron] = streak.windows
                self._say(streak.line)


def tell_of_streaks(neurons: Sequence[str], address: Address, say: Callable[[str], None]) -> None:
    """Tell of the streaks of neurons on a server, in a thread that ends with this process."""
    Thread(target=_tell, args=(Teller(neurons, say), address), name="streaks", daemon=True).start()


def _tell(teller: Teller, address: Address) -> None:
    """Look for ever; an outage of the server is waited out, and what it refuses costs a warning."""
    with temporary_settings(address.settings):
        while True:
            try:
                teller.look()
            except Exception as error:  # noqa: BLE001 - this thread must outlive what the server refuses
                if not is_outage(error):
                    log.warning("the newest windows were not looked at: %r", error)
            time.sleep(LOOK_SECONDS)


def reason_in(message: str | None) -> Reason | None:
    """The first reason that a state's message, or a line, names."""
    known = {reason.value: reason for reason in Reason}
    return next((known[code] for code in _CODE.findall(message or "") if code in known), None)
