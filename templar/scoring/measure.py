"""Losses before and after one payload alone, on the sequences of the evaluation plan.

The agreed parameters are never touched: a working copy of the model takes `theta - factor * update` for each payload.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from templar.model.loss import sequence_losses
from templar.scoring.evidence import Measurement
from templar.scoring.plan import EvaluationPlan, SequenceRef


class Evaluator:
    """Measures the payloads of one window.

    Args:
        model: A working copy of the model; its parameters are overwritten.
        params: The agreed parameters before the window's step, by name.
        sequences: Uid -> its sequences, int32 of shape (n, L); `plan.SPARE` for data that nobody was assigned.
        plan: What is measured on which sequences.
        micro_batch_size: Sequences per forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        sequences: Mapping[int, NDArray[np.int32]],
        plan: EvaluationPlan,
        *,
        micro_batch_size: int,
    ) -> None:
        self._model = model
        self._params = params
        self._sequences = sequences
        self._plan = plan
        self._micro_batch_size = micro_batch_size
        self._before: dict[SequenceRef, float] | None = None

    @property
    def baseline(self) -> Mapping[SequenceRef, float]:
        """Loss of every sequence of the evaluation batch under the agreed parameters."""
        if self._before is None:
            self._load(None, 0.0)
            batch = self._plan.batch
            self._before = dict(zip(batch, self._losses(batch), strict=True))
        return self._before

    @property
    def loss(self) -> float | None:
        """Mean loss of the evaluation batch under the agreed parameters; None if there is no batch."""
        return _mean(list(self.baseline.values()))

    def measure(self, uid: int, update: Mapping[str, Tensor], factor: float) -> Measurement:
        """Losses of a miner's sequences before and after `theta - factor * update`.

        Args:
            uid: The miner.
            update: Its update alone, by parameter name.
            factor: Step size of the measurement.
        """
        before = self.baseline
        own, random = self._plan.own[uid], self._plan.random[uid]
        self._load(update, factor)
        after = self._losses([*own, *random])
        return Measurement(
            own_before=_mean([before[ref] for ref in own]),
            own_after=_mean(after[: len(own)]),
            random_before=_mean([before[ref] for ref in random]),
            random_after=_mean(after[len(own) :]),
        )

    @torch.no_grad()
    def _load(self, update: Mapping[str, Tensor] | None, factor: float) -> None:
        for name, param in self._model.named_parameters():
            param.copy_(self._params[name])
            if update is not None:
                param.sub_(update[name].to(param.device) * factor)

    def _losses(self, refs: Sequence[SequenceRef]) -> list[float]:
        if not refs:
            return []
        tokens = torch.from_numpy(np.stack([self._sequences[ref.uid][ref.index] for ref in refs]))
        losses: list[float] = sequence_losses(self._model, tokens, micro_batch_size=self._micro_batch_size).tolist()
        return losses


def _mean(losses: Sequence[float]) -> float | None:
    """The exactly rounded mean; None if there is nothing, or something is not finite."""
    if not losses or not all(math.isfinite(loss) for loss in losses):
        return None
    return math.fsum(losses) / len(losses)
