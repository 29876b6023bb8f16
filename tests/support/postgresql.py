"""Debian's PostgreSQL with a cluster of its own: in a temporary folder, on a free loopback port, with a password."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from deployments.processes import Child, free_port, start_child, wait_until_ready

PROGRAMS = Path("/usr/lib/postgresql")
SUPERUSER = "postgres"
PASSWORD = "only-for-a-test"


class PostgreSQL:
    """A server with the database `prefect`, whose owner is the role `prefect`, as docs/miner.md makes them.

    PostgreSQL refuses to run as root: where a test does, it runs as Debian's user `postgres`.
    """

    def __init__(self):
        versions = self.installed()
        if not versions:
            pytest.skip("Debian's PostgreSQL is not installed: ./deployments/debian.sh postgresql")
        self._programs = versions[-1].parent
        self._folder = Path(tempfile.mkdtemp(prefix="templar-postgresql-"))
        self._prefix: list[str] = []
        if os.getuid() == 0:
            shutil.chown(self._folder, SUPERUSER, SUPERUSER)
            self._prefix = ["setpriv", f"--reuid={SUPERUSER}", f"--regid={SUPERUSER}", "--clear-groups"]
        self.port = free_port()
        self._child: Child | None = None

    @staticmethod
    def installed():
        """The program `initdb` of each version that this machine has."""
        return sorted(PROGRAMS.glob("*/bin/initdb"))

    @property
    def url(self):
        return f"postgresql+asyncpg://prefect:{PASSWORD}@127.0.0.1:{self.port}/prefect"

    def __enter__(self):
        data = self._folder / "data"
        self._run("initdb", "--pgdata", str(data), "--auth-local=trust", "--auth-host=scram-sha-256", "--no-sync")
        self.start()
        self.query(f"CREATE ROLE prefect LOGIN PASSWORD '{PASSWORD}'")
        self.query("CREATE DATABASE prefect OWNER prefect")
        return self

    def __exit__(self, kind, error, traceback):
        self.stop()
        shutil.rmtree(self._folder)

    def start(self):
        """Start it, or start it again, and wait until it takes queries."""
        socket = f"-cunix_socket_directories={self._folder}"
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), socket, f"-cport={self.port}"]
        log = self._folder / "postgresql.log"
        self._child = start_child("PostgreSQL", [*self._prefix, *command], log=log, cwd=self._folder)
        ready = [str(self._programs / "pg_isready"), "--quiet", "--host", str(self._folder), "--port", str(self.port)]
        wait_until_ready(self._child, lambda: subprocess.run(ready, check=False).returncode == 0, timeout_seconds=60.0)

    def stop(self):
        if self._child is not None:
            self._run("pg_ctl", "--pgdata", str(self._folder / "data"), "--mode", "fast", "stop")
            self._child.handle.wait()
            self._child = None

    def query(self, statement, database=SUPERUSER):
        options = ["--host", str(self._folder), "--port", str(self.port), "--username", SUPERUSER]
        return self._run("psql", *options, "--tuples-only", "--no-align", "--command", statement, database)

    def dump(self):
        """All that Prefect has stored, as text."""
        return self._run("pg_dump", "--host", str(self._folder), "--port", str(self.port), "-U", SUPERUSER, "prefect")

    def _run(self, program, *arguments):
        command = [*self._prefix, str(self._programs / program), *arguments]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()
