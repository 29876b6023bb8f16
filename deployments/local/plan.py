"""The members of a local network, and the paths of its files."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from deployments.prefect_server import PrefectServer
from deployments.processes import PROJECT_ROOT, FileOf
from deployments.schedules import HOUR
from deployments.supervisor import RECORD_FILE

NETUID = 1
DATASET_PREFIX = "text"
WALLET_NAME = "local"
DEFAULT_NEURON = "default"
LOCAL_FOLDER = Path(".templar") / "local"  # the folder of everything unless `--folder` says otherwise
NETWORK_ENV_FILE = "network.env"
"""In this folder: where the network is, for those who only read it. It outlives the network's servers."""
AGGREGATOR_STAKE, VALIDATOR_STAKE = 1000.0, 400.0


@dataclass(frozen=True)
class LocalNeuron:
    """One member of the local network."""

    name: str  # also of its block, pool, deployment and hotkey
    role: str  # `burn`, `aggregator`, `validator` or `miner`
    actor: str = "honest"  # of a miner: `honest`, or a bad actor
    stake: float = 0.0

    @property
    def title(self) -> str:
        """Return what the summary calls it."""
        return self.role if self.actor == "honest" else self.actor

    @property
    def account_id(self) -> str:
        """Account, and name, of its bucket."""
        return hashlib.sha256(f"templar.local.{self.name}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class LocalPlan:
    """A local network."""

    folder: Path  # of all its files; removed and made anew by a bring-up
    preset: str = "local"
    num_honest: int = 2  # honest miners; the first of them is the neuron `default`
    bad_actors: tuple[str, ...] = ("lazy",)  # the actor of each further miner
    prefect_port: int = 4200
    storage_port: int = 9200
    directory_store: bool = False  # keep objects in a folder instead of an S3 endpoint
    hparams_path: Path = PROJECT_ROOT / "hparams.json"
    pace: float = 1.0  # how many times as long as the preset's its windows are
    hour: timedelta = HOUR  # how long an hour takes for scheduled work; windows keep their length
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by neuron: more of its `.env`, which wins

    ledger = FileOf("ledger.sqlite")
    wallets = FileOf("wallets")
    dataset = FileOf("dataset")  # before it is uploaded
    buckets = FileOf("buckets")  # all of them, if they are folders: from the start, or once the network was taken down
    network_env = FileOf(NETWORK_ENV_FILE)  # the environment of a reader
    admin_file = FileOf("s3-admin.json")  # the S3 endpoint's administrator key
    marker = FileOf(".templar-local")  # marks the folder as a local network's, which may be removed
    logs = FileOf("logs")  # a log per process
    processes = FileOf(RECORD_FILE)  # the record of the processes that were started
    address = FileOf("server.json")  # where the Prefect server of the network that was brought up listens

    @property
    def neurons(self) -> tuple[LocalNeuron, ...]:
        """All members, in the order of their uids; the burn uid is first and has no process."""
        honest = [
            LocalNeuron(DEFAULT_NEURON if index == 0 else f"miner-{index + 1}", "miner")
            for index in range(self.num_honest)
        ]
        bad = [
            LocalNeuron(f"{actor}-{index}" if self.bad_actors.count(actor) > 1 else actor, "miner", actor)
            for index, actor in enumerate(self.bad_actors, start=1)
        ]
        return (
            LocalNeuron("burn", "burn"),
            LocalNeuron("aggregator", "aggregator", stake=AGGREGATOR_STAKE),
            LocalNeuron("validator", "validator", stake=VALIDATOR_STAKE),
            *honest,
            *bad,
        )

    @property
    def running(self) -> tuple[LocalNeuron, ...]:
        """The members that have a process."""
        return tuple(neuron for neuron in self.neurons if neuron.role != "burn")

    @property
    def server(self) -> PrefectServer:
        """The Prefect server."""
        return PrefectServer(self.folder / "prefect", self.prefect_port)

    @property
    def storage_url(self) -> str:
        """Return where objects are stored, as `TEMPLAR_STORAGE` says it."""
        if self.directory_store:
            return self.buckets.as_uri()
        return f"http://127.0.0.1:{self.storage_port}"

    def home(self, neuron: LocalNeuron) -> Path:
        """A neuron's folder."""
        return self.folder / "neurons" / neuron.name

    def env_file(self, neuron: str) -> Path:
        """The environment of the neuron of this name."""
        return self.folder / "env" / f"{neuron}.env"

    @property
    def brought_up(self) -> list[str]:
        """The names of the neurons that have an environment, which are those of the network that was brought up."""
        return sorted(path.stem for path in (self.folder / "env").glob("*.env"))
