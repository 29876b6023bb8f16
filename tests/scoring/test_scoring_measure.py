import math

import numpy as np
import pytest
import torch
from torch import Tensor

from templar.hparams import load_hparams
from templar.model.llama import build_model, load_parameters, parameters_of
from templar.model.loss import sequence_losses
from templar.model.root import parameters_digest
from templar.scoring.measure import Evaluator
from templar.scoring.plan import SPARE, EvaluationPlan, SequenceRef

MODEL = load_hparams("simulation").model
MICRO_BATCH = 2
RNG = np.random.default_rng(3)
SEQUENCES = {uid: RNG.integers(0, MODEL.vocab_size, (6, 16), dtype=np.int32) for uid in (4, 9, SPARE)}
PLAN = EvaluationPlan(
    own={4: (SequenceRef(4, 0), SequenceRef(4, 3), SequenceRef(4, 5)), 9: (SequenceRef(9, 1),)},
    random={4: (SequenceRef(9, 1), SequenceRef(SPARE, 2)), 9: (SequenceRef(SPARE, 0), SequenceRef(SPARE, 2))},
)


@pytest.fixture
def params() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in parameters_of(build_model(MODEL)).items()}


def evaluator(params: dict[str, Tensor], plan: EvaluationPlan = PLAN) -> Evaluator:
    return Evaluator(build_model(MODEL), params, SEQUENCES, plan, micro_batch_size=MICRO_BATCH)


def update(seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * scale
        for name, tensor in parameters_of(build_model(MODEL)).items()
    }


def mean_loss(params: dict[str, Tensor], refs: tuple[SequenceRef, ...]) -> float:
    model = build_model(MODEL)
    load_parameters(model, params)
    tokens = torch.from_numpy(np.stack([SEQUENCES[ref.uid][ref.index] for ref in refs]))
    return float(np.mean(sequence_losses(model, tokens, micro_batch_size=1).numpy()))


def test_losses_before_and_after_are_those_of_the_two_models(params: dict[str, Tensor]) -> None:
    step = update(1)
    moved = {name: tensor - 0.5 * step[name] for name, tensor in params.items()}
    measured = evaluator(params).measure(4, step, 0.5)
    assert measured.own_before == pytest.approx(mean_loss(params, PLAN.own[4]), rel=1e-6)
    assert measured.random_before == pytest.approx(mean_loss(params, PLAN.random[4]), rel=1e-6)
    assert measured.own_after == pytest.approx(mean_loss(moved, PLAN.own[4]), rel=1e-6)
    assert measured.random_after == pytest.approx(mean_loss(moved, PLAN.random[4]), rel=1e-6)
    assert measured.own_after != measured.own_before


def test_measuring_never_touches_the_agreed_parameters(params: dict[str, Tensor]) -> None:
    before = parameters_digest(params)
    measuring = evaluator(params)
    for seed, factor in ((1, 0.5), (2, 1e30), (3, float("nan"))):
        measuring.measure(4, update(seed), factor)
    assert parameters_digest(params) == before
    assert measuring.loss is not None


def test_one_measurement_does_not_depend_on_those_before_it(params: dict[str, Tensor]) -> None:
    measuring = evaluator(params)
    alone = evaluator(params).measure(9, update(2), 0.2)
    measuring.measure(4, update(1, scale=100.0), 1.0)
    measuring.measure(4, {name: torch.full_like(tensor, math.inf) for name, tensor in params.items()}, 1.0)
    assert measuring.measure(9, update(2), 0.2) == alone


def test_an_empty_update_changes_no_loss(params: dict[str, Tensor]) -> None:
    """Up to the last bits: a sequence stands in another place of another batch."""
    nothing = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    measured = evaluator(params).measure(4, nothing, 1.0)
    assert measured.own_after == pytest.approx(measured.own_before, rel=1e-6)
    assert measured.random_after == pytest.approx(measured.random_before, rel=1e-6)


def test_a_loss_that_is_not_finite_is_none(params: dict[str, Tensor]) -> None:
    broken = {name: torch.full_like(tensor, math.nan) for name, tensor in params.items()}
    measured = evaluator(params).measure(4, broken, 1.0)
    assert (measured.own_after, measured.random_after) == (None, None)
    assert measured.own_before is not None
    assert evaluator(broken).loss is None


def test_the_loss_is_the_mean_over_the_batch(params: dict[str, Tensor]) -> None:
    assert evaluator(params).loss == pytest.approx(mean_loss(params, PLAN.batch), rel=1e-6)


def test_nothing_to_measure_is_none(params: dict[str, Tensor]) -> None:
    empty = EvaluationPlan(own={4: ()}, random={4: ()})
    assert evaluator(params, empty).loss is None
    measured = evaluator(params, empty).measure(4, update(1), 1.0)
    assert set(measured.model_dump().values()) == {None}
