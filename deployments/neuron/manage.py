"""Commands around a neuron that runs, or will: `templar neuron init|stop|status|logs|service`.

init      write an .env with what the options say; what is left empty is yours to fill in
stop      stop what `templar neuron start` runs
status    show its processes, and the newest windows on its Prefect server
logs      show the end of each process's log
service   print a systemd unit that starts the neuron with the machine
"""

import argparse
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from blocks.env_file import env_lines, env_value
from deployments.local.plan import LOCAL_FOLDER
from deployments.local.prepare import join_local
from deployments.neuron.folder import NeuronFolder, known_neurons
from deployments.neuron.status import is_green, show_neuron_status, status_of
from deployments.options import BITTENSOR_OPTIONS, SHARED, add_shared, command_parser
from deployments.prefect_server import SERVER_LOG
from deployments.processes import PROJECT_ROOT, end_of, holder_of, stop_process
from templar.arguments import whole_number
from templar.errors import PermanentError, Reason
from templar.store.files import local_file

STOP_SECONDS = 120.0  # a worker's grace, what an interrupted window has to end, and the server's end
BYTES_PER_LINE = 400
PASSWORD_BYTES = 24


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says."""
    arguments = _parser().parse_args(words)
    commands = {"init": init, "stop": stop, "status": status, "logs": logs, "service": service}
    return commands[arguments.command](arguments, Console())


def init(arguments: argparse.Namespace, console: Console) -> int:
    """Write the .env, with a new password for the Prefect server; a file that is there is never changed.

    With `--local` the neuron gets a place in the local network, and nothing is left to fill in.
    """
    path: Path = arguments.env_file or Path(".env")
    values = {variable: getattr(arguments, variable) for variable in (*BITTENSOR_OPTIONS.values(), "TEMPLAR_ROLE")}
    values["PREFECT_API_AUTH_STRING"] = f"templar:{secrets.token_urlsafe(PASSWORD_BYTES)}"
    role, hotkey = arguments.TEMPLAR_ROLE, arguments.WALLET_HOTKEY
    given = {option for option, variable in BITTENSOR_OPTIONS.items() if getattr(arguments, variable) is not None}
    if arguments.local is not None and (role is None or given != {"--wallet.hotkey"}):
        problem = "--local takes --role and --wallet.hotkey, a new hotkey's name; all else is the local network's"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    try:
        path.touch(mode=0o600, exist_ok=False)  # first, so that nothing is done for a file that is there
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror}): name another --env-file, or remove it"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem) from None
    try:
        if arguments.local is not None:
            values |= join_local(arguments.local, role, hotkey)
        text = _filled((PROJECT_ROOT / ".env.example").read_text(encoding="utf-8"), values)
        with local_file(path):
            path.write_text(text, encoding="utf-8", newline="")
    except BaseException:
        path.unlink()
        raise
    empty = [line.partition("=")[0] for line in text.splitlines() if line.rstrip().endswith("=") and line[:1] != "#"]
    left = f"fill in {', '.join(empty)}" if empty else "nothing is left to fill in"
    console.print(f"{path} is written, readable for you alone; {left}", soft_wrap=True)
    return 0


def stop(arguments: argparse.Namespace, console: Console) -> int:
    """Stop a neuron, and say whether it ran."""
    was_there = stop_neuron(NeuronFolder(arguments.name))
    console.print(f"neuron {arguments.name!r} has stopped" if was_there else f"neuron {arguments.name!r} did not run")
    return 0


def stop_neuron(folder: NeuronFolder) -> bool:
    """Stop the supervisor, which stops its processes; then what is left of them if it was killed before.

    Returns:
        Whether anything ran.
    """
    supervisor = holder_of(folder.lock)
    if supervisor is not None:
        stop_process(supervisor, grace_seconds=STOP_SECONDS)
    left = folder.record.stop_all()
    return supervisor is not None or bool(left)


def status(arguments: argparse.Namespace, console: Console) -> int:
    """Show one neuron, or all of this machine; 0 if each of them runs whole."""
    folders = [NeuronFolder(arguments.name)] if arguments.name else known_neurons()
    found = {folder.name: status_of(folder) for folder in folders}
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, each in found.items():
            show_neuron_status(name, each, console)
        if not found:
            console.print("no neuron was ever started here with `templar neuron start`")
    return 0 if found and all(is_green(each) for each in found.values()) else 1


def logs(arguments: argparse.Namespace, console: Console) -> int:
    """Show the end of each log, or of that of one process; `bad_environment` if there is no such log."""
    folder = NeuronFolder(arguments.name)
    paths = sorted([*folder.logs.glob("*.log"), *folder.server_home.glob(SERVER_LOG)])
    chosen = [path for path in paths if arguments.process in (None, path.stem)]
    if not chosen:
        there = ", ".join(path.stem for path in paths) or "none"
        asked = "any log" if arguments.process is None else f"a log {arguments.process!r}"
        problem = f"{folder.logs} has not {asked}; there are: {there}. Correct --name or --process"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    for path in chosen:
        console.rule(str(path))
        lines = end_of(path, arguments.lines * BYTES_PER_LINE).splitlines()[-arguments.lines :]
        console.print(Text("\n".join(lines)), soft_wrap=True)
    return 0


def service(arguments: argparse.Namespace, console: Console) -> int:
    """Print a unit for systemd, and how to install it."""
    del console
    env_file = (arguments.env_file or Path(".env")).resolve()
    command = Path(sys.executable).parent / "templar"
    unit = f"templar-{arguments.name}.service"
    print(f"""\
# templar neuron service --name {arguments.name} > ~/.config/systemd/user/{unit}
# systemctl --user daemon-reload && systemctl --user enable --now {unit} && loginctl enable-linger
[Unit]
Description=The neuron {arguments.name}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
WorkingDirectory={PROJECT_ROOT}
ExecStart="{command}" neuron start --name {arguments.name} --env-file "{env_file}"
Restart=on-failure
RestartSec=10
KillMode=mixed
TimeoutStopSec={STOP_SECONDS:.0f}

[Install]
WantedBy=default.target""")
    return 0


def _filled(text: str, values: Mapping[str, str | None]) -> str:
    """The text of .env.example with the values that are given; variables that it does not have come last."""
    lines, left = list[str](), {name: value for name, value in values.items() if value is not None}
    for line in text.splitlines():
        variable, _, rest = line.removeprefix("#").partition("=")
        if (value := left.pop(variable, None)) is None:
            lines.append(line)
        else:
            _, mark, comment = rest.partition("#")
            lines.append(f"{variable}={env_value(variable, value)}" + (f"  {mark}{comment}" if mark else ""))
    return "\n".join([*lines, *env_lines(left)])


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("templar neuron", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("init", "stop", "status", "logs", "service"):
        options = commands.add_parser(command)
        if command == "status":
            options.add_argument("--name", **SHARED["--name"] | {"default": None})
        elif command != "init":
            add_shared(options, "--name")
        if command in ("init", "service"):
            options.add_argument("--env-file", type=Path, help="the neuron's variables; .env by default")
        if command == "init":
            options.add_argument("--role", dest="TEMPLAR_ROLE", choices=("miner", "validator", "aggregator"))
            local = "give it a place in the network that `make up` runs, in this folder (.templar/local)"
            options.add_argument("--local", type=Path, nargs="?", const=LOCAL_FOLDER, metavar="FOLDER", help=local)
            add_shared(options, *BITTENSOR_OPTIONS)
        if command == "status":
            add_shared(options, "--json")
        if command == "logs":
            options.add_argument("--process", metavar="LOG", help="one log, such as `worker`; all by default")
            options.add_argument("--lines", type=whole_number(1), default=20, help="lines of each (20)")
    return parser
