"""A real Prefect server for tests: own folder, own free port, stopped by its handle."""

import copy
import functools
import os
import signal
import time
from contextlib import contextmanager

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from deployments.prefect_server import PrefectServer
from deployments.processes import PROJECT_ROOT, Child, free_port, start_child, wait_until_ready

DRAIN_SECONDS = 10.0

generate_schema = functools.cache(Block.model_json_schema.__func__)  # type: ignore[attr-defined]


def schema_of(block, *arguments, **options):
    """A block's schema, which is the same at every call: Prefect makes it a hundred times to save one neuron."""
    return copy.deepcopy(generate_schema(block, *arguments, **options))


Block.model_json_schema = classmethod(schema_of)  # type: ignore[assignment, method-assign]


@contextmanager
def talking_to(server):
    """Let this process, and what runs in it, talk to a server; what it has to say is sent before the end."""
    with temporary_settings({PREFECT_API_URL: server.api_url, PREFECT_HOME: server.home}):
        try:
            yield
        finally:
            for service in (EventsWorker, APILogWorker):
                service.drain_all(timeout=DRAIN_SECONDS, at_exit=False)


class PromptTransport(httpx.HTTPTransport):
    """Asks again at once where SQLite has refused beside another writer; the client itself would wait for 2 s."""

    def handle_request(self, request):
        while (response := super().handle_request(request)).status_code == httpx.codes.SERVICE_UNAVAILABLE:
            response.close()
            time.sleep(0.05)
        return response


def artifacts_of(client, run):
    """The artifacts of a flow run."""
    this = ArtifactFilterFlowRunId(any_=[run])
    return client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=this))


def history_of(client, run):
    """The names of all states that a flow run was in, in order."""
    states = sorted(client.read_flow_run_states(run), key=lambda state: state.timestamp)
    return [str(state.name) for state in states]


class RunningPrefectServer:
    """A server that can go away and come back on the same port and database; it keeps everything in a folder."""

    def __init__(self, folder):
        self.server = PrefectServer(folder / "prefect", free_port())
        self._base = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        self._child: Child | None = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, kind, error, traceback):
        self.kill()

    @property
    def environment(self):
        return self.server.environment(self._base)

    def client(self):
        return SyncPrefectClient(self.server.api_url, httpx_settings={"transport": PromptTransport()})

    def artifacts(self, state):
        run_id = state.state_details.flow_run_id
        assert run_id is not None
        with self.client() as client:
            return {str(artifact.key): artifact for artifact in artifacts_of(client, run_id)}

    def configured(self):
        """Let this process, and what runs in it, talk to this server."""
        return talking_to(self.server)

    def start(self):
        server = self.server.service(self.environment)
        self._child = start_child(server.name, server.command, log=server.log, env=server.environment, cwd=PROJECT_ROOT)
        try:
            wait_until_ready(self._child, self.server.healthy, timeout_seconds=180.0)
        except BaseException:
            self.kill()
            raise

    def stop(self):
        if self._child is not None:
            self._child.stop()
            self._child = None

    def kill(self):
        if self._child is not None:
            self._child.stop(grace_seconds=0.0)
            self._child = None

    def freeze(self):
        """Let it accept connections and answer none, until `thaw`."""
        self._child.handle.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._child.handle.send_signal(signal.SIGCONT)
