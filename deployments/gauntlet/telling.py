"""Nodes in threads of this process, each of whose windows is told by the flow of its role.

Many runs start in the same second, more than SQLite takes at once. Prefect's own client waits for a server that refuses
until half of a window is over, so the one used here asks again at once.
"""

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any

import httpx
from prefect import Flow
from prefect.client.schemas.objects import State
from prefect.context import AsyncClientContext, SyncClientContext

from flows.aggregator_window import aggregator_window
from flows.miner_window import miner_window
from flows.validator_window import validator_window
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.validator import Validator

FLOWS: Mapping[type[Node], Flow[..., Any]] = {
    Miner: miner_window,
    Validator: validator_window,
    Aggregator: aggregator_window,
}
ASK_AGAIN, PAUSE_SECONDS = 50, 0.2
"""How often a busy server is asked again, and the mean pause, before the client takes over."""


class PromptTransport(httpx.HTTPTransport):
    """Asks a busy server again at once."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        for _ in range(ASK_AGAIN):
            response = super().handle_request(request)
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return response
            response.close()
            time.sleep(_pause())
        return super().handle_request(request)


class PromptAsyncTransport(httpx.AsyncHTTPTransport):
    """Asks a busy server again at once."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request."""
        for _ in range(ASK_AGAIN):
            response = await super().handle_async_request(request)
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return response
            await response.aclose()
            await asyncio.sleep(_pause())
        return await super().handle_async_request(request)


def tell(node: Node, window: int) -> State[Any]:
    """One window of a node that is hosted in this process, as a flow run; its final state."""
    flow = next(flow for kind, flow in FLOWS.items() if isinstance(node, kind))

    async def run() -> State[Any]:
        async with AsyncClientContext(httpx_settings={"transport": PromptAsyncTransport()}):
            told: Any = flow(window=window, neuron=node.name, return_state=True)
            state: State[Any] = await told
            return state

    with SyncClientContext(httpx_settings={"transport": PromptTransport()}):  # one client for all the tasks of the run
        return asyncio.run(run())


def _pause() -> float:
    return random.uniform(0, 2 * PAUSE_SECONDS)
