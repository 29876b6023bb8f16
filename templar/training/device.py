"""The device that a neuron trains or evaluates on: what is there, what the operator chose, what `auto` takes and why.

A choice that this machine cannot keep is an error at the start that names the setting and the remedy; nothing falls
back in silence. The one exception is torch.compile, which costs speed alone: without a compiler there is a warning.
"""

import logging
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.hparams import Model, TrainerSettings
from templar.resources import available_bytes, given_threads
from templar.training.model import InnerOptimizer, LayerStep, muon_matrices, parameter_shapes, transformer_layer

log = logging.getLogger(__name__)

PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "B200": 2250e12,
    "RTX 4090": 165e12,
}
"""Part of a CUDA device's name -> its peak of dense bfloat16 products, FLOP/s; the first that fits counts for MFU."""
LOSS_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # most bytes of a float32 tensor of (tokens, vocabulary)
PIECE_ELEMENTS = 1 << 24  # elements that are on the way between a GPU and the host at once
COPIED_BYTES_PER_SECOND = 2e9  # assumed, of a copy to the host or the disk
_PROBE_SIZE = 384
_PROBE_REPEATS = 3
_PROBE_GAIN = 1.1  # bfloat16 must be this many times as fast as float32 to be chosen: it has fewer digits


@dataclass(frozen=True)
class Work:
    """The use of a device, in the words of messages about it."""

    name: str
    batch: str  # the setting that a micro-batch divides
    lost: str  # what a window without it lacks


TRAINING = Work("training", "training.batch_size", "nothing is published in this window")
EVALUATION = Work("evaluation", "scoring.eval_micro_batch_size", "nothing is measured in this window")


@dataclass(frozen=True)
class Device:
    """The device that training or evaluation runs on."""

    place: torch.device
    name: str  # "NVIDIA H100 80GB HBM3", or "CPU, 2 threads"
    threads: int
    dtype: torch.dtype  # of the products
    layer_step: LayerStep  # compiled, or as it is
    why: str  # what `auto` took and why, in one line; empty if nothing was left to it

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU, whose operations run beside the program."""
        return self.place.type == "cuda"

    @property
    def precision(self) -> str:
        """Name of the precision of the products."""
        return "bfloat16" if self.dtype is torch.bfloat16 else "float32"

    @property
    def peak_flops(self) -> float | None:
        """The known peak that MFU refers to; None on a CPU, in float32, and for a device that is not in the table."""
        if not self.is_cuda or self.dtype is not torch.bfloat16:
            return None
        return next((peak for part, peak in PEAK_FLOPS.items() if part in self.name), None)

    def current(self) -> AbstractContextManager[object]:
        """Make a GPU torch's current one within this block."""
        return _current(self.place)

    def autocast(self) -> AbstractContextManager[object]:
        """Products in the chosen precision within this block."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.place.type, dtype=self.dtype, cache_enabled=False)

    def take(self, tensor: Tensor) -> Tensor:
        """Bring a tensor of the CPU to this device; a GPU gets it while the program goes on."""
        return tensor.pin_memory().to(self.place, non_blocking=True) if self.is_cuda else tensor

    def loss_chunk(self, vocab_size: int) -> int:
        """Tokens whose logits are computed at once."""
        return max(64, LOSS_CHUNK_BYTES[self.place.type] // (4 * vocab_size))

    def free_bytes(self) -> int:
        """Memory that a new allocation may take."""
        if self.is_cuda:
            free, _ = torch.cuda.mem_get_info(self.place)
            return int(free)
        return available_bytes()

    def reset_peak(self) -> None:
        """Begin to watch the peak of the device's memory; a CPU's is that of the process since its start."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.place)

    def peak_bytes(self) -> int:
        """The peak that `reset_peak` began to watch."""
        if self.is_cuda:
            return int(torch.cuda.max_memory_allocated(self.place))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def choose_device(settings: TrainerSettings, work: Work = TRAINING) -> Device:
    """The device that the settings ask for; `bad_environment` if there is none. What `auto` took is logged."""
    reasons: list[str] = []
    # 1. The device.
    place = _place(settings.device, reasons)
    threads = settings.threads or given_threads()
    if settings.threads == 0 and place.type == "cpu":
        reasons.append(f"{threads} threads: all that this process is given")
    is_cuda = place.type == "cuda"
    name = torch.cuda.get_device_name(place) if is_cuda else f"CPU, {threads} thread{'s' * (threads > 1)}"

    with _current(place):
        # 2. The precision of the products.
        dtype = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        lacks_units = is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False)
        if settings.precision == "auto" and not is_cuda:
            dtype, reason = _cpu_precision()
            reasons.append(reason)
        elif settings.precision == "auto":
            dtype = torch.float32 if lacks_units else torch.bfloat16
            reasons.append("float32: no units for bfloat16" if lacks_units else "bfloat16: the device has units for it")
        elif dtype is torch.bfloat16 and lacks_units:
            raise bad_environment(f"TEMPLAR_PRECISION is bfloat16, which {name} has no units for: set float32 or auto")

        # 3. The layers, compiled if they are to be and can be.
        step: LayerStep = transformer_layer
        if settings.compile_layers:
            step, reason = _compiled(place)
            reasons.append(reason)
    device = Device(place, name, threads, dtype, step, "; ".join(reasons))
    if device.why:
        log.info("%s on %s in %s (%s)", work.name, name, device.precision, device.why)
    return device


def flops_per_token(model: Model, length: int) -> float:
    """Floating-point operations of a token's forward and backward pass: 6 N + 12 layers * heads * length.

    N counts the parameters that take part in products: not the input embedding, unless it is tied to the output.
    `heads` is the width of all query heads together.
    """
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return 6.0 * (num_parameters(model) - embedding) + 12.0 * model.num_hidden_layers * model.attention_size * length


def num_parameters(model: Model) -> int:
    """Number of the model's parameters; tied ones count once."""
    return sum(torch.Size(shape).numel() for shape in parameter_shapes(model).values())


def num_second_moments(model: Model, optimizer: InnerOptimizer) -> int:
    """Number of second moments of the inner optimizer: one for each parameter that Muon does not move."""
    shapes, of_muon = parameter_shapes(model), muon_matrices(model, optimizer)
    return sum(torch.Size(shape).numel() for name, shape in shapes.items() if name not in of_muon)


def finish_seconds(model: Model, optimizer: InnerOptimizer | None) -> float:
    """About how long a miner takes from the last inner step until the payload is on the disk.

    Update and moments go to the host, and the private state to the disk; `demo` has no inner optimizer: None.
    """
    moved = 8 * num_parameters(model)
    if optimizer is not None:
        moved += 8 * num_parameters(model) + 8 * num_second_moments(model, optimizer)
    return moved / COPIED_BYTES_PER_SECOND


class Pinned:
    """Two pieces of pinned memory, through which a GPU and the host's ordinary memory exchange tensors.

    While the GPU copies one piece, all threads copy the other. A plain copy to memory that nothing has touched yet took
    1.5 GB/s on the host of an H200, this 13 GB/s with 16 threads.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._pieces = [torch.empty(PIECE_ELEMENTS, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in ordinary memory."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        parts = _parts(tensor, host)
        for number in range(len(parts) + 1):
            if number < len(parts):
                self._piece(number, parts).copy_(parts[number][0], non_blocking=True)
                self._free[number % 2].record()
            if number > 0:
                self._free[(number - 1) % 2].synchronize()
                parts[number - 1][1].copy_(self._piece(number - 1, parts))
        return host

    def to_gpu(self, tensor: Tensor, place: torch.device) -> Tensor:
        """A copy on a GPU, whose queue may be behind."""
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
        parts = _parts(tensor, there)
        for number, (source, target) in enumerate(parts):
            self._free[number % 2].synchronize()
            target.copy_(self._piece(number, parts).copy_(source), non_blocking=True)
            self._free[number % 2].record()
        return there

    def _piece(self, number: int, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return self._pieces[number % 2][: len(parts[number][0])]


def _parts(source: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [*zip(*(torch.split(each.reshape(-1), PIECE_ELEMENTS) for each in (source, target)), strict=True)]


pinned = cache(Pinned)  # the pieces of a type, made once


def to_host(tensor: Tensor) -> Tensor:
    """A tensor in the host's memory; one that is there is not copied."""
    return pinned(tensor.dtype).to_host(tensor) if tensor.is_cuda else tensor


@dataclass(frozen=True)
class TrainFigures:
    """The time that training took, and how well it used the device."""

    device: str  # its name
    precision: str  # of the products
    choice: str  # what `auto` took and why
    micro_batch: int  # sequences of a forward pass
    tokens: int  # of the whole steps that were taken; those of an interrupted training before it went on are not here
    seconds: float
    phases: Mapping[str, float]  # seconds by phase: forward, backward, step, other
    peak_bytes: int  # of the device's memory (on a CPU the process's, since its start); the largest of a host's ranks
    is_cuda: bool = False
    mfu: float | None = None  # share of the peak that is assumed; None where no peak is known
    assumed_peak: float | None = None  # FLOP/s

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained per second of training."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class PhaseClock:
    """Seconds of each phase of training. On a GPU events in its own queue measure them: nothing waits for it."""

    def __init__(self, device: Device) -> None:
        self._is_cuda = device.is_cuda
        self.started = self._last = time.perf_counter()
        self._seconds = dict.fromkeys(("forward", "backward", "step", "other"), 0.0)
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self.mark("other")

    def mark(self, phase: str) -> None:
        """End a phase: the time since the last mark belongs to it."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append((phase, event))
            return
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

    def wait_for(self, marks_ago: int) -> None:
        """Wait until a GPU has reached the mark that was set so many marks ago: then it is no further behind."""
        if len(self._events) >= marks_ago:
            self._events[-marks_ago][1].synchronize()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase since the clock was made."""
        if self._events:
            self._events[-1][1].synchronize()
            for (_, before), (phase, after) in zip(self._events, self._events[1:], strict=False):
                self._seconds[phase] += before.elapsed_time(after) / 1000
            self._events = self._events[-1:]
        return dict(self._seconds)


def _current(place: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


def _place(wanted: str, reasons: list[str]) -> torch.device:
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        reasons.append("the first of the CUDA devices" if number else "the CPU: there is no CUDA device")
        return torch.device("cuda:0" if number else "cpu")
    place = torch.device(wanted)
    if place.type == "cuda" and (place.index or 0) >= number:
        there = "no CUDA device" if number == 0 else f"cuda:0 to cuda:{number - 1}" if number > 1 else "cuda:0 alone"
        problem = f"TEMPLAR_DEVICE is {wanted!r}, and this machine has {there}"
        raise bad_environment(f"{problem}: set auto, cpu, or one that is there")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


@cache
def _cpu_precision() -> tuple[torch.dtype, str]:
    """Measure a product in both precisions; CPUs without bfloat16 units emulate it many times slower."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype)
        best = float("inf")
        for _ in range(_PROBE_REPEATS):
            started = time.perf_counter()
            torch.mm(matrix, matrix)
            best = min(best, time.perf_counter() - started)
        return best

    gain = seconds(torch.float32) / seconds(torch.bfloat16)
    measured = f"a product in bfloat16 was {gain:.2g} times as fast as in float32"
    if gain >= _PROBE_GAIN:
        return torch.bfloat16, f"bfloat16: {measured}"
    return torch.float32, f"float32: {measured}"


def _compiled(place: torch.device) -> tuple[LayerStep, str]:
    """The compiled layer if this machine can compile, else the plain one with a warning."""
    try:
        torch.compile(lambda numbers: (numbers * 2 + 1).sin())(torch.ones(64, device=place))
    except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and training goes on without one
        log.warning(
            "[%s] TEMPLAR_COMPILE is on, and torch.compile does not work here (%s): training goes on without it; "
            "install a C++ compiler (g++), or unset TEMPLAR_COMPILE",
            Reason.COMPILER_MISSING,
            str(error).strip().partition("\n")[0][:200],
        )
        return transformer_layer, f"layers not compiled [{Reason.COMPILER_MISSING}]"
    return torch.compile(transformer_layer), "layers compiled"


def bad_environment(message: str) -> PermanentError:
    """Make the error for a setting that does not fit this machine."""
    return PermanentError(Reason.BAD_ENVIRONMENT, message)
