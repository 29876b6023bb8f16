"""The folder that knows a neuron's processes on this machine: by the neuron's name, in every shell of the same user."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, PREFECT_HOME
from prefect.settings.legacy import Setting

from deployments.processes import FileOf, ProcessRecord, holder_of, state_folder, write_private
from deployments.supervisor import RECORD_FILE


@dataclass(frozen=True)
class Address:
    """The Prefect server that a neuron uses."""

    api_url: str
    home: str | None = None  # PREFECT_HOME of a server that `neuron start` runs itself
    password: str | None = field(default=None, repr=False)  # PREFECT_API_AUTH_STRING, if the server asks for one

    @property
    def settings(self) -> dict[Setting, Any]:
        """Return what a client of this process needs, for `temporary_settings`."""
        home = {} if self.home is None else {PREFECT_HOME: self.home}
        return {PREFECT_API_URL: self.api_url, PREFECT_API_AUTH_STRING: self.password} | home

    def save(self, path: Path) -> None:
        """Keep it for other commands, readable for this user alone."""
        write_private(path, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, path: Path) -> "Address | None":
        """The inverse of `save`; None if there is no such file."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


HOME_LOCK = "start.lock"  # the file in TEMPLAR_HOME that is held by the process that supervises the neuron


@dataclass(frozen=True)
class NeuronFolder:
    """The folder of one neuron's processes; training state is not in it, that is in TEMPLAR_HOME."""

    name: str
    logs = FileOf("logs")  # a log per process
    server_home = FileOf("prefect")  # of the Prefect server that `neuron start` runs itself, with its log
    address_file = FileOf("server.json")  # where the Prefect server of the newest start listens
    lock = FileOf("supervisor.lock")  # held by the process that supervises the others
    upgrade_file = FileOf("upgrade.json")  # of an upgrade that is not over
    upgrade_lock = FileOf("upgrade.lock")  # held by the command that makes it

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return state_folder() / "neurons" / self.name

    @property
    def record(self) -> ProcessRecord:
        """The processes that are supervised."""
        return ProcessRecord(self.folder / RECORD_FILE)

    @property
    def address(self) -> Address | None:
        """The Prefect server of the newest start; None if there was none."""
        return Address.read(self.address_file)


def known_neurons() -> list[NeuronFolder]:
    """The neurons that were started on this machine, by name."""
    return [NeuronFolder(path.parent.name) for path in sorted(state_folder().glob("neurons/*/server.json"))]


def foreign_home(home: Path, pid: int) -> str:
    """Return why a neuron is refused a folder that this process holds for another one, named if it is known."""
    holders = ((folder.name, holder_of(folder.lock)) for folder in known_neurons())
    names = [name for name, holder in holders if holder is not None and holder.pid == pid]
    whose = f"the neuron {names[0]!r}" if names else "another neuron"
    remedy = f"say --name {names[0]} if you mean that one, or " if names else ""
    return f"TEMPLAR_HOME is {home}, which {whose} uses (process {pid}): {remedy}give each neuron a folder of its own"
