"""Small networks whose code, optimizer and rule of aggregation can be chosen: what `benchmarks.quality` compares.

Each of a few workers takes inner steps on text of its own from the common parameters, or from a place that its error
feedback names; what it learnt goes through a code with error feedback, and all take the same outer step (SparseLoCo,
arXiv 2508.15706). The arithmetic is float32 throughout, on any device, so that rules can be tried that have no exact
integers yet; a test holds the plain row to the project's own trainer, payloads and aggregate.
"""

import copy
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks.pseudo_gradients import Setup
from templar.gradient.compress import top_k
from templar.gradient.dct import from_chunks, to_chunks
from templar.gradient.layout import TensorLayout
from templar.training.design import place_bits
from templar.training.loss import token_losses
from templar.training.model import build_model, is_hidden_matrix, named_parameters
from templar.training.schedule import schedule_factor

SCALE_BITS = 8


@dataclass(frozen=True)
class Row:
    """One network: everything that a row of the table may choose."""

    code: Literal["dense", "sign"] = "sign"
    k: int = 64  # coefficients of a chunk
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 0.004  # of AdamW
    matrix_rate: float = 0.02  # of Muon, for the matrices
    decay: float = 0.95  # of the error feedback
    carry: float = 0.0  # share of the error feedback that training begins with
    rule: Literal["contributors", "all"] = "contributors"  # the sum is divided by their number, or by R
    outer_rate: float = 1.0
    inner_steps: int = 10  # of a window


@dataclass(frozen=True)
class Outcome:
    """Result of one network with one seed."""

    losses: tuple[float, ...]  # held-out, nats per token, after each quarter of the windows
    bits: float  # of a parameter, mean of all payloads

    @property
    def ratio(self) -> float:
        """How many times smaller than float32 the payloads are."""
        return 32 / self.bits


def learn(row: Row, setup: Setup, device: str = "cpu") -> Outcome:
    """Train one network from its genesis parameters over all windows of a setup."""
    net = build_model(setup.hparams.model)
    nn.Module.to(net, device)
    agreed = {name: param.detach().clone() for name, param in named_parameters(net)}
    workers = [_Worker(row, setup, agreed) for _ in range(setup.num_workers)]
    num_windows, losses, bits = len(setup.sequences), list[float](), list[float]()
    for window, shares in enumerate(setup.sequences):
        # 1. Train, and publish.
        published = [worker.publish(net, agreed, share, window) for worker, share in zip(workers, shares, strict=True)]
        bits += [one.bits for one in published]
        # 2. Aggregate, and take the outer step.
        for name in agreed:
            agreed[name] -= row.outer_rate * combine([one.received[name] for one in published], row.rule)
        # 3. Look at text that nobody trains on.
        if (window + 1) * 4 // num_windows > window * 4 // num_windows:
            _load(net, agreed)
            losses.append(setup.held_out_loss(net))
    return Outcome(tuple(losses), statistics.fmean(bits) / setup.layout.num_elements)


@dataclass(frozen=True)
class Published:
    """One worker's part of a window, as its receivers read it."""

    received: Mapping[str, Tensor]  # by parameter name
    bits: float


class _Worker:
    """A worker's private state: optimizers and error feedback."""

    def __init__(self, row: Row, setup: Setup, agreed: Mapping[str, Tensor]) -> None:
        self._row, self._training = row, setup.hparams.training
        self._layouts = {tensor.name: tensor for tensor in setup.layout.tensors}
        self._feedback = {name: torch.zeros_like(param) for name, param in agreed.items()}
        self._optimizers: list[dict[str, object]] | None = None

    def publish(self, net: nn.Module, agreed: Mapping[str, Tensor], sequences: Tensor, window: int) -> Published:
        """Train on a window's sequences, and code what was learnt."""
        row, received, bits = self._row, dict[str, Tensor](), 0.0
        _load(net, {name: param - row.carry * self._feedback[name] for name, param in agreed.items()})
        self._train(net, sequences, window)
        for name, param in named_parameters(net):
            kept = 0.0 if row.code == "dense" else row.decay - row.carry
            wanted = kept * self._feedback[name] + (agreed[name] - param.detach())
            received[name], size = code(row, wanted, self._layouts[name])
            self._feedback[name] = wanted - received[name]
            bits += size
        return Published(received, bits)

    def _train(self, net: nn.Module, sequences: Tensor, window: int) -> None:
        training, optimizers = self._training, optimizers_of(self._row, net)
        for optimizer, state in zip(optimizers, self._optimizers or (), strict=False):
            optimizer.load_state_dict(copy.deepcopy(state))
        peaks = [self._row.learning_rate, self._row.matrix_rate]
        for step in range(training.inner_steps):
            places = (step * training.batch_size + torch.arange(training.batch_size)) % len(sequences)
            token_losses(net, sequences[places]).mean().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_([param for _, param in named_parameters(net)], training.max_grad_norm)
            factor = schedule_factor(training.schedule, window * training.inner_steps + step)
            for optimizer, peak in zip(optimizers, peaks, strict=False):
                optimizer.param_groups[0]["lr"] = peak * factor
                optimizer.step()
            net.zero_grad(set_to_none=True)
        self._optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]


def optimizers_of(row: Row, net: nn.Module) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or for embedding, head and norms with torch's Muon for the matrices."""
    matrices, rest = list[Tensor](), list[Tensor]()
    for name, param in named_parameters(net):
        (matrices if row.optimizer == "muon" and is_hidden_matrix(name, param.shape) else rest).append(param)
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    return [adamw, torch.optim.Muon(matrices, weight_decay=0.1)] if matrices else [adamw]


def code(row: Row, wanted: Tensor, tensor: TensorLayout) -> tuple[Tensor, float]:
    """What receivers read of a tensor, and how many bits it takes."""
    if row.code == "dense":
        return wanted.clone(), 32.0 * wanted.numel()
    chunks = to_chunks(wanted, tensor)
    count, length = chunks.shape
    k = min(length, row.k)
    indices = top_k(chunks, k)
    values = chunks.gather(1, indices)
    values = values.sign() * values.abs().mean(1, keepdim=True)
    received = from_chunks(torch.zeros_like(chunks).scatter(1, indices, values), tensor)
    return received, (place_bits(length, k) + SCALE_BITS) * count + values.numel()


def combine(received: list[Tensor], rule: str) -> Tensor:
    """The update of a tensor: norms clipped at their lower median, then the sum over what the rule says."""
    stack = torch.stack(received)
    norms = stack.flatten(1).norm(dim=1)
    positive = norms[norms > 0].sort().values
    median = positive[(len(positive) - 1) // 2] if len(positive) else norms[0]
    stack = stack * (median / (norms + 1e-30)).clamp(max=1).view(-1, *[1] * (stack.dim() - 1))
    number = torch.tensor(max(1, len(positive)))
    divisors = (stack != 0).sum(0).clamp(min=1) if rule == "contributors" else number
    total: Tensor = stack.sum(0)
    return total / divisors


def _load(net: nn.Module, params: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in named_parameters(net):
            param.copy_(params[name])
