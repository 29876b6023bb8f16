"""A neuron that `templar neuron start` runs, in processes of its own."""

import io
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any
from uuid import uuid4

import bittensor as bt

from deployments.neuron import manage
from deployments.neuron.folder import NeuronFolder
from deployments.prefect_server import DATABASE_URL
from deployments.processes import PROJECT_ROOT, end_of, free_port, start_child
from tests.support.commands import write_env
from tests.support.operator import wait_until
from tests.support.prepared import PreparedNetwork

PASSWORD = "templar:only-for-a-test"
HOTKEY_PASSWORD = "opens-the-hotkey-of-a-test"


class Started:
    """The lazy neuron of a network; its server's database is in PostgreSQL, or where there is no URL in SQLite.

    It runs from `checkout`, whose Python is `python`.
    """

    def __init__(
        self, folder, database_url=None, network=None, *, checkout=PROJECT_ROOT, python=sys.executable, **more
    ):
        self.name = f"test-{uuid4().hex[:8]}"
        self.folder = NeuronFolder(self.name)
        self._env_file = folder / ".env"
        self._log = folder / "start.log"
        network = network or PreparedNetwork(folder)
        self.bucket = network.bucket("lazy")
        values = network.environment("lazy")
        wallet = bt.Wallet(values["WALLET_NAME"], values["WALLET_HOTKEY"], values["WALLET_PATH"])
        wallet.hotkey_file.set_keypair(wallet.hotkey, encrypt=True, overwrite=True, password=HOTKEY_PASSWORD)
        secrets = {"PREFECT_API_AUTH_STRING": PASSWORD, "WALLET_HOTKEY_PASSWORD": HOTKEY_PASSWORD}
        if database_url is not None:
            secrets[DATABASE_URL] = database_url
        write_env(self._env_file, values | secrets | more)
        self._command = [str(python), "-m", "deployments", "neuron", "start"]
        self._checkout, self.port = checkout, free_port()
        self.child = self.start()

    def start(self):
        options = ["--name", self.name, "--env-file", str(self._env_file), "--prefect-port", str(self.port)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return start_child("neuron", [*self._command, *options], log=self._log, env=env, cwd=self._checkout)

    def status(self):
        with redirect_stdout(io.StringIO()) as shown:
            manage.main(["status", "--name", self.name, "--json"])
        found: dict[str, Any] = json.loads(shown.getvalue())[self.name]
        return found

    def wait(self, holds, what):
        found: list[dict[str, Any]] = []

        def asked():
            assert self.child.exit_code is None, end_of(self._log)
            found.append(self.status())
            return holds(found[-1])

        wait_until(asked, f"{what}: {end_of(self._log)}", patience_seconds=300.0)
        return found[-1]

    def said(self):
        return self._log.read_text()
