"""A private Prefect server on loopback: its environment, its start and its health; its database and its password.

All data of the server lies in one folder, or its database in PostgreSQL. The user's own Prefect profile is neither read
nor changed, so servers with different folders and ports are independent.
"""

import asyncio
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine

from blocks.proxies import exempting_loopback
from deployments.processes import end_of, http_serves
from deployments.supervisor import Service
from templar.errors import PermanentError, Reason
from templar.store.s3_protocol import is_loopback

SERVER_NAME = "the Prefect server"  # the name of the server's process in messages and records
SERVER_LOG = "server.log"  # the server's log in its folder
REPEATED = 3  # an error that stands so many times in the newest part of the log is no accident
LOG_SPAN = timedelta(hours=1)  # that part
LOG_TAIL_BYTES = 2**20
DATABASE_URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
"""The variable that names the server's database; without it, that is a SQLite file in the server's folder."""
DATABASE_PATIENCE_SECONDS = 10.0
LOG_DATE = "%Y-%m-%d %H:%M:%S"  # the beginning of log lines; Prefect's own format has no date
_ERROR = re.compile(r"^([0-9-]{10} [0-9:]{8})\.\d+ \| (?:ERROR|CRITICAL)\s*\| (.+)$", re.MULTILINE)
_CHANGING = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}|\d+(?:\.\d+)?")
_POSTGRESQL, _SQLITE = "postgresql+asyncpg", "sqlite+aiosqlite"


@dataclass(frozen=True)
class PrefectServer:
    """The place of a server's data and its address."""

    home: Path  # database, profiles and log; created at the first start
    port: int  # of API and UI
    host: str = "127.0.0.1"

    @property
    def ui_url(self) -> str:
        """Address of the UI."""
        return f"http://{self.host}:{self.port}"

    @property
    def api_url(self) -> str:
        """Address of the API."""
        return f"{self.ui_url}/api"

    @property
    def log(self) -> Path:
        """Return what the server prints."""
        return self.home / SERVER_LOG

    def service(self, environment: Mapping[str, str]) -> Service:
        """The process that serves: `prefect server start`, as deployments/server_process.py runs it."""
        command = [sys.executable, "-m", "deployments.server_process", "--host", self.host, "--port", str(self.port)]
        return Service(SERVER_NAME, command, self.log, environment)

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment of the server itself and of its clients.

        It extends `base`, by default this process's environment. The Prefect settings in `base` stay in force except
        for the server's address and folder. Where clients have PREFECT_API_AUTH_STRING, the server asks for it.
        """
        inherited = dict(os.environ if base is None else base)
        inherited.pop("PREFECT_PROFILE", None)  # it names a profile of the user's own folder
        if password := inherited.get("PREFECT_API_AUTH_STRING"):
            inherited["PREFECT_SERVER_API_AUTH_STRING"] = password
        return {
            **inherited,
            "PREFECT_HOME": str(self.home),
            "PREFECT_PROFILES_PATH": str(self.home / "profiles.toml"),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_UI_URL": self.ui_url,
            "PREFECT_SERVER_API_HOST": self.host,
            "PREFECT_SERVER_API_PORT": str(self.port),
            "PREFECT_SERVER_UI_API_URL": self.api_url,
            "PREFECT_LOGGING_FORMATTERS_STANDARD_DATEFMT": LOG_DATE,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            **exempting_loopback(inherited, self.host),
        }

    def healthy(self) -> bool:
        """Whether the API answers."""
        return http_serves(f"{self.api_url}/health")


def repeated_errors(log: Path, *, span: timedelta = LOG_SPAN) -> dict[str, int]:
    """Return the errors of the last `span` that a server's log repeats, each with its number, the most frequent first.

    A background service of the server that fails in every pass logs the same error each time, with other numbers and
    ids. A log that is not there has none.
    """
    since = datetime.now() - span
    errors = _ERROR.findall(end_of(log, LOG_TAIL_BYTES))
    recent = [what for at, what in errors if datetime.strptime(at, LOG_DATE) >= since]
    counts = Counter(_CHANGING.sub("…", what) for what in recent)
    return {what[:200]: count for what, count in counts.most_common() if count >= REPEATED}


def exposes_keys(api_url: str) -> str | None:
    """Return why a server that answers should not have this neuron's keys; None if it asks for a password."""
    if not http_serves(f"{api_url.rstrip('/')}/admin/version"):
        return None
    return (
        f"{api_url} asks for no password, and its database has this neuron's bucket keys: set PREFECT_API_AUTH_STRING"
    )


def require_guarded(api_url: str) -> None:
    """Refuse (`bad_environment`) a server that other machines may reach and that asks for no password."""
    if not is_loopback(urlsplit(api_url).hostname) and (problem := exposes_keys(api_url)):
        problem = f"{problem} for it and here, or let the server listen on loopback alone"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)


def require_database(environment: Mapping[str, str]) -> str:
    """The database of a server with this environment, in words without a password, once it answers.

    `bad_environment` if it does not answer, refuses the user, or is of a kind that Prefect has not.
    """
    url = environment.get(DATABASE_URL, "").strip()
    if not url or url.startswith(f"{_SQLITE}:"):
        return "a SQLite file"
    form = "postgresql+asyncpg://USER:PASSWORD@HOST:PORT/DATABASE, with special characters of the password as %XX"
    try:
        parsed = make_url(url)
    except (SQLAlchemyError, ValueError):
        raise PermanentError(Reason.BAD_ENVIRONMENT, f"{DATABASE_URL} is not an address: set {form}") from None
    if parsed.drivername != _POSTGRESQL:
        problem = f"{DATABASE_URL} begins with {parsed.drivername}: set {form}, or leave it empty"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    shown = f"the PostgreSQL database {parsed.database} at {parsed.host or 'a socket of this machine'}"
    try:
        asyncio.run(_connect(url))
    except (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TypeError) as error:
        why = str(getattr(error, "orig", None) or error) or type(error).__name__
        problem = f"{DATABASE_URL}: {shown} cannot be used ({why.splitlines()[0]}): start it, or correct the address"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem) from None
    return shown


async def _connect(url: str) -> None:
    engine = create_async_engine(url)
    try:
        async with asyncio.timeout(DATABASE_PATIENCE_SECONDS), engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
    finally:
        await engine.dispose()
