"""The inner optimizers, and their state between two trainings."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from operator import contains
from typing import Self

import torch
from torch import Tensor, nn

from templar.hparams import Training
from templar.tensorfile import Zeros
from templar.training.group import Alone


@dataclass(frozen=True)
class OptimizerState:
    """The state of the inner optimizer, by parameter name; a miner may change the optimizer between two trainings."""

    num_steps: int  # inner steps that went into it
    exp_avg: Mapping[str, Tensor]  # first moments, float32: Muon's momentum in the matrices that it moves
    exp_avg_sq: Mapping[str, Tensor]  # second moments, float32: not of matrices that Muon moves

    @classmethod
    def zeros(cls, params: Mapping[str, Tensor]) -> Self:
        """The state of a miner that never trained, in the shapes and on the devices of the parameters."""
        first, second = ({name: torch.zeros_like(param) for name, param in params.items()} for _ in range(2))
        return cls(0, first, second)


class InnerOptimizers:
    """AdamW for all parameters, or beside Muon for the rest (Jordan et al. 2024, torch's own)."""

    def __init__(
        self,
        group: Alone,
        training: Training,
        params: Mapping[str, nn.Parameter],
        state: OptimizerState,
        of_muon: Collection[str],
        *,
        repeatable: bool,
    ) -> None:
        self._group, self._training = group, training
        settings = training.adamw
        # 1. AdamW.
        rest = [param for name, param in params.items() if name not in of_muon]
        self._adamw = torch.optim.AdamW(
            rest,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            foreach=True if repeatable else None,  # one call for all tensors, with the same bits as one for each
            fused=None if repeatable else True,  # one pass over the memory
        )
        # 2. Muon.
        matrices, decay = [param for name, param in params.items() if name in of_muon], settings.weight_decay
        self._muon = torch.optim.Muon(matrices, weight_decay=decay) if matrices else None
        # 3. Their state, in the order of the names. What Muon moved so far has no second moments: AdamW begins there,
        #    with small steps.
        self._first, self._second = dict[str, Tensor](), dict[str, Tensor]()
        zeros = Zeros({name: param.shape for name, param in params.items()})
        for name, param in sorted(params.items()):
            begins = name not in of_muon and not group.decide(partial(contains, state.exp_avg_sq, name))
            moments = (zeros, zeros) if begins else (state.exp_avg, state.exp_avg_sq)
            first = self._first[name] = group.part(param, moments[0], name, param.device)
            if self._muon is not None and name in of_muon:
                self._muon.state[param] = {"momentum_buffer": first}
            else:
                second = self._second[name] = group.part(param, moments[1], name, param.device)
                step = torch.tensor(float(state.num_steps), device="cpu" if repeatable else param.device)
                self._adamw.state[param] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def step(self, factor: float) -> None:
        """One step with the gradients, which are dropped; the factor is on the peak learning rates."""
        training = self._training
        for optimizer, rate in ((self._adamw, training.adamw.learning_rate), (self._muon, training.muon_learning_rate)):
            if optimizer is not None:
                optimizer.param_groups[0]["lr"] = rate * factor
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def state(self, num_steps: int) -> OptimizerState:
        """Their own tensors, in the order of their names."""
        return OptimizerState(num_steps, self._first, self._second)

    def final_state(self, num_steps: int) -> OptimizerState:
        """Their state on the CPU, as a part of the result."""
        first, second = (
            self._group.keep((name, self._group.whole(tensor)) for name, tensor in moments.items())
            for moments in (self._first, self._second)
        )
        return OptimizerState(num_steps, first, second)
