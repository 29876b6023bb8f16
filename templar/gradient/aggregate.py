"""Many payloads to one update, the same bits on every node.

Magnitudes are whole numbers of a quantum, so sums are exact: the order of the payloads, the number of threads and the
machine cannot matter. Per tensor, with `s` the magnitude of a coefficient in quanta and `n2 = sum of s^2` a peer's
squared norm, exact as well:

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

The outer step: plain SGD on the agreed update, in operations that no compiler fuses.

With the update u, the learning rate and the decay each rounded once to float32, and every operation rounded to float32:

    theta <- theta * decay,    decay = 1 - learning_rate * weight_decay    (left out when weight_decay is 0)
    theta <- theta - (learning_rate * u)

In `sparseloco` u is the clipped mean of pseudo-gradients, the learning rate is constant and there is no decay (the
inner AdamW decays). In `demo` u is -1, 0 or 1, so every parameter that somebody spoke of moves by exactly the learning
rate. `aggregate` never gives a non-finite update, so finite parameters stay finite, and the agreed state is never left
to a node's own judgement of what to skip.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient import Recipe, backend, dct
from templar.gradient.codec.sections import Section, unpack
from templar.gradient.codec.values import CODES, QUANTUM, STEP_QUANTA
from templar.gradient.codec.wire import Payload, check_layout
from templar.gradient.dct import from_chunks
from templar.gradient.layout import Layout, TensorLayout
from templar.hparams import MAX_PEERS

UNIT_NORM = 1 << 40


def peer_norms(payloads: Sequence[Payload], layout: Layout) -> list[dict[str, int]]:
    """Squared norms in squared quanta, by parameter name, for each payload."""
    return [{name: _squared_norm(payload.sections[name]) for name in layout.names} for payload in payloads]


def median_norms(payloads: Sequence[Payload], layout: Layout) -> dict[str, int]:
    """The lower median of the squared norms in squared quanta, by parameter name (PROTOCOL 21).

    The square root of it is the lower median of the norms. Peers whose tensor is zero contribute nothing to it and do
    not count, or free riders could pull the median to zero; if all are zero, so is the median.

    Raises:
        ValueError: There are no payloads, or more than a subnet has uids, or one was made for another layout.
    """
    _check_peers(payloads, layout)
    return _medians(peer_norms(payloads, layout))


def aggregate(
    payloads: Sequence[Payload],
    layout: Layout,
    *,
    device: torch.device | str = "cpu",
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The update that everybody applies: parameters move by `-learning_rate` times it.

    It is made tensor by tensor from the payloads as they are, so the memory it takes does not grow with their number.

    Args:
        payloads: The payloads of a roster, decoded with `layout`, in any order; one is enough.
        layout: Tensors, chunks and recipe.
        device: Where the sums are made, and the update stays.
        out: An earlier update of this layout that nobody needs any more; it is overwritten.

    Returns:
        Float32 tensors by parameter name, finite; for demo of -1, 0 and 1.

    Raises:
        ValueError: There are no payloads (a null window applies nothing), or more than a subnet has uids, or one was
            made for another layout.
    """
    _check_peers(payloads, layout)
    norms = peer_norms(payloads, layout)
    return _updates(payloads, norms, _medians(norms), layout, out or _empty(layout, device))


def single_update(
    payload: Payload, layout: Layout, medians: Mapping[str, int], *, out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """What one peer contributes, as an update of its own: for measuring what it is worth.

    Args:
        payload: One payload of the roster, or a payload to be measured against it.
        layout: Tensors, chunks and recipe.
        medians: `median_norms` of the roster; its clip is this peer's clip. Demo does not use it.
        out: As in `aggregate`.

    Returns:
        As `aggregate`.

    Raises:
        ValueError: The payload was made for another layout.
    """
    _check_peers([payload], layout)
    return _updates([payload], peer_norms([payload], layout), medians, layout, out or _empty(layout, "cpu"))


def magnitudes(section: Section, squared_norm: int, median: int, recipe: Recipe) -> NDArray[np.int64]:
    """The magnitude that each scale code of a peer contributes, shape (256,), with a norm of at most the target's."""
    target = UNIT_NORM**2 if recipe == "demo" else min(median, squared_norm)
    quanta = _code_quanta(section.top)
    if squared_norm in (0, target):
        return quanta
    used = np.unique(section.codes).tolist()
    table = np.zeros(CODES + 1, np.int64)
    table[used] = [math.isqrt(int(quanta[code]) ** 2 * target // squared_norm) for code in used]
    return table


def tensor_update(
    section: Section, table: NDArray[np.int64], tensor: TensorLayout, layout: Layout, out: Tensor
) -> Tensor:
    """One tensor of `single_update`, from its section and its `magnitudes`; `out` is overwritten with it."""
    return _combiner(layout, out.device)([section], [table], tensor, layout, out)


def _combiner(layout: Layout, device: torch.device) -> Callable[..., Tensor]:
    """What adds up the sections of a tensor there."""
    if backend.uses_kernels(layout.num_elements, device):
        from templar.gradient.kernels.combine import combine  # noqa: PLC0415 - numba takes a second to import

        return combine
    return _combine


def _empty(layout: Layout, device: torch.device | str) -> dict[str, Tensor]:
    return {tensor.name: torch.empty(tensor.shape, device=device) for tensor in layout.tensors}


def _updates(
    payloads: Sequence[Payload],
    norms: Sequence[Mapping[str, int]],
    medians: Mapping[str, int],
    layout: Layout,
    out: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    layout.check(out, "out")
    combine = _combiner(layout, out[layout.names[0]].device)
    updates = {}
    for tensor in layout.tensors:
        name = tensor.name
        sections = [payload.sections[name] for payload in payloads]
        tables = [
            magnitudes(section, peer[name], medians[name], layout.recipe)
            for section, peer in zip(sections, norms, strict=True)
        ]
        updates[name] = combine(sections, tables, tensor, layout, out[name])
    return updates


def _combine(
    sections: Sequence[Section],
    tables: Sequence[NDArray[np.int64]],
    tensor: TensorLayout,
    layout: Layout,
    out: Tensor,
) -> Tensor:
    """The update of one tensor; `kernels.combine` gives the same bits."""
    shape = tensor.num_chunks, tensor.chunk_length
    total = torch.zeros(shape, dtype=torch.int64, device=out.device)
    contributors = torch.zeros(shape, dtype=torch.int64, device=out.device)
    for section, table in zip(sections, tables, strict=True):
        coefficients = unpack(section)
        levels = table[section.codes]
        magnitudes = np.where(coefficients.upper, levels[:, -1:], levels[:, :1])
        signed = torch.from_numpy(np.where(coefficients.negative, -magnitudes, magnitudes)).to(out.device)
        places = torch.from_numpy(coefficients.indices.astype(np.int64)).to(out.device)
        total.scatter_add_(1, places, signed)  # no index twice in a chunk of one peer
        contributors.scatter_add_(1, places, (signed != 0).to(torch.int64))
    means = total.to(torch.float64) / contributors.clamp(min=1).to(torch.float64)
    return out.copy_(from_chunks(finish(means, tensor, layout), tensor))


def finish(means: Tensor, tensor: TensorLayout, layout: Layout) -> Tensor:
    """Float32 chunks of the update from mean coefficients in quanta, float64, of the same shape."""
    values = dct.inverse(means, tensor.edges) if layout.use_dct else means
    return (torch.sign(values) if layout.recipe == "demo" else values * QUANTUM).to(torch.float32)


def _squared_norm(section: Section) -> int:
    """The exact sum of the squared magnitudes."""
    quanta, counts = _code_quanta(section.top).tolist(), _code_counts(section).tolist()
    return sum(count * scale * scale for count, scale in zip(counts, quanta, strict=True) if count)


def _code_quanta(top: int) -> NDArray[np.int64]:
    """Quanta by scale code, shape (256,), in a section with the largest step `top`; codes that cannot occur have 0."""
    steps = np.maximum(np.arange(CODES + 1) + top - CODES, 0)
    return np.where(np.arange(CODES + 1) > 0, STEP_QUANTA[steps], 0)


def _code_counts(section: Section) -> NDArray[np.int64]:
    """How many coefficients have each scale code, shape (256,)."""
    codes, k = section.codes, section.tensor.k
    active = codes[:, -1] > 0
    upper = section.upper_counts()
    counts = np.bincount(codes[active, 0], weights=k - upper, minlength=CODES + 1)
    return (counts + np.bincount(codes[active, -1], weights=upper, minlength=CODES + 1)).astype(np.int64)


def _medians(norms: Sequence[Mapping[str, int]]) -> dict[str, int]:
    contributing = {name: sorted(peer[name] for peer in norms if peer[name] > 0) for name in norms[0]}
    return {name: squares[(len(squares) - 1) // 2] if squares else 0 for name, squares in contributing.items()}


def _check_peers(payloads: Sequence[Payload], layout: Layout) -> None:
    if not 1 <= len(payloads) <= MAX_PEERS:
        raise ValueError(f"{len(payloads)} payloads cannot be aggregated: a roster has 1 to {MAX_PEERS}")
    check_layout(payloads, layout)


@torch.no_grad()
def outer_step(
    params: Mapping[str, Tensor], update: Mapping[str, Tensor], *, learning_rate: float, weight_decay: float
) -> None:
    """Apply an update to parameters, in place.

    Args:
        params: Float32 parameters by name, on any device.
        update: The update by name, float32, in the same shapes.
        learning_rate: Step size.
        weight_decay: Decoupled weight decay; 0 for none.

    Raises:
        ValueError: Names, shapes or types do not match; then nothing was changed.
    """
    if set(params) != set(update):
        raise ValueError(f"parameters and update differ in names: {sorted(set(params) ^ set(update))[:3]}")
    for name, param in params.items():
        if param.shape != update[name].shape or not param.dtype == update[name].dtype == torch.float32:
            raise ValueError(f"parameter {name!r} and its update must be float32 tensors of one shape")
    for name, param in params.items():
        rate = torch.tensor(learning_rate, dtype=torch.float32, device=param.device)
        if weight_decay:
            param.mul_(torch.tensor(1.0 - learning_rate * weight_decay, dtype=torch.float32, device=param.device))
        param.sub_(rate * update[name].to(param.device))
