"""Measure the trainer beside a bare torch loop, and a neuron's memory and disk.

    python -m benchmarks.training [--quick] [--device cuda]

The bare loop is over the same transformers model. Both sides take the same AdamW steps on the same tokens, in the same
precision, micro-batches and number of threads; the bare loop has nothing else: forward, backward, clip, step. They run
in turns, because the machine is shared, each in a process of its own, and each round gives one ratio; the few of the
short run are uncertain by some percent. A batch is much smaller than a preset's, so what the trainer does once in a
window, such as its copy of the parameters, weighs more here than there. On one thread the process's own computing time
counts, which others cannot add to. The last line is JSON: `plain_x`, tokens per second of `Trainer.learn` over those of
the bare loop, is the smallest of all rows. `mfu` is that of the last
row, on a device with a known peak. Bytes per parameter are those of `benchmarks.neuron_memory`, which is run for them
where the device is a CPU.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import neuron_memory
from benchmarks.command import command_line, finish
from templar.hparams import Model, TrainerSettings, Training, load_hparams
from templar.resources import given_threads
from templar.training.device import TrainFigures
from templar.training.loss import torch_threads
from templar.training.model import build_model, genesis_parameters
from templar.training.optimizers import OptimizerState
from templar.training.train import Trainer

PLAIN_BAR = {"cpu": 0.97, "cuda": 0.95}
COMPUTING = ("forward", "backward", "step")
SMALL = load_hparams("local-large").model.model_copy(update={"num_hidden_layers": 10})
"""8 million parameters on the embedded text's vocabulary."""


@dataclass(frozen=True)
class Row:
    """One model, batch and number of threads, and how it is measured."""

    name: str
    model: Model
    batch: int
    micro_batch: int
    length: int
    steps: int
    rounds: int
    threads: int = 1
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        """Tokens of one side in one round."""
        return self.steps * self.batch * self.length

    @property
    def is_cuda(self) -> bool:
        """Whether both sides run on a GPU: compiled, in bfloat16."""
        return self.device != "cpu"

    def training(self) -> Training:
        """The recipe with this row's sizes, and the optimizer of the bare loop."""
        sizes = {"batch_size": self.batch, "micro_batch_size": self.micro_batch, "inner_steps": self.steps}
        return load_hparams("150M").training.model_copy(update=sizes | {"max_step_batches": 1, "optimizer": "adamw"})

    def settings(self) -> TrainerSettings:
        """Return what an operator would choose for this row."""
        return TrainerSettings(
            device=self.device,
            threads=self.threads,
            precision="bfloat16" if self.is_cuda else "float32",
            compile_layers=self.is_cuda,
            repeatable=False,
        )


def bare_loop(net: nn.Module, forward: Callable[..., Any], sequences: Tensor, row: Row) -> None:
    """The steps as anybody would write them with torch and transformers."""
    settings = row.training().adamw
    adamw = torch.optim.AdamW(
        net.parameters(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for step in range(row.steps):
        for start in range(step * row.batch, (step + 1) * row.batch, row.micro_batch):
            tokens = sequences[start : start + row.micro_batch].to(row.device)
            with torch.autocast(torch.device(row.device).type, dtype=torch.bfloat16, enabled=row.is_cuda):
                logits = forward(input_ids=tokens[:, :-1]).logits
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss * row.micro_batch / row.batch)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
    if row.is_cuda:
        torch.cuda.synchronize(row.device)


@dataclass(frozen=True)
class Speed:
    """The result of a row."""

    row: Row
    plain: float  # tokens per second of the bare loop, median
    learn: float  # the same of the trainer
    ratio: float  # of the trainer to the bare loop, the median of the rounds' ratios
    figures: TrainFigures  # of the last training


@contextmanager
def two_processes() -> Iterator[tuple[Executor, Executor]]:
    """A process for each side.

    In one process each side would compute in the memory that the other has freed and not returned to the system, and
    the trainer frees more of it.
    """
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as plain, ProcessPoolExecutor(1, spawn) as learn:
        yield plain, learn


def measure(row: Row, plain: Executor, learn: Executor) -> Speed:
    """Run both sides in turns, one ratio per round, after a short round that warms up."""
    for opening in [plain.submit(_open, Bare, row), learn.submit(_open, Learning, row)]:
        opening.result()
    for each in (learn, plain):
        each.submit(_turn, replace(row, batch=row.micro_batch, steps=1)).result()
    rounds, figures = list[tuple[float, float]](), None
    for number in range(row.rounds):
        # Each side is first in every second round.
        turns = {each: each.submit(_turn, row).result() for each in ((plain, learn) if number % 2 else (learn, plain))}
        rounds.append((turns[plain][0], turns[learn][0]))
        figures = turns[learn][1]
    if figures is None:
        raise RuntimeError("the trainer gave no figures")
    plain_seconds, learn_seconds = (median(each) for each in zip(*rounds, strict=True))
    ratio = median(plain / learn for plain, learn in rounds)
    return Speed(row, row.tokens / plain_seconds, row.tokens / learn_seconds, ratio, figures)


class Bare:
    """The side of the bare loop."""

    def __init__(self, row: Row) -> None:
        self._net, self._sequences = build_model(row.model), sequences_of(row)
        nn.Module.to(self._net, row.device)
        self._forward: Callable[..., Any] = torch.compile(self._net) if row.is_cuda else self._net

    def run(self, row: Row) -> None:
        """Take the row's steps."""
        with torch_threads(row.threads):
            bare_loop(self._net, self._forward, self._sequences, row)


class Learning:
    """The side of the trainer, from parameters, moments and sequences equal to those of the bare loop."""

    def __init__(self, row: Row) -> None:
        self._trainer, self._sequences = Trainer(row.model, row.settings()), sequences_of(row)
        self._params = genesis_parameters(row.model)
        self._optimizer = OptimizerState.zeros(self._params)

    def run(self, row: Row) -> TrainFigures | None:
        """Take the row's steps."""
        return self._trainer.learn(
            self._params,
            self._sequences,
            training=row.training(),
            outer_steps=2000,
            optimizer=self._optimizer,
            keep_going=lambda: True,
        ).figures


_sides: list[Bare | Learning] = []  # the side of this process


def _open(side: type[Bare | Learning], row: Row) -> None:
    """Take this side from now on."""
    _sides.clear()
    _sides.append(side(row))


def _turn(row: Row) -> tuple[float, TrainFigures | None]:
    """Take the steps; the seconds, of computing on one thread of the CPU, else of time, and the trainer's figures."""
    clock = time.process_time if row.threads == 1 and not row.is_cuda else time.perf_counter
    started = clock()
    figures = _sides[0].run(row)
    seconds = clock() - started
    if row.is_cuda:
        torch.cuda.empty_cache()  # the other side has the same device
    return seconds, figures


def sequences_of(row: Row) -> Tensor:
    """Random sequences, the same for both sides."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, row.model.vocab_size, (row.steps * row.batch, row.length), generator=generator)


def rows(device: str, quick: bool) -> list[Row]:
    """The rows: on a CPU 8 and 150 million parameters with one and two threads, on a GPU `150M` and `1B`."""
    large = load_hparams("150M").model
    if device != "cpu":
        one = Row("150M", large, 64, 16, 2048, 15, 3 if quick else 5, given_threads(), device)
        return [one] if quick else [one, Row("1B", load_hparams("1B").model, 32, 8, 2048, 20, 3, one.threads, device)]
    both = [1, 2] if given_threads() > 1 else [1]
    steps, rounds = (3, 2) if quick else (4, 7)
    small = [Row("8 M", SMALL, 8, 8, 256, steps, rounds, threads) for threads in both]
    return small if quick else [*small, *(Row("150M", large, 4, 1, 2048, 1, 3, threads) for threads in both)]


def run(device: str, quick: bool) -> dict[str, Any]:
    """Measure, print the tables, and return the figures."""
    speeds: list[Speed] = []
    for row in rows(device, quick):
        with two_processes() as sides:
            speeds.append(measure(row, *sides))
        Console().print(speeds_table(speeds))  # with one row more each time: compiling the next takes minutes on a GPU
    is_cuda = speeds[-1].row.is_cuda
    memory = {} if is_cuda or quick else neuron_memory.run(quick=False)
    memory_holds = memory.pop("holds", True)

    plain, last = min(speed.ratio for speed in speeds), speeds[-1].figures
    speeds_hold = plain >= PLAIN_BAR["cuda" if is_cuda else "cpu"]
    return {
        "device": last.device,
        "plain_x": round(plain, 3),
        **memory,
        "mfu": None if last.mfu is None else round(last.mfu, 3),
        "holds": bool(speeds_hold and memory_holds),
    }


def speeds_table(speeds: Sequence[Speed]) -> Table:
    """Tokens per second of both sides, and the trainer's time by phase."""
    device = speeds[-1].figures.device.partition(",")[0]
    table = Table("model", title=f"Trainer.learn and a bare torch loop on {device}, tokens/s")
    columns = ("threads", "bare", "learn", "ratio", *COMPUTING, "other")
    for column in columns if speeds[-1].figures.mfu is None else (*columns, "MFU"):
        table.add_column(column, justify="right")
    for speed in speeds:
        figures, seconds = speed.figures, sum(speed.figures.phases.values())
        table.add_row(
            speed.row.name,
            str(speed.row.threads),
            f"{speed.plain:,.0f}",
            f"{speed.learn:,.0f}",
            f"{speed.ratio:.3f}",
            *(f"{figures.phases[name] / seconds:.1%}" for name in (*COMPUTING, "other")),
            *([] if figures.mfu is None else [f"{figures.mfu:.1%}"]),
        )
    return table


def main() -> int:
    """Parse the command line, measure, print the figures as the last line; 1 if a bar does not hold."""
    parser = command_line("training", __doc__, quick="8 million parameters, few rounds, no memory, within a minute")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    arguments = parser.parse_args()
    return finish(run(arguments.device, arguments.quick))


if __name__ == "__main__":
    raise SystemExit(main())
