"""Vectors of payloads, aggregation, outer step, state roots, sync proof and learning rates."""

import struct
import zlib
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
    gradient_settings,
    hotkey,
    layout_of,
    params_after,
    payload,
    payloads,
    root_after,
    root_before,
    tensor_hex,
    tensors_hex,
)
from templar.canonical import keyed_seed, sha256_hex
from templar.errors import Reason, RejectedError
from templar.exchange.proof import state_proof
from templar.gradient import Recipe, dct
from templar.gradient.aggregate import aggregate, median_norms, peer_norms
from templar.gradient.feedback import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.gradient.payload import Header, Payload
from templar.gradient.values import SIGN_AND_SCALE, scale_codes, scale_quanta, scale_values
from templar.gradient.wire import decode, encode
from templar.hparams import Schedule
from templar.model.root import genesis_root, next_root, null_root, parameters_digest
from templar.model.schedule import schedule_factor

# What is wrong, where the bytes are changed, to what, and whether the checksum is made right again. The payload is that
# of uid 2: header, 96 bytes; "bias" with scales at 96, indices at 100 and signs at 108; "weight" at 110, 114 and 122.
_DAMAGES: tuple[tuple[str, int, str, bool], ...] = (
    ("another magic", 0, "54504c51", True),
    ("version 2", 4, "0200", True),
    ("another layout", 16, "00", True),
    ("no hotkey", 48, "00" * 48, True),
    ("a wrong checksum", 100, "0100", False),
    ("a scale of NaN", 96, "c07f", True),
    ("a scale below 2^-37", 96, "ff2c", True),
    ("an index beyond the chunk", 102, "0300", True),
    ("indices that do not ascend", 100, "02000000", True),
    ("a silent chunk with a sign", 108, "06", True),
    ("a silent chunk with other indices", 104, "01000200", True),
    ("a bit after the last sign", 109, "80", True),
)


def payload_vectors() -> dict[str, Any]:
    """One payload byte by byte, what makes it illegal, and the value code."""
    layout, one = layout_of("sparseloco"), payload(2, "sparseloco")
    data = encode(one, layout)
    return {
        "layout": _layout(layout),
        "layout_with_dct": _layout(layout_of("demo")),
        "payload": {
            "hex": data.hex(),
            "sha256": sha256_hex(data),
            "bytes": len(data),
            "header": {"window": one.header.window, "uid": one.header.uid, "hotkey": one.header.hotkey},
            "tensors": {
                name: {
                    "scale_codes": part.scales.tolist(),
                    "scales": scale_values(part.scales).tolist(),
                    "indices": part.indices.tolist(),
                    "values": SIGN_AND_SCALE.decode(part).tolist(),
                }
                for name, part in one.tensors.items()
            },
        },
        "rejected": [_rejection(data, layout, damage) for damage in _DAMAGES],
        "value_code": _value_codes(),
        "compression": _compression(layout),
    }


def aggregate_vectors() -> dict[str, Any]:
    """Three payloads to one update and one outer step, for both recipes; and the transform by itself."""
    return {"recipes": {recipe: _aggregate(recipe) for recipe in LEARNING_RATES}, "dct": _transforms()}


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
    return {
        name: schedule.model_dump() | {"factors": {str(step): schedule_factor(schedule, step) for step in steps}}
        for name, schedule in schedules.items()
    }


def _proof(params: Mapping[str, Tensor]) -> dict[str, Any]:
    key: dict[str, str | int] = {"window": WINDOW, "block_hash": SETTLING_HASH, "hotkey": hotkey(2).address}
    return key | {
        "parameters": tensors_hex(params),
        "first_draws": [f"{keyed_seed('templar.proof.slice', *key.values(), index):032x}" for index in range(3)],
        "proof": state_proof(params, window=WINDOW, block_hash=SETTLING_HASH, hotkey=hotkey(2).address),
    }


def _layout(layout: Layout) -> dict[str, Any]:
    tensors = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "edges": list(tensor.edges),
            "k": tensor.k,
            "chunks": tensor.num_chunks,
            "section_bytes": tensor.section_bytes,
        }
        for tensor in layout.tensors
    ]
    sizes = {"payload_bytes": layout.max_payload_bytes, "digest": layout.digest}
    return {"target_chunk": 4, "topk_compression": 2, "use_dct": layout.use_dct, "tensors": tensors} | sizes


def _rejection(data: bytes, layout: Layout, damage: tuple[str, int, str, bool]) -> dict[str, Any]:
    what, offset, new, fix = damage
    changed = bytearray(data)
    changed[offset : offset + len(new) // 2] = bytes.fromhex(new)
    if fix:
        changed[-4:] = struct.pack("<I", zlib.crc32(changed[:-4]))
    reason: Reason | None = None
    try:
        decode(bytes(changed), layout)
    except RejectedError as error:
        reason = error.reason
    return {"what": what, "offset": offset, "new": new, "checksum_made_right": fix, "reason": reason}


def _value_codes() -> list[dict[str, Any]]:
    means = np.array([0.0, 2.0**-38, 2.0**-37, 1e-8, 0.1, 1.0, 1.00390625, 1.01171875, 3.14159, 1020.0, 1e9])
    codes = scale_codes(means)
    rows = zip(means.tolist(), codes.tolist(), scale_values(codes).tolist(), scale_quanta(codes).tolist(), strict=True)
    return [{"mean": mean, "code": code, "scale": scale, "quanta": quanta} for mean, code, scale, quanta in rows]


def _compression(layout: Layout) -> dict[str, Any]:
    """Two windows of a miner: what it publishes of its updates and what it keeps."""
    rule = FeedbackRule("sparseloco", gradient_settings(use_dct=False).momentum_decay, LEARNING_RATES["sparseloco"])
    state = FeedbackState.zeros(layout)
    windows = []
    for window in (1, 2):
        update = {
            "bias": torch.tensor([0.5, -0.0, -0.5, 0.25, 0.0, 0.125]) * window,
            "weight": torch.tensor([((37 * place + 11 * window) % 29 - 14) / 16 for place in range(24)]).reshape(4, 6),
        }
        done = compress(state, update, layout=layout, rule=rule, coding=SIGN_AND_SCALE)
        state = done.state
        data = encode(Payload(Header(window, 2, hotkey(2).address, layout.digest), done.tensors), layout)
        windows.append({"update": tensors_hex(update), "payload": data.hex(), "residual": tensors_hex(state.buffers)})
    return {"decay": rule.decay, "learning_rate": rule.learning_rate, "windows": windows}


def _aggregate(recipe: Recipe) -> dict[str, Any]:
    layout, three = layout_of(recipe), payloads(recipe)
    return {
        "payloads": [encode(each, layout).hex() for each in three],
        "squared_norms": {str(uid): norms for uid, norms in zip(MINER_UIDS, peer_norms(three, layout), strict=True)},
        "squared_medians": median_norms(three, layout),
        "update": tensors_hex(aggregate(three, layout, recipe)),
        "learning_rate": LEARNING_RATES[recipe],
        "weight_decay": WEIGHT_DECAYS[recipe],
        "parameters_before": tensors_hex(genesis_params()),
        "parameters_after": tensors_hex(params_after(recipe)),
    }


def _transforms() -> list[dict[str, Any]]:
    cases: tuple[tuple[int, ...], ...] = ((3,), (4, 3))
    found = []
    for edges in cases:
        length = int(np.prod(edges))
        chunk = torch.tensor([[((7 * place) % 11 - 5) / 8 for place in range(length)]])
        forward, inverse = dct.forward(chunk, edges), dct.inverse(chunk.to(torch.float64), edges)
        found.append(
            {
                "edges": list(edges),
                "chunk": tensor_hex(chunk),
                "forward": forward.numpy().astype("<f8").tobytes().hex(),
                "inverse": inverse.numpy().astype("<f8").tobytes().hex(),
            }
        )
    return found
