"""Many payloads to one update, the same bits on every node.

Magnitudes are whole numbers of a quantum, so sums are exact: the order of the payloads, the number of threads and the
machine cannot matter. Per tensor, with `s` a chunk's scale in quanta and `n2 = sum of k s^2` a peer's squared norm,
exact as well:

    sparseloco  target  m2 = the lower median of n2 over the peers with n2 > 0
                each magnitude becomes s if n2 <= m2, else floor(s * sqrt(m2 / n2))
    demo        target  m2 = (2^40)^2, the unit norm
                each magnitude becomes floor(s * sqrt(m2 / n2))

Rounding down keeps every peer's contribution at or below the target norm. A coefficient's sum is divided by the number
of peers that contributed to it, those whose magnitude there is not 0: zeros dilute nobody. The quotient is that of
IEEE 754 float64; the inverse DCT, if there is one, is exact in the sense of `dct`; then `sparseloco` multiplies by the
quantum and rounds to float32, and `demo` takes the sign, with sign(0) = 0.

No update is ever non-finite: a magnitude is below 2^54 quanta of 2^-44, so a mean is below 2^10 and no inverse DCT of
edges up to 64 makes it larger than 2^16.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient import Recipe, dct
from templar.gradient.chunks import from_chunks
from templar.gradient.layout import Layout, TensorLayout
from templar.gradient.payload import Coefficients, Payload
from templar.gradient.values import QUANTUM, scale_parts, scale_quanta
from templar.hparams import MAX_PEERS

UNIT_NORM = 1 << 40


def peer_norms(payloads: Sequence[Payload], layout: Layout) -> list[dict[str, int]]:
    """Squared norms in squared quanta, by parameter name, for each payload."""
    return [
        {tensor.name: _squared_norm(payload.tensors[tensor.name]) for tensor in layout.tensors} for payload in payloads
    ]


def median_norms(payloads: Sequence[Payload], layout: Layout) -> dict[str, int]:
    """The lower median of the squared norms in squared quanta, by parameter name (PROTOCOL 21).

    The square root of it is the lower median of the norms. Peers whose tensor is zero contribute nothing to it and do
    not count, or free riders could pull the median to zero; if all are zero, so is the median.

    Raises:
        ValueError: There are no payloads, or more than a subnet has uids, or one was made for another layout.
    """
    _check_peers(payloads, layout)
    return _medians(peer_norms(payloads, layout))


def aggregate(payloads: Sequence[Payload], layout: Layout, recipe: Recipe) -> dict[str, Tensor]:
    """The update that everybody applies: parameters move by `-learning_rate` times it.

    Args:
        payloads: The payloads of a roster, decoded with `layout`, in any order; one is enough.
        layout: Tensors and chunks.
        recipe: The rule of aggregation.

    Returns:
        Float32 tensors by parameter name, on the CPU, finite; for demo of -1, 0 and 1.

    Raises:
        ValueError: There are no payloads (a null window applies nothing), or more than a subnet has uids, or one was
            made for another layout.
    """
    _check_peers(payloads, layout)
    norms = peer_norms(payloads, layout)
    return _updates(payloads, norms, _medians(norms), layout, recipe)


def single_update(payload: Payload, layout: Layout, recipe: Recipe, medians: Mapping[str, int]) -> dict[str, Tensor]:
    """What one peer contributes, as an update of its own: for measuring what it is worth.

    Args:
        payload: One payload of the roster, or a payload to be measured against it.
        layout: Tensors and chunks.
        recipe: The rule of aggregation.
        medians: `median_norms` of the roster; its clip is this peer's clip. Demo does not use it.

    Returns:
        As `aggregate`.

    Raises:
        ValueError: The payload was made for another layout.
    """
    _check_peers([payload], layout)
    return _updates([payload], peer_norms([payload], layout), medians, layout, recipe)


def _updates(
    payloads: Sequence[Payload],
    norms: Sequence[Mapping[str, int]],
    medians: Mapping[str, int],
    layout: Layout,
    recipe: Recipe,
) -> dict[str, Tensor]:
    updates = {}
    for tensor in layout.tensors:
        name = tensor.name
        peers = [
            (payload.tensors[name], _magnitudes(payload.tensors[name], peer[name], medians[name], recipe))
            for payload, peer in zip(payloads, norms, strict=True)
        ]
        values = _mean_over_contributors(peers, tensor)
        values = dct.inverse(values, tensor.edges) if layout.use_dct else values
        direction = torch.sign(values) if recipe == "demo" else values * QUANTUM
        updates[name] = from_chunks(direction.to(torch.float32), tensor)
    return updates


def _mean_over_contributors(peers: Sequence[tuple[Coefficients, NDArray[np.int64]]], tensor: TensorLayout) -> Tensor:
    """The mean of every coefficient in quanta, float64, from peers with the magnitudes of their chunks."""
    total = np.zeros((tensor.num_chunks, tensor.chunk_length), np.int64)
    contributors = np.zeros((tensor.num_chunks, tensor.chunk_length), np.int64)
    for coefficients, magnitudes in peers:
        rows = np.flatnonzero(magnitudes)
        signs = np.where(coefficients.negative[rows], -1, 1)
        places = rows[:, None], coefficients.indices[rows]  # no index twice in a chunk of one peer
        total[places] += signs * magnitudes[rows, None]
        contributors[places] += 1
    return torch.from_numpy(total.astype(np.float64) / np.maximum(contributors, 1).astype(np.float64))


def _magnitudes(coefficients: Coefficients, squared_norm: int, median: int, recipe: Recipe) -> NDArray[np.int64]:
    """The magnitude that each chunk of a peer contributes, shape (C,), with a norm of at most the target's."""
    target = UNIT_NORM**2 if recipe == "demo" else min(median, squared_norm)
    if squared_norm in (0, target):
        return scale_quanta(coefficients.scales)
    codes, places = np.unique(coefficients.scales, return_inverse=True)
    scaled = [math.isqrt(int(scale) ** 2 * target // squared_norm) for scale in scale_quanta(codes)]
    return np.array(scaled, np.int64)[places]


def _squared_norm(coefficients: Coefficients) -> int:
    """`k` times the sum of the squared scales, exactly: shift by shift, since squares of 8 bits add up in a float64."""
    significands, shifts = scale_parts(coefficients.scales)
    sums = np.bincount(shifts, weights=significands * significands).tolist()
    return coefficients.indices.shape[1] * sum(int(total) << 2 * shift for shift, total in enumerate(sums) if total)


def _medians(norms: Sequence[Mapping[str, int]]) -> dict[str, int]:
    contributing = {name: sorted(peer[name] for peer in norms if peer[name] > 0) for name in norms[0]}
    return {name: squares[(len(squares) - 1) // 2] if squares else 0 for name, squares in contributing.items()}


def _check_peers(payloads: Sequence[Payload], layout: Layout) -> None:
    if not 1 <= len(payloads) <= MAX_PEERS:
        raise ValueError(f"{len(payloads)} payloads cannot be aggregated: a roster has 1 to {MAX_PEERS}")
    for payload in payloads:
        if payload.header.layout_digest != layout.digest:
            raise ValueError(f"the payload of uid {payload.header.uid} was made for another layout")
