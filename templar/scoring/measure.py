"""Measure payloads on the segments of the evaluation plan: to first order for all, exactly for those that were drawn.

First order: one backward pass over the whole evaluation batch, segment by segment, gives the inner products of every
update with the gradient of the miner's own segment and with that of the rest. That costs three passes in all (a forward
one, and a backward one of twice its cost), for any number of miners.

Exact: the model computes with `theta - factor * update` and then with `theta` again, by exchanging the tensors that it
points at. The agreed parameters are never written, and there is no second model: the gradients' memory holds the moved
parameters.

A `Meter` computes the losses, on the operator's device and in its precision; all results are on the CPU.

Losses alone do not show copies and inflated payloads; `find_likenesses` and `norm_ratios` do.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from statistics import median
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from templar.errors import PermanentError, Reason
from templar.gradient.aggregate import peer_norms, single_update
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.gradient.product import UpdateProducts
from templar.gradient.similarity import similarity
from templar.hparams import TrainerSettings
from templar.interrupt import check_stop
from templar.scoring.evidence import Estimate, Likeness, MeasuredOn, Measurement
from templar.scoring.score import first_order_score, relative_gain
from templar.scoring.standing import round_score
from templar.training.device import EVALUATION, PassSizes, as_out_of_memory, choose_device
from templar.training.loss import mean_loss, micro_batch_losses, torch_threads
from templar.training.model import (
    bind_parameters,
    hidden_states,
    load_parameters,
    named_parameters,
    output_weight,
    parameters_of,
)

T = TypeVar("T")


class _Sizes(NamedTuple):
    """The preset's sizes of an evaluation: a forward pass is a batch."""

    batch_size: int
    micro_batch_size: int


class Meter:
    """Computes losses and their gradients as the operator chose.

    With repeatable settings, the default, they are those of docs/protocol.md 14 to the last bit that a kind of machine
    has: on one thread of the CPU, in float32, with the preset's micro-batch. Otherwise device, precision, threads and
    micro-batch are the operator's, and logits are computed in chunks of tokens; an audit allows for that.
    """

    def __init__(self, settings: TrainerSettings | None = None) -> None:
        """Choose the device.

        Raises:
            PermanentError: `bad_environment`; the machine has no such device or precision, or there are several ranks.
        """
        self.settings = settings or TrainerSettings()
        if self.settings.ranks not in (1, "auto"):
            raise PermanentError(
                Reason.BAD_ENVIRONMENT,
                f"TEMPLAR_RANKS is {self.settings.ranks}, and an evaluation runs on one device: set 1 or auto",
            )
        # A smaller micro-batch, and checkpointed layers, change last bits.
        exact_sizes = self.settings.micro_batch == "preset" and not self.settings.checkpoint_layers
        self.repeatable = self.settings.repeatable and exact_sizes
        self.device = choose_device(self.settings, EVALUATION)
        self._sizes = PassSizes(self.settings, self.device, work=EVALUATION)

    @property
    def measured_on(self) -> MeasuredOn:
        """What evidence says of it."""
        device: Literal["cpu", "cuda"] = "cuda" if self.device.is_cuda else "cpu"
        precision: Literal["float32", "bfloat16"] = "float32" if self.device.precision == "float32" else "bfloat16"
        return MeasuredOn(device=device, precision=precision, repeatable=self.repeatable)

    def check(self, micro_batch_size: int) -> None:
        """Whether the settings suit the preset's number of sequences of a forward pass.

        Raises:
            PermanentError: `bad_environment`.
        """
        self._sizes.size(_Sizes(micro_batch_size, micro_batch_size), 0)

    def load(self, net: nn.Module, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Let a model compute with these parameters; they themselves on a CPU, else the model's own copy on the device.

        Raises:
            ValueError: They are not the model's.
            PermanentError: `out_of_memory`.
        """
        if not self.device.is_cuda:
            bind_parameters(net, params)
            return params
        with as_out_of_memory(self.device, EVALUATION):
            net.to(self.device.place)
            load_parameters(net, params)
        return parameters_of(net)

    def fitting(self, micro_batch_size: int, length: int, compute: Callable[[int], T], net: nn.Module) -> T:
        """The result of `compute`, which takes the sequences of a forward pass, on the device's threads.

        Raises:
            PermanentError: `out_of_memory`; with `TEMPLAR_MICRO_BATCH=auto` not before a single sequence is too much.
        """
        with torch_threads(self.device.threads), as_out_of_memory(self.device, EVALUATION):
            sizes = _Sizes(micro_batch_size, micro_batch_size)
            return self._sizes.fitting(sizes, length, compute, forget=net.zero_grad)

    def passes(self, net: nn.Module, tokens: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The mean losses of sequences of shape (n, L), float64, and their sum within autograd; `size` at a time.

        Raises:
            StoppedError: A stop was asked for.
        """
        if self.repeatable:
            for losses in micro_batch_losses(net, tokens, micro_batch_size=size):
                yield losses.detach(), losses.sum()
            return
        device, weight = self.device, output_weight(net)
        for start in range(0, len(tokens), size):
            check_stop()
            batch = tokens[start : start + size].to(device.place, torch.int64)
            with device.autocast():
                hidden = hidden_states(
                    net,
                    batch[:, :-1],
                    checkpoint_layers=self.settings.checkpoint_layers,
                    layer_step=device.layer_step,
                ).flatten(0, 1)
                each = torch.empty(len(hidden), device=device.place)
                mean = mean_loss(
                    hidden,
                    weight if torch.is_grad_enabled() else weight.detach(),  # its gradient would be computed, too
                    batch[:, 1:].flatten(),
                    chunk=device.loss_chunk(len(weight)),
                    each=each,
                )
            yield each.view(len(batch), -1).double().mean(dim=1), mean * len(batch)


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
    micro_batch_size: int  # sequences per forward pass, by the preset
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self._params = self.meter.load(self.model, self.params)
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
        gains, totals = self._fitting(lambda size: self._first_order(uids, exact_uids, size))
        self._gains = {uid: gains[uid] for uid in exact_uids}
        estimates = {uid: self._estimate(uid, gains[uid].get(uid, 0.0), totals[uid]) for uid in uids}
        return {
            uid: estimate.model_copy(update={"expected": self._expected(uid, estimate, estimates)})
            for uid, estimate in estimates.items()
        }

    def _first_order(
        self, uids: Sequence[int], exact_uids: Sequence[int], size: int
    ) -> tuple[dict[int, dict[int, float]], dict[int, float]]:
        """Products with the gradients: uid -> segment -> sum over its sequences, and uid -> over the whole batch."""
        products = UpdateProducts([self.payloads[uid] for uid in uids], self.layout, self.medians)
        index = {uid: number for number, uid in enumerate(uids)}
        gains: dict[int, dict[int, float]] = {uid: {} for uid in uids}
        with self._gradients() as gradients:
            # The gradient accumulates over segments, so a segment's gain is the product after it less that before it.
            reached = dict.fromkeys(exact_uids, 0.0)
            for owner, tokens in self._tokens.items():
                asked = [*exact_uids, *([owner] if owner in index and owner not in reached else [])]
                if asked[len(exact_uids) :]:
                    reached[owner] = products.with_gradients(gradients, [index[owner]])[0]
                self._before[owner] = self._backward(tokens, size)
                now = dict(zip(asked, products.with_gradients(gradients, [index[uid] for uid in asked]), strict=True))
                for uid in asked:
                    gains[uid][owner] = now[uid] - reached[uid]
                reached = {uid: now[uid] for uid in exact_uids}
            return gains, dict(zip(uids, products.with_gradients(gradients, range(len(uids))), strict=True))

    def measure(self, uid: int, others: Sequence[int]) -> Measurement:
        """Return the losses before and after a payload of `exact_uids` is applied alone, once `estimate` was called.

        They are measured on its own segment and on those of the `others`.
        """
        # 1. Move: theta - factor * update, in the gradients' memory.
        moved = single_update(self.payloads[uid], self.layout, self.medians, out=self._buffer or None)
        self._buffer = moved
        for name, update in moved.items():
            update.mul_(-self.factor).add_(self._params[name])
        # 2. Compute with the moved parameters, then point the model at the agreed ones again.
        bind_parameters(self.model, moved)
        try:
            after = self._fitting(lambda size: {owner: self._losses(owner, size) for owner in (uid, *others)})
        finally:
            bind_parameters(self.model, self._params)
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

    def _fitting(self, compute: Callable[[int], T]) -> T:
        length = next((tokens.shape[1] for tokens in self._tokens.values()), 0)
        return self.meter.fitting(self.micro_batch_size, length, compute, self.model)

    def _backward(self, tokens: Tensor, size: int) -> list[float]:
        """Add the gradient of a segment's summed losses, and return the losses of its sequences."""
        losses: list[Tensor] = []
        with torch.enable_grad():
            for batch, total in self.meter.passes(self.model, tokens, size):
                losses.append(batch)
                torch.autograd.backward(total)
        return _numbers(losses)

    @torch.no_grad()
    def _losses(self, owner: int, size: int) -> list[float]:
        if owner not in self._tokens:
            return []
        return _numbers([losses for losses, _ in self.meter.passes(self.model, self._tokens[owner], size)])

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
