"""Losses and their gradients on the operator's devices: what an evaluation is computed with."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from templar.hparams import HParams, TrainerSettings
from templar.interrupt import check_stop
from templar.resources import given_threads
from templar.scoring.evidence import MeasuredOn
from templar.training.cluster import rank_count
from templar.training.device import EVALUATION, choose_device
from templar.training.loss import mean_loss, micro_batch_losses, torch_threads
from templar.training.memory import EVALUATION_BYTES, PassSizes, estimated_bytes, on_device
from templar.training.model import bind_parameters, hidden_states, load_parameters, output_weight, parameters_of

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
        """Choose the devices.

        PermanentError: `bad_environment`; the machine has no such device or precision, or not so many devices.
        """
        chosen = settings or TrainerSettings()
        count = rank_count(chosen)
        self.settings = chosen if count == 1 else _of_one(chosen, 0, count)
        # A smaller micro-batch, and checkpointed layers, change last bits.
        exact_sizes = chosen.micro_batch == "preset" and not chosen.checkpoint_layers
        self.repeatable = chosen.repeatable and exact_sizes
        self.device = choose_device(self.settings, EVALUATION)
        self._sizes = PassSizes(self.settings, self.device, work=EVALUATION)
        self.each: tuple[Meter, ...] = (self, *(Meter(_of_one(chosen, number, count)) for number in range(1, count)))
        """The meters of all devices, of which this one is the first; each uses its own device alone."""

    @property
    def measured_on(self) -> MeasuredOn:
        """The description of the device in evidence."""
        device: Literal["cpu", "cuda"] = "cuda" if self.device.is_cuda else "cpu"
        precision: Literal["float32", "bfloat16"] = "float32" if self.device.precision == "float32" else "bfloat16"
        return MeasuredOn(device=device, precision=precision, repeatable=self.repeatable)

    def check(self, hparams: HParams) -> None:
        """Whether the settings suit the preset's sequences of a forward pass, and its model fits each device.

        PermanentError: `bad_environment`; `out_of_memory`, with the estimate beside the free memory.
        """
        passes, length = hparams.scoring.eval_micro_batch_size, hparams.data.sequence_length
        size = self._sizes.smallest(_Sizes(passes, passes), length)
        state, sharers = EVALUATION_BYTES[self.device.place.type], 1 if self.device.is_cuda else len(self.each)
        for meter in self.each:
            with on_device(meter.device, EVALUATION):
                needed = estimated_bytes(
                    hparams.model, meter.settings, meter.device, micro_batch=size, length=length, state=state
                )
                meter._sizes.require(needed, meter.device.free_bytes() // sharers, size)

    def load(self, net: nn.Module, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Let a model compute with these parameters; they themselves on a CPU, else the model's own copy on the device.

        ValueError if they are not the model's; errors as of `fitting`.
        """
        if not self.device.is_cuda:
            bind_parameters(net, params)
            return params
        with on_device(self.device, EVALUATION):
            net.to(self.device.place)
            load_parameters(net, params)
        return parameters_of(net)

    def fitting(self, micro_batch_size: int, length: int, compute: Callable[[int], T], net: nn.Module) -> T:
        """The result of `compute`, which takes the sequences of a forward pass, on the device's threads.

        PermanentError: `out_of_memory`; with `TEMPLAR_MICRO_BATCH=auto` not before a single sequence is too much.
        TransientError: `trainer_failed`; torch or the device's driver refuses something else.
        """
        with torch_threads(self.device.threads), on_device(self.device, EVALUATION):
            sizes = _Sizes(micro_batch_size, micro_batch_size)
            return self._sizes.fitting(sizes, length, compute, forget=net.zero_grad)

    def passes(self, net: nn.Module, tokens: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The mean losses of sequences of shape (n, L), float64, and their sum within autograd; `size` at a time."""
        if self.repeatable:
            for losses in micro_batch_losses(net, tokens, micro_batch_size=size):
                yield losses.detach(), losses.sum()
            return
        device, weight = self.device, output_weight(net)
        for start in range(0, len(tokens), size):
            check_stop()
            batch = device.take(tokens[start : start + size].to(torch.int64))
            with device.autocast():
                hidden = hidden_states(
                    net, batch[:, :-1], checkpoint_layers=self.settings.checkpoint_layers, layer_step=device.layer_step
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


def _of_one(settings: TrainerSettings, number: int, count: int) -> TrainerSettings:
    """The settings for one of several devices; on a CPU they share the threads."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        threads = max(1, (settings.threads or given_threads()) // count)
        return settings.model_copy(update={"ranks": 1, "device": "cpu", "threads": threads})
    return settings.model_copy(update={"ranks": 1, "device": f"cuda:{number}"})
