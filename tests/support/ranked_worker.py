"""`prefect`, in a process whose neuron trains on ranks of `tests.support.faulty_rank` with a short watchdog."""

from pathlib import Path

from prefect.cli import app

from templar.hparams import Model, TrainerSettings
from templar.neuron import miner
from templar.training.ranks import RankedTrainer

WATCHDOG_SECONDS = 1.0


def open_faulty(model: Model, settings: TrainerSettings, folder: Path) -> RankedTrainer:
    """What a miner opens here."""
    assert settings.ranks == 2, settings
    return RankedTrainer(
        model, settings, folder, watchdog_seconds=WATCHDOG_SECONDS, rank_module="tests.support.faulty_rank"
    )


if __name__ == "__main__":
    miner.open_trainer = open_faulty
    app()
