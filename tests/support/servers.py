"""S3 servers for tests: processes on 127.0.0.1 that a test starts, pauses and ends."""

import signal
import tempfile
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deployments.s3_endpoint import AccessKey, EndpointAdmin
from lab.gauntlet.endpoints import Server, random_key, start_moto, start_rclone
from templar.store.s3 import S3Store
from templar.store.s3_protocol import S3Settings

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def paused(server):
    """The process stands still: connections are accepted by the kernel, and nothing answers."""
    server.child.handle.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.child.handle.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class MotoEndpoint:
    server: Server
    admin: EndpointAdmin


@contextmanager
def moto_endpoint(folder):
    """Start the embedded S3 endpoint in a process of its own; `folder` takes its admin file."""
    with closing(start_moto(folder / "admin.json", folder / "moto.log")) as server:
        yield MotoEndpoint(server, EndpointAdmin.load(folder / "admin.json"))


def store_at(url, bucket, key, settings=None):
    return S3Store(
        bucket,
        endpoint_url=url,
        access_key_id=key.access_key_id,
        secret_access_key=key.secret_access_key,
        settings=settings or S3Settings(max_attempts=1),
    )


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
    with (
        tempfile.TemporaryDirectory(prefix="templar-server-") as logs,
        closing(start_rclone(root, [write_key], Path(logs, "writable.log"))) as writable,
        closing(start_rclone(root, [read_key], Path(logs, "read-only.log"), "--read-only")) as read_only,
    ):
        yield RcloneEndpoints(root, writable, read_only, write_key, read_key)
