"""`python -m lab.gauntlet --endpoint rclone`: run the gauntlet and print its verdicts.

The flow runs in this process, against the Prefect server of PREFECT_API_URL or else against a server of its own. It
prints the flow's table artifact as a table and as one line of JSON, and ends with 1 if anything is not as expected.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.client.schemas.objects import State
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from rich.console import Console
from rich.table import Table

from blocks.proxies import exempting_loopback
from deployments.prefect_server import PrefectServer
from deployments.processes import free_port
from deployments.work_pool import require_server
from lab.adversary.catalogue import SCENARIOS
from lab.gauntlet.flow import TABLE, gauntlet
from lab.gauntlet.order import SUBSET, EndpointName, Where
from lab.gauntlet.subset import AVAILABLE
from templar.arguments import whole_number
from templar.errors import TemplarError

TABLE_WIDTH = 150
DRAIN_SECONDS = 10.0
Rows = list[dict[str, str]]


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print."""
    arguments = _parser().parse_args(words)
    if arguments.list:
        _print_list()
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the network ends with this process
    logging.getLogger("templar.gauntlet").setLevel(logging.INFO)
    try:
        with _server():
            state, rows = _run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except TemplarError as error:
        print(error, file=sys.stderr)
        return 1
    if rows:
        _print_table(rows)
    print(json.dumps({"passed": state.is_completed(), "message": state.message, "verdicts": rows}))
    return 0 if state.is_completed() else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.gauntlet", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--scenario",
        action="append",
        choices=tuple(dict.fromkeys((*SCENARIOS, *AVAILABLE))),
        metavar="NAME",
        help="a scenario; may be repeated; by default the named subset",
    )
    parser.add_argument("--where", choices=get_args(Where), default="s3", help="simulated time, or a real endpoint")
    parser.add_argument("--endpoint", choices=get_args(EndpointName), default="moto", help="which S3 endpoint")
    parser.add_argument("--miners", type=whole_number(1), help="miners of a network, attackers included")
    parser.add_argument("--attackers", type=whole_number(1), default=1, help="attackers of each scenario")
    parser.add_argument("--windows", type=whole_number(1), help="at least; as many as the scenarios need by default")
    parser.add_argument("--seed", type=whole_number(0), default=1, help="keys, blocks and assignments follow from it")
    parser.add_argument("--list", action="store_true", help="name all scenarios, and where they run")
    return parser


@contextmanager
def _server() -> Iterator[None]:
    """Use the operator's server, or one of this command's own as long as the context lasts."""
    if PREFECT_API_URL.value():
        require_server()
        yield
        return
    with tempfile.TemporaryDirectory(prefix="templar-gauntlet-server-") as folder:
        server = PrefectServer(Path(folder), free_port())
        os.environ.update(exempting_loopback(os.environ))
        child = server.start()
        try:
            with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_HOME: server.home}):
                try:
                    yield
                finally:  # or they would retry against the stopped server for minutes
                    for service in (EventsWorker, APILogWorker):
                        service.drain_all(timeout=DRAIN_SECONDS, at_exit=False)
        finally:
            child.stop()


def _run(arguments: argparse.Namespace) -> tuple[State[Any], Rows]:
    """The flow's final state, and its table."""
    run: Any = gauntlet(
        arguments.scenario,
        where=arguments.where,
        endpoint=arguments.endpoint,
        miners=arguments.miners,
        attackers=arguments.attackers,
        windows=arguments.windows,
        seed=arguments.seed,
        return_state=True,
    )
    state: State[Any] = asyncio.run(run)
    run_id = state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[run_id] if run_id else []),
                key=ArtifactFilterKey(any_=[TABLE]),
            )
        )
    return state, json.loads(str(found[0].data)) if found else []


def _print_table(rows: Sequence[dict[str, str]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    _console().print(table)


def _print_list() -> None:
    table = Table("scenario", "rows", "expected", "what happens", "runs", "in the named subset")
    for name, scenario in {**SCENARIOS, **AVAILABLE}.items():
        places = [place for place, known in (("simulation", SCENARIOS), ("s3", AVAILABLE)) if name in known]
        rows = ", ".join(map(str, scenario.rows))
        chosen = "yes" if name in SUBSET else ""
        table.add_row(name, rows, scenario.expect.name.lower(), scenario.title, ", ".join(places), chosen)
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
