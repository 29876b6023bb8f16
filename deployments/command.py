"""`templar`: all commands of this project under one name. `python -m deployments` is the same.

    templar neuron start --name default --env-file .env
    templar --help

Each command is the `main` of one module, which is imported when it is called and not before. Its options are shown from
docs/commands.md, for the import takes seconds.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from templar.errors import PermanentError, Reason, TemplarError, TransientError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
GO_ON = "run the same command again: it goes on where it was"


@dataclass(frozen=True)
class Command:
    """One command."""

    words: str  # after `templar`
    summary: str
    module: str
    given: tuple[str, ...] = ()  # what the module's `main` gets before the user's arguments


COMMANDS = (
    Command("run", "train a whole network on this machine for some windows", "deployments.local.command", ("run",)),
    Command("up", "the same network, left running", "deployments.local.command", ("up",)),
    Command("down", "stop what `up` started", "deployments.local.command", ("down",)),
    Command("status", "what runs of it, and its newest windows", "deployments.local.command", ("status",)),
    Command("neuron init", "write an .env to fill in", "deployments.neuron.manage", ("init",)),
    Command("neuron register", "check the .env, and save the neuron on the Prefect server", "deployments.register"),
    Command(
        "neuron start", "register, then run all processes of the neuron until a signal", "deployments.neuron.start"
    ),
    Command("neuron stop", "stop what `start` runs, from another shell", "deployments.neuron.manage", ("stop",)),
    Command("neuron status", "processes and newest windows", "deployments.neuron.manage", ("status",)),
    Command("neuron doctor", "look at everything that the neuron needs", "deployments.neuron.doctor"),
    Command(
        "neuron rehearse", "train on a past window, and say what it would have earned", "deployments.neuron.rehearse"
    ),
    Command("neuron restore", "take a miner's state from its bucket onto this machine", "deployments.neuron.restore"),
    Command("neuron upgrade", "let another release run it, or the old one if that fails", "deployments.neuron.upgrade"),
    Command("neuron logs", "the end of each process's log", "deployments.neuron.manage", ("logs",)),
    Command("neuron service", "print a systemd unit that starts it", "deployments.neuron.manage", ("service",)),
    Command("upgrade", "with --check: what a release would change for a neuron", "deployments.neuron.release"),
    Command("network init", "start a network: genesis and first window", "deployments.network"),
    Command(
        "network design", "settings for a size, miners and a device, and what to expect", "deployments.design_network"
    ),
    Command("network plan", "show and change the settings of a running network", "deployments.network_plan"),
    Command("bucket ls", "list the objects of a bucket", "deployments.bucket", ("ls",)),
    Command("bucket purge", "count objects by age, name or version, and delete them", "deployments.bucket", ("purge",)),
    Command("bucket access", "what each bucket key of an .env can do, and should", "deployments.bucket", ("access",)),
    Command("clock", "start a run of every window deployment once per window", "deployments.clock"),
    Command("preview", "the text that a uid trains on", "deployments.preview"),
    Command("leaderboard", "who leads, who earns, who was punished and why", "deployments.leaderboard"),
    Command("page", "the network as one page for a browser", "deployments.page"),
    Command("why", "what a miner got for a window, and why", "deployments.why"),
    Command("audit", "rebuild a validator's evidence and compare it", "deployments.audit_window"),
    Command("model fetch", "fetch and verify the newest model", "deployments.model", ("fetch",)),
    Command("model generate", "let it go on with a text", "deployments.model", ("generate",)),
    Command("model evaluate", "measure it on held-out text", "deployments.model", ("evaluate",)),
    Command("model export", "copy it into a folder for other programs", "deployments.model", ("export",)),
    Command("model verify", "compute it again from the miners' payloads", "deployments.model", ("verify",)),
    Command("dataset build", "make a training dataset from text", "deployments.build_dataset"),
    Command("dataset import", "make a dataset of the reference's files", "deployments.import_dataset"),
    Command("dataset verify", "check every byte of a dataset in a folder or a bucket", "deployments.verify_dataset"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the command and call it; its exit status, or 2 if there is no such command."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for command in COMMANDS:
        name = command.words.split()
        if words[: len(name)] == name:
            if words[len(name) :] in (["-h"], ["--help"]) and (shown := _options(command)) is not None:
                print(shown)
                return 0
            try:
                from blocks.proxies import exempting_loopback  # noqa: PLC0415 - takes seconds, and a page of help none

                with suppress(PermanentError):  # of a proxy that is of no use: what needs one says so
                    os.environ.update(exempting_loopback(os.environ))
                module = importlib.import_module(command.module)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return 130
            except ValidationError as error:  # Prefect reads its settings when it is imported
                print(_refused_settings(error), file=sys.stderr)
                return 1
            return exit_status(module.main, [*command.given, *words[len(name) :]])
    asked = [word for word in words if not word.startswith("-")]
    matches = [command for command in COMMANDS if command.words.split()[: len(asked)] == asked]
    if matches and (not words or words[-1] in ("-h", "--help")):
        print(_help(matches))
        return 0
    print(f"templar: there is no command {' '.join(asked)!r}\n{_help(matches or list(COMMANDS))}", file=sys.stderr)
    return 2


def _options(command: Command) -> str | None:
    """What the page of commands says of one; None without the page, and then the command tells it."""
    page = PAGE.read_text() if PAGE.exists() else ""
    found = re.search(rf"^## templar {command.words}\n\n```text\n(.*?)\n```$", page, re.M | re.S)
    return found and found[1]


def exit_status(main: Callable[..., int], *arguments: Sequence[str]) -> int:
    """Run a command; its exit status. An error of ours is one line, and so is a Ctrl-C, whose status is 130.

    The module of the command may say which status an error has (`FAILED`, else 1), and that a command which is given
    again goes on where it was (`RESUMABLE`).
    """
    module = sys.modules[main.__module__]
    advice = f"; {GO_ON}" if getattr(module, "RESUMABLE", False) else ""
    try:
        return int(main(*arguments))
    except TemplarError as error:
        print(f"{error}{advice if isinstance(error, TransientError) else ''}", file=sys.stderr)
        return int(getattr(module, "FAILED", 1))
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"interrupted{advice}", file=sys.stderr)
        return 130


def _refused_settings(error: ValidationError) -> PermanentError:
    """The error for settings of the environment or of a profile that Prefect refuses, by the variables' names."""
    group = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.title.removesuffix("Settings"))
    refused = {
        "_".join(["PREFECT", *filter(None, [group]), *map(str, item["loc"] or ["*"])]).upper(): item["msg"]
        for item in error.errors(include_url=False, include_input=False)
        if item["type"] != "default_factory_not_called"
    }
    text = "; ".join(f"{name} is refused: {why}" for name, why in refused.items())
    return PermanentError(Reason.BAD_ENVIRONMENT, f"{text}: correct or remove it, in the environment or the profile")


def _help(commands: Sequence[Command]) -> str:
    width = max(len(command.words) for command in commands)
    lines = [f"  templar {command.words:<{width}}  {command.summary}" for command in commands]
    return "\n".join([*lines, "", "`templar COMMAND --help` shows the options of one of them."])
