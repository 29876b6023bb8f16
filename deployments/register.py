"""Register a neuron of this host with the Prefect server: its block, its work pool and its window deployment.

    python -m deployments.register --name default --env-file .env

The environment is checked first: a variable that is missing or malformed, or that names a chain, a bucket or a dataset
that does not answer, is named and nothing is changed. Running it again updates what is there.
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.types.entrypoint import EntrypointType
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.preflight import require_reachable
from deployments.work_pool import require_server_address
from deployments.worker import ResidentWorker
from templar.errors import PermanentError, Reason, TemplarError

POOL_KINDS: dict[str, type[BaseWorker[Any, Any, Any]]] = {"resident": ResidentWorker, "process": ProcessWorker}


def read_environment(env_file: Path | None) -> dict[str, str]:
    """This process's environment over that of a file.

    Raises:
        PermanentError: `bad_environment`; the file is not there, or cannot be read.
    """
    values: Mapping[str, str | None] = {}
    if env_file is not None:
        if not env_file.is_file():
            raise PermanentError(
                Reason.BAD_ENVIRONMENT, f"{env_file}: no such file; copy .env.example to it and fill it in"
            )
        try:
            values = dotenv_values(env_file)
        except (OSError, UnicodeDecodeError) as error:
            raise PermanentError(Reason.BAD_ENVIRONMENT, f"{env_file}: cannot be read: {error}") from None
    return {name: value for name, value in values.items() if value is not None} | dict(os.environ)


def require_server() -> None:
    """Refuse to go on without a Prefect server that answers.

    Raises:
        PermanentError: `bad_environment`.
    """
    address = require_server_address()
    with get_client(sync_client=True) as client:
        if (problem := client.api_healthcheck()) is not None:
            raise PermanentError(
                Reason.BAD_ENVIRONMENT,
                f"PREFECT_API_URL is {address}, which does not answer ({problem}): start the server, or correct it",
            )


def ensure_pool(client: SyncPrefectClient, name: str, kind: str, **variables: float) -> None:
    """Make a work pool unless it is there.

    Args:
        client: Client of the Prefect API.
        name: Name of the pool.
        kind: `resident` or `process`.
        variables: Defaults of the pool's job variables, such as `grace_seconds`.
    """
    template = POOL_KINDS[kind].get_default_base_job_template()
    for variable, value in variables.items():
        template["variables"]["properties"][variable]["default"] = value
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type=kind, base_job_template=template))
    except ObjectAlreadyExists:
        return


def deploy_window(neuron: str, role: str, pool: str, *, name: str | None = None) -> None:
    """Deploy the window flow of a neuron's role.

    Args:
        neuron: Name of the neuron.
        role: Its role.
        pool: The work pool that runs it.
        name: Name of the deployment; that of the neuron by default.
    """
    flow = getattr(importlib.import_module(f"flows.{role}_window"), f"{role}_window")
    assert isinstance(flow, Flow)  # noqa: S101 - getattr knows no types
    deployment: Any = flow.to_deployment(
        name=name or neuron,
        parameters={"neuron": neuron},
        work_pool_name=pool,
        entrypoint_type=EntrypointType.MODULE_PATH,
        description=f"One window of {neuron}. The window clock starts it; by hand it takes the next window.",
    )
    deployment.apply()


def register(name: str, block: Neuron, *, pool: str | None = None, grace_seconds: float = 30.0) -> None:
    """Save a neuron's block and make its pool and its window deployment.

    Args:
        name: Name of the neuron.
        block: Its block.
        pool: Its resident work pool; called like the neuron by default.
        grace_seconds: How long a window may go on when the worker is asked to stop.
    """
    pool = pool or f"neuron-{name}"
    block.save(name, overwrite=True)
    with get_client(sync_client=True) as client:
        ensure_pool(client, pool, "resident", grace_seconds=grace_seconds)
    deploy_window(name, block.role, pool)


def _name(text: str) -> str:
    """A name that blocks, pools and artifacts take."""
    if re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not lower-case letters, digits and single hyphens between them")
    return text


def main() -> int:
    """Parse the command line and register."""
    parser = argparse.ArgumentParser(prog="python -m deployments.register", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--name", type=_name, default="default", help="name of the neuron on this host")
    parser.add_argument("--env-file", type=Path, help="file with the variables of .env.example")
    arguments = parser.parse_args()
    try:
        block = neuron_from_environment(read_environment(arguments.env_file))
        require_reachable(block)
        require_server()
        register(arguments.name, block)
    except TemplarError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"neuron {arguments.name!r} is registered; its worker: prefect worker start --pool neuron-{arguments.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
