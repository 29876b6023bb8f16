"""Learning rates: the reference's known answers."""

import math

import pytest

from templar.hparams import Schedule, load_hparams
from templar.training.schedule import (
    inner_learning_rate,
    loudest_coefficient,
    outer_learning_rate,
    outer_weight_decay,
    schedule_factor,
)

DEMO = {0: 4.0e-5, 1: 4.144e-5, 100: 1.84e-4, 249: 3.9856e-4, 250: 4e-4, 1000: 3.98752322e-4, 5250: 3.47279221e-4,
        10250: 2.2e-4, 20249: 4.0000002e-5, 20250: 4e-4, 40250: 2.2e-4, 60250: 4e-4}  # fmt: skip
SPARSELOCO = {0: 1.3e-10, 1: 8.679658e-8, 30: 2.6001274e-6, 750: 6.5000065e-5, 1499: 1.29913334e-4, 1500: 1.3e-4,
              10000: 1.28939061e-4, 71500: 7.15e-5, 141500: 1.3e-5}  # fmt: skip


def test_the_outer_schedule_of_demo():
    training = load_hparams("templar-0.2.82").training
    assert {step: outer_learning_rate(training, step) for step in DEMO} == pytest.approx(DEMO, rel=2e-8)


def test_the_inner_schedule_of_sparseloco():
    training = load_hparams("templar-2.1.3").training
    rates = {step: inner_learning_rate(training, step // 30, step % 30) for step in SPARSELOCO}
    assert rates == pytest.approx(SPARSELOCO, rel=1e-7)
    assert [schedule_factor(training.schedule, step) for step in (141_500, 141_501, 10**9)] == [0.1, 0.1, 0.1]


def test_restarts_double_their_period():
    schedule = Schedule(warmup_steps=0, warmup_start_factor=0.1, t_max=3, eta_min_factor=0.0, restarts=True)
    factors = [schedule_factor(schedule, step) for step in range(22)]
    assert [step for step, factor in enumerate(factors) if factor == 1.0] == [0, 3, 9, 21]


def test_the_cosine_is_accurate():
    schedule = Schedule(warmup_steps=0, warmup_start_factor=0.1, t_max=9973, eta_min_factor=0.0, restarts=False)
    for step in range(0, 9974, 7):
        assert abs(schedule_factor(schedule, step) - (1 + math.cos(math.pi * step / 9973)) / 2) < 1e-15


def test_a_payload_is_no_louder_than_all_that_its_miner_can_have_learnt():
    training = load_hparams("templar-2.1.3").training
    first, last = loudest_coefficient(training, 0.95, 0), loudest_coefficient(training, 0.95, 60)
    assert first == pytest.approx(20 * sum(inner_learning_rate(training, 0, step) for step in range(30)))
    assert last == pytest.approx(20 * 30 * 1.3e-4, rel=1e-3), "after the warm-up"
    assert loudest_coefficient(training, 0.8, 60) == pytest.approx(last / 4)
    assert loudest_coefficient(load_hparams("templar-0.2.82").training, 0.95, 60) is None, "its steps are signs"


def test_the_outer_step_of_each_recipe():
    sparseloco = load_hparams("templar-2.1.3").training
    assert {outer_learning_rate(sparseloco, step) for step in (0, 10, 10**6)} == {1.0}
    demo = load_hparams("templar-0.2.82", overrides={"training": {"weight_decay": 0.1}}).training
    assert outer_weight_decay(demo) == 0.1
    other = load_hparams("local", overrides={"training": {"weight_decay": 0.1}}).training
    assert outer_weight_decay(other) == 0.0
