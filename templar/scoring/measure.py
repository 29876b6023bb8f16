"""Measure payloads on the segments of the evaluation plan: to first order for all, exactly for those that were drawn.

First order: one backward pass over the whole evaluation batch, segment by segment, gives the inner products of every
update with the gradient of the miner's own segment and with that of the rest. That costs three passes in all (a forward
one, and a backward one of twice its cost), for any number of miners.

Exact: the model computes with `theta - factor * update` and then with `theta` again, by exchanging the tensors that it
points at. The agreed parameters are never written, and there is no second model: the gradients' memory holds the moved
parameters.

A `Meter` computes the losses, on the operator's devices and in its precision; all results are on the CPU. Several
devices share the segments of the backward pass, and the payloads that are measured exactly; each has its own model.

Losses alone do not show copies and inflated payloads; `find_likenesses` and `norm_ratios` do.
"""

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, reduce
from statistics import median
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from templar.gradient.aggregate import peer_norms, single_update
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.gradient.product import UpdateProducts
from templar.gradient.similarity import similarity
from templar.scoring.evidence import Estimate, Likeness, Measurement
from templar.scoring.meter import Meter
from templar.scoring.score import first_order_score, relative_gain
from templar.scoring.standing import round_score
from templar.store.deadline import in_parallel
from templar.training.device import EVALUATION
from templar.training.memory import on_device
from templar.training.model import bind_parameters, empty_copy, named_parameters

T = TypeVar("T")


@dataclass(eq=False)
class Evaluator:
    """Measures the payloads of one window."""

    model: nn.Module  # of the network's shape; it is left bound to `params`
    params: Mapping[str, Tensor]  # those that payloads are measured on, by name; only read
    segments: Mapping[int, NDArray[np.int32]]  # uid -> its sequences, shape (n, L), in the order of evaluation
    payloads: Mapping[int, Payload]
    _: KW_ONLY
    layout: Layout
    targets: Mapping[str, int]  # the norms that payloads are clipped to, as in `single_update`
    factor: float  # step size of the measurement
    micro_batch_size: int  # sequences per forward pass, by the preset
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        tokens = {uid: torch.from_numpy(sequences) for uid, sequences in self.segments.items()}
        nets = [self.model, *(empty_copy(self.model) for _ in self.meter.each[1:])]
        self._parts = [
            _Part(net, meter.load(net, self.params), tokens, self.micro_batch_size, meter)
            for net, meter in zip(nets, self.meter.each, strict=True)
        ]
        self._before: dict[int, list[float]] = {}
        self._gains: dict[int, dict[int, float]] = {}

    @property
    def loss(self) -> float | None:
        """Mean loss of the evaluation batch under `params`; None before `estimate`, and if not finite."""
        return _mean(loss for losses in self._before.values() for loss in losses)

    def estimate(self, exact_uids: Sequence[int]) -> dict[int, Estimate]:
        """Return the first-order measurement of every payload.

        The gain of `exact_uids`, which are measured exactly, is found on every segment: it says what to expect there.
        """
        # 1. Each device takes some of the segments.
        uids, payloads = list(self.payloads), list(self.payloads.values())

        def first_order(part: "_Part", owners: list[int]) -> "_FirstOrder":
            return part.first_order(UpdateProducts(payloads, self.layout, self.targets), uids, exact_uids, owners)

        found = self._share(first_order, list(self.segments))
        # 2. Put together what they found. Products are sums over segments.
        before = {owner: losses for each in found for owner, losses in each.before.items()}
        self._before = {owner: before[owner] for owner in self.segments}
        gains = {uid: {owner: gain for each in found for owner, gain in each.gains[uid].items()} for uid in uids}
        totals = {uid: reduce(operator.add, (each.totals[uid] for each in found)) for uid in uids}
        self._gains = {uid: gains[uid] for uid in exact_uids}
        estimates = {uid: self._estimate(uid, gains[uid].get(uid, 0.0), totals[uid]) for uid in uids}
        return {
            uid: estimate.model_copy(update={"expected": self._expected(uid, estimate, estimates)})
            for uid, estimate in estimates.items()
        }

    def measure(self, plan: Mapping[int, Sequence[int]]) -> dict[int, Measurement]:
        """Return the losses before and after each payload is applied alone, once `estimate` was called with these uids.

        The plan has, for each uid, the others on whose segments its payload is measured besides its own.
        """

        def losses_after(part: "_Part", uids: list[int]) -> dict[int, dict[int, list[float]]]:
            return {
                uid: part.losses_after(
                    partial(single_update, self.payloads[uid], self.layout, self.targets),
                    self.factor,
                    (uid, *plan[uid]),
                )
                for uid in uids
            }

        after = {uid: losses for each in self._share(losses_after, list(plan)) for uid, losses in each.items()}
        return {uid: self._measurement(uid, others, after[uid]) for uid, others in plan.items()}

    def _share(self, work: "Callable[[_Part, list[int]], T]", uids: list[int]) -> list[T]:
        """Let each device work for some of the uids; what each of them found."""
        count = len(self._parts)
        return in_parallel(lambda number: work(self._parts[number], uids[number::count]), range(count), count)

    def _measurement(self, uid: int, others: Sequence[int], after: Mapping[int, Sequence[float]]) -> Measurement:
        count = sum(len(after[owner]) for owner in others)
        gain = sum(self._gains[uid][owner] for owner in others) * self.factor
        return Measurement(
            own_before=_mean(self._before.get(uid, [])),
            own_after=_mean(after[uid]),
            random_before=_mean(loss for owner in others for loss in self._before[owner]),
            random_after=_mean(loss for owner in others for loss in after[owner]),
            random_gain=_finite(gain / count) if count else None,
        )

    def _estimate(self, uid: int, own: float, total: float) -> Estimate:
        mine = self._before.get(uid, [])
        rest = [loss for owner, losses in self._before.items() if owner != uid for loss in losses]
        return Estimate(
            own_before=_mean(mine),
            own_gain=_finite(own * self.factor / len(mine)) if mine else None,
            random_before=_mean(rest),
            random_gain=_finite((total - own) * self.factor / len(rest)) if rest else None,
            expected=0.0,
        )

    def _expected(self, uid: int, estimate: Estimate, estimates: Mapping[int, Estimate]) -> float:
        """Return how much easier a miner's segment is than the rest for the other `exact_uids`; their median."""
        count, differences = len(self._before.get(uid, [])), []
        for other, gains in self._gains.items():
            if other != uid and uid in gains:
                there = relative_gain(estimate.own_before, gains[uid] * self.factor / count)
                differences.append(there - first_order_score(estimates[other]))
        return median(differences) if differences else 0.0


def step_losses(
    model: nn.Module,
    params: Mapping[str, Tensor],
    sequences: NDArray[np.int32],
    update: Callable[..., dict[str, Tensor]],
    *,
    factor: float,
    micro_batch_size: int,
    meter: Meter,
) -> tuple[float | None, float | None]:
    """Return the mean loss of sequences, shape (n, L), before and after a step along an update; None if not finite.

    The model is left bound to `params`, the agreed parameters before the step, which are only read. `update` takes the
    tensors `out` to write the update into, or None.
    """
    part = _Part(model, meter.load(model, params), {0: torch.from_numpy(sequences)}, micro_batch_size, meter)
    return _mean(part.losses(0)), _mean(part.losses_after(update, factor, (0,))[0])


@dataclass(frozen=True)
class _FirstOrder:
    """The results of the backward passes over some segments."""

    before: dict[int, list[float]]  # segment -> losses of its sequences
    gains: dict[int, dict[int, float]]  # uid -> segment -> product with its gradient, the sum over its sequences
    totals: dict[int, float]  # uid -> product with the gradient of all these segments


@dataclass(eq=False)
class _Part:
    """The part of an evaluation that one device computes."""

    net: nn.Module
    params: Mapping[str, Tensor]  # the agreed parameters, where the model computes with them
    tokens: Mapping[int, Tensor]  # uid -> its sequences
    micro_batch_size: int  # by the preset
    meter: Meter  # of this device

    def __post_init__(self) -> None:
        self._buffer: dict[str, Tensor] = {}

    def first_order(
        self, products: UpdateProducts, uids: Sequence[int], exact_uids: Sequence[int], owners: Sequence[int]
    ) -> _FirstOrder:
        """Products of payloads with the gradients of the segments of `owners`.

        Those of `exact_uids` are found on each of these segments, the others only on their own and on all together.
        """
        index = {uid: number for number, uid in enumerate(uids)}

        def compute(size: int) -> _FirstOrder:
            before: dict[int, list[float]] = {}
            gains: dict[int, dict[int, float]] = {uid: {} for uid in uids}
            with self._gradients() as gradients:
                # The gradient accumulates over segments: a segment's gain is the product after it less that before it.
                reached = dict.fromkeys(exact_uids, 0.0)
                for owner in owners:
                    asked = [*exact_uids, *([owner] if owner in index and owner not in reached else [])]
                    if asked[len(exact_uids) :]:
                        reached[owner] = products.with_gradients(gradients, [index[owner]])[0]
                    before[owner] = self._backward(self.tokens[owner], size)
                    found = products.with_gradients(gradients, [index[uid] for uid in asked])
                    now = dict(zip(asked, found, strict=True))
                    for uid in asked:
                        gains[uid][owner] = now[uid] - reached[uid]
                    reached = {uid: now[uid] for uid in exact_uids}
                totals = dict(zip(uids, products.with_gradients(gradients, range(len(uids))), strict=True))
                return _FirstOrder(before, gains, totals)

        return self._fitting(compute)

    def losses_after(
        self, update: Callable[..., dict[str, Tensor]], factor: float, owners: Sequence[int]
    ) -> dict[int, list[float]]:
        """The losses of segments after a step along an update; `update` takes the tensors `out` to write it into."""
        # 1. Move: theta - factor * update, in the gradients' memory.
        with on_device(self.meter.device, EVALUATION):
            self._buffer = moved = moved_along(update(out=self._buffer or None), self.params, factor)
        # 2. Compute with the moved parameters, then point the model at the agreed ones again.
        bind_parameters(self.net, moved)
        try:
            return self._fitting(lambda size: {owner: self._losses(owner, size) for owner in owners})
        finally:
            bind_parameters(self.net, self.params)

    def losses(self, owner: int) -> list[float]:
        """The losses of a segment under the agreed parameters."""
        return self._fitting(lambda size: self._losses(owner, size))

    @contextmanager
    def _gradients(self) -> Iterator[dict[str, Tensor]]:
        """Yield zeros that backward passes add to; afterwards the model drops them, and they become the buffer."""
        gradients = {}
        try:
            for name, param in named_parameters(self.net):
                param.requires_grad_(True)
                param.grad = gradients[name] = torch.zeros_like(param)
            yield gradients
            self._buffer = gradients
        finally:
            self.net.zero_grad(set_to_none=True)

    def _fitting(self, compute: Callable[[int], T]) -> T:
        length = next((tokens.shape[1] for tokens in self.tokens.values()), 0)
        return self.meter.fitting(self.micro_batch_size, length, compute, self.net)

    def _backward(self, tokens: Tensor, size: int) -> list[float]:
        """Add the gradient of a segment's summed losses, and return the losses of its sequences."""
        losses: list[Tensor] = []
        with torch.enable_grad():
            for batch, total in self.meter.passes(self.net, tokens, size):
                losses.append(batch)
                torch.autograd.backward(total)
        return _numbers(losses)

    @torch.no_grad()
    def _losses(self, owner: int, size: int) -> list[float]:
        if owner not in self.tokens:
            return []
        return _numbers([losses for losses, _ in self.meter.passes(self.net, self.tokens[owner], size)])


def moved_along(update: dict[str, Tensor], params: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The parameters after a step of `factor` along an update, in the update's memory."""
    for name, each in update.items():
        each.mul_(-factor).add_(params[name])
    return update


def _numbers(losses: Sequence[Tensor]) -> list[float]:
    numbers: list[float] = torch.cat(tuple(losses)).tolist() if losses else []
    return numbers


def _mean(losses: Iterable[float]) -> float | None:
    """Return the exactly rounded mean; None without losses, or if one is not finite."""
    known = list(losses)
    if not known or not all(math.isfinite(loss) for loss in known):
        return None
    return math.fsum(known) / len(known)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def find_likenesses(
    payloads: Mapping[int, Payload],
    earlier: Mapping[int, Payload],
    applied: frozenset[int],
    layout: Layout,
    *,
    threshold: float,
) -> tuple[dict[int, Likeness], dict[int, Likeness]]:
    """Return a similar payload of each: uid -> in its window, and uid -> in the window before.

    From a share of `threshold` on two payloads are alike. Of several like ones the own earlier one is named, or else
    that of the lowest uid, so that all that are alike name the same; if there is none, the most similar. Payloads
    without a partner to compare are left out. Of the `earlier` payloads those of `applied` uids were applied.
    """
    mine, theirs = list(payloads), list(earlier)
    taken = similarity([*payloads.values(), *earlier.values()], layout).taken
    overlaps: dict[int, Likeness] = {}
    repeats: dict[int, Likeness] = {}
    for row, uid in enumerate(mine):
        # A payload like this miner's own earlier one is no evidence against it: it can be a copy of what was public.
        old = len(mine) + theirs.index(uid) if uid in earlier else None
        present = [
            (taken[row, column], other)
            for column, other in enumerate(mine)
            if other != uid and (old is None or taken[column, old] < threshold)
        ]
        # A miner's own earlier payload counts only if it was applied: what was not applied stays in the error feedback,
        # and an honest miner sends much of it again.
        past = [
            (taken[row, len(mine) + column], other)
            for column, other in enumerate(theirs)
            if other != uid or other in applied
        ]
        for found, likenesses in ((present, overlaps), (past, repeats)):
            shares = [Likeness(uid=other, share=round_score(float(share))) for share, other in found]
            alike = [each for each in shares if each.share >= threshold]
            if alike:
                likenesses[uid] = min(alike, key=lambda each: (each.uid != uid, each.uid))
            elif shares:
                likenesses[uid] = max(shares, key=lambda each: (each.share, -each.uid))
    return overlaps, repeats


def norm_ratios(payloads: Mapping[int, Payload], layout: Layout, applied: Collection[int] = ()) -> dict[int, float]:
    """Return uid -> norm of its payload over the lower median of the applied ones, or of all if none is.

    Payloads that are zero are not part of the median; their ratio is 0.
    """
    squares = {
        uid: sum(norms.values())
        for uid, norms in zip(payloads, peer_norms(list(payloads.values()), layout), strict=True)
    }
    known = [squares[uid] for uid in applied if squares.get(uid, 0) > 0] or list(squares.values())
    positive = sorted(square for square in known if square > 0)
    lower_median = positive[(len(positive) - 1) // 2] if positive else 1
    return {uid: round_score(math.sqrt(square / lower_median)) for uid, square in squares.items()}
