"""Options that commands share, and the environment that a command works with."""

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blocks.env_file import read_environment
from templar.arguments import whole_number

BITTENSOR_OPTIONS = {
    "--netuid": "NETUID",
    "--subtensor.network": "NETWORK",
    "--wallet.name": "WALLET_NAME",
    "--wallet.hotkey": "WALLET_HOTKEY",
    "--wallet.path": "WALLET_PATH",
}
"""Options with Bittensor's usual names -> the variables that they replace."""


def neuron_name(text: str) -> str:
    """A name that blocks, pools and artifacts take."""
    if re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not lower-case letters, digits and single hyphens between them")
    return text


SHARED: Mapping[str, dict[str, Any]] = {
    "--name": {"type": neuron_name, "default": "default", "help": "name of the neuron on this host"},
    "--neuron": {"help": "name of a neuron's block, which says where to read"},
    "--env-file": {"type": Path, "help": "file with the variables of .env.example"},
    "--validator": {"type": whole_number(0), "metavar": "UID", "help": "whose evidence"},
    "--json": {"action": "store_true", "help": "as JSON"},
    **{
        option: {"dest": name, "metavar": "X", "help": f"value of {name}"} for option, name in BITTENSOR_OPTIONS.items()
    },
}
NEURON = ("--name", "--env-file", *BITTENSOR_OPTIONS)
"""The options that say which neuron is meant; those of wallet and subnet have Bittensor's names."""


def command_parser(prog: str, doc: str | None, *shared: str) -> argparse.ArgumentParser:
    """The parser of a command, with the first line of its module's text and some of the shared options."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0])
    add_shared(parser, *shared)
    return parser


def add_shared(parser: argparse.ArgumentParser, *shared: str) -> None:
    """Add some of the shared options."""
    for option in shared:
        parser.add_argument(option, **SHARED[option])


def environment_of(arguments: argparse.Namespace, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options' variables over a process's own environment over that of the file; `bad_environment` as there."""
    chosen = {variable: getattr(arguments, variable) for variable in BITTENSOR_OPTIONS.values()}
    given = {variable: value for variable, value in chosen.items() if value is not None}
    return read_environment(arguments.env_file, own) | given
