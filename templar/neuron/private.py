"""What only a miner has: its error feedback and the state of its inner optimizer (PROTOCOL 18).

A window changes it only as *staged* state beside the live one. Staged state goes live when the decided roster has the
miner's own payload; otherwise the state before the window stands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from templar.errors import PermanentError, Reason
from templar.gradient.feedback import FeedbackState
from templar.gradient.layout import Layout
from templar.model.training import OptimizerState

_FEEDBACK, _EXP_AVG, _EXP_AVG_SQ = "feedback/", "exp_avg/", "exp_avg_sq/"


@dataclass(frozen=True)
class PrivateState:
    """Error feedback and inner optimizer.

    Attributes:
        feedback: Residuals and the number of compressions.
        optimizer: State of the inner optimizer; zeros in the demo recipe, which has none.
    """

    feedback: FeedbackState
    optimizer: OptimizerState

    @classmethod
    def fresh(cls, layout: Layout, params: Mapping[str, Tensor]) -> Self:
        """The state of a miner that never trained."""
        return cls(FeedbackState.zeros(layout), OptimizerState.zeros(params))

    def save(self, path: Path) -> None:
        """Write everything to one safetensors file."""
        parts = (
            (_FEEDBACK, self.feedback.buffers),
            (_EXP_AVG, self.optimizer.exp_avg),
            (_EXP_AVG_SQ, self.optimizer.exp_avg_sq),
        )
        tensors = {
            prefix + name: tensor.detach().cpu().contiguous() for prefix, part in parts for name, tensor in part.items()
        }
        counters = {"num_calls": str(self.feedback.num_calls), "num_steps": str(self.optimizer.num_steps)}
        save_file(tensors, path, metadata=counters)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            PermanentError: `bad_state_file`.
        """
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
                metadata = file.metadata() or {}
                num_calls, num_steps = int(metadata["num_calls"]), int(metadata["num_steps"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise PermanentError(Reason.BAD_STATE_FILE, f"{path}: cannot be read: {error}") from None
        return cls(
            FeedbackState(_part(tensors, _FEEDBACK), num_calls),
            OptimizerState(num_steps, _part(tensors, _EXP_AVG), _part(tensors, _EXP_AVG_SQ)),
        )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
