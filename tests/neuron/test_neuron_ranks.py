"""A miner that trains on two ranks: a rank that dies costs one window."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from torch import Tensor

from templar.hparams import TrainerSettings
from templar.neuron.configuration import NeuronConfig
from templar.neuron.miner import Miner
from templar.training.ranks import RankedTrainer
from templar.training.train import TrainResult
from tests.support.network import Network, tiny

RANKS = TrainerSettings(ranks=2, micro_batch="auto", repeatable=False)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # two groups are started: a minute


class RankedMiner(Miner):
    """Trains on two ranks, one of which is killed in window 2."""

    def __init__(self, config: NeuronConfig) -> None:
        super().__init__(replace(config, trainer=RANKS))

    def learn(self, window: int, sequences: Tensor, keep_going: Callable[[], bool]) -> TrainResult:
        def kill_and_go_on() -> bool:
            if window == 2:
                self.processes()[1].kill()
            return keep_going()

        return super().learn(window, sequences, kill_and_go_on)

    def processes(self) -> list[psutil.Process]:
        """The ranks."""
        assert isinstance(self.trainer, RankedTrainer)
        assert self.trainer.group is not None
        return [self.trainer.group.processes[number] for number in range(2)]


@pytest.mark.long
def test_a_rank_that_dies_costs_one_window(tmp_path: Path) -> None:
    network = Network(tmp_path, tiny(), actors=("honest",), kinds={"honest": RankedMiner})
    try:
        miner = network.all(RankedMiner)[0]
        network.run([1, 2, 3])
        uid = miner.exchange.identity(1).uid
        assert [uid in {entry.uid for entry in network.roster(window).entries} for window in (1, 3)] == [True, True]
        assert network.roster(2) is None or not network.roster(2).entries
        assert [len(network.roots(window)) for window in (1, 2, 3)] == [1, 1, 1]
        assert None not in network.roots(3)
        processes = miner.processes()
    finally:
        network.stop()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert not (miner.home / "ranks").exists()
