"""`templar run|up|down|status`: a whole training network on this machine.

    run     bring it up, show its progress for a fixed number of windows, print a summary, take it down
    up      bring it up and leave it running
    down    stop what `up` started
    status  show its processes, and the newest windows of each neuron

`run`, and `up --follow`, say so when a neuron misses several windows in a row; `status` says it of what runs.
The last line of `run` is JSON; everything in it was read back from the chain and the buckets.
"""

import argparse
import json
import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.live import Live

from blocks.proxies import exempting_loopback
from deployments.local.bringup import LocalNetwork
from deployments.local.pace import measure_pace
from deployments.local.plan import DEFAULT_NEURON, LOCAL_FOLDER, LocalPlan
from deployments.local.view import LocalView, Summary, WindowRow, as_table, summarise
from deployments.neuron.status import is_green, show_network_status, show_warning, tell_of_streaks
from deployments.options import command_parser
from deployments.processes import PROJECT_ROOT, program
from deployments.schedules import scheduled_work
from templar.arguments import port, positive, whole_number
from templar.errors import RejectedError, TemplarError, TransientError
from templar.hparams import load_hparams

POLL_SECONDS = 1.0
PATIENCE_WINDOWS = 4  # windows for which the view waits for one that does not come
console = Console(stderr=False)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says."""
    arguments = _parser().parse_args(words)
    plan = LocalPlan(
        folder=arguments.folder.resolve(),
        preset=arguments.preset,
        num_honest=arguments.miners,
        bad_actors=tuple(arguments.actor) if arguments.actor is not None else ("lazy",),
        prefect_port=arguments.prefect_port,
        storage_port=arguments.storage_port,
        directory_store=arguments.store == "directory",
        hparams_path=arguments.hparams.resolve(),
        hour=timedelta(seconds=arguments.hour_seconds),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended takes its network down as well
    os.environ.update(exempting_loopback(os.environ))
    if arguments.command in ("run", "up"):
        plan = paced(plan, arguments.window_seconds)
    network = LocalNetwork(plan, lambda text: console.print(f"[dim]{text}[/dim]", soft_wrap=True))
    match arguments.command:
        case "run":
            return run(network, arguments.windows)
        case "up":
            return up(network, follows=arguments.follow)
        case "down":
            return down(network)
    return status(network, as_json=arguments.json)


def paced(plan: LocalPlan, window_seconds: float | None) -> LocalPlan:
    """The plan with windows of this length, or of one that suits this machine as it is now."""
    preset = load_hparams(plan.preset, path=plan.hparams_path)
    if window_seconds is not None:
        return replace(plan, pace=window_seconds / preset.windows.seconds)
    pace = measure_pace(len(plan.running))
    if pace > 1:
        seconds = pace * preset.windows.seconds
        console.print(
            f"This machine is busy or slow: a window takes {seconds:g} s instead of {preset.windows.seconds:g} s. "
            "WINDOW_SECONDS (--window-seconds) sets another length.",
            soft_wrap=True,
        )
    return replace(plan, pace=pace)


def run(network: LocalNetwork, num_windows: int) -> int:
    """Bring up, watch, summarise, take down; 0 if the network passed every check of the summary."""
    started = time.monotonic()
    birth = network.up()
    try:
        network.supervise()
        view = LocalView(network.plan, network.neuron_block(network.plan.running[0].name), birth)
        ui = network.plan.server.ui_url
        console.print(f"Prefect UI: {ui}  ·  first window {birth.start.start_window}")
        tell_of_streaks(network.plan.brought_up, network.address, partial(show_warning, console=console))
        last = watch(view, num_windows)
        view.wait_until_proven(view.proven(last))
        scheduled = network.scheduled()
        network.stop_neurons()  # what they published is enough from here, and the summary has the machine to itself
        summary = summarise(view, last, num_windows, started).with_scheduled(*scheduled)
        console.print(f"Prefect UI (while the network runs; `make up` keeps it): {ui}")
        keep(network)
    finally:
        network.down()
    return report(summary)


def keep(network: LocalNetwork) -> None:
    """Keep the trained model, and say how to use it; a model that cannot be kept is no reason to fail."""
    try:
        mark = network.keep()
    except TemplarError as error:
        console.print(f"the trained model was not kept: {error}", soft_wrap=True, markup=False)
        return
    console.print(
        f"the model of window {mark.window} was kept: `templar model generate --prompt 'def '` goes on with a text",
        soft_wrap=True,
    )


def up(network: LocalNetwork, *, follows: bool = False) -> int:
    """Bring up and leave it running; with `follows` say what goes wrong, until the network is down or Ctrl-C."""
    birth = network.up()
    network.supervise()
    plan = network.plan
    console.print(f"The network runs. Prefect UI: {plan.server.ui_url}")
    console.print(f"Window {birth.start.start_window} is its first. In this shell:")
    prefect, home = program("prefect"), shlex.quote(str(plan.server.home))
    commands = [
        f"export PREFECT_API_URL={plan.server.api_url} PREFECT_HOME={home}",
        f"{prefect} deployment run miner-window/{DEFAULT_NEURON}",
        *(f"{prefect} deployment schedule ls {deployment}" for deployment in scheduled_deployments(plan)),
    ]
    for command in commands:
        print(f"  {command}")  # rich would break a long line, and a copy of it
    console.print("The training at a glance, after each window, of the network and of each neuron:")
    for name, address in network.pages(birth).items():
        print(f"  {name:<10}  {address}")
    console.print("`make status` shows how the newest windows went; `make down` stops it.", soft_wrap=True)
    if follows:
        follow(network)
    return 0


def scheduled_deployments(plan: LocalPlan) -> list[str]:
    """The deployments with a schedule: all of the neuron `default`, and those of the validator that a miner has not."""
    hparams = load_hparams(plan.preset, path=plan.hparams_path)
    flows = {role: [work.flow for work in scheduled_work(role, hparams)] for role in ("miner", "validator")}
    own = [f"{flow}/{DEFAULT_NEURON}" for flow in flows["miner"]]
    others = [f"{flow}/validator" for flow in flows["validator"] if flow not in flows["miner"]]
    return [each.replace("_", "-") for each in (*own, *others)]


def follow(network: LocalNetwork) -> None:
    """Say so when a neuron misses several windows in a row, until the network is down or Ctrl-C, which leaves it up."""
    console.print("Neurons that miss several windows in a row are named here; Ctrl-C leaves the network running.")
    tell_of_streaks(network.plan.brought_up, network.address, partial(show_warning, console=console))
    try:
        while network.is_running:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        console.print("the network goes on running; `make down` stops it")


def down(network: LocalNetwork) -> int:
    """Keep the model of a network that runs, and stop what is running."""
    running = network.running
    if network.is_running:
        keep(network)
    network.down()
    console.print(f"stopped {len(running)} processes" if running else "nothing was running")
    return 0


def status(network: LocalNetwork, *, as_json: bool) -> int:
    """Show what runs, and the newest windows of each neuron; 0 if all of it runs, and does what it should by itself."""
    found = network.status()
    if as_json:
        print(json.dumps(found))
    else:
        show_network_status(found, console)
    return 0 if is_green(found) else 1


def watch(view: LocalView, num_windows: int) -> int:
    """Show the windows as they are scored; the last window."""

    def row_of(window: int) -> WindowRow | None:
        try:
            return view.row(window)
        except (TransientError, RejectedError):  # the validator has not announced its bucket yet
            return None

    first = view.birth.start.start_window
    last = first + num_windows - 1
    titles = {neuron.uid: view.names[neuron.hotkey].name for neuron in view.chain.metagraph().neurons}
    rows: list[WindowRow] = []
    give_up = time.time() + view.hparams.windows.seconds * PATIENCE_WINDOWS + 60
    with Live(as_table(rows, titles), console=console, refresh_per_second=2) as live:
        for window in range(first, last + 1):
            while (row := row_of(window)) is None and time.time() < give_up:
                if row_of(window + 1) is not None:  # a later window has been scored, so this one never will be
                    break
                time.sleep(POLL_SECONDS)
            give_up = time.time() + view.hparams.windows.seconds * PATIENCE_WINDOWS
            rows.append(row or WindowRow(window, None, None, {}, {}))
            live.update(as_table(rows, titles))
    console.line()
    return last


def report(summary: Summary) -> int:
    """Print the summary, then its JSON; 0 if every check passed."""
    figures = summary.figures
    if figures["compression"] is not None:
        console.print(
            f"a payload took {figures['payload_bytes'] / 1000:.1f} kB on average, "
            f"{figures['compression']} times less than {figures['dense_bytes'] / 1000:.1f} kB of float32"
        )
    for check, passed in summary.checks.items():
        console.print(f"[{'green' if passed else 'red'}]{'✓' if passed else '✗'}[/] {check}")
    print(json.dumps(figures))
    return 0 if all(summary.checks.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("templar", __doc__)
    parser.add_argument("command", choices=["run", "up", "down", "status"])
    parser.add_argument("--windows", type=whole_number(1), default=10, help="windows that `run` runs")
    parser.add_argument("--miners", type=whole_number(1), default=2, help="honest miners")
    parser.add_argument("--actor", action="append", help="a bad actor; may be repeated; `lazy` by default")
    parser.add_argument("--preset", default="local", help="preset of hparams.json")
    parser.add_argument("--hparams", type=Path, default=PROJECT_ROOT / "hparams.json", help="another hparams.json")
    parser.add_argument(
        "--window-seconds", type=positive, help="length of a window; by default one that suits this machine"
    )
    parser.add_argument(
        "--hour-seconds", type=positive, default=3600.0, help="how long an hour takes for scheduled work (3600)"
    )
    parser.add_argument("--store", choices=["s3", "directory"], default="s3", help="where objects are kept")
    parser.add_argument("--folder", type=Path, default=LOCAL_FOLDER, help="where everything lies")
    parser.add_argument("--prefect-port", type=port, default=4200)
    parser.add_argument("--storage-port", type=port, default=9200)
    parser.add_argument("--follow", action="store_true", help="`up` stays, and says so when a neuron misses windows")
    parser.add_argument("--json", action="store_true", help="what `status` shows, as JSON")
    return parser
