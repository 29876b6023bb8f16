"""Memory of a device: the estimate, the micro-batches that fit, and what follows when there is not enough."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from templar.errors import PermanentError, Reason, TransientError
from templar.hparams import Model, TrainerSettings, Training
from templar.training.device import TRAINING, Device, Work, bad_environment, num_parameters
from templar.training.model import inner_optimizer

log = logging.getLogger(__name__)

T = TypeVar("T")

TRAINING_BYTES = 16  # per parameter, on the device while it trains: float32 parameters, gradients and two moments
EVALUATION_BYTES = {"cpu": 4, "cuda": 8}
"""Per parameter, while a device evaluates: gradients or changed parameters, and a GPU's copy of the parameters."""
AUTO_CPU_TOKENS = 4096
"""Most tokens of a micro-batch that `auto` takes on a CPU: more of them take memory and are not faster."""
_NO_ROOM = ("DefaultCPUAllocator", "out of memory", "_STATUS_ALLOC_FAILED")
"""In the errors of the CPU's allocator, of the driver and NCCL, and of cuBLAS and cuDNN."""


class Batches(Protocol):
    """The preset's numbers of sequences: of a batch, and of a forward pass."""

    @property
    def batch_size(self) -> int:
        """Sequences of a batch."""

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a forward pass."""


def estimated_bytes(
    model: Model,
    settings: TrainerSettings,
    device: Device,
    *,
    micro_batch: int,
    length: int,
    shards: int = 1,
    state: int = TRAINING_BYTES,
) -> int:
    """About what training or an evaluation takes on the device.

    That is `state` bytes per parameter, the activations of one micro-batch, and logits. A layer keeps about 8 tensors
    of the hidden size in float32, and 4 of it and 4 of the inner size in the products' precision; a checkpointed one
    keeps its input. A chunk of logits is there twice in float32, and once in bfloat16 if the products are. With
    `shards`, a rank has one of so many parts of the state, and what FSDP2 gathers, all in float32: embedding and output
    layer with their gradients, the layer at work, the next one, and the gradient of one.
    """
    tokens, width = micro_batch * length, 2 if device.dtype is torch.bfloat16 else 4
    full = 4 * tokens * (max(model.hidden_size, model.attention_size) * (8 + width) + width * model.intermediate_size)
    every = settings.checkpoint_layers
    checkpointed = -(-model.num_hidden_layers // every) if every else 0
    activations = full * (model.num_hidden_layers - checkpointed) + (full if checkpointed else 0)
    activations += checkpointed * tokens * model.hidden_size * 4
    logits_tokens = tokens if settings.repeatable else min(tokens, device.loss_chunk(model.vocab_size))
    logits = (8 if width == 4 else 8 + width) * logits_tokens * model.vocab_size
    number = num_parameters(model)
    outer = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    gathered = 8 * outer + (3 * width + 4) * (number - outer) // model.num_hidden_layers if shards > 1 else 0
    return state * number // shards + gathered + activations + logits


def shards_of(ranks: int, hosts: int) -> int:
    """Ranks that share one sharded model: those of a host, or of all hosts if each has one alone."""
    return ranks if ranks == hosts else ranks // hosts


class PassSizes:
    """The number of sequences of a forward pass: the preset's, the operator's, or what memory has room for."""

    def __init__(self, settings: TrainerSettings, device: Device, *, ranks: int = 1, work: Work = TRAINING) -> None:
        self._settings, self._device, self._ranks, self._work = settings, device, ranks, work
        self.found: dict[tuple[int, int], int] = {}  # batch and length -> what `auto` found, for the next windows

    def size(self, batches: Batches, length: int) -> int:
        """The size for these batches; `bad_environment` if the operator's number does not divide the batch."""
        wanted, batch = self._settings.micro_batch, self._share(batches)
        if wanted == "preset":
            wanted = batches.micro_batch_size
        if wanted == "auto":
            return self.found.get((batch, length)) or self._first_guess(batch, length)
        if batch % wanted:
            divisors = ", ".join(str(number) for number in _divisors(batch))
            divided = f"{self._work.batch} {batches.batch_size}" + f" / {self._ranks} ranks" * (self._ranks > 1)
            choice = f"set auto, preset or one of {divisors}"
            raise bad_environment(f"TEMPLAR_MICRO_BATCH is {wanted} and does not divide {divided}: {choice}")
        return wanted

    def smallest(self, batches: Batches, length: int) -> int:
        """The size that must fit, as in `size`: `auto` goes down to 1."""
        return 1 if self._settings.micro_batch == "auto" else self.size(batches, length)

    def fitting(self, batches: Batches, length: int, compute: Callable[[int], T], *, forget: Callable[[], None]) -> T:
        """The result of `compute` with the size; after out-of-memory it forgets and tries a smaller one."""
        while True:
            try:
                return compute(self.size(batches, length))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # its frames hold the tensors that did not fit
            forget()
            self.halve(batches, length, failure)

    def halve(self, batches: Batches, length: int, error: BaseException) -> None:
        """Take at most half the size from now on, because the device ran out of memory.

        `out_of_memory` if the operator or the preset chose the size, or it is 1.
        """
        size = self.size(batches, length)
        smaller = [number for number in _divisors(self._share(batches)) if number <= size // 2]
        if self._settings.micro_batch != "auto" or not smaller:
            raise PermanentError(
                Reason.OUT_OF_MEMORY,
                f"{self._device.name} ran out of memory with micro-batches of {size} sequences of {length} tokens: set "
                f"{self._remedies(size)}; {self._work.lost}",
            ) from error
        log.warning("%s ran out of memory with micro-batches of %d: now %d", self._device.name, size, smaller[-1])
        self.found[self._share(batches), length] = smaller[-1]
        if self._device.is_cuda:
            torch.cuda.empty_cache()

    def require(self, needed: int, free: int, size: int, others: Sequence[str] = ()) -> None:
        """Refuse, as `out_of_memory`, what needs more bytes with forward passes of `size` sequences than are free.

        `others` are settings that would take less, besides those that every kind of work has.
        """
        if needed <= free:
            return
        each = "" if self._ranks == 1 else " on each of its ranks"
        raise PermanentError(
            Reason.OUT_OF_MEMORY,
            f"{self._work.name} with micro-batches of {size} takes about {needed / 2**30:.3g} GiB{each}, and "
            f"{self._device.name} has {free / 2**30:.3g} GiB for it: set {self._remedies(size, others)}",
        )

    def _remedies(self, size: int, others: Sequence[str] = ()) -> str:
        """Name the settings that take less memory than forward passes of `size` sequences, of those not set yet."""
        smaller = ["TEMPLAR_MICRO_BATCH=auto"] if size > 1 and self._settings.micro_batch != "auto" else []
        if self._settings.checkpoint_layers != 1:
            smaller.append("TEMPLAR_CHECKPOINT_LAYERS=1")
        return " or ".join([*smaller, *others, "a TEMPLAR_DEVICE with more memory"])

    def _share(self, batches: Batches) -> int:
        """Sequences of a batch that one rank takes."""
        batch = batches.batch_size
        if batch % self._ranks:
            divisors = ", ".join(str(number) for number in _divisors(batch))
            name = "TEMPLAR_RANKS" if self._settings.hosts == 1 else "TEMPLAR_HOSTS times TEMPLAR_RANKS"
            choice = f"set {name} to {divisors}"
            raise bad_environment(f"{self._ranks} ranks do not divide {self._work.batch} {batch}: {choice}")
        return batch // self._ranks

    def _first_guess(self, batch: int, length: int) -> int:
        """The size that `auto` begins with."""
        return self.found.setdefault((batch, length), batch)


class MicroBatches(PassSizes):
    """The sizes for training a model, of which `auto` begins with an estimate."""

    def __init__(self, model: Model, settings: TrainerSettings, device: Device, *, ranks: int = 1) -> None:
        super().__init__(settings, device, ranks=ranks)
        self._model, self._shards = model, shards_of(ranks, settings.hosts)

    def check(self, training: Training, length: int) -> None:
        """Refuse a size that does not divide the batch, and a model that the device has no room for.

        PermanentError: `bad_environment`; `out_of_memory`, with the estimate beside the free memory.
        """
        self._share(training)
        with on_device(self._device):
            size = self.smallest(training, length)
            is_sharded = self.sharded(length)
            if is_sharded and self._ranks > 1 and inner_optimizer(training, self._settings) == "muon":
                choice = "set TEMPLAR_SHARDING=replicated or TEMPLAR_OPTIMIZER=adamw"
                raise bad_environment(f"the optimizer is muon, and sharded ranks have parts of its matrices: {choice}")
            others = []
            if self._ranks > 1 and not is_sharded:
                others.append("TEMPLAR_SHARDING=sharded")
            elif self._device.is_cuda and torch.cuda.device_count() > self._ranks // self._settings.hosts:
                others.append("TEMPLAR_DEVICE=cuda with TEMPLAR_RANKS=auto")
            needed = self._needed(size, length, self._shards if is_sharded else 1)
            self.require(needed, self._free_bytes(), size, others)

    def sharded(self, length: int) -> bool:
        """Whether each of several ranks takes a part of the model."""
        if self._settings.sharding == "auto":
            return self._ranks > 1 and self._needed(1, length, 1) > self._free_bytes()
        return self._settings.sharding == "sharded"

    def _needed(self, size: int, length: int, shards: int) -> int:
        return estimated_bytes(
            self._model, self._settings, self._device, micro_batch=size, length=length, shards=shards
        )

    def _free_bytes(self) -> int:
        """Memory for one rank: on a CPU those of a host share it, and a GPU's counts as if it were free."""
        if self._ranks > 1 and self._device.is_cuda:
            return int(torch.cuda.get_device_properties(self._device.place).total_memory)
        return self._device.free_bytes() // (self._ranks // self._settings.hosts)

    def _first_guess(self, batch: int, length: int) -> int:
        """The most sequences that should fit by the estimate; on a CPU no more than are of use."""
        free, best = self._free_bytes(), 1
        for size in _divisors(batch):
            needed = self._needed(size, length, self._shards if self.sharded(length) else 1)
            if needed <= free and (self._device.is_cuda or size * length <= AUTO_CPU_TOKENS):
                best = size
        self.found[batch, length] = best
        return best


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate: its GPU allocator's error has a type of its own, others have a text."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _NO_ROOM)


@contextmanager
def on_device(device: Device, work: Work = TRAINING) -> Iterator[None]:
    """Work on a device within this block, and turn torch's errors into ones with a reason.

    PermanentError: `out_of_memory`; `trainer_failed`, in training, for what else torch or the driver refuses.
    TransientError: `trainer_failed`, in an evaluation, which can be done again.
    """
    try:
        with device.current():
            yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            problem = f"{device.name} has no room for the state of {work.name}"
            remedy = f"free memory, or choose another TEMPLAR_DEVICE; {work.lost}"
            raise PermanentError(Reason.OUT_OF_MEMORY, f"{problem}: {remedy}") from error
        log.exception("%s failed on %s", work.name, device.name)
        kind = PermanentError if work is TRAINING else TransientError
        raise kind(
            Reason.TRAINER_FAILED,
            f"{work.name} failed on {device.name} ({str(error).strip().partition(chr(10))[0][:200]}): {work.lost}; if "
            "that repeats, start the neuron again, or choose another TEMPLAR_DEVICE",
        ) from error


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
