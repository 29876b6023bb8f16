"""The neurons that live in this process, by name.

A neuron is built from its block once per process and stays: model, optimizer and error feedback survive from window to
window. A new process restores the neuron from its snapshot and journal.
"""

import atexit
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from blocks.env_file import read_environment
from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron, load_saved
from tasks.sinks.attached import attach, detach, publish
from tasks.sinks.sending import Identity
from templar.errors import PermanentError, Reason
from templar.neuron.lock import LastRun
from templar.neuron.node import Node
from templar.reports.metrics import condition_of

N = TypeVar("N", bound=Node)

_neurons: dict[str, Node] = {}
_lock = threading.Lock()


def hosted(name: str, kind: type[N]) -> N:
    """The live neuron of this name; built and started by the first call.

    Raises:
        PermanentError: `bad_environment` (no such block, or a neuron of another role), `already_running`,
            `not_registered`, ...: the neuron cannot start.
        TransientError: Chain or stores could not be reached, or the network has not started.
    """
    with _lock:
        if name not in _neurons:
            node = _neurons[name] = load_block(name).build(name)
            network, hotkey = node.birth.network, node.exchange.own_signer.address
            who = Identity(name, node.role or "observer", network.netuid, network.genesis, hotkey)
            attach(who, node.home, os.environ)
            LastRun(node.state.window, node.state.root, time.time()).save(node.home)
        node = _neurons[name]
    if not isinstance(node, kind):
        raise PermanentError(
            Reason.BAD_ENVIRONMENT,
            f"neuron {name!r} is a {type(node).__name__}, this flow is for a {kind.__name__}: run the flow of its role",
        )
    return node


def current(name: str) -> Node | None:
    """The live neuron of this name, if there is one."""
    with _lock:
        return _neurons.get(name)


def load_block(name: str) -> Neuron:
    """The saved settings of a neuron; of `default`, if none were saved, those of the environment and `./.env`.

    `bad_environment` if there are neither, or another release saved them.
    """

    def of_environment() -> Neuron | None:
        environment = read_environment() if name == "default" else {}
        return neuron_from_environment(environment) if "TEMPLAR_ROLE" in environment else None

    remedy = f"check .env, then run `templar neuron register --name {name}`"
    return load_saved(Neuron, name, remedy=remedy, instead=of_environment)


def release(name: str) -> None:
    """Stop a neuron and forget it; a later `hosted` starts it again."""
    with _lock:
        node = _neurons.pop(name, None)
    if node is not None:
        node.stop()
        detach(name)


@contextmanager
def release_on_lost_lease(name: str) -> Iterator[None]:
    """Stop a neuron whose lease another process took; the next window starts it again, once that lease has ended."""
    try:
        yield
    except PermanentError as error:
        if error.reason is Reason.LEASE_LOST:
            if (node := current(name)) is not None:
                publish(name, condition_of(node, node.state.window))
            release(name)
        raise


@atexit.register
def release_leases() -> None:
    """Give the leases back when the process ends, so that other machines can start; after a kill they expire."""
    for node in tuple(_neurons.values()):
        node.release_lease()
