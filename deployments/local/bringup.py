"""Bring a local network up: servers, preparation, registration, workers, genesis, clock, scheduled work."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

from prefect.client.orchestration import get_client
from prefect.context import SyncClientContext
from prefect.settings import temporary_settings

from blocks.env_file import read_env_file
from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.local.acting import acting_command, actors
from deployments.local.pace import slowed_windows, write_slowed
from deployments.local.plan import DEFAULT_NEURON, NETUID, LocalPlan
from deployments.local.prepare import (
    announce_bucket,
    keep_buckets,
    prepare_buckets,
    prepare_chain,
    prepare_dataset,
    prepare_folder,
    publish_network,
    require_own_folder,
    write_environments,
)
from deployments.neuron.folder import Address
from deployments.neuron.status import status_of_network
from deployments.prefect_server import SERVER_NAME
from deployments.processes import ProcessRecord, require_free_port, stop_process
from deployments.register import (
    CLOCK_COMMAND,
    deploy_by_hand,
    deploy_scheduled,
    ensure_pool,
    ranked_command,
    register,
    watch,
    worker_command,
)
from deployments.s3_endpoint import LISTENING
from deployments.schedules import HOUSEKEEPING_POOL, scheduled_runs
from deployments.supervisor import Service, Supervisor, log_file
from tasks.glance import network_key, neuron_key, open_page
from templar.agreement.genesis import Birth
from templar.agreement.state import StateMark
from templar.errors import PermanentError, Reason
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.hparams import HParams, load_hparams

WORKER_GRACE_SECONDS = 1.0  # a worker of a network that is taken down does not wait for its window
STOP_SECONDS = 15.0
START_SECONDS = 60.0  # longest wait for a server at pace 1
EVENTS_RETENTION = "PT6H"  # short windows make events fast: of five neurons, hundreds of megabytes an hour
STORAGE = "S3 endpoint"
CLOCK = "window clock"
HOUSEKEEPING = "housekeeping worker"
SUPERVISOR = "supervisor"
SERVERS = (SERVER_NAME, STORAGE)
NEURONS_START_SECONDS = 30.0  # from genesis to the first window at pace 1: the workers load flows and neurons meanwhile


class LocalNetwork:
    """The processes of the local network `plan`; `say` prints a line of progress for the user."""

    def __init__(self, plan: LocalPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self._say = say
        self._record = ProcessRecord(plan.processes)
        self._supervisor = Supervisor(self._record, say)

    def up(self) -> Birth:
        """Bring everything up; if that is refused nothing is changed, if it fails what was started is stopped again."""
        hparams = self._check()
        try:
            self._prepare(hparams)
            # One client for all calls: making each its own takes 30 ms.
            with temporary_settings(self.address.settings), SyncClientContext.get_or_create():
                return self._populate()
        except BaseException:
            self.down()
            raise

    @property
    def is_running(self) -> bool:
        """Whether any process besides the servers runs, so that there may be a model."""
        return any(name not in SERVERS for name in self.running)

    @property
    def running(self) -> tuple[str, ...]:
        """The names of all processes that run."""
        return tuple(entry.name for entry in self._record.running())

    def keep(self) -> StateMark:
        """Stop the neurons, publish the newest state as a checkpoint, and keep all buckets in the network's folder.

        The folder's `network.env` leads readers there, also when the servers are gone. Before the first window was
        applied, there is no state to keep (`object_missing`).
        """
        self.stop_neurons()
        # The environments say what was brought up; the plan of another command may not.
        blocks = (self.neuron_block(name) for name in self.plan.brought_up)
        block = next((block for block in blocks if block.role == "aggregator"), None)
        if block is None:
            raise PermanentError(Reason.OBJECT_MISSING, f"{self.plan.folder}: no aggregator was prepared here")
        config = block.config("aggregator")
        with closing(config.buckets):
            mark = publish_newest_checkpoint(config, preset=block.preset)
        if not block.bucket.endpoint.url.startswith("file:"):
            keep_buckets(self.plan)
        return mark

    def down(self) -> None:
        """Stop every process of the record, the servers last."""
        self.stop_neurons()
        self._record.stop_all(grace_seconds=STOP_SECONDS)

    def stop_neurons(self) -> None:
        """Stop everything but the servers."""
        for entry in self._record.running():
            if entry.name == SUPERVISOR:  # it would start again what is stopped
                stop_process(entry.identity, grace_seconds=STOP_SECONDS)
        dependents = [entry for entry in self._record.running() if entry.name not in SERVERS]
        with ThreadPoolExecutor(max_workers=max(1, len(dependents))) as pool:
            for entry in dependents:
                pool.submit(stop_process, entry.identity, grace_seconds=STOP_SECONDS)

    def supervise(self) -> None:
        """Leave a process behind that starts again what ends, until `down`; if that fails, everything is stopped."""
        command = [sys.executable, "-m", "deployments.supervisor", str(self.plan.folder)]
        successor = Service(SUPERVISOR, command, log_file(self.plan.logs, SUPERVISOR))
        try:
            self._supervisor.leave(self.plan.folder, successor, without=[STORAGE])  # it would have forgotten all
        except BaseException:
            self.down()
            raise

    def neuron_block(self, neuron: str) -> Neuron:
        """The block of the neuron of this name, from its environment."""
        return neuron_from_environment(read_env_file(self.plan.env_file(neuron)))

    def _check(self) -> HParams:
        """Find out, before anything is touched, whether the network can be brought up."""
        plan = self.plan
        if running := self._record.running():
            problem = f"{plan.folder}: a network runs here already ({len(running)} processes): `make down` stops it"
            raise PermanentError(Reason.ALREADY_RUNNING, problem)
        hparams = load_hparams(plan.preset, path=plan.hparams_path)
        if plan.pace != 1:
            load_hparams(plan.preset, path=plan.hparams_path, overrides={"windows": slowed_windows(hparams, plan.pace)})
        known = actors()
        if unknown := [actor for actor in plan.bad_actors if actor not in known]:
            problem = f"--actor {unknown[0]}: there is no such actor; there are {', '.join(known)}"
            raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
        remedy = "stop what listens there, or set {} ({} of make)"
        require_free_port("127.0.0.1", plan.prefect_port, remedy=remedy.format("--prefect-port", "PREFECT_PORT"))
        if not plan.directory_store:
            if plan.storage_port == plan.prefect_port:
                problem = f"port {plan.storage_port} is asked for twice: set another --storage-port"
                raise PermanentError(Reason.PORT_TAKEN, problem)
            require_free_port("127.0.0.1", plan.storage_port, remedy=remedy.format("--storage-port", "STORAGE_PORT"))
        require_own_folder(plan)
        return hparams

    def _prepare(self, hparams: HParams) -> None:
        """Servers, and everything that needs no running neuron."""
        prepare_folder(self.plan)
        if self.plan.pace != 1:  # the network has an hparams.json of its own
            target = self.plan.folder / "hparams.json"
            hparams = write_slowed(self.plan.hparams_path, self.plan.preset, self.plan.pace, target)
            self.plan = replace(self.plan, hparams_path=target)
        plan = self.plan
        self._say("starting the Prefect server" + ("" if plan.directory_store else " and the S3 endpoint"))
        with ThreadPoolExecutor(max_workers=2) as pool:
            server = pool.submit(self._start_server)
            storage = None if plan.directory_store else pool.submit(self._start_storage)
            self._say("building the dataset and its tokenizer, creating the ledger and its wallets")
            prepare_chain(plan, hparams)
            prepare_dataset(plan, hparams)
            if storage is not None:
                storage.result()
            write_environments(plan, prepare_buckets(plan))
            server.result()

    def _populate(self) -> Birth:
        """Blocks, pools, workers, genesis, clock, scheduled work."""
        plan, environment = self.plan, self.plan.server.environment()
        # 1. Work pools, and a worker for each neuron: they take seconds to start.
        self._say(f"registering {len(plan.running)} neurons and starting their workers")
        blocks = {neuron: self.neuron_block(neuron.name) for neuron in plan.running}
        with get_client(sync_client=True) as client:
            for neuron in plan.running:
                ensure_pool(client, f"neuron-{neuron.name}", "resident", grace_seconds=WORKER_GRACE_SECONDS)
        for neuron in plan.running:
            command = acting_command(neuron.actor, worker_command(f"neuron-{neuron.name}", "resident"))
            settings = {**plan.settings.get(neuron.name, {}), **environment}
            self._start(f"worker of {neuron.name}", ranked_command(command, blocks[neuron]), settings)
        # 2. Blocks and windows' deployments meanwhile.
        for neuron, block in blocks.items():
            announce_bucket(block)
            register(neuron.name, block)
        # 3. The network begins: genesis, then the clock that starts its windows.
        self._say("publishing the genesis checkpoint")
        publisher = next(block for neuron, block in blocks.items() if neuron.role == "aggregator")
        birth = publish_network(plan, publisher, opens_in_seconds=plan.pace * NEURONS_START_SECONDS)
        self._start(CLOCK, CLOCK_COMMAND, environment)
        # 4. Scheduled work until the first window opens, and its worker.
        self._say("deploying the scheduled work")
        for neuron, block in blocks.items():
            deploy_scheduled(neuron.name, block, hour=plan.hour)
            watch(neuron.name, block, None)
        deploy_by_hand(DEFAULT_NEURON, "miner")
        self._start(HOUSEKEEPING, worker_command(HOUSEKEEPING_POOL, "process"), environment)
        return birth

    def pages(self, birth: Birth) -> dict[str, str]:
        """The addresses in the UI that show the training at a glance: of the network, and by neuron."""
        keys = {"network": network_key(NETUID, birth.network.genesis)}
        keys |= {neuron.name: neuron_key(neuron.name) for neuron in self.plan.running}
        with temporary_settings(self.address.settings):
            opened = {name: open_page(key) for name, key in keys.items()}
        ui = self.plan.server.ui_url
        return {name: f"{ui}/artifacts/artifact/{page}" for name, page in opened.items() if page is not None}

    @property
    def address(self) -> Address:
        """The network's Prefect server."""
        server = self.plan.server
        return Address(server.api_url, str(server.home), os.environ.get("PREFECT_API_AUTH_STRING") or None)

    def status(self) -> dict[str, Any]:
        """Return what runs of the network that was brought up in this folder, and the newest windows of its neurons."""
        address = Address.read(self.plan.address)
        return status_of_network(self._record, address, self.plan.brought_up, newest=HOUSEKEEPING)

    def scheduled(self) -> tuple[Counter[str], list[str]]:
        """What its schedules have made of the runs that are due, as `scheduled_runs`."""
        with temporary_settings(self.address.settings), get_client(sync_client=True) as client:
            return scheduled_runs(client)

    def _start_server(self) -> None:
        server = self.plan.server
        environment = server.environment({**os.environ, "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": EVENTS_RETENTION})
        self._supervisor.start(server.service(environment), server.healthy, timeout_seconds=self._patience)
        self.address.save(self.plan.address)

    def _start_storage(self) -> None:
        command = [sys.executable, "-m", "deployments.s3_endpoint", "--port", str(self.plan.storage_port)]
        command += ["--admin-file", str(self.plan.admin_file)]
        self._start(STORAGE, command, announces=LISTENING)

    @property
    def _patience(self) -> float:
        return max(1.0, self.plan.pace) * START_SECONDS

    def _start(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None, *, announces: str = ""
    ) -> None:
        """Start a process, and wait until it has said what it `announces`."""
        log = log_file(self.plan.logs, name)
        is_ready = (lambda: announces in log.read_text()) if announces else None
        self._supervisor.start(Service(name, command, log, environment), is_ready, timeout_seconds=self._patience)
