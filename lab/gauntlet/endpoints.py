"""Real S3 endpoints on this machine; each account has a bucket, a key to read and a key to write.

They are children of this process, which ends them.
"""

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deployments.processes import start_child, wait_until_ready
from deployments.s3_endpoint import LISTENING, AccessKey, BucketKeys, EndpointAdmin, create_bucket_with_keys
from templar.errors import PermanentError, Reason

EndpointName = Literal["moto", "rclone"]
READY_SECONDS = 60.0
RCLONE_LISTENING = "Starting s3 server on "


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
    """The embedded endpoint: a key opens its own bucket only."""
    admin_file = folder / "admin.json"
    command = [sys.executable, "-m", "deployments.s3_endpoint", "--port", "0", "--admin-file", str(admin_file)]
    with _child("moto", command, folder / "moto.log", LISTENING):
        admin = EndpointAdmin.load(admin_file)
        url = admin.endpoint_url
        yield Endpoint(url, url, lambda bucket: create_bucket_with_keys(admin, bucket))


@contextmanager
def _rclone(folder: Path, num_buckets: int) -> Iterator[Endpoint]:
    """Two processes over one folder: every key opens every bucket of its process, so readers get a read-only one."""
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise PermanentError(
            Reason.BAD_ENVIRONMENT, "endpoint rclone: it is not installed; install the extra `dev`, or choose moto"
        )
    root = folder / "objects"
    root.mkdir()
    pairs = [(_random_key(), _random_key()) for _ in range(num_buckets)]
    # So short a directory cache shows each process what the other wrote; without one rclone is very slow.
    command = [program, "serve", "s3", str(root), "--addr", "127.0.0.1:0", "--dir-cache-time", "1ms"]
    command += ["--poll-interval", "0s"]
    with ExitStack() as stack:
        urls = []
        for place, more in enumerate(([], ["--read-only"])):
            keys = [pair[1 - place] for pair in pairs]
            environment = {"RCLONE_AUTH_KEY": ",".join(_quoted(key) for key in keys), "RCLONE_CONFIG": ""}
            name = f"rclone-{place}"
            started = _child(name, [*command, *more], folder / f"{name}.log", RCLONE_LISTENING, environment)
            urls.append(stack.enter_context(started))
        left = iter(pairs)

        def make(bucket: str) -> BucketKeys:
            (root / bucket).mkdir()
            read, write = next(left)
            return BucketKeys(bucket, read=read, write=write)

        yield Endpoint(reading=urls[1], writing=urls[0], make=make)


@contextmanager
def _child(
    name: str, command: Sequence[str], log: Path, announcement: str, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Run a server as long as the context lasts; its address."""
    child = start_child(name, command, log=log, env={**os.environ, **(environment or {})})
    try:
        wait_until_ready(child, lambda: _address(log, announcement) is not None, timeout_seconds=READY_SECONDS)
        yield _address(log, announcement) or ""
    finally:
        child.stop()


def _address(log: Path, announcement: str) -> str | None:
    """The address that a server announced in its log; None until the line is complete."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        _, found, address = line.partition(announcement)
        if found and line.endswith("\n"):
            return address.strip().strip("[]/")
    return None


def _random_key() -> AccessKey:
    """A key of the shape that R2 gives out: 32 and 64 hex digits."""
    return AccessKey(secrets.token_hex(16), secrets.token_hex(32))


def _quoted(key: AccessKey) -> str:
    return f'"{key.access_key_id},{key.secret_access_key}"'
