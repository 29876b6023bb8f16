"""The outer step: plain SGD on the agreed update, in operations that no compiler fuses.

With the update u, the learning rate and the decay each rounded once to float32, and every operation rounded to float32:

    theta <- theta * decay,    decay = 1 - learning_rate * weight_decay    (left out when weight_decay is 0)
    theta <- theta - (learning_rate * u)

In `sparseloco` u is the clipped mean of pseudo-gradients, the learning rate is constant and there is no decay (the
inner AdamW decays). In `demo` u is -1, 0 or 1, so every parameter that somebody spoke of moves by exactly the learning
rate. `aggregate` never gives a non-finite update, so finite parameters stay finite, and the agreed state is never left
to a node's own judgement of what to skip.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def outer_step(
    params: Mapping[str, Tensor], update: Mapping[str, Tensor], *, learning_rate: float, weight_decay: float
) -> None:
    """Apply an update to parameters, in place.

    Args:
        params: Float32 parameters by name, on any device.
        update: The update by name, float32, in the same shapes.
        learning_rate: Step size.
        weight_decay: Decoupled weight decay; 0 for none.

    Raises:
        ValueError: Names, shapes or types do not match; then nothing was changed.
    """
    if set(params) != set(update):
        raise ValueError(f"parameters and update differ in names: {sorted(set(params) ^ set(update))[:3]}")
    for name, param in params.items():
        if param.shape != update[name].shape or not param.dtype == update[name].dtype == torch.float32:
            raise ValueError(f"parameter {name!r} and its update must be float32 tensors of one shape")
    for name, param in params.items():
        rate = torch.tensor(learning_rate, dtype=torch.float32, device=param.device)
        if weight_decay:
            param.mul_(torch.tensor(1.0 - learning_rate * weight_decay, dtype=torch.float32, device=param.device))
        param.sub_(rate * update[name].to(param.device))
