"""The documented comparison of debug values: how far a published state is from the own one, in steps.

It is for comparing this system with the one that it replaces. No score, penalty or state follows from it: steps of a
learning rate say little where updates are not signs, and a publisher can choose the values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_STEP = 1e-9
"""The smallest change that counts as a step of its own."""


@dataclass(frozen=True)
class DebugComparison:
    """How far debug values are from parameters; infinite where nothing could be compared.

    The documented first version reports the means and `max_steps`, the second one the last two.

    Attributes:
        count: Elements that were compared.
        l2: Root of the sum of squared differences; 0 without any.
        avg_l2: The same over `count`.
        avg_abs_diff: Mean absolute difference.
        avg_steps_behind: The same in steps of the learning rate.
        max_steps: The largest absolute difference in steps of the learning rate.
        median_steps_behind: Median of the elements' absolute differences, each in its own steps; of an even number the
            lower one of the two in the middle.
        max_steps_behind: The largest of them.
    """

    count: int
    l2: float
    avg_l2: float
    avg_abs_diff: float
    avg_steps_behind: float
    max_steps: float
    median_steps_behind: float
    max_steps_behind: float


def compare_debug(
    values: Mapping[str, Sequence[float]],
    params: Mapping[str, Tensor],
    indices: tuple[int, int],
    learning_rate: float,
    *,
    steps: Mapping[str, Sequence[float]] | None = None,
) -> DebugComparison:
    """Compare published values with the own parameters after the same window.

    Both sides are rounded to float32, and differences are taken in double precision; one that is not a number counts as
    infinite. Names that only one side has do not count, nor do values that are not as many as the parameter has
    elements in that range.

    Args:
        values: Published elements by name.
        params: The own parameters by name.
        indices: The elements' range in the flattened parameters: the first, and the one after the last.
        learning_rate: The size of a step. Without a positive one, distances in its steps are infinite.
        steps: By name, each of these elements' recent change per window, where known: the size of its own steps, at
            least `MIN_STEP`. Not used if they are not as many as the values.
    """
    differences: list[float] = []
    ratios: list[float] = []
    for name, found in _differences(values, params, indices):
        known = (steps or {}).get(name, ())
        sizes = [max(MIN_STEP, size) for size in known] if len(known) == len(found) else [learning_rate] * len(found)
        differences += found
        ratios += [_in_steps(difference, size) for difference, size in zip(found, sizes, strict=True)]
    count, l2 = len(differences), math.hypot(*differences)
    mean = math.fsum(differences) / count if count else math.inf
    return DebugComparison(
        count=count,
        l2=l2,
        avg_l2=l2 / count if count else math.inf,
        avg_abs_diff=mean,
        avg_steps_behind=_in_steps(mean, learning_rate),
        max_steps=_in_steps(max(differences, default=math.inf), learning_rate),
        median_steps_behind=sorted(ratios)[(count - 1) // 2] if count else math.inf,
        max_steps_behind=max(ratios, default=math.inf),
    )


def _differences(
    values: Mapping[str, Sequence[float]], params: Mapping[str, Tensor], indices: tuple[int, int]
) -> Iterator[tuple[str, list[float]]]:
    """By name, the absolute differences of the elements that both sides have."""
    for name in sorted(values.keys() & params.keys()):
        own = params[name].detach().reshape(-1)[slice(*indices)].to("cpu", torch.float32)
        published = torch.tensor(values[name], dtype=torch.float32)
        if own.shape == published.shape:
            yield name, (own.double() - published.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf).tolist()


def _in_steps(difference: float, step: float) -> float:
    return difference / step if 0 < step < math.inf else math.inf
