"""The process of a Prefect server on this machine: `prefect server start`, fit for SQLite under several workers.

    python -m deployments.server_process --host 127.0.0.1 --port 4200

With five neurons on one server, Prefect 3.8 by itself logged `database is locked` several times a minute, and stood
still for a minute at a time, which cost windows. What is done here about both changes nothing with PostgreSQL.
"""

import asyncio
import gc
import runpy
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from functools import cache
from itertools import count
from threading import Thread
from typing import Any
from weakref import WeakKeyDictionary

from prefect._internal.schemas import validators
from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration
from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

COLLECT_SECONDS = 5.0  # between two collections of young garbage
ALL_EVERY = 12  # one in so many looks through everything, old objects too: a twentieth of a core if each did
TURN_SECONDS = 5.0  # the longest that a transaction waits for its turn; they take milliseconds


def collect_garbage_aside() -> None:
    """Let a thread of its own collect this process's garbage from now on, and never the event loop's.

    A statement that SQLite refuses leaves an open cursor in the traceback of its error. Where the garbage collection
    of the event loop's thread frees that cursor, it waits for the cursor's connection. The connection may be waiting
    for the database, for up to a minute, and the transaction that has it needs the event loop to go on: the server
    would stand still for that minute. Another thread may wait for as long as it takes.
    """
    gc.disable()
    Thread(target=_collect_garbage, name="garbage", daemon=True).start()


def _collect_garbage() -> None:
    time.sleep(COLLECT_SECONDS)
    gc.freeze()  # the modules stay: they need not be looked through each time
    for number in count():
        gc.collect(1 if number % ALL_EVERY else 2)
        time.sleep(COLLECT_SECONDS)


def serialise_transactions() -> None:
    """Let the server's transactions on SQLite wait for one another in the event loop, and begin as writers.

    Prefect begins a transaction as a reader, and SQLite refuses at once, with any time-out, to make it a writer if
    another one has written meanwhile. With several workers on one server that happens many times a minute: clients ask
    again, but what the server does by itself fails, and each time a traceback is logged. PostgreSQL is not concerned.
    """
    begin = AioSqliteConfiguration.begin_transaction
    inside = ContextVar[asyncio.Task[Any] | None]("inside", default=None)
    locks = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    @asynccontextmanager
    async def begin_alone(
        self: AioSqliteConfiguration, session: AsyncSession, with_for_update: bool = False
    ) -> AsyncIterator[AsyncSessionTransaction]:
        task = asyncio.current_task()
        if inside.get() is task:  # it is begun within another one of the same task, and would wait for itself
            async with begin(self, session, with_for_update) as transaction:
                yield transaction
            return
        lock = locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with AsyncExitStack() as stack:
            # 1. Its turn. One for whose end the one before it waits goes on without, as Prefect lets it.
            with suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS):
                    await stack.enter_async_context(lock)
            stack.callback(inside.reset, inside.set(task))
            # 2. It begins as a writer, before anybody else can write; what is begun within it does not.
            transaction = await stack.enter_async_context(begin(self, session, with_for_update=True))
            await session.connection()
            SQLITE_BEGIN_MODE.set("DEFERRED")
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_alone  # type: ignore[method-assign]


def main() -> None:
    """Run `prefect server start` with this process's arguments, and what its SQLite database needs under load."""
    sys.argv = ["prefect", "server", "start", *sys.argv[1:]]
    collect_garbage_aside()
    serialise_transactions()
    validators.get_timezones = cache(validators.get_timezones)  # type: ignore[attr-defined]  # else once per schedule
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
