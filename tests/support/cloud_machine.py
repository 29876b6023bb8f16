"""A 'machine' of a cloud on this one: a process that executes what SkyPilot makes of a task file."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from uuid import uuid4

import psutil
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import temporary_settings

from blocks.env_file import env_lines
from deployments.neuron.folder import NeuronFolder
from deployments.processes import PROJECT_ROOT, end_of, free_port, start_child
from tests.support.commands import copy_checkout

FOLDER = PROJECT_ROOT / "deployments" / "skypilot"


def parsed(file, secrets, *variables):
    """What SkyPilot makes of a task file and of the options of `sky jobs launch`."""
    subprocess.run(
        ["make", "--silent", ".venv-skypilot/.made", f"PYTHON={sys.executable}"], cwd=PROJECT_ROOT, check=True
    )
    command = [".venv-skypilot/bin/python", "-P", "tests/support/skypilot_task.py", file, secrets, *variables]
    env = {"HOME": str(secrets.parent), "PATH": os.environ["PATH"], "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Machine:
    """A 'machine' of a cloud: a home with a checkout, a Prefect server and processes of its own.

    Machines of one user share the folder that knows the processes of neurons, so each gives its neuron another name.
    """

    def __init__(self, folder, values):
        self.home, self.name = folder, f"test-{uuid4().hex[:8]}"
        self.neuron_home = folder / ".templar" / "neuron"
        checkout = folder / "sky_workdir"
        copy_checkout(checkout)
        (checkout / ".venv").symlink_to(sys.prefix)
        secrets = folder / "secrets.env"
        secrets.write_text("".join(env_lines(values)))
        variables = (f"NEURON_NAME={self.name}", f"PREFECT_PORT={free_port()}")
        task = parsed(checkout / "deployments" / "skypilot" / "miner.yaml", secrets, *variables)
        self._scripts = {part: folder / f"{part}.sh" for part in ("setup", "run")}
        for part, path in self._scripts.items():
            path.write_text(task[part])
        self._env = {"HOME": str(folder), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        self._log = folder / "run.log"
        self.child = None

    def setup(self):
        """Execute the task's `setup`, with an installation that is complete: it must find nothing to do."""
        made = ["make", "--question", ".venv"]
        done = subprocess.run(made, cwd=self.home / "sky_workdir", env=self._env, check=False)
        assert done.returncode == 0, "the installation is older than what it is made of: run `make .venv`"
        subprocess.run(["bash", "-i", self._scripts["setup"]], env=self._env, cwd=self.home, check=True)

    def start(self):
        """Begin the task's `run`, as SkyPilot does."""
        command = ["bash", "-i", str(self._scripts["run"])]
        self.child = start_child("machine", command, log=self._log, env=self._env, cwd=self.home)

    def said(self):
        assert self.child.exit_code is None, end_of(self._log)
        return self._log.read_text()

    def processes(self):
        root = psutil.Process(self.child.identity.pid)
        return [root, *root.children(recursive=True)]

    @contextmanager
    def _client(self):
        address = NeuronFolder(self.name).address
        assert address is not None
        with temporary_settings(address.settings), get_client(sync_client=True) as client:
            yield client

    def hold_windows(self, *, held):
        """Let the neuron begin no window after the one under way, or let it go on."""
        with self._client() as client:
            client.update_work_pool(f"neuron-{self.name}", WorkPoolUpdate(is_paused=held))

    def has_ended(self, window):
        """Whether the run of a window is over, well or not."""
        name = FlowRunFilterName(any_=[f"{self.name} window {window}"])
        with self._client() as client:
            (run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=name))
        return run.state.is_final()

    def kill(self):
        """Lose the machine: all of its processes, at once."""
        lost = self.processes()
        for send in (psutil.Process.suspend, psutil.Process.kill):
            for process in lost:
                send(process)
        psutil.wait_procs(lost)
        self.child.handle.wait()

    def terminate(self):
        """End the task as SkyPilot ends one: SIGTERM to its process group; how it exits."""
        left = self.processes()
        os.killpg(self.child.identity.pid, signal.SIGTERM)
        status = self.child.handle.wait()
        assert not [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        return status

    def close(self):
        if self.child is not None and self.child.exit_code is None:
            self.kill()
        shutil.rmtree(NeuronFolder(self.name).folder, ignore_errors=True)
