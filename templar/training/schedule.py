"""Learning rates and weight decay by step: the same doubles on every machine."""

from templar.hparams import Schedule, Training

_PI = 3.141592653589793


def schedule_factor(schedule: Schedule, step: int) -> float:
    """The factor on the peak learning rate after `step` steps: the same double on every machine.

    Linear from `warmup_start_factor` at step 0 to 1 at `warmup_steps`, then a cosine from 1 to `eta_min_factor`. With
    `restarts` the cosine starts again at its foot, each period twice as long as the last, the first of `t_max` steps
    (SGDR, arXiv 1608.03983, T_mult = 2). Without, it stays at its foot.
    """
    if step < schedule.warmup_steps:
        return schedule.warmup_start_factor + (1 - schedule.warmup_start_factor) * step / schedule.warmup_steps
    position, period = step - schedule.warmup_steps, schedule.t_max
    if schedule.restarts:
        cycle = (position // period + 1).bit_length() - 1  # cycle i begins at t_max (2^i - 1)
        position, period = position - period * (2**cycle - 1), period * 2**cycle
    lowest = schedule.eta_min_factor
    return lowest + (1 - lowest) * _half_cosine(min(position, period) / period)


def inner_factor(training: Training, outer_steps: int, inner_step: int) -> float:
    """The factor on the peak learning rates of `sparseloco` after so many inner steps of a window.

    `outer_steps` are those since genesis, before this window; null windows do not count (docs/protocol.md 9).
    """
    return schedule_factor(training.schedule, outer_steps * training.inner_steps + inner_step)


def inner_learning_rate(training: Training, outer_steps: int, inner_step: int) -> float:
    """The learning rate of AdamW in `sparseloco`, as `inner_factor`."""
    return training.adamw.learning_rate * inner_factor(training, outer_steps, inner_step)


def loudest_coefficient(training: Training, momentum_decay: float, outer_steps: int) -> float | None:
    """Bound a payload's coefficients in a window (docs/protocol.md 9); None in `demo`, which has no sizes.

    AdamW moves a parameter by about its learning rate in a step (Kingma and Ba 2015, 2.1), and Muon in wide matrices by
    about as much. So a run moves it by about the sum of its rates, and what error feedback keeps of all runs before it
    makes the bound `1 / (1 - momentum_decay)` times as much.
    """
    if training.recipe == "demo":
        return None
    reach = 0.0
    for step in range(training.inner_steps):
        reach += inner_learning_rate(training, outer_steps, step)
    return training.outer_learning_rate * reach / (1 - momentum_decay)


def outer_learning_rate(training: Training, outer_steps: int) -> float:
    """The learning rate of the outer step after `outer_steps` others: constant in `sparseloco`, scheduled in `demo`."""
    if training.recipe == "sparseloco":
        return training.outer_learning_rate
    return training.outer_learning_rate * schedule_factor(training.schedule, outer_steps)


def outer_weight_decay(training: Training) -> float:
    """The decay of the parameters in the outer step: none in `sparseloco`, whose inner optimizer decays."""
    return training.weight_decay if training.recipe == "demo" else 0.0


def _half_cosine(fraction: float) -> float:
    """`(1 + cos(pi * fraction)) / 2` for a fraction of 0 to 1, within 1e-15.

    All nodes must agree on the learning rate to the last bit, and the cosines of C libraries differ there. This is the
    Taylor series in IEEE 754 additions, multiplications and divisions, on an angle of at most pi/4.
    """
    if fraction > 0.5:
        return 1.0 - _half_cosine(1.0 - fraction)
    angle = _PI * fraction / 2  # (1 + cos 2x) / 2 = cos^2 x
    squared = angle * angle
    term = cosine = 1.0
    for order in range(2, 22, 2):
        term = -term * squared / (order * (order - 1))
        cosine += term
    return cosine * cosine
