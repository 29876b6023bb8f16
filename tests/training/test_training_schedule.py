"""Learning rates: the reference's known answers."""

import pytest

from templar.hparams import load_hparams
from templar.training import schedule as schedules

DEMO = {0: 4.0e-5, 1: 4.144e-5, 100: 1.84e-4, 249: 3.9856e-4, 250: 4e-4, 1000: 3.98752322e-4, 5250: 3.47279221e-4,
        10250: 2.2e-4, 20249: 4.0000002e-5, 20250: 4e-4, 40250: 2.2e-4, 60250: 4e-4}  # fmt: skip
SPARSELOCO = {0: 1.3e-10, 1: 8.679658e-8, 30: 2.6001274e-6, 750: 6.5000065e-5, 1499: 1.29913334e-4, 1500: 1.3e-4,
              10000: 1.28939061e-4, 71500: 7.15e-5, 141500: 1.3e-5}  # fmt: skip


def test_the_outer_schedule_of_demo():
    training = load_hparams("templar-0.2.82").training
    assert {step: schedules.outer_learning_rate(training, step) for step in DEMO} == pytest.approx(DEMO, rel=2e-8)


def test_the_inner_schedule_of_sparseloco():
    training = load_hparams("templar-2.1.3").training
    rates = {step: schedules.inner_learning_rate(training, step // 30, step % 30) for step in SPARSELOCO}
    assert rates == pytest.approx(SPARSELOCO, rel=1e-7)
    assert [schedules.schedule_factor(training.schedule, step) for step in (141_500, 141_501, 10**9)] == [0.1, 0.1, 0.1]


def test_the_outer_step_of_each_recipe():
    sparseloco = load_hparams("templar-2.1.3").training
    assert {schedules.outer_learning_rate(sparseloco, step) for step in (0, 10, 10**6)} == {1.0}
    demo = load_hparams("templar-0.2.82", overrides={"training": {"weight_decay": 0.1}}).training
    assert schedules.outer_weight_decay(demo) == 0.1
    other = load_hparams("local", overrides={"training": {"weight_decay": 0.1}}).training
    assert schedules.outer_weight_decay(other) == 0.0
