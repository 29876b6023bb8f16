"""Vectors of aggregation, outer step, transform, state roots, sync proof and learning rates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docs.vectors.scenario import (
    LEARNING_RATES,
    MINER_UIDS,
    NETUID,
    SETTLING_HASH,
    WEIGHT_DECAYS,
    WINDOW,
    genesis_params,
    hotkey,
    layout_of,
    params_after,
    payloads,
    root_after,
    root_before,
    tensor_hex,
    tensors_hex,
)
from templar.agreement.state import genesis_root, next_root, null_root, parameters_digest
from templar.agreement.sync_proof import state_proof
from templar.canonical import keyed_seed
from templar.gradient import Recipe, dct
from templar.gradient.aggregate import aggregate, outer_step, peer_norms, single_update, target_norms
from templar.gradient.codec.wire import encode
from templar.hparams import AdamW, Schedule, load_hparams
from templar.training.schedule import loudest_coefficient, schedule_factor

MOMENTUM_DECAY = 0.95
# Name -> recipe and the limit on coefficients.
_CASES: Mapping[str, tuple[Recipe, float | None]] = {
    "sparseloco": ("sparseloco", None),
    "sparseloco, too loud": ("sparseloco", 0.005),
    "demo": ("demo", None),
}


def aggregate_vectors() -> dict[str, Any]:
    """Three payloads to one update and one outer step, and one payload's update alone; and the transform by itself."""
    return {"cases": {name: _aggregate(*case) for name, case in _CASES.items()}, "dct": _transforms()}


def state_vectors() -> dict[str, Any]:
    """State roots of three windows, of which the second is null, and sync proofs."""
    before, after = parameters_digest(genesis_params()), parameters_digest(params_after("sparseloco"))
    params = params_after("sparseloco")
    first, second = root_after(), null_root(root_after(), WINDOW + 1, after)
    return {
        "netuid": NETUID,
        "parameters": [tensors_hex(genesis_params()), tensors_hex(params)],
        "parameters_digests": [before, after],
        "roots": [
            {"kind": "genesis", "parameters": before, "root": genesis_root(NETUID, before)},
            {
                "kind": "next",
                "window": WINDOW,
                "outer_steps": 1,
                "parameters": after,
                "previous": root_before(),
                "root": first,
            },
            {"kind": "null", "window": WINDOW + 1, "parameters": after, "previous": first, "root": second},
            {
                "kind": "next",
                "window": WINDOW + 2,
                "outer_steps": 2,
                "parameters": before,
                "previous": second,
                "root": next_root(second, WINDOW + 2, 2, before),
            },
        ],
        "proofs": [_proof(params), _proof({"long": torch.arange(200) / 8, "short": torch.arange(6) / 8})],
    }


def schedule_vectors() -> dict[str, Any]:
    """Learning-rate factors at some steps."""
    schedules = {
        "one cosine": Schedule(warmup_steps=10, warmup_start_factor=0.1, t_max=100, eta_min_factor=0.1, restarts=False),
        "restarts": Schedule(warmup_steps=5, warmup_start_factor=0.1, t_max=20, eta_min_factor=0.1, restarts=True),
    }
    steps = (0, 1, 4, 5, 9, 10, 17, 25, 26, 60, 65, 110, 1000)
    adamw = AdamW(learning_rate=0.004, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
    found: dict[str, Any] = {}
    for name, schedule in schedules.items():
        numbers = {"inner_steps": 4, "adamw": adamw, "schedule": schedule, "outer_learning_rate": 0.7}
        training = load_hparams("simulation").training.model_copy(update=numbers)
        loudest = {str(steps): loudest_coefficient(training, MOMENTUM_DECAY, steps) for steps in (0, 2, 5, 40)}
        found[name] = schedule.model_dump() | {
            "factors": {str(step): schedule_factor(schedule, step) for step in steps},
            "training": training.model_dump(include={"inner_steps", "outer_learning_rate"}),
            "learning_rate": adamw.learning_rate,
            "momentum_decay": MOMENTUM_DECAY,
            "loudest": loudest,
        }
    return found


def _proof(params: Mapping[str, Tensor]) -> dict[str, Any]:
    key: dict[str, str | int] = {"window": WINDOW, "block_hash": SETTLING_HASH, "hotkey": hotkey(2).address}
    return key | {
        "parameters": tensors_hex(params),
        "first_draws": [f"{keyed_seed('templar.proof.slice', *key.values(), index):032x}" for index in range(3)],
        "proof": state_proof(params, window=WINDOW, block_hash=SETTLING_HASH, hotkey=hotkey(2).address),
    }


def _aggregate(recipe: Recipe, limit: float | None) -> dict[str, Any]:
    layout, three = layout_of(recipe), payloads(recipe)
    targets, update = target_norms(three, layout, limit), aggregate(three, layout, limit)
    after = genesis_params()
    outer_step(after, update, learning_rate=LEARNING_RATES[recipe], weight_decay=WEIGHT_DECAYS[recipe])
    return {
        "recipe": recipe,
        "payloads": [encode(each, layout).hex() for each in three],
        "squared_norms": {str(uid): norms for uid, norms in zip(MINER_UIDS, peer_norms(three, layout), strict=True)},
        "limit": limit,
        "squared_targets": targets,
        "update": tensors_hex(update),
        "update_of_uid_3": tensors_hex(single_update(three[1], layout, targets)),
        "learning_rate": LEARNING_RATES[recipe],
        "weight_decay": WEIGHT_DECAYS[recipe],
        "parameters_before": tensors_hex(genesis_params()),
        "parameters_after": tensors_hex(after),
    }


def _transforms() -> list[dict[str, Any]]:
    cases: tuple[tuple[int, ...], ...] = ((3,), (8,), (4, 3))
    found = []
    for edges in cases:
        length = int(np.prod(edges))
        chunk = torch.tensor([[((7 * place) % 11 - 5) / 8 for place in range(length)]])
        forward, inverse = dct.forward(chunk, edges), dct.inverse(chunk.to(torch.float64), edges)
        found.append(
            {
                "edges": list(edges),
                "chunk": tensor_hex(chunk),
                "forward": tensor_hex(forward),
                "inverse": inverse.numpy().astype("<f8").tobytes().hex(),
            }
        )
    return found
