"""One window of training: a miner's sequences become an update, which is not applied yet.

Both recipes leave the model as they found it, bit for bit, also when they fail: the update and the new optimizer state
stand beside the old ones until the window is decided (docs/protocol.md 6). On a CPU the result does not depend on the
number of threads.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from templar.errors import PermanentError, Reason
from templar.hparams import AdamW, Schedule, Training
from templar.interrupt import check_stop
from templar.training.loss import single_threaded, token_losses
from templar.training.model import load_parameters, named_parameters, parameters_of

_PI = 3.141592653589793
LARGEST_UPDATE = 2.0**64
"""The largest magnitude of an update's element: the error feedback adds up unpublished ones and must stay finite."""


@dataclass(frozen=True)
class OptimizerState:
    """The state of the inner AdamW, by parameter name."""

    num_steps: int  # inner steps that went into it
    exp_avg: Mapping[str, Tensor]  # first moments, float32
    exp_avg_sq: Mapping[str, Tensor]  # second moments, float32

    @classmethod
    def zeros(cls, params: Mapping[str, Tensor]) -> Self:
        """The state of a miner that never trained, in the shapes and on the devices of the parameters."""
        first, second = ({name: torch.zeros_like(param) for name, param in params.items()} for _ in range(2))
        return cls(0, first, second)


@dataclass(frozen=True)
class TrainResult:
    """The result of one window of training; losses are means in nats per token."""

    update: dict[str, Tensor]  # float32: parameters before minus after (sparseloco), or the mean gradient (demo)
    optimizer: OptimizerState | None  # the new state of the inner optimizer; None for demo, which has none
    first_loss: float
    mean_loss: float  # over all steps
    last_loss: float
    num_steps: int  # inner steps (sparseloco) or batches (demo) that went into the update
    num_sequences: int  # a sequence used twice counts twice
    stopped_early: bool  # whether `keep_going` ended the training


def train_sparseloco(
    net: nn.Module,
    sequences: Tensor,
    *,
    training: Training,
    outer_steps: int,
    optimizer: OptimizerState,
    keep_going: Callable[[], bool],
) -> TrainResult:
    """Take up to `inner_steps` AdamW steps from the agreed parameters (DiLoCo, arXiv 2311.08105).

    Args:
        net: The model at the agreed parameters.
        sequences: Shape (n, L), integer tokens; used in order, from the start again when they run out.
        training: Recipe settings.
        outer_steps: Outer steps since genesis; places the window in the learning-rate schedule.
        optimizer: State before; not changed.
        keep_going: Called before every micro-batch; False ends the training, and the step at hand is not taken.

    Raises:
        ValueError: There are no sequences.
        PermanentError: `non_finite_loss`, `non_finite_update`; `no_time_left`, not one step was finished.
        StoppedError: A stop was asked for.
    """
    before = {name: param.clone() for name, param in parameters_of(net).items()}
    losses: list[float] = []
    with _restored(net, before), single_threaded():
        adamw = _adamw(net, training.adamw, optimizer)
        for inner_step in range(training.inner_steps):
            # 1. The mean gradient of one batch, with its norm clipped.
            loss = _accumulate_batch(net, sequences, inner_step, training, keep_going)
            if loss is None:
                break
            norm = nn.utils.clip_grad_norm_([param for _, param in named_parameters(net)], training.max_grad_norm)
            _check_finite(float(norm), f"gradient norm of inner step {inner_step}")
            # 2. One step of AdamW.
            adamw.param_groups[0]["lr"] = inner_learning_rate(training, outer_steps, inner_step)
            adamw.step()
            adamw.zero_grad(set_to_none=True)
            losses.append(loss)
        # 3. The pseudo-gradient: how far the parameters moved, negated.
        update = {name: before[name] - param for name, param in parameters_of(net).items()}
    state = _optimizer_state(net, adamw, optimizer.num_steps + len(losses))
    return _result(update, state, losses, training, num_wanted=training.inner_steps)


def train_demo(net: nn.Module, sequences: Tensor, *, training: Training, keep_going: Callable[[], bool]) -> TrainResult:
    """Average the gradient at the agreed parameters over up to `inner_steps` batches.

    The parameters stand still, so a sequence seen twice would teach nothing: the pass ends with the sequences, and only
    its last batch is filled up from the start.

    Args:
        net: The model at the agreed parameters.
        sequences: Shape (n, L), integer tokens; used in order.
        training: Recipe settings.
        keep_going: Called before every micro-batch; False ends the training, and the batch at hand does not count.

    Raises:
        ValueError: There are no sequences.
        PermanentError: `non_finite_loss`, `non_finite_update`; `no_time_left`, not one batch was finished.
        StoppedError: A stop was asked for.
    """
    total = {name: torch.zeros_like(param) for name, param in parameters_of(net).items()}
    losses: list[float] = []
    num_batches = min(training.inner_steps, -(-len(sequences) // training.batch_size))
    with _restored(net), single_threaded():
        for batch in range(max(num_batches, 1)):
            loss = _accumulate_batch(net, sequences, batch, training, keep_going)
            if loss is None:
                break
            for name, param in named_parameters(net):
                if param.grad is not None:
                    total[name] += param.grad
            net.zero_grad(set_to_none=True)
            losses.append(loss)
        update = {name: gradient / max(len(losses), 1) for name, gradient in total.items()}
    return _result(update, None, losses, training, num_wanted=num_batches)


def _accumulate_batch(
    net: nn.Module, sequences: Tensor, batch: int, training: Training, keep_going: Callable[[], bool]
) -> float | None:
    """Add the mean gradient of the window's `batch`-th batch to the model's gradients, and return its mean loss.

    None if `keep_going` ended the batch: then the gradients are incomplete.
    """
    if len(sequences) == 0:
        raise ValueError("there are no sequences to train on")
    num_micro_batches = training.batch_size // training.micro_batch_size
    total = 0.0
    for index in range(num_micro_batches):
        check_stop()
        if not keep_going():
            return None
        start = batch * training.batch_size + index * training.micro_batch_size
        places = torch.arange(start, start + training.micro_batch_size) % len(sequences)
        loss = token_losses(net, sequences[places]).mean()
        total += _check_finite(float(loss.detach()), f"loss of batch {batch}, micro-batch {index}")
        torch.autograd.backward(loss / num_micro_batches)
    return total / num_micro_batches


def _check_finite(number: float, name: str) -> float:
    if not math.isfinite(number):
        raise PermanentError(
            Reason.NON_FINITE_LOSS,
            f"{name} is {number}: nothing is published in this window; lower the learning rate, check the data, "
            "or return to the last snapshot",
        )
    return number


@contextmanager
def _restored(net: nn.Module, before: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Clear the gradients at both ends of a block, and at its end restore the parameters, if given."""
    net.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        net.zero_grad(set_to_none=True)
        if before is not None:
            load_parameters(net, before)


def _adamw(net: nn.Module, settings: AdamW, state: OptimizerState) -> torch.optim.AdamW:
    """The AdamW of torch, continued from copies of a state."""
    params = dict(named_parameters(net))
    if set(params) != set(state.exp_avg) or set(params) != set(state.exp_avg_sq):
        raise ValueError("the optimizer state does not have exactly the model's parameters")
    adamw = torch.optim.AdamW(
        params.values(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=True,  # one call for all tensors, with the same bits
    )
    for name, param in params.items():
        adamw.state[param] = {
            "step": torch.tensor(float(state.num_steps)),
            "exp_avg": state.exp_avg[name].to(param.device, copy=True),
            "exp_avg_sq": state.exp_avg_sq[name].to(param.device, copy=True),
        }
    return adamw


def _optimizer_state(net: nn.Module, adamw: torch.optim.AdamW, num_steps: int) -> OptimizerState:
    states = {name: adamw.state[param] for name, param in sorted(named_parameters(net))}
    exp_avg = {name: state["exp_avg"] for name, state in states.items()}
    return OptimizerState(num_steps, exp_avg, {name: state["exp_avg_sq"] for name, state in states.items()})


def _result(
    update: dict[str, Tensor],
    optimizer: OptimizerState | None,
    losses: list[float],
    training: Training,
    *,
    num_wanted: int,
) -> TrainResult:
    if not losses:
        raise PermanentError(
            Reason.NO_TIME_LEFT,
            f"not one batch of {training.batch_size} sequences was finished in time: nothing is published in this "
            "window; lower training.batch_size or lengthen the window",
        )
    for name, tensor in update.items():
        largest = float(tensor.abs().max())
        if not largest <= LARGEST_UPDATE:  # also true for NaN
            raise PermanentError(
                Reason.NON_FINITE_UPDATE,
                f"the update of parameter {name!r} is as large as {largest}: nothing is published in this window; "
                "lower the learning rate, check the data, or return to the last snapshot",
            )
    return TrainResult(
        update=update,
        optimizer=optimizer,
        first_loss=losses[0],
        mean_loss=math.fsum(losses) / len(losses),
        last_loss=losses[-1],
        num_steps=len(losses),
        num_sequences=len(losses) * training.batch_size,
        stopped_early=len(losses) < num_wanted,
    )


def schedule_factor(schedule: Schedule, step: int) -> float:
    """The factor on the peak learning rate.

    Linear from `warmup_start_factor` at step 0 to 1 at `warmup_steps`, then a cosine from 1 to `eta_min_factor`. With
    `restarts` the cosine starts again at its foot, each period twice as long as the last, the first of `t_max` steps
    (SGDR, arXiv 1608.03983, T_mult = 2). Without, it stays at its foot.

    Args:
        schedule: The hyper-parameters.
        step: Steps done before this one, from 0.

    Returns:
        The same double on every machine: see `_half_cosine`.
    """
    if step < schedule.warmup_steps:
        return schedule.warmup_start_factor + (1 - schedule.warmup_start_factor) * step / schedule.warmup_steps
    position, period = step - schedule.warmup_steps, schedule.t_max
    if schedule.restarts:
        cycle = (position // period + 1).bit_length() - 1  # cycle i begins at t_max (2^i - 1)
        position, period = position - period * (2**cycle - 1), period * 2**cycle
    lowest = schedule.eta_min_factor
    return lowest + (1 - lowest) * _half_cosine(min(position, period) / period)


def inner_learning_rate(training: Training, outer_steps: int, inner_step: int) -> float:
    """The learning rate of one inner step of `sparseloco`.

    Args:
        training: Peak and schedule.
        outer_steps: Outer steps since genesis, before this window; null windows do not count (docs/protocol.md 9).
        inner_step: Inner steps done in this window.
    """
    step = outer_steps * training.inner_steps + inner_step
    return training.adamw.learning_rate * schedule_factor(training.schedule, step)


def outer_learning_rate(training: Training, outer_steps: int) -> float:
    """The learning rate of the outer step after `outer_steps` others: constant in `sparseloco`, scheduled in `demo`."""
    if training.recipe == "sparseloco":
        return training.outer_learning_rate
    return training.outer_learning_rate * schedule_factor(training.schedule, outer_steps)


def outer_weight_decay(training: Training) -> float:
    """The decay of the parameters in the outer step: none in `sparseloco`, whose inner optimizer decays."""
    return training.weight_decay if training.recipe == "demo" else 0.0


def _half_cosine(fraction: float) -> float:
    """`(1 + cos(pi * fraction)) / 2` for a fraction of 0 to 1, within 1e-15.

    All nodes must agree on the learning rate to the last bit, and the cosines of C libraries differ there. This is the
    Taylor series in IEEE 754 additions, multiplications and divisions, on an angle of at most pi/4.
    """
    if fraction > 0.5:
        return 1.0 - _half_cosine(1.0 - fraction)
    angle = _PI * fraction / 2  # (1 + cos 2x) / 2 = cos^2 x
    squared = angle * angle
    term = cosine = 1.0
    for order in range(2, 22, 2):
        term = -term * squared / (order * (order - 1))
        cosine += term
    return cosine * cosine
