"""The outer step: unfused, in place, and all or nothing."""

import numpy as np
import pytest
import torch

from templar.gradient.aggregate import outer_step


def test_outer_step_in_unfused_float32() -> None:
    generator = np.random.default_rng(1)
    theta, direction = (generator.standard_normal(999).astype(np.float32) for _ in range(2))
    rate, decay = np.float32(0.4e-3), np.float32(1 - 0.4e-3 * 0.1)
    params = {"p": torch.from_numpy(theta.copy())}
    outer_step(params, {"p": torch.from_numpy(direction)}, learning_rate=0.4e-3, weight_decay=0.1)
    expected = theta * decay - rate * direction
    fused = (theta.astype(np.float64) * decay - np.float64(rate) * direction).astype(np.float32)
    assert np.array_equal(params["p"].numpy(), expected)
    assert not np.array_equal(expected, fused)


def test_outer_step_moves_models_parameters_in_place() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    params = dict(layer.named_parameters())
    outer_step(params, {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, learning_rate=0.5, weight_decay=0.0)
    assert torch.equal(layer.weight.detach(), before - 0.5)


@pytest.mark.parametrize(
    "update",
    [
        {"p": torch.ones(2), "q": torch.ones(2)},
        {},
        {"p": torch.ones(3)},
        {"p": torch.ones(2, dtype=torch.float64)},
    ],
)
def test_outer_step_changes_all_or_nothing(update: dict) -> None:
    params = {"p": torch.ones(2)}
    with pytest.raises(ValueError, match=r"names|one shape"):
        outer_step(params, update, learning_rate=1.0, weight_decay=0.5)
    assert params["p"].tolist() == [1.0, 1.0]
