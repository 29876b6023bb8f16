"""The trainer: parameters, sequences and optimizer state become an update, new optimizer state and figures.

It knows nothing of windows, stores or chains. The agreed parameters are never touched: the working copy is the
trainer's own, and its storage becomes the update at the end. Update and new optimizer state stand beside the old ones
until the window is decided (docs/protocol.md 6). With repeatable settings on a CPU, the result does not depend on the
machine's number of threads.
"""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from templar.errors import PermanentError, Reason
from templar.hparams import Model, TrainerSettings, Training
from templar.training.device import Device, PhaseClock, TrainFigures, choose_device, flops_per_token
from templar.training.group import Alone
from templar.training.loss import mean_loss, token_losses, torch_threads
from templar.training.memory import MicroBatches, on_device
from templar.training.model import (
    check_shapes,
    hidden_states,
    inner_optimizer,
    muon_matrices,
    named_parameters,
    output_weight,
    parameter_shapes,
)
from templar.training.optimizers import InnerOptimizers, OptimizerState
from templar.training.schedule import inner_factor, inner_learning_rate

LARGEST_UPDATE = 2.0**64
"""The largest magnitude of an update's element: the error feedback adds up unpublished ones and must stay finite."""
_DIVERGED = (
    "nothing is published in this window; lower the learning rate, check the data, or return to the last snapshot"
)
FOREVER = sys.float_info.max  # seconds; not infinite, for a share of them is taken off
MOST_STEPS = 64  # inner steps of a window whose figures are reported
MOST_AHEAD = 2  # micro-batches that a GPU may be behind the program: a deadline is kept to within so many


@dataclass(frozen=True)
class TrainResult:
    """The result of one window of training; losses are means in nats per token."""

    update: Mapping[str, Tensor]  # float32: parameters before minus after (sparseloco), or the mean gradient (demo)
    optimizer: OptimizerState | None  # the new state of the inner optimizer; None for demo, which has none
    losses: tuple[float, ...]  # of the inner steps (sparseloco) or batches (demo) that went into the update
    num_sequences: int  # a sequence used twice counts twice
    stopped_early: bool  # whether `keep_going` ended the training
    figures: TrainFigures | None = None  # None for an update that was not trained
    norms: tuple[float, ...] = ()  # of the gradient of each inner step, before it is clipped; none in demo
    rates: tuple[float, ...] = ()  # AdamW's learning rate in each inner step; none in demo

    @property
    def num_steps(self) -> int:
        """Inner steps (sparseloco) or batches (demo) that went into the update."""
        return len(self.losses)

    @property
    def first_loss(self) -> float:
        """Of the first step; 0 for an update that was not trained."""
        return self.losses[0] if self.losses else 0.0

    @property
    def last_loss(self) -> float:
        """Of the last step, in the same way."""
        return self.losses[-1] if self.losses else 0.0


@dataclass(frozen=True)
class StepState:
    """Training after an inner step (`sparseloco`) or a batch (`demo`): all that the next one needs."""

    losses: tuple[float, ...]  # of every step done, in order
    num_batches: int  # that went into them
    tensors: Mapping[str, Tensor]  # float32, by parameter name: the working parameters, or the sum of gradients (demo)
    optimizer: OptimizerState | None  # None for demo
    norms: tuple[float, ...] = ()  # as in `TrainResult`


@dataclass(frozen=True)
class StepSeries:
    """Figures of some inner steps (`demo`: batches), evenly spread, the first and the last among them."""

    inner_step: tuple[int, ...] = ()  # their numbers from 0
    loss: tuple[float, ...] = ()  # of each of them, like the next two; empty if it is not known
    grad_norm: tuple[float, ...] = ()  # before it is clipped
    inner_lr: tuple[float, ...] = ()  # AdamW's
    norms: tuple[float, float, float] | None = None  # the least, mean and largest norm of all steps

    @classmethod
    def of(cls, result: TrainResult) -> Self:
        """At most `MOST_STEPS` steps of a training, with six digits per figure."""
        count, last, norms = min(result.num_steps, MOST_STEPS), result.num_steps - 1, result.norms
        steps = tuple(each * last // max(count - 1, 1) for each in range(count))

        def some(figures: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(float(f"{figures[step]:.6g}") for step in steps) if figures else ()

        spread = (min(norms), math.fsum(norms) / len(norms), max(norms)) if norms else None
        return cls(steps, some(result.losses), some(norms), some(result.rates), spread)


class TrainProgress(Protocol):
    """A store for the progress of a training, so that a later `learn` with the same arguments goes on from it."""

    def save(self, state: StepState) -> None:
        """Take note of the state after a step, or pass it by; its tensors change when this has returned."""

    def restore(self) -> StepState | None:
        """The newest state that was kept; None if there is none to go on from."""


class Trainer:
    """Trains one model on one device. Between two calls it holds no parameters, and knows what fits the device."""

    def __init__(self, model: Model, settings: TrainerSettings | None = None, group: Alone | None = None) -> None:
        """Choose the device, by default for repeatable training in this process alone; else `bad_environment`."""
        self.model, self.settings = model, settings or TrainerSettings()
        self.device: Device = choose_device(self.settings)
        self.group = group or Alone()
        self.net: nn.Module = self.group.build(model, self.device)
        self.micro_batches = MicroBatches(model, self.settings, self.device, ranks=self.group.size)

    def check(self, training: Training, *, length: int) -> None:
        """Raise PermanentError, `bad_environment` or `out_of_memory`, if the device does not suit such sequences."""
        self.micro_batches.check(training, length)

    def learn(
        self,
        params: Mapping[str, Tensor],
        sequences: Tensor,
        *,
        training: Training,
        outer_steps: int,
        optimizer: OptimizerState,
        keep_going: Callable[[], bool],
        progress: TrainProgress | None = None,
        begin: Mapping[str, Tensor] | None = None,
        seconds_left: Callable[[], float] = lambda: FOREVER,
    ) -> TrainResult:
        """Train from these parameters until the steps are done or `keep_going` ends it.

        Args:
            params: The agreed parameters, float32, on the CPU; not changed.
            sequences: Shape (n, L), integer tokens.
            training: Its recipe and settings.
            outer_steps: Outer steps since genesis; places the training in the learning-rate schedule.
            optimizer: State before; not changed. The recipe `demo` has none and ignores it.
            keep_going: Called before every micro-batch; False ends the training, and the step at hand is not taken.
            progress: Where to go on from, and where to keep the state after each step. With repeatable settings, a
                training that goes on gives the same bits as one that was not interrupted.
            begin: The parameters that the first step starts from, float32; `params` if None. The recipe `sparseloco`
                alone: the update is measured from `params` in any case.
            seconds_left: For the rest of the training. A step takes as many batches as its share of them allows, one
                at least and at most `training.max_step_batches`.

        Raises:
            ValueError: There are no sequences; names or shapes are not the model's.
            PermanentError: `non_finite_loss`, `non_finite_update`; `no_time_left`, not one step was finished;
                `out_of_memory`; `trainer_failed`, torch or the device's driver refuses something else.
            StoppedError: A stop was asked for.
        """
        check_inputs(self.model, params, sequences)
        with torch_threads(self.device.threads), on_device(self.device):
            self.micro_batches.size(training, sequences.shape[1])  # while the memory for the state is free
            run = _Run(self, training, sequences, keep_going, progress=progress, seconds_left=seconds_left)
            try:
                run.load(params if begin is None else begin)
                if training.recipe == "demo":
                    return train_demo(run)
                return train_sparseloco(run, params, outer_steps=outer_steps, optimizer=optimizer)
            finally:
                run.release()


def check_inputs(model: Model, params: Mapping[str, Tensor], sequences: Tensor) -> None:
    """Raise ValueError if there are no sequences, or if names or shapes are not the model's."""
    if len(sequences) == 0:
        raise ValueError("there are no sequences to train on")
    check_shapes(parameter_shapes(model), params)


class _Run:
    """One call of `learn`: the working copy of the model, and the steps that both recipes have in common."""

    def __init__(
        self,
        trainer: Trainer,
        training: Training,
        sequences: Tensor,
        keep_going: Callable[[], bool],
        *,
        progress: TrainProgress | None,
        seconds_left: Callable[[], float],
    ) -> None:
        self.trainer, self.training, self.sequences, self._keep_going = trainer, training, sequences, keep_going
        self.progress, self._seconds_left = progress, seconds_left
        self.num_batches = self._num_restored = 0  # that were taken, and of these by an earlier call
        self._longest = 0.0  # seconds of a batch
        self.norms = list[float]()  # of the gradient, by inner step
        self.net, self.device, self.group = trainer.net, trainer.device, trainer.group
        self.device.reset_peak()
        self.clock = PhaseClock(self.device)
        self._micro_batch = 0
        self._too_large: dict[str, float] = {}  # of the update, by parameter name

    def load(self, params: Mapping[str, Tensor]) -> None:
        """Copy parameters into the working copy."""
        for name, param in named_parameters(self.net):
            self.group.load(param, params, name, self.device.place)
            param.grad = None

    def restore(self) -> StepState | None:
        """The state to go on from, if there is one."""
        state = None if self.progress is None else self.progress.restore()
        self.num_batches = self._num_restored = 0 if state is None else state.num_batches
        return state

    def keep(self, losses: list[float], tensors: Mapping[str, Tensor], optimizer: OptimizerState | None) -> None:
        """Let the state after a step be kept."""
        if self.progress is not None:
            self.progress.save(StepState(tuple(losses), self.num_batches, tensors, optimizer, tuple(self.norms)))
            self.clock.mark("other")

    def release(self) -> None:
        """Give the memory of parameters and gradients back; what became the update lives on there."""
        for _, param in named_parameters(self.net):
            param.grad = None
            self.group.unload(param)

    def mean_gradient(self, steps_left: int = 1) -> float | None:
        """Add the mean gradient of the next batches to the parameters' gradients, and return their mean loss.

        There are as many as the share of one of the steps that are left has time for. After out-of-memory they begin
        again with smaller micro-batches. None if `keep_going` ended one: then the gradients are incomplete.
        """
        taken, left = self.num_batches, self._seconds_left()
        until = left - left / steps_left

        def compute(size: int) -> float | None:
            losses, self.num_batches = list[float](), taken
            while not losses or self._has_time(len(losses), until):
                before = self._seconds_left()
                if (loss := self._accumulate(self.num_batches, size)) is None:
                    self.num_batches = taken
                    return None
                losses.append(loss)
                self.num_batches += 1
                self._longest = max(self._longest, before - self._seconds_left())
            self._average(len(losses))
            return sum(losses) / len(losses)

        return self.trainer.micro_batches.fitting(
            self.training, self.sequences.shape[1], compute, forget=lambda: self.net.zero_grad(set_to_none=True)
        )

    def _has_time(self, num_batches: int, until: float) -> bool:
        """Whether a step of so many batches takes one more, and ends with `until` seconds left at the latest."""
        if num_batches == self.training.max_step_batches:
            return False
        return self.group.decide(lambda: self._seconds_left() - self._longest >= until)

    def _average(self, num_batches: int) -> None:
        """Turn the sum of the batches' gradients into their mean, over all ranks."""
        if num_batches > 1:
            for _, param in named_parameters(self.net):
                if param.grad is not None:
                    param.grad /= num_batches
        self.group.mean_gradients(self.net)

    def _accumulate(self, batch: int, size: int) -> float | None:
        training, group = self.training, self.group
        num_micro_batches = training.batch_size // (size * group.size)
        losses: list[Tensor] = []
        self._micro_batch = size
        for index in range(num_micro_batches):
            self.clock.wait_for(2 * MOST_AHEAD)  # marks: two per micro-batch
            if not group.decide(self._keep_going):
                return None
            start = batch * training.batch_size + index * size * group.size + group.rank
            places = (start + group.size * torch.arange(size)) % len(self.sequences)
            loss = self._loss(self.sequences[places])
            losses.append(loss.detach())
            self.clock.mark("forward")
            torch.autograd.backward(loss / num_micro_batches)
            self.clock.mark("backward")
        # Here the program waits until a GPU has finished the batch.
        numbers = group.mean_losses([float(number) for number in torch.stack(losses).tolist()])
        for index, number in enumerate(numbers):
            _check_finite(number, f"loss of batch {batch}, micro-batch {index}")
        return sum(numbers) / num_micro_batches

    def _loss(self, sequences: Tensor) -> Tensor:
        """The mean loss of some sequences, within autograd."""
        settings, device = self.trainer.settings, self.device
        if settings.repeatable and not settings.checkpoint_layers:
            return token_losses(self.net, sequences).mean()
        tokens = device.take(sequences.to(torch.int64))
        chunk = device.loss_chunk(self.trainer.model.vocab_size)

        def compute() -> Tensor:
            hidden = hidden_states(
                self.net,
                tokens[:, :-1],
                checkpoint_layers=settings.checkpoint_layers,
                layer_step=self.group.layer_step(device.layer_step),
            )
            return mean_loss(hidden.flatten(0, 1), output_weight(self.net), tokens[:, 1:].flatten(), chunk=chunk)

        with device.autocast():
            return self.group.loss(self.net, compute)

    def optimizers(self, state: OptimizerState) -> InnerOptimizers:
        """The inner optimizers, continued from copies of a state."""
        params = dict(named_parameters(self.net))
        if set(params) != set(state.exp_avg) or not set(params) >= set(state.exp_avg_sq):
            raise ValueError("the optimizer state does not have exactly the model's parameters")
        training, settings = self.training, self.trainer.settings
        of_muon = muon_matrices(self.trainer.model, inner_optimizer(training, settings))
        return InnerOptimizers(self.group, training, params, state, of_muon, repeatable=settings.repeatable)

    def tensors(self) -> dict[str, Tensor]:
        """The working parameters themselves, in the order of their names."""
        return {name: param.data for name, param in sorted(named_parameters(self.net))}

    def checked(self, update: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors of an update on; the first rank notes those that are too large: `result` refuses them."""
        for name, tensor in update:
            if self.group.rank == 0:
                lowest, highest = (float(each) for each in torch.aminmax(tensor))
                largest = max(-lowest, highest)
                if not largest <= LARGEST_UPDATE:  # also true for NaN
                    self._too_large[name] = largest
            yield name, tensor

    def result(
        self, update: Mapping[str, Tensor], optimizer: OptimizerState | None, losses: list[float], *, num_wanted: int
    ) -> TrainResult:
        """The result of the steps that were taken; PermanentError: `no_time_left`, `non_finite_update`."""
        training = self.training
        if not losses:
            raise PermanentError(
                Reason.NO_TIME_LEFT,
                f"not one batch of {training.batch_size} sequences was finished in time: nothing is published in this "
                "window; train on a faster device, or on more of them (TEMPLAR_DEVICE, TEMPLAR_RANKS)",
            )
        for name, largest in self._too_large.items():
            problem = f"the update of parameter {name!r} is as large as {largest}"
            raise PermanentError(Reason.NON_FINITE_UPDATE, f"{problem}: {_DIVERGED}")
        return TrainResult(
            update=update,
            optimizer=optimizer,
            losses=tuple(losses),
            num_sequences=self.num_batches * training.batch_size,
            stopped_early=len(losses) < num_wanted,
            figures=self._figures(),
            norms=tuple(self.norms),
        )

    def _figures(self) -> TrainFigures:
        self.clock.mark("other")
        phases, seconds, device = self.clock.seconds(), time.perf_counter() - self.clock.started, self.device
        length, size = self.sequences.shape[1], self.group.size
        tokens = (self.num_batches - self._num_restored) * self.training.batch_size * length
        peak = None if device.peak_flops is None else size * device.peak_flops
        return TrainFigures(
            device=device.name if size == 1 else f"{size} x {device.name}",
            precision=device.precision,
            choice=device.why,
            micro_batch=self._micro_batch,
            tokens=tokens,
            seconds=seconds,
            phases=phases,
            peak_bytes=device.peak_bytes(),
            is_cuda=device.is_cuda,
            mfu=None if peak is None else tokens / seconds * flops_per_token(self.trainer.model, length) / peak,
            assumed_peak=peak,
        )


def train_sparseloco(
    run: _Run, before: Mapping[str, Tensor], *, outer_steps: int, optimizer: OptimizerState
) -> TrainResult:
    """Take up to `inner_steps` inner steps from the agreed parameters (DiLoCo, arXiv 2311.08105).

    Sequences are used in order, from the start again when they run out.
    """
    training, net = run.training, run.net
    losses, optimizers = _begin(run, optimizer)
    run.clock.mark("other")
    for inner_step in range(len(losses), training.inner_steps):
        # 1. The mean gradient of its batches.
        loss = run.mean_gradient(training.inner_steps - inner_step)
        if loss is None:
            break
        # 2. Clip its norm.
        clipped = nn.utils.clip_grad_norm_([param for _, param in named_parameters(net)], training.max_grad_norm)
        norm = float(run.group.whole(clipped))
        _check_finite(norm, f"gradient norm of inner step {inner_step}")
        run.norms.append(norm)
        # 3. One step of the optimizer.
        optimizers.step(inner_factor(training, outer_steps, inner_step))
        losses.append(loss)
        run.clock.mark("step")
        if run.progress is not None:
            run.keep(losses, run.tensors(), optimizers.state(optimizer.num_steps + len(losses)))
    # 4. The pseudo-gradient, in the working copy's own memory: how far the parameters moved, negated.
    net.zero_grad(set_to_none=True)
    after = ((name, run.group.whole(tensor)) for name, tensor in run.tensors().items())
    is_first = run.group.rank == 0  # the only rank that has the parameters before
    moved = ((name, torch.sub(before[name], each, out=each) if is_first else each) for name, each in after)
    update = run.group.keep(run.checked(moved))
    moments = optimizers.final_state(optimizer.num_steps + len(losses))
    result = run.result(update, moments, losses, num_wanted=training.inner_steps)
    rates = (inner_learning_rate(training, outer_steps, inner_step) for inner_step in range(len(losses)))
    return replace(result, rates=tuple(rates))


def _begin(run: _Run, state: OptimizerState) -> tuple[list[float], InnerOptimizers]:
    """The losses so far and the optimizers; what a training goes on from needs no memory after this."""
    losses = list[float]()
    if (known := run.restore()) is not None and known.optimizer is not None:
        run.load(known.tensors)
        losses, run.norms, state = list(known.losses), list(known.norms), known.optimizer
    return losses, run.optimizers(state)


def train_demo(run: _Run) -> TrainResult:
    """Average the gradient at the agreed parameters over up to `inner_steps` batches.

    The parameters stand still, so a sequence seen twice would teach nothing: the pass ends with the sequences, and only
    its last batch is filled up from the start.
    """
    training, net, losses = run.training, run.net, list[float]()
    total = {name: torch.zeros_like(param) for name, param in run.tensors().items()}
    if (known := run.restore()) is not None:
        losses = list(known.losses)
        for name, tensor in total.items():
            tensor.copy_(known.tensors[name])
    num_batches = min(training.inner_steps, -(-len(run.sequences) // training.batch_size))
    run.clock.mark("other")
    for _ in range(len(losses), num_batches):
        # 1. The mean gradient of one batch.
        loss = run.mean_gradient()
        if loss is None:
            break
        # 2. Add it up.
        for name, param in named_parameters(net):
            if param.grad is not None:
                total[name] += param.grad
        net.zero_grad(set_to_none=True)
        losses.append(loss)
        run.clock.mark("step")
        run.keep(losses, total, None)
    # 3. The mean over the batches.
    count = max(len(losses), 1)
    means = ((name, run.group.whole(sums / count)) for name, sums in total.items())
    update = run.group.keep(run.checked(means))
    return run.result(update, None, losses, num_wanted=num_batches)


def _check_finite(number: float, name: str) -> None:
    if not math.isfinite(number):
        raise PermanentError(Reason.NON_FINITE_LOSS, f"{name} is {number}: {_DIVERGED}")
