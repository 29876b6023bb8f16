"""A network on simulated time whose windows are flow runs in this process, on a real Prefect server."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from prefect import Flow
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import SyncClientContext

from flows.aggregator_window import aggregator_window
from flows.miner_window import miner_window
from flows.validator_window import validator_window
from tasks import host
from templar.neuron.aggregator import RosterNode
from templar.window import drive_window
from tests.support.operator import wait_until

FLOWS: dict[str | None, Flow[..., Any]] = {
    "miner": miner_window,
    "validator": validator_window,
    "aggregator": aggregator_window,
}


@contextmanager
def hosting(name, node):
    """Let this process host a node that the test started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(host._neurons, name, node)
        yield


def run_window(node, window):
    """One window of a node as a flow run; its final state."""
    name = node.name
    with hosting(name, node), SyncClientContext.get_or_create():
        return asyncio.run(FLOWS[node.role](window=window, neuron=name, return_state=True))


def run_windows(network, windows):
    """Windows of all nodes as flow runs, at once; the final states by the nodes' names."""
    windows = list(windows)
    states: dict[str, list[State[Any]]] = defaultdict(list)

    def live(node):
        for window in windows:
            network.to_window(window, node.chain)
            states[node.name].append(run_window(node, window))

    with ExitStack() as stack:
        for name, node in network.nodes.items():
            stack.enter_context(hosting(name, node))
        # Each thread of the clock gets the settings of this one.
        lives: list[Callable[[], None]] = [partial(copy_context().run, live, node) for node in network.nodes.values()]
        network.clock.run(lives)
    return states


def run_beside_publishers(network, node, *windows):
    """Windows of one node as flow runs, one after the other, while aggregators and validators take theirs without."""
    states: list[State[Any]] = []

    def live():
        states.extend(run_window(node, window) for window in windows)

    def publish(publisher):
        for window in range(1, len(windows) + 1):
            drive_window(publisher, window)

    publishers = [partial(publish, publisher) for publisher in network.all(RosterNode)]
    network.clock.run([partial(copy_context().run, live), *publishers])
    return states


def run_id(state):
    assert state.state_details.flow_run_id is not None
    return state.state_details.flow_run_id


def task_runs(client, state, *, at_least):
    """The task runs of a flow run in the order of their start, once the server has heard of their ends."""
    this_run = FlowRunFilter(id=FlowRunFilterId(any_=[run_id(state)]))

    runs: list[TaskRun] = []

    def all_ended():
        runs[:] = client.read_task_runs(flow_run_filter=this_run)
        return len(runs) >= at_least and all(run.state is not None and run.state.is_final() for run in runs)

    wait_until(all_ended, f"{at_least} task runs have ended")
    return sorted(runs, key=lambda run: (run.start_time is None, run.start_time))


def run_flow(flow, neuron, **parameters):
    return asyncio.run(flow(neuron=neuron, return_state=True, **parameters))


def saved(block):
    name = f"changed-{uuid4().hex[:8]}"
    block.save(name)
    return name


def rows_of_table(server, key):
    with server.client() as client:
        rows: list[dict[str, Any]] = json.loads(client.request("GET", f"/artifacts/{key}/latest").json()["data"])
        return rows
