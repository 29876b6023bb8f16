"""S3 servers for tests: processes on 127.0.0.1 that a test starts, pauses, ends and starts again."""

import os
import secrets
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deployments.processes import start_child, wait_until_ready
from deployments.s3_endpoint import LISTENING, AccessKey, EndpointAdmin
from templar.store.s3 import S3Store
from templar.store.s3_protocol import S3Settings
from tests.support.commands import installed

START_SECONDS, STOP_SECONDS = 180.0, 30.0
REPOSITORY = Path(__file__).parents[2]


class Server:
    """A server process that has said where it listens: its endpoint follows the announcement on one of its lines."""

    def __init__(self, command, announcement, environment=None):
        self._folder = tempfile.TemporaryDirectory(prefix="templar-server-")
        log, env = Path(self._folder.name) / "log", {**os.environ, **(environment or {})}
        self._child = start_child("the server", command, log=log, env=env, cwd=REPOSITORY)

        def announced():
            return "".join(self.output).partition(announcement)[2]

        try:
            wait_until_ready(self._child, lambda: "\n" in announced(), timeout_seconds=START_SECONDS)
        except BaseException:
            self.kill()
            raise
        self.endpoint_url = announced().splitlines()[0].strip().strip("[]/")

    @property
    def output(self):
        return self._child.log.read_text().splitlines(keepends=True)

    @property
    def port(self):
        return int(self.endpoint_url.rpartition(":")[2])

    @contextmanager
    def paused(self):
        """The process stands still: connections are accepted by the kernel, and nothing answers."""
        self._child.handle.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._child.handle.send_signal(signal.SIGCONT)

    def kill(self):
        self._child.stop(grace_seconds=0.0)

    def stop(self):
        return self._child.stop(grace_seconds=STOP_SECONDS)


@dataclass(frozen=True)
class MotoEndpoint:
    server: Server
    admin: EndpointAdmin


@contextmanager
def moto_endpoint(folder):
    """Start the embedded S3 endpoint in a process of its own; `folder` takes its admin file."""
    admin_file = folder / "admin.json"
    command = [sys.executable, "-m", "deployments.s3_endpoint", "--port", "0", "--admin-file", str(admin_file)]
    server = Server(command, LISTENING)
    try:
        yield MotoEndpoint(server, EndpointAdmin.load(admin_file))
    finally:
        server.stop()


def store_at(url, bucket, key, settings=None):
    return S3Store(
        bucket,
        endpoint_url=url,
        access_key_id=key.access_key_id,
        secret_access_key=key.secret_access_key,
        settings=settings or S3Settings(max_attempts=1),
    )


def random_key():
    """A key of the shape that R2 gives out: 32 and 64 hex digits."""
    return AccessKey(secrets.token_hex(16), secrets.token_hex(32))


def start_rclone(root, key, *, read_only=False, port=0):
    """Start `rclone serve s3` over `root`, whose folders are the buckets. The caller stops it.

    Every key of an rclone process may write, so a read-only key is a second process, `read_only`, over the same root.
    That process answers a write with 500, not 403.
    """
    # With a directory cache this short, one process sees what the other has written; with none, rclone crawls.
    command = [installed("rclone"), "serve", "s3", str(root), "--addr", f"127.0.0.1:{port}", "--dir-cache-time", "1ms"]
    command += ["--poll-interval", "0s", *(["--read-only"] if read_only else [])]
    environment = {
        "RCLONE_AUTH_KEY": f'"{key.access_key_id},{key.secret_access_key}"',
        "RCLONE_CONFIG": "",  # nobody's remotes
    }
    return Server(command, "Starting s3 server on ", environment)


@dataclass(frozen=True)
class RcloneEndpoints:
    """Two processes over one folder, each with the key that opens it."""

    root: Path
    """Its folders are the buckets."""
    writable: Server
    read_only: Server
    write_key: AccessKey
    read_key: AccessKey


@contextmanager
def rclone_endpoints(root):
    write_key, read_key = random_key(), random_key()
    with ExitStack() as stack:
        writable = start_rclone(root, write_key)
        stack.callback(writable.stop)
        read_only = start_rclone(root, read_key, read_only=True)
        stack.callback(read_only.stop)
        yield RcloneEndpoints(root, writable, read_only, write_key, read_key)
