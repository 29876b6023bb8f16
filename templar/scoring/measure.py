"""Measure payloads on the segments of the evaluation plan: to first order for all, exactly for those that were drawn.

First order: one backward pass over the whole evaluation batch, segment by segment, gives the inner products of every
update with the gradient of the miner's own segment and with that of the rest. That costs three passes in all (a forward
one, and a backward one of twice its cost), for any number of miners.

Exact: the model computes with `theta - factor * update` and then with `theta` again, by exchanging the tensors that it
points at. The agreed parameters are never written, and there is no second model: the gradients' memory holds the moved
parameters.

Losses alone do not show copies and inflated payloads; `find_likenesses` and `norm_ratios` do.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from statistics import median

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
from templar.scoring.score import first_order_score, relative_gain
from templar.scoring.standing import round_score
from templar.training.loss import micro_batch_losses, sequence_losses, single_threaded
from templar.training.model import bind_parameters, named_parameters


@dataclass(eq=False)
class Evaluator:
    """Measures the payloads of one window."""

    model: nn.Module  # of the network's shape; it is left bound to `params`
    params: Mapping[str, Tensor]  # the agreed parameters before the window's step, by name; only read
    segments: Mapping[int, NDArray[np.int32]]  # uid -> its sequences, shape (n, L), in the order of evaluation
    payloads: Mapping[int, Payload]
    _: KW_ONLY
    layout: Layout
    medians: Mapping[str, int]  # the norms that payloads are clipped to, as in `single_update`
    factor: float  # step size of the measurement
    micro_batch_size: int  # sequences per forward pass

    def __post_init__(self) -> None:
        bind_parameters(self.model, self.params)
        self._tokens = {uid: torch.from_numpy(sequences) for uid, sequences in self.segments.items()}
        self._buffer: dict[str, Tensor] = {}
        self._before: dict[int, list[float]] = {}
        self._gains: dict[int, dict[int, float]] = {}

    @property
    def loss(self) -> float | None:
        """Mean loss of the evaluation batch under the agreed parameters; None before `estimate`, and if not finite."""
        return _mean(loss for losses in self._before.values() for loss in losses)

    def estimate(self, exact_uids: Sequence[int]) -> dict[int, Estimate]:
        """Return the first-order measurement of every payload.

        The gain of `exact_uids`, which are measured exactly, is found on every segment: it says what to expect there.
        """
        uids = list(self.payloads)
        products = UpdateProducts([self.payloads[uid] for uid in uids], self.layout, self.medians)
        index = {uid: number for number, uid in enumerate(uids)}
        gains: dict[int, dict[int, float]] = {uid: {} for uid in uids}  # sums over the sequences of a segment
        with single_threaded(), self._gradients() as gradients:
            # The gradient accumulates over segments, so a segment's gain is the product after it less that before it.
            reached = dict.fromkeys(exact_uids, 0.0)
            for owner, tokens in self._tokens.items():
                asked = [*exact_uids, *([owner] if owner in index and owner not in reached else [])]
                if asked[len(exact_uids) :]:
                    reached[owner] = products.with_gradients(gradients, [index[owner]])[0]
                self._before[owner] = self._backward(tokens)
                now = dict(zip(asked, products.with_gradients(gradients, [index[uid] for uid in asked]), strict=True))
                for uid in asked:
                    gains[uid][owner] = now[uid] - reached[uid]
                reached = {uid: now[uid] for uid in exact_uids}
            totals = dict(zip(uids, products.with_gradients(gradients, range(len(uids))), strict=True))
        self._gains = {uid: gains[uid] for uid in exact_uids}
        estimates = {uid: self._estimate(uid, gains[uid].get(uid, 0.0), totals[uid]) for uid in uids}
        return {
            uid: estimate.model_copy(update={"expected": self._expected(uid, estimate, estimates)})
            for uid, estimate in estimates.items()
        }

    def measure(self, uid: int, others: Sequence[int]) -> Measurement:
        """Return the losses before and after a payload of `exact_uids` is applied alone, once `estimate` was called.

        They are measured on its own segment and on those of the `others`.
        """
        # 1. Move: theta - factor * update, in the gradients' memory.
        moved = single_update(self.payloads[uid], self.layout, self.medians, out=self._buffer or None)
        self._buffer = moved
        for name, update in moved.items():
            update.mul_(-self.factor).add_(self.params[name])
        # 2. Compute with the moved parameters, then point the model at the agreed ones again.
        bind_parameters(self.model, moved)
        try:
            after = {owner: self._losses(owner) for owner in (uid, *others)}
        finally:
            bind_parameters(self.model, self.params)
        count = sum(len(after[owner]) for owner in others)
        gain = sum(self._gains[uid][owner] for owner in others) * self.factor
        return Measurement(
            own_before=_mean(self._before.get(uid, [])),
            own_after=_mean(after[uid]),
            random_before=_mean(loss for owner in others for loss in self._before[owner]),
            random_after=_mean(loss for owner in others for loss in after[owner]),
            random_gain=_finite(gain / count) if count else None,
        )

    @contextmanager
    def _gradients(self) -> Iterator[dict[str, Tensor]]:
        """Yield zeros that backward passes add to; afterwards the model drops them, and they become the buffer."""
        gradients = {}
        try:
            for name, param in named_parameters(self.model):
                param.requires_grad_(True)
                param.grad = gradients[name] = torch.zeros_like(param)
            yield gradients
            self._buffer = gradients
        finally:
            self.model.zero_grad(set_to_none=True)

    def _backward(self, tokens: Tensor) -> list[float]:
        """Add the gradient of a segment's summed losses, and return the losses of its sequences."""
        losses: list[float] = []
        with torch.enable_grad():
            for batch in micro_batch_losses(self.model, tokens, micro_batch_size=self.micro_batch_size):
                losses += batch.tolist()
                torch.autograd.backward(batch.sum())
        return losses

    def _losses(self, owner: int) -> list[float]:
        if owner not in self._tokens:
            return []
        losses: list[float] = sequence_losses(
            self.model, self._tokens[owner], micro_batch_size=self.micro_batch_size
        ).tolist()
        return losses

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
