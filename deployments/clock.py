"""The window clock: follows the chain and starts every window deployment of this host, once per window.

    templar clock

No window is started twice: each run has the idempotency key `{netuid}/{genesis}/{hotkey}/{role}/{window}`, and the
server returns the same run for the same key. A restarted clock resumes at the current window. It also emits
`templar.window.opened`, `.closed` and `.settled` events, and shows the network's training at a glance when a window is
settled. Once a minute it sends the alerts `schedule-stalled` and `server-errors` if there is a reason.

Window deployments are those of the three window flows on a resident pool whose neuron has the flow's role.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.deployments import arun_deployment
from prefect.events import emit_event
from prefect.settings import PREFECT_HOME

from blocks.neuron import Neuron
from deployments.options import command_parser
from deployments.prefect_server import SERVER_LOG, repeated_errors
from deployments.schedules import stalled
from deployments.work_pool import API_PATIENCE_SECONDS, is_outage, require_server
from tasks.alerts import Alert, Raised, send
from tasks.glance import network_key, show_network
from tasks.host import load_block
from templar.agreement.genesis import Birth, find_birth
from templar.chain.base import Chain
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.network_view import NetworkView
from templar.hparams import HParams
from templar.interrupt import request_stop
from templar.reports.training_curve import NetworkCurve
from templar.timeline import WindowTimes, closing_block, first_block, window_of

T = TypeVar("T")
log = logging.getLogger(__name__)
WINDOW_FLOWS = {"miner-window": "miner", "validator-window": "validator", "aggregator-window": "aggregator"}
"""Window flow -> the role that it is for."""
RETRY_SECONDS = 2.0
LOOK_SECONDS = 60.0  # between two looks at schedules and at the server's log


@dataclass(frozen=True)
class WindowDeployment:
    """A deployment that runs one window of one neuron."""

    name: str  # `{flow}/{deployment}`
    neuron: str  # name of the neuron's block
    role: str
    hotkey: str  # ss58 address


async def find_deployments(client: PrefectClient) -> tuple[list[WindowDeployment], dict[str, Neuron]]:
    """The window deployments on the server, and the block of each neuron that they run.

    A deployment whose neuron is not there, cannot be opened or has another role is left out, with a warning.
    """
    found: list[WindowDeployment] = []
    neurons: dict[str, Neuron] = {}
    flow_filter = FlowFilter(name=FlowFilterName(any_=list(WINDOW_FLOWS)))
    flows = {flow.id: flow.name for flow in await client.read_flows(flow_filter=flow_filter)}
    for deployment in await client.read_deployments(flow_filter=flow_filter):
        flow = flows[deployment.flow_id]
        pool = await client.read_work_pool(deployment.work_pool_name) if deployment.work_pool_name else None
        if pool is None or pool.type != "resident" or deployment.paused:
            continue
        neuron = str(deployment.parameters.get("neuron", "default"))
        try:
            block = neurons[neuron] if neuron in neurons else await asyncio.to_thread(load_block, neuron)
            if block.role != WINDOW_FLOWS[flow]:
                continue
            hotkey = block.wallet.open().address
        except PermanentError as error:
            log.warning("deployment %s/%s is left out: %s", flow, deployment.name, error)
            continue
        neurons[neuron] = block
        found.append(WindowDeployment(f"{flow}/{deployment.name}", neuron, block.role, hotkey))
    return found, neurons


class WindowClock:
    """Starts window runs and emits window events; `show` gets each settled window, in a thread of its own."""

    def __init__(
        self,
        chain: Chain,
        hparams: HParams,
        *,
        genesis: str,
        start_window: int,
        deployments: Sequence[WindowDeployment],
        show: Callable[[int], None],
    ) -> None:
        self._chain, self._hparams = chain, hparams
        self._genesis, self._start_window = genesis, start_window
        self._deployments, self._show = deployments, show

    async def run(self) -> None:
        """Follow the chain for ever. The first window is started early, so that neurons are ready when it opens."""
        window = max(self._start_window, await self._current_window())
        while True:
            await self.start(window)
            await asyncio.to_thread(self._wait_for, first_block(window, self._hparams.windows))
            self._emit("opened", window)
            ending = asyncio.create_task(self._announce_end(window))
            ending.add_done_callback(_log_failure)
            await asyncio.to_thread(self._wait_for, closing_block(window, self._hparams.windows))
            window = max(window + 1, await self._current_window())

    async def start(self, window: int) -> None:
        """Create the run of a window for every deployment; tries again until the server has taken them all.

        One after the other: SQLite refuses writers that come together, and the client then waits for seconds.
        """
        for deployment in self._deployments:
            await self._start_one(deployment, window)

    async def _start_one(self, deployment: WindowDeployment, window: int) -> None:
        key = f"{self._chain.netuid}/{self._genesis}/{deployment.hotkey}/{deployment.role}/{window}"
        while True:
            try:
                with anyio.fail_after(API_PATIENCE_SECONDS):
                    await arun_deployment(
                        deployment.name,
                        parameters={"window": window, "neuron": deployment.neuron},
                        flow_run_name=f"{deployment.neuron} window {window}",
                        timeout=0,
                        as_subflow=False,
                        idempotency_key=key,
                    )
                log.info("window %d: %s is started", window, deployment.name)
                return
            except Exception as error:
                if not is_outage(error):  # the deployment was deleted or changed: the others continue
                    log.exception("window %d: %s cannot be started", window, deployment.name)
                    return
                log.warning("window %d: %s could not be started yet: %r", window, deployment.name, error)
            if await self._current_window() > window:
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _announce_end(self, window: int) -> None:
        rules = self._hparams.windows
        closing = closing_block(window, rules)
        await asyncio.to_thread(self._wait_for, closing)
        self._emit("closed", window)
        at = partial(self._chain.block_time, finalized=False)
        blocks = first_block(window, rules), closing
        opened, closed = [await asyncio.to_thread(self._patiently, partial(at, block)) for block in blocks]
        settles = WindowTimes(window, opened, closed, rules).settles
        await asyncio.to_thread(self._chain.clock.sleep_until, settles)
        self._emit("settled", window)
        await asyncio.to_thread(self._show, window)

    def _emit(self, what: str, window: int) -> None:
        resource = {"prefect.resource.id": f"templar.subnet.{self._chain.netuid}", "templar.genesis": self._genesis}
        emit_event(f"templar.window.{what}", resource=resource, payload={"window": window})

    def _wait_for(self, block: int) -> None:
        self._patiently(partial(self._chain.wait_for_block, block, finalized=False))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Call the chain, through any outage of it."""
        while True:
            try:
                return call()
            except TransientError as error:
                log.warning("the chain cannot be reached: %s", error)
                self._chain.clock.sleep_until(self._chain.clock.now() + RETRY_SECONDS)

    async def _current_window(self) -> int:
        return window_of(await asyncio.to_thread(self._patiently, self._chain.head), self._hparams.windows)


class ServiceWatch:
    """Sends an alert of what some neurons' Prefect server should do by itself and does not, once as it begins."""

    def __init__(self, neurons: Sequence[str], log: Path | None = None) -> None:
        self._neurons = neurons
        self._log = log or PREFECT_HOME.value() / SERVER_LOG
        self._seen: set[tuple[str, Raised]] = set()
        self._told: set[tuple[str, Raised]] = set()

    def look(self) -> None:
        """Look, and send what was already so at the look before and was not sent yet."""
        now = {
            (neuron, Raised(Alert.SCHEDULE_STALLED, Reason.SCHEDULE_STALLED, line))
            for neuron, line in stalled(self._neurons)
        }
        if errors := repeated_errors(self._log):
            # Without its number of times, which grows: it is one alert.
            text = f"{self._log} repeats an error: {next(iter(errors))}"
            now |= {(neuron, Raised(Alert.SERVER_ERRORS, Reason.SERVER_ERRORS, text)) for neuron in self._neurons}
        for neuron, raised in sorted(now & self._seen - self._told):
            log.warning("%s: %s", neuron, raised.text)
            send(neuron, [raised])
        self._told = now & (self._told | self._seen)
        self._seen = now


async def _keep_looking(watch: ServiceWatch) -> None:
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            await asyncio.to_thread(watch.look)
        except Exception as error:  # noqa: BLE001 - windows are worth more than what is looked at beside them
            log.warning("schedules were not looked at: %r", error)


async def serve() -> None:
    """Find what to start, and follow the network of each neuron; `bad_environment` if there is nothing to start."""

    async def find() -> tuple[list[WindowDeployment], dict[str, Neuron]]:
        await asyncio.to_thread(require_server)
        async with get_client() as client:
            return await find_deployments(client)

    deployments, neurons = await _patiently(find)
    if not deployments:
        problem = "no window deployment of a known neuron on this server: run `templar neuron register` first"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    networks: dict[tuple[Any, ...], list[WindowDeployment]] = defaultdict(list)
    for deployment in deployments:
        block = neurons[deployment.neuron]
        networks[block.subnet.network, block.subnet.netuid, block.preset, block.genesis].append(deployment)
    try:
        following = [_follow(neurons[members[0].neuron], members) for members in networks.values()]
        await asyncio.gather(*following, _keep_looking(ServiceWatch(list(neurons))))
    finally:
        request_stop()  # a thread that waits for a block would keep the process alive


async def _follow(block: Neuron, deployments: Sequence[WindowDeployment]) -> None:
    """Join the network of some deployments, and start their windows for ever."""
    hparams = block.hparams()

    def join() -> tuple[NetworkView, Birth]:
        chain = block.subnet.open(None)
        buckets = Buckets(chain, block.bucket.endpoint.open_reader)
        birth = find_birth(chain, buckets, hparams, pinned=block.genesis or None)
        return NetworkView(chain, buckets, birth.network, hparams), birth

    exchange, birth = await _patiently(lambda: asyncio.to_thread(join))
    chain, genesis, start = exchange.chain, birth.network.genesis, birth.start.start_window
    log.info("network %s of subnet %d starts at window %d", genesis[:12], chain.netuid, start)
    curve = NetworkCurve(exchange, birth, {each.hotkey: each.neuron for each in deployments})
    show = partial(show_network, curve, network_key(chain.netuid, genesis))
    await WindowClock(chain, hparams, genesis=genesis, start_window=start, deployments=deployments, show=show).run()


async def _patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try until server, chain and stores are there."""
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not isinstance(error, TransientError) and not is_outage(error) and not is_outage(error.__cause__):
                raise
            log.warning("not there yet, trying again: %s", error)
        await asyncio.sleep(RETRY_SECONDS)


def _log_failure(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("an event could not be emitted: %s", task.exception())


def main(words: Sequence[str] | None = None) -> int:
    """Run until SIGTERM."""
    parser = command_parser("templar clock", __doc__)
    parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # not a line per request
    with suppress(KeyboardInterrupt):
        asyncio.run(serve())
    return 0
