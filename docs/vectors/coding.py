"""Vectors of what a payload is made from: steps of scales, signs, index planes, transform and error feedback."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from docs.vectors.scenario import LEARNING_RATES, gradient_settings, header, layout_of, tensors_hex
from templar.gradient.codec.planes import encode_indices
from templar.gradient.codec.values import MAX_STEP, SIGNIFICANDS, STEP_QUANTA, STEP_VALUES, SignAndScale, nearest_steps
from templar.gradient.codec.wire import Payload, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout, TensorLayout

# Magnitude -0.0 is no negative number; the second chunk of a tensor is written beside the first.
_CODED: tuple[tuple[str, list[list[float]]], ...] = (
    ("the mean magnitude", [[4.0, -1.0, 1.0, -2.0], [0.5, 0.5, -0.0, 0.0]]),
    ("a mean of 255 steps below the largest is silence", [[1.0] * 4, [4.2e-7] * 4, [-4.0e-7] * 4]),
    ("out of range", [[1e6] * 4]),
    ("nothing at all", [[0.0, -0.0, 0.0, -0.0], [1e-12] * 4]),
    ("a single coefficient", [[3.0], [-0.1]]),
)

# chunk length, k, ascending indices of each chunk
_INDICES: tuple[tuple[int, int, list[list[int]]], ...] = (
    (12, 2, [[0, 5], [3, 11]]),
    (3, 2, [[0, 2]]),
    (256, 4, [[0, 1, 2, 3], [252, 253, 254, 255], [17, 64, 128, 200]]),
    (4096, 1, [[0], [4095], [2047]]),
    (4096, 3, [[1000, 2000, 3000], [5, 4094, 4095], [0, 1, 2], [4093, 4094, 4095]]),
)


def value_code_vectors() -> dict[str, Any]:
    """Mean magnitudes and the nearest steps: ties, and both ends of the range."""
    tie = (271 + 287) / 2 * 2.0**-12  # between steps 386 and 387
    means = [0.0, 2.0**-38, 2.0**-37, math.nextafter(2.0**-37, 1), 2.0**-36, 1e-8, 0.1]
    means += [math.nextafter(tie, 0), tie, math.nextafter(tie, 1), 1.0, 1.0303, 3.14159]
    means += [(912 + 966) / 2, math.nextafter((912 + 966) / 2, 1e9), 966.0, 1e9]
    steps = nearest_steps(torch.tensor(means, dtype=torch.float64)).tolist()
    rows = [
        {"mean": mean, "step": step, "quanta": int(STEP_QUANTA[step]), "scale": float(STEP_VALUES[step])}
        for mean, step in zip(means, steps, strict=True)
    ]
    return {"significands": list(SIGNIFICANDS), "max_step": MAX_STEP, "means": rows}


def coding_vectors() -> list[dict[str, Any]]:
    """Chosen coefficients of one tensor, a row for each chunk, and what is written of them."""
    found = []
    for what, rows in _CODED:
        values, coding = torch.tensor(rows), SignAndScale()
        coded = coding.encode(torch.arange(values.shape[1]).expand(values.shape), values)
        written = {"steps": coded.steps.tolist(), "received": coding.decode(coded).tolist()}
        found.append({"what": what, "values": values.tolist(), **written})
    return found


def rice_vectors() -> list[dict[str, Any]]:
    """Indices of some chunks and their two planes."""
    found = []
    for length, k, indices in _INDICES:
        tensor = TensorLayout("tensor", (len(indices) * length,), (length,), k)
        remainders, quotients = encode_indices(np.array(indices, np.uint16), tensor)
        found.append(
            {
                "chunk_length": length,
                "k": k,
                "rice_parameter": tensor.remainder_bits,
                "indices": indices,
                "remainders": remainders.hex(),
                "quotients": quotients.hex(),
                "max_quotient_bits": tensor.max_quotient_bits,
            }
        )
    return found


def compression_vectors() -> list[dict[str, Any]]:
    """Two windows of a miner: what it publishes of its updates and what it keeps."""
    with_dct = Layout.of(
        {tensor.name: tensor.shape for tensor in layout_of("demo").tensors},
        gradient_settings(use_dct=True),
        "sparseloco",
    )
    return [
        _compression(layout_of("sparseloco"), calls_before=0),
        _compression(with_dct, calls_before=0),
        _compression(layout_of("demo"), calls_before=4),
    ]


def _compression(layout: Layout, *, calls_before: int) -> dict[str, Any]:
    rule = FeedbackRule(
        layout.recipe, gradient_settings(use_dct=layout.use_dct).momentum_decay, LEARNING_RATES[layout.recipe]
    )
    state = FeedbackState(FeedbackState.zeros(layout).buffers, calls_before)
    windows = []
    for window in (1, 2):
        update = _update(window)
        done = compress(state, update, layout=layout, rule=rule)
        state = done.state
        data = encode(Payload.of(header(2, layout, window), done.tensors, layout), layout)
        windows.append({"update": tensors_hex(update), "payload": data.hex(), "residual": tensors_hex(state.buffers)})
    settings = {"recipe": layout.recipe, "use_dct": layout.use_dct}
    feedback = {"calls_before": calls_before, "decay": rule.decay, "learning_rate": rule.learning_rate}
    return settings | feedback | {"windows": windows}


def _update(window: int) -> dict[str, Tensor]:
    return {
        "bias": torch.tensor([0.5, -0.0, -0.5, 0.25, 0.0, 0.125]) * window,
        "gain": torch.tensor([0.0625, -0.75]) / window,
        "weight": torch.tensor([((37 * place + 11 * window) % 29 - 14) / 16 for place in range(24)]).reshape(4, 6),
    }
