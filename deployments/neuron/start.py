"""Run a neuron: check it, register it, and keep its processes running until a signal.

    templar neuron start --name default --env-file .env

It needs no other terminal. The processes are the neuron's worker, a worker for its scheduled flows, the window clock,
and a Prefect server unless PREFECT_API_URL names one that runs already. Each is started again when it ends. SIGTERM or
Ctrl-C ends all of them: a window under way has the grace of its work pool.
"""

import signal
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from prefect.settings import temporary_settings

from blocks.chain import PASSWORD
from blocks.neuron import Neuron
from blocks.proxies import exempting_loopback
from deployments.neuron.folder import HOME_LOCK, Address, NeuronFolder, foreign_home
from deployments.neuron.status import tell_of_streaks
from deployments.options import NEURON, command_parser, environment_of
from deployments.prefect_server import PrefectServer, require_database, require_guarded
from deployments.processes import require_free_port, sole_process
from deployments.register import CLOCK_COMMAND, checked_neuron, enrol, ranked_command, worker_command
from deployments.schedules import HOUSEKEEPING_POOL
from deployments.supervisor import Service, Supervisor, log_file, say
from deployments.work_pool import hostname_of, require_server
from tasks.glance import neuron_key, open_page
from templar.arguments import port
from templar.errors import PermanentError, Reason

USUAL_PORT = 4200
WORKER_GRACE_SECONDS = 60.0  # the pool's grace for a window (30 s), what an interrupted one has to end (10 s), and room


def command_line(prog: str = "templar neuron start", doc: str | None = __doc__) -> ArgumentParser:
    """The parser of this command, or of another one that takes its options."""
    parser = command_parser(prog, doc, *NEURON)
    parser.add_argument(
        "--prefect-port", type=port, help=f"of the Prefect server, unless PREFECT_API_URL is set ({USUAL_PORT})"
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and run the neuron; 0 after a signal, 1 if it is refused."""
    arguments = command_line().parse_args(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(arguments.name, environment_of(arguments), prefect_port=arguments.prefect_port)
    except KeyboardInterrupt:
        say(f"neuron {arguments.name!r} has stopped")
    return 0


def run(name: str, environment: Mapping[str, str], *, prefect_port: int | None) -> None:
    """Check, register, start, and watch until a KeyboardInterrupt.

    `environment` has the variables of .env.example. With PREFECT_API_URL a server runs already; without it, one is
    started on `prefect_port`. PREFECT_API_AUTH_STRING is the server's password, if it has one.

    Raises:
        PermanentError: `already_running`, also for a folder of another neuron; what `checked_neuron` refuses;
            `bad_environment`, `port_taken`, `process_died`.
        TransientError: What does not answer.
    """
    folder = NeuronFolder(name)
    if prefect_port is not None and (known := environment.get("PREFECT_API_URL")):
        problem = f"--prefect-port {prefect_port} is for a server of the neuron's own, and PREFECT_API_URL is {known}"
        raise PermanentError(Reason.BAD_ENVIRONMENT, f"{problem}: leave one of them out")
    with sole_process(folder.lock, lambda pid: f"neuron {name!r} is run by process {pid} of this machine already"):
        # What an earlier start left behind when it was killed would hold locks and ports.
        if left := folder.record.stop_all():
            say(f"stopped what an earlier start left: {', '.join(left)}")
        say("checking the wallet, the chain, the bucket and the dataset")
        block = checked_neuron(environment)
        home = Path(block.home)
        with sole_process(home / HOME_LOCK, partial(foreign_home, home)):
            _run(folder, block, environment, prefect_port=prefect_port or USUAL_PORT)


def _run(folder: NeuronFolder, block: Neuron, environment: Mapping[str, str], *, prefect_port: int) -> None:
    name = folder.name
    # 1. The Prefect server, and the environment of all processes.
    known = environment.get("PREFECT_API_URL")
    server = None if known else PrefectServer(folder.server_home, prefect_port)
    password = environment.get("PREFECT_API_AUTH_STRING") or None
    own = {**environment, **exempting_loopback(environment)} if server is None else server.environment(environment)
    if password is None:
        own.pop("PREFECT_API_AUTH_STRING", None)  # an empty one is not the same to Prefect
    address = Address(own["PREFECT_API_URL"], None if server is None else str(server.home), password)
    if (hotkey_password := block.wallet.given_password) is not None:
        own[PASSWORD] = hotkey_password  # the processes have no terminal that they could ask
    supervisor = Supervisor(folder.record, say)
    with supervisor.stopping():
        if server is None:
            hostname_of(address.api_url)
            require_guarded(address.api_url)
            with temporary_settings(address.settings):
                require_server()
        else:
            say(f"starting the Prefect server with {require_database(own)}")
            remedy = "choose another --prefect-port, or set PREFECT_API_URL to use the server that listens there"
            require_free_port(server.host, server.port, remedy=remedy)
        address.save(folder.address_file)
        if server is not None:
            supervisor.start(server.service(own), server.healthy)

        # 2. The neuron's block, pools and deployments.
        with temporary_settings(address.settings):
            require_server()
            enrol(name, block, environment)
            page = open_page(neuron_key(name))

        # 3. Everything else.
        grace = WORKER_GRACE_SECONDS
        for process, command, seconds in (
            ("worker", ranked_command(worker_command(f"neuron-{name}", "resident"), block), grace),
            ("housekeeping worker", worker_command(HOUSEKEEPING_POOL, "process"), grace),
            ("window clock", CLOCK_COMMAND, 10.0),
        ):
            supervisor.start(Service(process, command, log_file(folder.logs, process), own, seconds))
        ui = address.api_url.removesuffix("/api")
        say(f"neuron {name!r} runs; Prefect UI: {ui}; logs: {folder.logs}")
        if page is not None:
            say(f"the training at a glance, after each window: {ui}/artifacts/artifact/{page}")
        if block.trainer.hosts > 1:
            from templar.training.torchrun import command_of_other_hosts  # noqa: PLC0415 - torch takes seconds

            say(f"it begins when each of the other hosts runs: {command_of_other_hosts(block.trainer)}")
        tell_of_streaks([name], address, say)
        supervisor.watch()
