"""Flows that worker processes run in the tests; what they saw goes into a file that the test reads."""

import logging
import os
import threading
import time
from pathlib import Path

from prefect import flow, task

from templar.interrupt import check_stop, end_soon, wait
from tests.support import resident_state

LOGGER = logging.getLogger("templar.resident_test")


def note(folder, text):
    with (Path(folder) / "notes").open("a") as file:
        file.write(f"{text}\n")


@task
def visit(folder: str, name: str) -> None:
    """Note which process, thread and module state this run met."""
    resident_state.VISITS.append(name)
    thread = threading.current_thread().name
    note(folder, f"{name} {resident_state.TOKEN} {os.getpid()} {len(resident_state.VISITS)} {thread}")
    LOGGER.info("visited by %s", name)


@task
def work(folder: str, seconds: float, *, busy: bool) -> None:
    """Take a while, in a wait or in a loop, and heed a request to stop."""
    note(folder, "working")
    if not busy:
        wait(seconds)
        return
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check_stop()
        time.sleep(0.01)


@task
def hang(folder: str, seconds: float) -> None:
    note(folder, "working")
    time.sleep(seconds)


@flow(name="visit")
async def visit_async(folder: str, name: str) -> None:
    visit(folder, name)


@flow(name="visit-sync")
def visit_sync(folder: str, name: str) -> None:
    visit(folder, name)


@flow(name="work")
async def work_for(folder: str, seconds: float, busy: bool = False) -> None:
    work(folder, seconds, busy=busy)
    note(folder, "finished")


@flow(name="resume")
async def resume_after(folder: str, ends: bool = False) -> None:
    """Work for ever, unless it is taken up a second time; the process may say that it is of no use any more."""
    if (Path(folder) / "notes").exists():
        note(folder, "resumed")
        return
    if ends:
        end_soon()
    work(folder, 600.0, busy=False)


@flow(name="hang")
async def hang_for(folder: str, seconds: float) -> None:
    hang(folder, seconds)


@flow(name="raise")
async def raise_one(kind: str) -> None:
    raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}[kind](kind)


@flow(name="raise-sync")
def raise_one_sync(kind: str) -> None:
    raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt, "ValueError": ValueError}[kind](kind)
