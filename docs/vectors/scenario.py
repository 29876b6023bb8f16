"""The tiny network of the test vectors: who is on it, its model, its payloads, its first window.

Three tensors, one validator, three miners. Every value is written out or follows from the library, never from a clock
or a random number, so the vectors are the same on every machine.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lab.hotkeys import hotkey_from_seed
from templar.agreement.state import genesis_root, next_root, parameters_digest
from templar.chain.hotkey import Hotkey
from templar.gradient import Recipe
from templar.gradient.aggregate import aggregate, outer_step
from templar.gradient.codec.values import Coefficients
from templar.gradient.codec.wire import Header, Payload
from templar.gradient.layout import Layout
from templar.hparams import Gradient, Windows
from templar.timeline import WindowTimes

NETUID = 1
WINDOW = 1
VALIDATOR_UID = 1
MINER_UIDS = (2, 3, 4)
SHAPES: Mapping[str, tuple[int, ...]] = {"bias": (6,), "gain": (2,), "weight": (4, 6)}
OPENING_HASH = "0x" + "1d" * 32
"""Hash of the window's first block."""
SETTLING_HASH = "0x" + "5e" * 32
"""Hash of the block that settles the window."""
LEARNING_RATES: Mapping[Recipe, float] = {"sparseloco": 0.9, "demo": 0.0004}
WEIGHT_DECAYS: Mapping[Recipe, float] = {"sparseloco": 0.0, "demo": 0.1}

RULES = Windows(
    blocks_per_window=18,
    block_seconds=1.0,
    commit_guard_seconds=1,
    time_window_delta_seconds=2,
    read_margin_seconds=1,
    roster_slot_seconds=2,
    roster_ranks=2,
    quorum=0.5,
    train_margin_seconds=1.5,
)
TIMES = WindowTimes(WINDOW, opened=1_700_000_018.25, closed=1_700_000_036.5, rules=RULES)

Rows = list[list[int]]

# uid -> tensor -> (steps, indices, negative), one entry or row per chunk. Step 433 is 1.0, 12 steps are an octave. The
# chunk of "gain" publishes all it has.
_COEFFICIENTS: Mapping[int, Mapping[str, tuple[list[int], Rows, Rows]]] = {
    2: {
        "bias": ([409, 0], [[0, 2], [0, 1]], [[0, 1], [0, 0]]),
        "gain": ([409], [[0, 1]], [[1, 0]]),
        "weight": ([433, 421], [[0, 5], [3, 11]], [[0, 1], [1, 0]]),
    },
    3: {
        "bias": ([430, 394], [[1, 2], [0, 2]], [[1, 1], [0, 1]]),
        "gain": ([301], [[0, 1]], [[0, 0]]),
        "weight": ([452, 440], [[0, 4], [2, 3]], [[1, 0], [0, 0]]),
    },
    4: {
        "bias": ([0, 0], [[0, 1], [0, 1]], [[0, 0], [0, 0]]),
        "gain": ([415], [[0, 1]], [[1, 1]]),
        "weight": ([0, 421], [[0, 1], [0, 11]], [[0, 0], [1, 0]]),
    },
}


def gradient_settings(*, use_dct: bool) -> Gradient:
    """The compression's hyper-parameters."""
    return Gradient(momentum_decay=0.95, topk_compression=2, target_chunk=4, use_dct=use_dct)


def layout_of(recipe: Recipe) -> Layout:
    """The layout: `demo` with the transform, `sparseloco` without."""
    return Layout.of(SHAPES, gradient_settings(use_dct=recipe == "demo"), recipe)


def hotkey(uid: int) -> Hotkey:
    """The hotkey of a uid: its 32-byte seed is the uid, 32 times."""
    return hotkey_from_seed(bytes([uid]) * 32)


def header(uid: int, layout: Layout, window: int = WINDOW) -> Header:
    """The header of a miner's payload."""
    return Header(layout.recipe, window, uid, hotkey(uid).address, layout.digest)


def payload(uid: int, recipe: Recipe) -> Payload:
    """Return what a miner publishes in the window."""
    tensors = {
        name: Coefficients(np.array(indices, np.uint16), np.array(negative, np.bool_), np.array(steps, np.uint16))
        for name, (steps, indices, negative) in _COEFFICIENTS[uid].items()
    }
    layout = layout_of(recipe)
    return Payload.of(header(uid, layout), tensors, layout)


def payloads(recipe: Recipe) -> list[Payload]:
    """The payloads of all miners, in uid order."""
    return [payload(uid, recipe) for uid in MINER_UIDS]


def genesis_params() -> dict[str, Tensor]:
    """The parameters before the window: multiples of 1/32 and 1/64, exact in float32."""
    return {
        "bias": torch.arange(6) / 32,
        "gain": 1 + torch.arange(2) / 32,
        "weight": (torch.arange(24).reshape(4, 6) - 11) / 64,
    }


def params_after(recipe: Recipe) -> dict[str, Tensor]:
    """The parameters after the window."""
    params = genesis_params()
    update = aggregate(payloads(recipe), layout_of(recipe))
    outer_step(params, update, learning_rate=LEARNING_RATES[recipe], weight_decay=WEIGHT_DECAYS[recipe])
    return params


@cache
def root_before() -> str:
    """The genesis root."""
    return genesis_root(NETUID, parameters_digest(genesis_params()))


@cache
def root_after() -> str:
    """The root after the window, in `sparseloco`."""
    return next_root(root_before(), WINDOW, 1, parameters_digest(params_after("sparseloco")))


def tensor_hex(tensor: Tensor) -> str:
    """The elements in row-major order as little-endian float32, in hex."""
    return tensor.detach().numpy().astype("<f4").tobytes().hex()


def tensors_hex(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`tensor_hex` of each."""
    return {name: tensor_hex(tensors[name]) for name in sorted(tensors)}
