"""One worker per work pool: a second one is refused, and runs without a process are closed.

A second worker is refused on this machine by a lock that the kernel drops with the process, and on other machines by
the server's list of workers. Therefore a pool's only worker knows that a running flow run that is not its own has lost
its process, and closes it.
"""

import hashlib
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import anyio
import httpx
from prefect.client.base import ServerType
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from prefect.states import AwaitingRetry, Cancelled, Crashed

from blocks.proxies import exempting_loopback
from deployments.processes import sole_process, state_folder
from templar.errors import PermanentError, Reason, one_line

API_PATIENCE_SECONDS = 10.0  # time limit of a call of the API, before it is repeated
MOST_ATTEMPTS = 3  # most attempts of a run that crashes its process
_UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]


def require_server_address() -> str:
    """The address of the Prefect server; `bad_environment` if there is none, since Prefect would start a server here.

    From then on, the clients of this process reach loopback addresses without a proxy.
    """
    address = get_current_settings().api.url
    if address is None:
        problem = "PREFECT_API_URL is not set: start a server with `prefect server start` and name it"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    os.environ.update(exempting_loopback(os.environ, hostname_of(address)))
    return address


def hostname_of(address: str) -> str:
    """The host of a server's address; `bad_environment` if that is none of an API."""
    try:
        parts = urlsplit(address)
        is_address = re.fullmatch(r"https?://[!-~]+", address) is not None and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        problem = f"PREFECT_API_URL is {address!a}, which is no address: set http://HOST:PORT/api, without spaces"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    if parts.path in ("", "/"):
        problem = f"PREFECT_API_URL is {address}, without the path of the API: set {address.rstrip('/')}/api"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    return str(parts.hostname)


def require_server() -> None:
    """Refuse (`bad_environment`) to go on without a Prefect server that answers; the cause is for `is_outage`."""
    address, problem = require_server_address(), None
    try:
        with get_client(sync_client=True) as client:
            if (problem := client.api_healthcheck()) is None and client.server_type is not ServerType.CLOUD:
                client.api_version()  # also another program may say that it is healthy
    except Exception as error:  # noqa: BLE001 - of Prefect, HTTP, TLS or JSON
        problem = error
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
            problem = error.__cause__
    if problem is not None:
        text = f"PREFECT_API_URL is {address}, {_server_problem(problem)}"
        raise PermanentError(Reason.BAD_ENVIRONMENT, text) from problem


def _server_problem(error: BaseException) -> str:
    """Return what a call of the Prefect API met, and what to do."""
    what = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
    if isinstance(error, httpx.HTTPStatusError):
        what = f"status {error.response.status_code}"
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
        return f"which refuses this client ({what}): set PREFECT_API_AUTH_STRING to the server's"
    if is_outage(error):
        return f"which does not answer ({what}): start the server, or correct it"
    return f"which is no Prefect API ({what}): correct it, most end with /api"


def is_outage(error: BaseException | None) -> bool:
    """Whether a failed call of the Prefect API may succeed later."""
    if isinstance(error, RuntimeError):  # the client wraps what its first call meets
        error = error.__cause__
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.is_server_error
    return isinstance(error, httpx.TransportError | TimeoutError)


@asynccontextmanager
async def outages_tolerated(logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> AsyncIterator[None]:
    """Limit calls of the Prefect API to `API_PATIENCE_SECONDS`, and log an outage instead of raising.

    The client would wait by itself, but its back-off grows to minutes and can double the length of an outage.
    """
    try:
        with anyio.fail_after(API_PATIENCE_SECONDS):
            yield
    except Exception as error:
        if not is_outage(error):
            raise
        logger.warning("The Prefect API does not answer, trying again: %s", error or type(error).__name__)


@asynccontextmanager
async def failures_logged(logger: logging.Logger | logging.LoggerAdapter[logging.Logger]) -> AsyncIterator[None]:
    """As `outages_tolerated`, and any other refusal of the API as well: for calls that the worker must outlive."""
    try:
        async with outages_tolerated(logger):
            yield
    except Exception:
        logger.exception("The Prefect API refused a call.")


def default_worker_name(pool: str) -> str:
    """The name of a pool's worker on this machine, the same at every start, so that a restart is known as such."""
    return f"{pool}@{socket.gethostname()}".replace("/", "-").replace("%", "-")


def sole_worker_of(pool: str) -> AbstractContextManager[None]:
    """Hold a pool of the configured server against this user's other processes here; `already_running` if held."""
    address = require_server_address().rstrip("/").replace("//localhost:", "//127.0.0.1:")
    digest = hashlib.sha256(f"{address}\n{pool}".encode()).hexdigest()
    held, remedy = f"work pool {pool!r} is served by process", "or give this neuron a pool of its own"
    lock = state_folder() / "workers" / f"{digest[:16]}.lock"
    return sole_process(lock, lambda pid: f"{held} {pid} of this machine: stop that one first, {remedy}")


async def claim_pool(client: PrefectClient, pool: str, *, worker_type: str, own_name: str) -> None:
    """Refuse (`bad_environment`) a pool that is missing or of another type, and (`already_running`) one with a worker.

    A worker that was killed counts as online for three of its heartbeats; on its own machine it comes back under its
    old name and need not wait.
    """
    try:
        found = await client.read_work_pool(pool)
        workers = await client.read_workers_for_work_pool(pool)
    except ObjectNotFound:
        known = sorted(each.name for each in await client.read_work_pools() if each.type == worker_type)
        there = f"those of type {worker_type!r} are: {', '.join(known) or 'none'}"
        remedy = "Correct --pool, or register the neuron: `templar neuron register --name NAME` makes `neuron-NAME`"
        problem = f"there is no work pool {pool!r}; {there}. {remedy}"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem) from None
    if found.type != worker_type:
        remedy = f"create another one with `prefect work-pool create NAME --type {worker_type}`"
        raise PermanentError(Reason.BAD_ENVIRONMENT, f"work pool {pool!r} is of type {found.type!r}: {remedy}")
    for worker in workers:
        if worker.name != own_name and worker.status is WorkerStatus.ONLINE:
            served = f"is served by worker {worker.name!r} (last heard of at {worker.last_heartbeat_time:%H:%M:%S} UTC)"
            wait = f"if it is gone, wait {3 * (worker.heartbeat_interval_seconds or 30)} s from that moment"
            problem = f"work pool {pool!r} {served}: stop that one first, or, {wait}"
            raise PermanentError(Reason.ALREADY_RUNNING, problem)


async def runs_under_way(client: PrefectClient, pool: str) -> list[FlowRun]:
    """The runs of a pool that have begun, or are about to, and have not ended."""
    return await client.read_flow_runs(
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY))),
    )


async def close_orphans(client: PrefectClient, pool: str, own_runs: Callable[[], Collection[UUID]]) -> list[FlowRun]:
    """Close the runs of a pool whose process is gone; right only for the pool's one worker.

    A run that is being cancelled becomes Cancelled, any other one crashes. No state is forced: a run that has reached a
    final state meanwhile keeps it. `own_runs`, the worker's, are asked for before and after the list is read.
    """
    own = set(own_runs())
    runs = await runs_under_way(client, pool)
    own.update(own_runs())
    orphans = [run for run in runs if run.id not in own]
    for run in orphans:
        if run.state is not None and run.state.is_cancelling():
            await client.set_flow_run_state(run.id, Cancelled(message="Cancelled: the worker that ran it is gone."))
            continue
        await crash(client, run, f"[{Reason.PROCESS_DIED}] The worker that ran it ended without a report.")
    return orphans


async def crash(client: PrefectClient, run: FlowRun, message: str) -> None:
    """Set a run Crashed, and schedule it again if it crashed less than `MOST_ATTEMPTS` times.

    So a window continues where its journal ends (docs/architecture.md D9).
    """
    crashed: State[Any] = Crashed(message=message)
    await client.set_flow_run_state(run.id, crashed)
    if run.run_count < MOST_ATTEMPTS:
        again: State[Any] = AwaitingRetry(message="Its worker is there and continues it where it stopped.")
        await client.set_flow_run_state(run.id, again)
