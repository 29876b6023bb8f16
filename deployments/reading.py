"""The network that a command reads: of an `.env`, of a neuron's block, or the local one."""

import argparse
import sys
from contextlib import nullcontext

from prefect.settings import get_current_settings, temporary_settings

from blocks.env_file import read_environment
from blocks.neuron import Neuron
from deployments.local.plan import LOCAL_FOLDER, NETWORK_ENV_FILE
from deployments.neuron.folder import NeuronFolder
from deployments.work_pool import require_server
from tasks.host import load_block
from tasks.observing import AUDIT_FOLDER, PublicNetwork, network_from_environment, network_of
from templar.errors import PermanentError, Reason


def open_network(arguments: argparse.Namespace, folder: str = AUDIT_FOLDER) -> PublicNetwork:
    """The network of `--env-file`, or of the block `--neuron`; its reader keeps its files in this folder.

    Without either it is the local network in `.templar/local`, if there is one and no neuron `default` was started on
    this machine, and otherwise the block `default`. Errors as in `network_from_environment` and `neuron_block`.
    """
    env_file, local = arguments.env_file, LOCAL_FOLDER / NETWORK_ENV_FILE
    is_said = env_file is not None or arguments.neuron is not None
    if not is_said and local.is_file() and NeuronFolder("default").address is None:
        env_file = local
        print(f"network: {local}", file=sys.stderr)
    if env_file is not None:
        return network_from_environment(read_environment(env_file), folder)
    return network_of(neuron_block(arguments.neuron or "default"), folder)


def neuron_block(name: str) -> Neuron:
    """A neuron's block on the server of PREFECT_API_URL, or else on the one that the neuron uses on this machine.

    `bad_environment` if there is no server, or no such block.
    """
    known = get_current_settings().api.url
    address = None if known else NeuronFolder(name).address
    if known is None and address is None:
        problem = f"no Prefect server is known that has the neuron {name!r}: set PREFECT_API_URL, or give --env-file"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    with nullcontext() if address is None else temporary_settings(address.settings):
        require_server()
        return load_block(name)
