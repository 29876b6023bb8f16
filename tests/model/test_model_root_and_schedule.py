"""State roots from their description, and learning rates from the reference's known answers."""

import hashlib
import json
import math

import pytest
import torch

from templar.agreement.state import genesis_root, next_root, null_root, parameters_digest
from templar.hparams import Schedule, load_hparams
from templar.training.schedule import inner_learning_rate, outer_learning_rate, outer_weight_decay, schedule_factor

PARAMS = {"b": torch.tensor([[1.0, -2.0], [0.5, 3.25]]), "a": torch.tensor(7.0)}


def stranger_hash(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def stranger_leaf(name: str, shape: list[int], data: bytes) -> str:
    header = {"domain": "templar/tensor/1", "dtype": "float32", "name": name, "shape": shape}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode() + b"\n" + data).hexdigest()


def test_a_stranger_recomputes_the_digest() -> None:
    leaves = [
        stranger_leaf("a", [], bytes.fromhex("0000e040")),
        stranger_leaf("b", [2, 2], bytes.fromhex("0000803f000000c00000003f00005040")),
    ]
    assert parameters_digest(PARAMS) == stranger_hash({"domain": "templar/parameters/1", "leaves": leaves})


def test_a_stranger_recomputes_the_roots() -> None:
    digest = parameters_digest(PARAMS)
    genesis = genesis_root(3, digest)
    assert genesis == stranger_hash({"domain": "templar/root/genesis/1", "netuid": 3, "parameters": digest})
    after = next_root(genesis, 17, 1, digest)
    expected = {"outer_steps": 1, "parameters": digest, "previous": genesis, "window": 17}
    assert after == stranger_hash({"domain": "templar/root/next/1", **expected})
    null = {"parameters": digest, "previous": after, "window": 18}
    assert null_root(after, 18, digest) == stranger_hash({"domain": "templar/root/null/1", **null})


def test_the_digest_sees_every_bit_and_name() -> None:
    digest = parameters_digest(PARAMS)
    changes = [
        {"b": PARAMS["b"]},
        PARAMS | {"c": torch.zeros(1)},
        PARAMS | {"a": torch.tensor([7.0])},
        PARAMS | {"a": torch.tensor(7.0, dtype=torch.float64)},
        PARAMS | {"a": torch.tensor(7.0, dtype=torch.bfloat16)},
        PARAMS | {"b": PARAMS["b"].t().contiguous()},
        PARAMS | {"b": PARAMS["b"].nextafter(torch.tensor(9.0))},
        {"a": PARAMS["b"], "b": PARAMS["a"]},
    ]
    assert len({digest, *map(parameters_digest, changes)}) == len(changes) + 1
    assert parameters_digest({"z": torch.tensor(0.0)}) != parameters_digest({"z": torch.tensor(-0.0)})


def test_the_digest_does_not_depend_on_how_a_tensor_lies_in_memory() -> None:
    transposed = PARAMS["b"].t().contiguous().t()
    assert not transposed.is_contiguous()
    sliced = torch.cat([PARAMS["b"], PARAMS["b"]])[2:].requires_grad_()
    for other in (transposed, sliced):
        assert parameters_digest({"b": other, "a": PARAMS["a"]}) == parameters_digest(PARAMS)


def test_every_step_of_a_history_has_its_own_root() -> None:
    digest = parameters_digest(PARAMS)
    genesis = genesis_root(3, digest)
    roots = {
        genesis,
        genesis_root(4, digest),
        next_root(genesis, 1, 1, digest),
        next_root(genesis, 2, 1, digest),
        next_root(genesis, 1, 2, digest),
        next_root(genesis_root(4, digest), 1, 1, digest),
        null_root(genesis, 1, digest),
        null_root(genesis, 2, digest),
        null_root(genesis, 1, genesis),
    }
    assert len(roots) == 9


DEMO = {0: 4.0e-5, 1: 4.144e-5, 100: 1.84e-4, 249: 3.9856e-4, 250: 4e-4, 1000: 3.98752322e-4, 5250: 3.47279221e-4,
        10250: 2.2e-4, 20249: 4.0000002e-5, 20250: 4e-4, 40250: 2.2e-4, 60250: 4e-4}  # fmt: skip
SPARSELOCO = {0: 1.3e-10, 1: 8.679658e-8, 30: 2.6001274e-6, 750: 6.5000065e-5, 1499: 1.29913334e-4, 1500: 1.3e-4,
              10000: 1.28939061e-4, 71500: 7.15e-5, 141500: 1.3e-5}  # fmt: skip


@pytest.mark.parametrize(("step", "rate"), DEMO.items())
def test_the_outer_schedule_of_demo(step: int, rate: float) -> None:
    training = load_hparams("templar-0.2.82").training
    assert outer_learning_rate(training, step) == pytest.approx(rate, rel=2e-8)


@pytest.mark.parametrize(("step", "rate"), SPARSELOCO.items())
def test_the_inner_schedule_of_sparseloco(step: int, rate: float) -> None:
    training = load_hparams("templar-2.1.3").training
    assert inner_learning_rate(training, step // 30, step % 30) == pytest.approx(rate, rel=1e-7)


def test_one_cosine_stays_at_its_foot() -> None:
    schedule = load_hparams("templar-2.1.3").training.schedule
    assert [schedule_factor(schedule, step) for step in (141_500, 141_501, 10**9)] == [0.1, 0.1, 0.1]


def test_restarts_double_their_period() -> None:
    schedule = Schedule(warmup_steps=0, warmup_start_factor=0.1, t_max=3, eta_min_factor=0.0, restarts=True)
    factors = [schedule_factor(schedule, step) for step in range(22)]
    assert [step for step, factor in enumerate(factors) if factor == 1.0] == [0, 3, 9, 21]


def test_the_cosine_is_accurate() -> None:
    schedule = Schedule(warmup_steps=0, warmup_start_factor=0.1, t_max=9973, eta_min_factor=0.0, restarts=False)
    for step in range(0, 9974, 7):
        assert abs(schedule_factor(schedule, step) - (1 + math.cos(math.pi * step / 9973)) / 2) < 1e-15


def test_the_outer_step_of_each_recipe() -> None:
    sparseloco = load_hparams("templar-2.1.3").training
    assert {outer_learning_rate(sparseloco, step) for step in (0, 10, 10**6)} == {1.0}
    demo = load_hparams("templar-0.2.82", overrides={"training": {"weight_decay": 0.1}}).training
    assert outer_weight_decay(demo) == 0.1
    other = load_hparams("local", overrides={"training": {"weight_decay": 0.1}}).training
    assert outer_weight_decay(other) == 0.0
