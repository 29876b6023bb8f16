"""`gauntlet`: a network with attackers in it, and a verdict on each of them.

On simulated time the network runs in this process. On an endpoint it runs in a process of its own
(`lab.gauntlet.host`) with its nodes and their servers; nothing of it is left when that process has ended.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Any

from prefect import flow, task
from prefect.client.schemas.objects import State
from prefect.settings import get_current_settings
from prefect.states import Completed, Failed
from pydantic import Field

from lab.adversary.catalogue import SCENARIOS
from lab.adversary.gauntlet import check_choice, lineups, run_gauntlet
from lab.adversary.judge import Verdict
from lab.gauntlet.order import JUDGEMENTS, SUBSET, EndpointName, Judgement, Order, Where, hparams_file
from tasks.artifacts import progress, table
from templar import interrupt
from templar.errors import PermanentError, Reason, TransientError
from templar.hparams import HParams, load_hparams

log = logging.getLogger("templar.gauntlet")

PRESET = "simulation"
MINERS = 11
"""Miners of a simulated network, attackers included."""
FIRST_MINER = 3
"""The miner with the lowest uid: before it come the uid that burns, the aggregator and the validator."""
HOST = "lab.gauntlet.host"
"""The module that hosts a network on an endpoint."""
GRACE_SECONDS = 30.0
STOP_SECONDS = 1.0
"""How often a request to stop is looked for."""
TABLE, BAR = "gauntlet-verdicts", "gauntlet-progress"


@flow(name="gauntlet", flow_run_name="gauntlet on {where}, seed {seed}")
async def gauntlet(
    scenarios: list[str] | None = None,
    *,
    where: Where = "simulation",
    endpoint: EndpointName = "moto",
    miners: Annotated[int, Field(ge=1, le=64)] | None = None,
    attackers: Annotated[int, Field(ge=1, le=16)] = 1,
    windows: Annotated[int, Field(ge=1, le=100)] | None = None,
    seed: Annotated[int, Field(ge=0)] = 1,
) -> State[None]:
    """Run attacks and faults, and compare the outcome of each with the expected one.

    Args:
        scenarios: Names from the catalogue; by default one scenario for each kind of attack.
        where: `simulation`, on simulated time in this process; or `s3`, in real time on an S3 endpoint of its own,
            where every window of every node is a flow run.
        endpoint: Which S3 endpoint.
        miners: Miners of each network, attackers included; by default 11 on simulated time, and three honest ones
            beside the attackers on an endpoint.
        attackers: Attackers of each scenario.
        windows: Windows of each network at least; as many as the scenarios need by default.
        seed: Keys, blocks and assignments follow from it; on simulated time everything does.
    """
    judgements = run_networks(where, Order(tuple(scenarios or ()), miners, attackers, windows, seed, endpoint))
    failed = [judgement for judgement in judgements if not judgement.passed]
    if failed:
        first = failed[0]
        return Failed(
            message=f"[{Reason.NOT_AS_EXPECTED}] {len(failed)} of {len(judgements)} failed, the first: "
            f"{first.scenario}: {first.problems[0]}"
        )
    return Completed(message=f"{len(judgements)} of {len(judgements)} as expected: nothing honest was lost, one root")


@task(task_run_name="run networks {where}")
def run_networks(where: Where, order: Order) -> tuple[Judgement, ...]:
    """Run scenarios and judge them; not retried, since a run takes minutes. Shows a table and a progress artifact.

    Raises:
        PermanentError: `bad_parameters`, `bad_environment`, `process_died`, ...; nothing was judged.
        TransientError: `process_not_ready`; the machine is too busy.
    """
    bar = progress(BAR, "Windows, or scenarios, that are done.")
    judgements = _simulate(order, bar) if where == "simulation" else _host(order, bar)
    place = "on simulated time" if where == "simulation" else f"in real time, on {order.endpoint}"
    table(TABLE, [judgement.row() for judgement in judgements], f"Verdicts {place}, seed {order.seed}.")
    return judgements


def _simulate(order: Order, bar: Callable[[float], None]) -> tuple[Judgement, ...]:
    names = tuple(dict.fromkeys(order.scenarios)) or tuple(name for name in SUBSET if name in SCENARIOS)
    miners = MINERS if order.miners is None else order.miners
    judgements: list[Judgement] = []

    def on_verdict(verdict: Verdict) -> None:
        name = verdict.scenario
        uids = _uids(names, miners=miners, attackers=order.attackers)[name]
        judgements.append(Judgement.of(verdict, SCENARIOS[name], uids))
        bar(100 * len(judgements) / len(names))

    try:
        check_choice(names, miners=miners, attackers=order.attackers)
    except ValueError as error:
        raise PermanentError(Reason.BAD_PARAMETERS, str(error)) from None
    run_gauntlet(
        names,
        _hparams,
        miners=miners,
        attackers=order.attackers,
        seed=order.seed,
        windows=order.windows,
        on_verdict=on_verdict,
    )
    return tuple(sorted(judgements, key=lambda judgement: names.index(judgement.scenario)))


def _uids(names: tuple[str, ...], *, miners: int, attackers: int) -> dict[str, tuple[int, ...]]:
    """Scenario -> uids of its attackers, from their places in the line-up."""
    found: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    for lineup in lineups(names, miners=miners, attackers=attackers):
        for uid, part in enumerate(lineup.parts, start=FIRST_MINER):
            if part is not None:
                found[part.name] += (uid,)
    return found


def _hparams(overrides: Mapping[str, Mapping[str, object]]) -> HParams:
    return load_hparams(
        PRESET, path=hparams_file(), overrides={section: dict(values) for section, values in overrides.items()}
    )


def _host(order: Order, bar: Callable[[float], None]) -> tuple[Judgement, ...]:
    """Run the network in a process of its own, and log its messages."""
    with tempfile.TemporaryDirectory(prefix="templar-gauntlet-") as folder, _hosting(Path(folder)) as process:
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        with suppress(BrokenPipeError):  # its log says why
            process.stdin.write(order.to_json() + "\n")
            process.stdin.flush()  # and left open: its end is the end of the network
        for line in _lines(process.stdout):
            words: dict[str, Any] = json.loads(line)
            if "judgements" in words:
                return JUDGEMENTS.validate_python(words["judgements"])
            if "error" in words:
                kind = PermanentError if words["permanent"] else TransientError
                raise kind(Reason(words["error"]), words["message"])
            log.info("%s", words["said"])
            bar(100 * words["share"])
        tail = (Path(folder) / "host.log").read_text(errors="replace")[-1000:]
    raise PermanentError(
        Reason.PROCESS_DIED, f"the network's process ended without a verdict; the end of its log:\n{tail}"
    )


def _lines(stream: IO[str]) -> Iterator[str]:
    """The lines that a process prints, to its end; a request to stop is seen between lines, too."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def pump() -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=pump, name="gauntlet", daemon=True).start()
    while True:
        interrupt.check_stop()
        with suppress(queue.Empty):
            if not (line := lines.get(timeout=STOP_SECONDS)):
                return
            yield line


@contextmanager
def _hosting(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process, in a process group of its own, which ends with the context."""
    with (folder / "host.log").open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603 - this project's own program, never a shell
            [sys.executable, "-m", HOST, str(folder / "network")],
            env={**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started goes with it
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
