"""The evaluation on a CUDA device; skipped where there is none. `make gpu` runs it."""

import pytest
import torch

from templar.agreement.state import parameters_digest
from templar.hparams import TrainerSettings
from templar.scoring.differences import compare_facts
from templar.scoring.evidence import MeasuredOn
from tests.support.evaluations import evaluator, facts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_device_finds_the_numbers_of_the_cpu_within_the_tolerance(precision):
    settings = TrainerSettings.model_validate({"device": "cuda", "precision": precision, "repeatable": False})
    measuring = evaluator(settings)
    before = parameters_digest(measuring.params)
    found = facts(measuring)
    assert found.measured_on == MeasuredOn(device="cuda", precision=precision, repeatable=False)
    assert compare_facts(found, facts(evaluator(TrainerSettings())), tolerance=None) == ()
    assert parameters_digest(measuring.params) == before
    assert {param.device.type for param in measuring.model.parameters()} == {"cuda"}
    assert {tensor.device.type for tensor in measuring.params.values()} == {"cpu"}
