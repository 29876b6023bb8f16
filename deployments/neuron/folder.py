"""Where a neuron's processes are known on this machine: by the neuron's name, in every shell of the same user."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from deployments.processes import ProcessRecord, state_folder


@dataclass(frozen=True)
class Address:
    """The Prefect server that a neuron uses."""

    api_url: str
    home: str | None = None  # PREFECT_HOME of a server that `neuron start` runs itself


@dataclass(frozen=True)
class NeuronFolder:
    """The folder of one neuron's processes; training state is not in it, that is in TEMPLAR_HOME."""

    name: str

    @property
    def path(self) -> Path:
        """The folder itself."""
        return state_folder() / "neurons" / self.name

    @property
    def logs(self) -> Path:
        """A log per process."""
        return self.path / "logs"

    @property
    def lock(self) -> Path:
        """Held by the process that supervises the others."""
        return self.path / "supervisor.lock"

    @property
    def record(self) -> ProcessRecord:
        """The processes that are supervised."""
        return ProcessRecord(self.path / "processes.json")

    @property
    def address(self) -> Address | None:
        """The Prefect server of the newest start; None if there was none."""
        try:
            return Address(**json.loads((self.path / "server.json").read_text()))
        except FileNotFoundError:
            return None

    def save(self, address: Address) -> None:
        """Keep the address of the Prefect server for other commands."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / "server.json").write_text(json.dumps(asdict(address)))
