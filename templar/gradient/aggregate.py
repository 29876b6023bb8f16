"""Many payloads to one update and one outer step, with the same bits on every node.

Magnitudes are whole numbers of a quantum, so sums are exact: the order of the payloads, the number of threads and the
machine cannot matter. Per tensor, with `s` the magnitude of a coefficient in quanta and `n2 = sum of s^2` a peer's
squared norm, exact as well:

    sparseloco  target  m2 = the lower median of n2 over the peers with n2 > 0, at most the limit of the window
                each magnitude becomes s if n2 <= m2, else floor(s * sqrt(m2 / n2))
    demo        target  m2 = (2^40)^2, the unit norm
                each magnitude becomes floor(s * sqrt(m2 / n2))

Rounding down keeps every peer's contribution at or below the target norm. A coefficient's sum is divided by the number
of peers that contributed to it, those whose magnitude there is not 0; or, with `mean_over` "payloads", by the number of
peers whose n2 is not 0: a payload of zeros dilutes no other peer. With "parts" a peer with n2 >= 2 m2 counts twice: its
target is 4 m2, and it adds 2 to the number. The quotient is that of IEEE 754 float64; the inverse
DCT, if there is one, is exact in the sense of `dct`; then `sparseloco` multiplies by the quantum and rounds to float32,
and `demo` takes the sign, with sign(0) = 0.

No update is ever non-finite: a magnitude is below 2^54 quanta of 2^-44, so a mean is below 2^10 and no inverse DCT of
edges up to 64 makes it larger than 2^16. So finite parameters stay finite, and no node has to decide what to skip.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from templar.gradient import Recipe, dct, kernels
from templar.gradient.codec.planes import Section
from templar.gradient.codec.sections import unpack
from templar.gradient.codec.values import CODES, QUANTUM, STEP_QUANTA
from templar.gradient.codec.wire import Header, Payload, check_layout, decode, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.dct import from_chunks
from templar.gradient.layout import Layout, TensorLayout
from templar.hparams import MAX_PEERS
from templar.shared_results import Same, shared

log = logging.getLogger(__name__)

UNIT_NORM = 1 << 40
SLOW_SECONDS = 2.0


def aggregate(
    payloads: Sequence[Payload], layout: Layout, limit: float | None = None, *, out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The update that every node applies: parameters move by `-learning_rate` times it.

    It is made tensor by tensor from the packed payloads, so the memory it takes does not grow with their number.

    The payloads are those of a roster, in any order. `limit` is the largest root mean square that the coefficients of a
    tensor may have, as `loudest_coefficient` gives it for the window; None for no limit. `out`, an earlier update of
    this layout, is overwritten, on its device. The result has float32 tensors by parameter name, finite; for demo of
    -1, 0 and 1.

    ValueError: There are no payloads, or more than a subnet has uids, or one was made for another layout.
    """
    _check_peers(payloads, layout)
    norms = peer_norms(payloads, layout)
    return _updates(payloads, norms, _targets(norms, layout, limit), layout, out)


def single_update(
    payload: Payload, layout: Layout, targets: Mapping[str, int], *, out: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """One peer's contribution as an update of its own, to measure its value; `out` and errors as in `aggregate`.

    `targets` are the `target_norms` of a roster, for the same clip as there; demo does not use them. Alone, a payload
    is one part.
    """
    _check_peers([payload], layout)
    return _updates([payload], peer_norms([payload], layout), targets, replace(layout, mean_over="payloads"), out)


def peer_norms(payloads: Sequence[Payload], layout: Layout) -> list[dict[str, int]]:
    """Squared norms in squared quanta, by parameter name, for each payload."""
    return [{name: _squared_norm(payload.sections[name]) for name in layout.names} for payload in payloads]


def target_norms(payloads: Sequence[Payload], layout: Layout, limit: float | None = None) -> dict[str, int]:
    """The squared norm that no peer's tensor exceeds, in squared quanta, by parameter name (docs/protocol.md 9).

    It is the lower median of the squared norms; the square root of it is the lower median of the norms. Peers whose
    tensor is zero contribute nothing to it and do not count, or free riders could pull the median to zero; if all are
    zero, so is the median. Where most peers are too loud the limit holds. Errors as in `aggregate`.
    """
    _check_peers(payloads, layout)
    return _targets(peer_norms(payloads, layout), layout, limit)


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


def signed_magnitudes(section: Section, table: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places in their chunks and signed `magnitudes` of a section's coefficients, each of shape (C, k)."""
    coefficients, sizes = unpack(section), table[section.codes][:, None]
    return coefficients.indices.astype(np.int64), np.where(coefficients.negative, -sizes, sizes)


def combine_sections(
    sections: Sequence[Section],
    tables: Sequence[NDArray[np.int64]],
    tensor: TensorLayout,
    layout: Layout,
    out: Tensor,
    *,
    divisor: int = 0,
) -> Tensor:
    """Overwrite `out` with the update of one tensor, from each peer's section and `magnitudes`.

    A coefficient's sum is divided by the divisor, or by the number of its contributors if that is 0. For one peer both
    are the same.
    """
    if kernels.uses_kernels(layout.num_elements, out.device):
        from templar.gradient.kernels.combine import combine  # noqa: PLC0415 - numba takes a second to import

        finish = None if layout.updates_are_plain else lambda means: _finish(means, tensor, layout)
        return combine(sections, tables, tensor, out, finish, divisor)
    shape = tensor.num_chunks, tensor.chunk_length
    total = torch.zeros(shape, dtype=torch.int64, device=out.device)
    contributors = torch.zeros(shape, dtype=torch.int64, device=out.device)
    for section, table in zip(sections, tables, strict=True):
        places, signed = (torch.from_numpy(each).to(out.device) for each in signed_magnitudes(section, table))
        total.scatter_add_(1, places, signed)  # no index twice in a chunk of one peer
        contributors.scatter_add_(1, places, (signed != 0).to(torch.int64))
    divisors = torch.tensor(divisor) if divisor else contributors.clamp(min=1)
    means = total.to(torch.float64) / divisors.to(torch.float64)
    return out.copy_(from_chunks(_finish(means, tensor, layout), tensor))


@torch.no_grad()
def outer_step(
    params: Mapping[str, Tensor], update: Mapping[str, Tensor], *, learning_rate: float, weight_decay: float
) -> None:
    """Apply an update u to parameters theta, in place: plain SGD, in operations that no compiler fuses.

        theta <- theta * decay,    decay = 1 - learning_rate * weight_decay    (left out when weight_decay is 0)
        theta <- theta - (learning_rate * u)

    Learning rate and decay are rounded once to float32, and so is every operation. In `demo` u is -1, 0 or 1, so every
    parameter that a peer contributed to moves by exactly the learning rate.

    Parameters and update are float32, in the same shapes, on any device. The decay is decoupled, and 0 in `sparseloco`,
    whose inner AdamW decays.

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


def compile_kernels(layout: Layout) -> None:
    """Compile the kernels that a window needs, if they run for this layout, with one tiny payload.

    A window has no time for it. Compiled code is kept on disk, so only the first call on a machine takes seconds.
    """
    if not kernels.uses_kernels(layout.num_elements):
        return
    started = time.monotonic()
    tiny = replace(layout, tensors=(TensorLayout("matrix", (4, 4), (2, 2), 2),))
    rule = FeedbackRule(layout.recipe, decay=0.5, learning_rate=1.0)
    update = {"matrix": torch.arange(1.0, 17.0).reshape(4, 4)}
    update["matrix"][:2, :2] = 1e-8  # too small beside the rest: the residual of this chunk is written again
    with kernels.forced("numba"):
        compressed = compress(FeedbackState.zeros(tiny), update, layout=tiny, rule=rule)
        header = Header(layout.recipe, 0, 0, "nobody", tiny.digest)
        aggregate([decode(encode(Payload.of(header, compressed.tensors, tiny), tiny), tiny)], tiny)
    seconds = time.monotonic() - started
    if seconds > SLOW_SECONDS:
        log.info("the codec was compiled for this machine in %.0f s", seconds)


def _updates(
    payloads: Sequence[Payload],
    norms: Sequence[Mapping[str, int]],
    targets: Mapping[str, int],
    layout: Layout,
    out: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    if out is None:
        out = {tensor.name: torch.empty(tensor.shape) for tensor in layout.tensors}
    layout.check(out, "out")
    updates = {}
    for tensor in layout.tensors:
        name, target = tensor.name, targets[tensor.name]
        sections, squares = [payload.sections[name] for payload in payloads], [peer[name] for peer in norms]
        parts = [_parts(square, target, layout) for square in squares]
        tables = [
            magnitudes(section, square, part**2 * target, layout.recipe)
            for section, square, part in zip(sections, squares, parts, strict=True)
        ]
        audible = sum(part for part, square in zip(parts, squares, strict=True) if square > 0)  # else all sums are 0
        divisor = 0 if layout.mean_over == "contributors" else audible
        updates[name] = combine_sections(sections, tables, tensor, layout, out[name], divisor=divisor)
    return updates


def _parts(squared_norm: int, target: int, layout: Layout) -> int:
    """As how many parts a peer's tensor counts."""
    counts_parts = layout.mean_over == "parts" and layout.recipe == "sparseloco"
    return 2 if counts_parts and squared_norm >= 2 * target > 0 else 1


def _finish(means: Tensor, tensor: TensorLayout, layout: Layout) -> Tensor:
    """Float32 chunks of the update from mean coefficients in quanta, float64, of the same shape."""
    values = dct.inverse(means, tensor.edges) if layout.use_dct else means
    return (torch.sign(values) if layout.recipe == "demo" else values * QUANTUM).to(torch.float32)


@shared(Same, most=2048)
def _squared_norm(section: Section) -> int:
    """The exact sum of the squared magnitudes."""
    quanta, counts = _code_quanta(section.top).tolist(), np.bincount(section.codes, minlength=CODES + 1).tolist()
    return section.tensor.k * sum(count * scale * scale for count, scale in zip(counts, quanta, strict=True))


@lru_cache(maxsize=256)
def _code_quanta(top: int) -> NDArray[np.int64]:
    """Quanta by scale code, shape (256,), in a section with the largest step `top`; codes that cannot occur have 0."""
    steps = np.maximum(np.arange(CODES + 1) + top - CODES, 0)
    quanta = np.where(np.arange(CODES + 1) > 0, STEP_QUANTA[steps], 0)
    quanta.flags.writeable = False
    return quanta


def _targets(norms: Sequence[Mapping[str, int]], layout: Layout, limit: float | None) -> dict[str, int]:
    targets, most = {}, None if limit is None else int(limit / QUANTUM) ** 2
    for tensor in layout.tensors:
        squares = sorted(peer[tensor.name] for peer in norms if peer[tensor.name] > 0)
        median = squares[(len(squares) - 1) // 2] if squares else 0
        # The DCT may gather what a whole chunk holds in its largest coefficients.
        count = tensor.num_elements if layout.use_dct else tensor.num_coefficients
        targets[tensor.name] = median if most is None else min(median, count * most)
    return targets


def _check_peers(payloads: Sequence[Payload], layout: Layout) -> None:
    if not 1 <= len(payloads) <= MAX_PEERS:
        raise ValueError(f"{len(payloads)} payloads cannot be aggregated: a roster has 1 to {MAX_PEERS}")
    check_layout(payloads, layout)
