"""Register a neuron of this host with the Prefect server: its block, its work pool and its window deployment.

    templar neuron register --name default --env-file .env

The environment is checked first: a variable that is missing or malformed, or that names a chain, a bucket or a dataset
that does not answer, is named and nothing is changed. Then the hotkey announces the neuron's role on chain. Running it
again updates what is there.
"""

import importlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.blocks.abstract import NotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.types.entrypoint import EntrypointType
from prefect.workers.base import BaseWorker
from prefect.workers.process import ProcessWorker

from blocks.buckets import credentials_of, names_page, page_bucket
from blocks.environment import bucket_variables, neuron_from_environment
from blocks.neuron import Neuron
from deployments.automations import alert_block, definitions, deploy_automations
from deployments.options import NEURON, command_parser, environment_of
from deployments.processes import program
from deployments.schedules import HOUR, HOUSEKEEPING_POOL, SLUG, deployments_of, scheduled_work
from deployments.work_pool import require_server
from deployments.worker import ResidentWorker
from tasks.sinks.attached import SinkSettings
from templar.chain.remote import public_address
from templar.errors import PermanentError, Reason, TemplarError
from templar.housekeeping.access import check_access
from templar.neuron.configuration import announce_role
from templar.neuron.lock import make_private
from templar.store.base import ObjectStore
from templar.store.files import local_file

BY_HAND = {
    "bucket_purge": "Delete from a bucket by version, age, prefix or suffix. Only counts, unless dry_run is off.",
    "audit_window": "Rebuild a window from public objects, and say whether roster and evidence follow from them.",
}
"""The flows of a neuron that an operator starts by hand -> what they do."""
WINDOW = "One window of {neuron}. The window clock starts it; by hand it takes the next window."
CLOCK_COMMAND = [sys.executable, "-m", "deployments", "clock"]
POOLS = {
    "resident": "The windows of one neuron, in one process that keeps the model in memory.",
    "process": "Scheduled work of this server's neurons, four runs at a time, each in a process of its own.",
}
POOL_KINDS: dict[str, type[BaseWorker[Any, Any, Any]]] = {"resident": ResidentWorker, "process": ProcessWorker}


def require_reachable(block: Neuron) -> None:
    """Refuse a neuron whose chain, buckets or dataset do not answer, or that is not registered on its subnet.

    The neuron's folder is made, with its network's settings; the rights of its bucket's keys are tried with objects
    that are removed again: the read key is about to be published. No more is written. An error names the variables.
    """
    address = block.wallet.open().address
    with _named("NETWORK, NETUID"):
        chain = block.subnet.open(block.wallet)
        neuron = chain.metagraph().by_hotkey(address)
    if neuron is None:
        subnet = f"subnet {block.subnet.netuid} of {public_address(block.subnet.network)}"
        problem = f"WALLET_HOTKEY: {address} is not registered on {subnet}: register it there first"
        raise PermanentError(Reason.NOT_REGISTERED, problem)
    with _named("WALLET_NAME"):
        chain.require_fees()
    variables, own = bucket_variables(block.role), block.bucket.open()
    with _named(f"{variables}_READ_*"):
        _look_into(block.bucket.endpoint.open_reader(own.address))
    with _named(f"{variables}_WRITE_*"):
        _look_into(own.store)
    with _named(f"{variables}_READ_*, {variables}_WRITE_*"):
        report = check_access([next(iter(credentials_of(block, {})))])
        if report.problems:
            raise PermanentError(report.problems[0][0], "; ".join(text for _, text in report.problems))
    with _named("R2_DATASET_*"):
        for store in block.dataset.stores():
            _look_into(store)
    config = block.config("register")
    with _named("DATASET_BINS_PATH"):
        block.dataset.open(config.hparams, Path(block.home))
    with _named("TEMPLAR_HOME"), local_file(Path(block.home)):
        make_private(Path(block.home))
        tempfile.TemporaryFile(dir=block.home).close()
        if config.agreed is not None:
            config.keep_settings()


def ensure_pool(client: SyncPrefectClient, name: str, kind: str, **variables: float) -> None:
    """Make a work pool, `resident` or `process`, unless it is there; `variables` are defaults of its job variables."""
    template = POOL_KINDS[kind].get_default_base_job_template()
    for variable, value in variables.items():
        template["variables"]["properties"][variable]["default"] = value
    try:
        pool = WorkPoolCreate(name=name, type=kind, description=POOLS[kind], base_job_template=template)
        client.create_work_pool(pool)
    except ObjectAlreadyExists:
        return


def deploy_window(neuron: str, role: str, pool: str, *, name: str | None = None) -> None:
    """Deploy the window flow of a neuron's role on a work pool; the deployment is called like the neuron by default."""
    _deploy(
        f"{role}_window",
        neuron,
        role,
        name=name or neuron,
        work_pool_name=pool,
        description=WINDOW.format(neuron=neuron),
    )


def deploy_scheduled(neuron: str, block: Neuron, *, hour: timedelta = HOUR) -> None:
    """Deploy the scheduled flows of a neuron; doing it again changes what differs.

    Parameters and schedules that an operator has added stay, and a schedule that was paused stays paused. `hour` is how
    long an hour takes, as for `scheduled_work`.
    """
    with get_client(sync_client=True) as client:
        ensure_pool(client, HOUSEKEEPING_POOL, "process")
        known = {each.entrypoint: each for each in deployments_of(client, neuron)}
    for work in scheduled_work(block.role, block.hparams(), hour=hour):
        there = known.get(f"flows.{work.flow}.{work.flow}")
        is_paused = there is not None and any(each.slug == work.slug and not each.active for each in there.schedules)
        _deploy(
            work.flow,
            neuron,
            block.role,
            name=neuron,
            description=work.description,
            parameters={} if there is None else there.parameters,
            schedules=[work.schedule(neuron, hour, active=not is_paused)],
            work_pool_name=HOUSEKEEPING_POOL,
        )
        # Schedules that other numbers of the network gave the deployment go.
        with get_client(sync_client=True) as client:
            for schedule in () if there is None else there.schedules:
                if there is not None and schedule.slug != work.slug and SLUG.fullmatch(schedule.slug or ""):
                    client.delete_deployment_schedule(there.id, schedule.id)


def deploy_by_hand(neuron: str, role: str) -> None:
    """Deploy the flows of a neuron that an operator starts by hand, and the build of datasets, which needs no neuron.

    None has a schedule or a concurrency limit: a limit's lease that cannot be renewed kills its run.
    """
    with get_client(sync_client=True) as client:
        ensure_pool(client, HOUSEKEEPING_POOL, "process")
    for flow, description in BY_HAND.items():
        _deploy(flow, neuron, role, name=neuron, description=description, work_pool_name=HOUSEKEEPING_POOL)
    text = "Build a training dataset from files of the worker's machine, and upload it. Needs no neuron."
    _apply("build_dataset", name="by-hand", description=text, work_pool_name=HOUSEKEEPING_POOL)


def _deploy(
    flow_name: str, neuron: str, role: str, *, parameters: Mapping[str, Any] | None = None, **options: Any
) -> None:
    of_neuron = {**(parameters or {}), "neuron": neuron}
    _apply(flow_name, parameters=of_neuron, tags=[f"neuron:{neuron}", f"role:{role}"], **options)


def _apply(flow_name: str, **options: Any) -> None:
    """Deploy a flow by its module path: a worker that has the package loads it from there, in any folder."""
    flow = getattr(importlib.import_module(f"flows.{flow_name}"), flow_name)
    assert isinstance(flow, Flow)  # noqa: S101 - getattr knows no types
    deployment: Any = flow.to_deployment(entrypoint_type=EntrypointType.MODULE_PATH, **options)
    deployment.apply()


def register(name: str, block: Neuron) -> None:
    """Save a neuron's block, and make its resident work pool and its window deployment."""
    pool = f"neuron-{name}"
    block.save_with_parts(name)
    with get_client(sync_client=True) as client:
        ensure_pool(client, pool, "resident")
    deploy_window(name, block.role, pool)


def worker_command(pool: str, kind: str) -> list[str]:
    """The command that serves a work pool, `resident` or `process`."""
    if kind == "process":
        return [sys.executable, "-m", "deployments.housekeeping_worker", "--pool", pool]
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", kind]


def ranked_command(command: list[str], block: Neuron) -> list[str]:
    """The command of a worker, `PYTHON -m MODULE ...`: under torch's launcher if its miner has several ranks."""
    trainer = block.trainer
    if block.role != "miner" or trainer.ranks == trainer.hosts == 1:
        return command
    python, option, *module = command
    folder = str(Path(block.home) / "ranks")
    return [python, option, "templar.training.torchrun", trainer.model_dump_json(), folder, *module]


def checked_neuron(environment: Mapping[str, str]) -> Neuron:
    """The neuron of an environment, once all that it needs has answered, as `require_reachable`."""
    block = neuron_from_environment(dict(environment))
    SinkSettings.of(environment)
    if names_page(environment):
        page_bucket(block.bucket.endpoint, environment)
    require_reachable(block)
    return block


def enrol(name: str, block: Neuron, environment: Mapping[str, str]) -> None:
    """Announce a neuron's role on chain, register it, and deploy all flows of its role and its automations.

    `bad_environment` if TEMPLAR_ALERT_BLOCK names no block that notifies; the chain may refuse the role.
    """
    notifying = alert_block(environment)
    announce_role(block.subnet.open(block.wallet), block.wallet.open().address, block.role)
    register(name, block)
    deploy_scheduled(name, block)
    deploy_by_hand(name, block.role)
    watch(name, block, notifying)


def watch(name: str, block: Neuron, notifying: NotificationBlock | None) -> None:
    """Deploy the automations of a neuron; what they notify with, or None."""
    wanted = definitions(name, block.hparams().windows.seconds, notifying)
    with get_client(sync_client=True) as client:
        deploy_automations(client, wanted, name)


@contextmanager
def _named(variables: str) -> Iterator[None]:
    """Say which variables an error is about."""
    try:
        yield
    except TemplarError as error:
        raise type(error)(error.reason, f"{variables}: {error.message}") from error


def _look_into(store: ObjectStore) -> None:
    next(iter(store.list()), None)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and register."""
    arguments = command_parser("templar neuron register", __doc__, *NEURON).parse_args(words)
    environment = environment_of(arguments)
    block = checked_neuron(environment)
    require_server()
    enrol(arguments.name, block, environment)
    worker = f"{program('prefect')} worker start --pool neuron-{arguments.name}"
    print(f"neuron {arguments.name!r} is registered; its worker: {worker}")
    return 0
