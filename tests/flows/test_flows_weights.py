"""Weights that a chain refuses, as an operator sees them; the window goes on."""

from collections.abc import Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State

from templar.adversary.chains import ChainView
from templar.chain.extrinsics import ExtrinsicRefusedError
from templar.errors import Reason
from templar.neuron.journal import Status
from tests.support.flow_network import run_window, task_runs
from tests.support.memory import folder
from tests.support.network import Network, tiny
from tests.support.prefect_server import RunningPrefectServer

__all__ = ["folder"]

NO_PERMIT = ExtrinsicRefusedError(Reason.CHAIN_REFUSED, "no permit this time", cause=Reason.NO_VALIDATOR_PERMIT)


class RefusingOnce(ChainView):
    """A chain that refuses the first weights."""

    refuses = True

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Refuse them, or set them."""
        if self.refuses:
            self.refuses = False
            raise NO_PERMIT
        super().set_weights(weights)


@pytest.mark.usefixtures("prefect_api")
def test_refused_weights_are_seen_and_block_nothing(folder: Path, prefect_server: RunningPrefectServer) -> None:
    network = Network(folder, tiny(weights={"windows_per_weights": 7}), actors=("honest",), seed=12)
    validator = network.validator
    validator.chain = RefusingOnce(validator.chain)
    validator.journal.enter(0, "weights", '{"window": 0, "weights": {}, "reason": "chain_refused"}')  # still owed
    name = network.name(validator)
    states: list[State[Any]] = []

    def live() -> None:
        for window in (1, 2):
            validator.chain.wait_for_block(window * network.hparams.windows.blocks_per_window)
            states.append(run_window(validator, window))

    network.run([1, 2], but=[name], beside=[partial(copy_context().run, live)])
    first, second = states

    assert first.is_completed()
    assert ", weights refused [no_validator_permit], root " in str(first.message)
    assert network.objects(name, "proof-1-")
    assert validator.journal.status(1) is Status.FINISHED
    with prefect_server.client() as client:
        runs = {run.name: run for run in task_runs(client, first, at_least=12)}
    task = runs["set weights"]
    assert (task.state_name, task.run_count) == ("WeightsRefused", 1)
    assert task.state is not None
    assert str(task.state.message).startswith("window 1 [no_validator_permit] no permit this time")
    assert {run.state_name for name, run in runs.items() if name != "set weights"} == {"Completed"}

    assert ", weights set, root " in str(second.message)
    assert list(network.world.chain.weights()) == [validator.exchange.identity(2).uid]
    network.stop()
