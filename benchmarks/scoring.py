"""Measure what scoring a window's miners costs, and how well the score ranks them: 32 miners in 8 graded step counts.

    python -m benchmarks.scoring [--quick]

The miners train real text for some windows, each with its own number of inner steps, and exchange what they learnt; the
last window's payloads are scored on the state before it. All of them are honest.

The reference's procedure is measured in the same process on the same sequences: for every miner two copies of the
model, losses before and after on the miner's own segment and on the whole evaluation batch. It is timed for some of the
miners, in turn with ours, for it costs the same for each. Ours is everything from payloads to scores: linear scores of
all, exact measurements of those that are drawn, likeness of payloads. CPU is that of this process, with one thread.

- `cost_fraction`: CPU seconds per miner, over those of the reference's procedure.
- `spearman`: rank correlation of the score, of this one window and without any past, with the exact fall of the loss on
  ten times as many tokens, which nobody was scored on.

The last line is JSON: these, what is behind them, and whether every bar holds. With `--quick` there are too few miners
and tokens for the cost, and only the ranks are held against their bar.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.command import measured
from benchmarks.pseudo_gradients import Setup, embedded_text, train
from templar.gradient.aggregate import single_update, target_norms
from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.scoring.evaluation_plan import Candidate, draw_plan
from templar.scoring.measure import Evaluator, find_likenesses, norm_ratios
from templar.scoring.score import CurvaturePrior, score_payload
from templar.scoring.standing import FRESH
from templar.training.loss import sequence_losses, single_threaded
from templar.training.model import load_parameters, parameters_of

STEPS = (2, 4, 6, 8, 11, 15, 20, 26)  # inner steps of the grades
EXACT_MINERS, EXACT_SEGMENTS, FACTOR, MICRO_BATCH = 8, 4, 0.2, 16
TOKENS_TIMES = 10
COST_BAR, RANK_BAR = 0.1, 0.9


@dataclass(frozen=True)
class Sizes:
    """The size of a measurement."""

    per_grade: int = 4  # miners of each step count
    windows: int = 6  # windows that are trained; the last one is scored
    segment: int = 16  # sequences of a miner's own segment
    timed: int = 4  # miners that the reference's procedure is timed for
    rounds: int = 3  # how often both are timed

    @property
    def num_miners(self) -> int:
        """All of them."""
        return self.per_grade * len(STEPS)


FULL = Sizes()
QUICK = Sizes(per_grade=2, windows=2, segment=6, timed=1, rounds=1)


@dataclass(frozen=True)
class Scene:
    """A window that is to be scored."""

    model: nn.Module  # at the parameters before the window
    layout: Layout
    payloads: dict[int, Payload]  # by uid
    segments: dict[int, np.ndarray]  # uid -> own segment, int32 of shape (n, L)
    fresh: Tensor  # sequences that nobody has trained on or is scored on, shape (m, L)
    factor: float  # step size of the measurement
    large_prediction_ratio: float  # as in `Scoring`

    @property
    def batch(self) -> Tensor:
        """The whole evaluation batch."""
        return torch.from_numpy(np.concatenate(list(self.segments.values())))


def play(sizes: Sizes) -> Scene:
    """Train the miners up to the window that is scored."""
    uids = range(sizes.num_miners)
    with embedded_text() as text:
        setup = Setup.of(text, seed=1, workers=sizes.num_miners, windows=sizes.windows + 1)
    trained = train(setup, lambda uid: STEPS[uid % len(STEPS)])
    *_, before = islice(trained, sizes.windows - 1)
    net = copy.deepcopy(before.net)
    scored = next(trained)
    payloads, rate = dict(enumerate(scored.exchange.payloads)), scored.learnt.rule.learning_rate
    segments = {uid: setup.sequences[sizes.windows - 1][uid][: sizes.segment].numpy() for uid in uids}
    wanted = TOKENS_TIMES * sum(len(segment) for segment in segments.values())
    fresh = torch.cat(setup.sequences[sizes.windows])[:wanted]
    ratio = setup.hparams.scoring.large_prediction_ratio
    return Scene(net, setup.layout, payloads, segments, fresh, rate * FACTOR, ratio)


def ours(scene: Scene) -> dict[int, float]:
    """The scores of a window, as a validator finds them."""
    candidates = {uid: Candidate(f"miner-{uid}", len(segment), 1) for uid, segment in scene.segments.items()}
    plan = draw_plan(
        candidates,
        num_spare=0,
        num_sequences=len(scene.segments[0]),
        exact_miners=EXACT_MINERS,
        exact_segments=EXACT_SEGMENTS,
        block_hash="0x" + "ab" * 32,
    )
    params = {name: tensor.clone() for name, tensor in parameters_of(scene.model).items()}
    evaluator = Evaluator(
        scene.model,
        params,
        {uid: scene.segments[uid] for uid in plan.segments},
        scene.payloads,
        layout=scene.layout,
        targets=target_norms(list(scene.payloads.values()), scene.layout),
        factor=scene.factor,
        micro_batch_size=MICRO_BATCH,
    )
    estimates = evaluator.estimate(list(plan.exact))
    measurements = evaluator.measure(plan.exact)
    find_likenesses(scene.payloads, scene.payloads, frozenset(), scene.layout, threshold=0.4)
    norm_ratios(scene.payloads, scene.layout)
    prior = CurvaturePrior.of(estimates.values(), measurements.values(), scene.large_prediction_ratio)
    return {
        uid: score_payload(estimate, measurements.get(uid), FRESH, prior).gradient_score
        for uid, estimate in estimates.items()
    }


def reference(scene: Scene, uid: int) -> tuple[float, float]:
    """The reference's procedure for one miner: its gradient score, and how far its own loss fell."""
    own = torch.from_numpy(scene.segments[uid])
    return _exact_fall(scene, uid, scene.batch), _exact_fall(scene, uid, own)


def _exact_fall(scene: Scene, uid: int, tokens: Tensor, before: float | None = None) -> float:
    """The relative fall of the mean loss on some sequences, by a copy of the model; `before` if that is known."""
    moved = copy.deepcopy(scene.model)
    if before is None:
        before = _mean_loss(moved, tokens)
    targets = target_norms(list(scene.payloads.values()), scene.layout)
    update = single_update(scene.payloads[uid], scene.layout, targets)
    params = parameters_of(moved)
    load_parameters(moved, {name: tensor - scene.factor * update[name] for name, tensor in params.items()})
    return (before - _mean_loss(moved, tokens)) / before


def _mean_loss(model: nn.Module, tokens: Tensor) -> float:
    return float(sequence_losses(model, tokens, micro_batch_size=MICRO_BATCH).mean())


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _timings(scene: Scene, sizes: Sizes) -> Iterator[tuple[float, float]]:
    """Seconds per miner of ours and of the reference's, in turn."""
    for turn in range(sizes.rounds):
        uids = [(turn * sizes.timed + number) % sizes.num_miners for number in range(sizes.timed)]
        pair = {
            "ours": lambda: _cpu_seconds(lambda: ours(scene)) / sizes.num_miners,
            "reference": lambda: _cpu_seconds(lambda: [reference(scene, uid) for uid in uids]) / len(uids),  # noqa: B023
        }
        order = list(pair) if turn % 2 else list(reversed(pair))
        seconds = {name: pair[name]() for name in order}
        yield seconds["ours"], seconds["reference"]


def measure(quick: bool) -> dict[str, object]:
    """Measure and print a table; the figures."""
    sizes = QUICK if quick else FULL
    with single_threaded():
        scene = play(sizes)
        scores = ours(scene)
        timings = list(_timings(scene, sizes))
        before = _mean_loss(scene.model, scene.fresh)
        exact = {uid: _exact_fall(scene, uid, scene.fresh, before) for uid in scores}
    ranks = pd.DataFrame({"score": scores, "exact": exact}).rank()
    cost = statistics.median(mine / theirs for mine, theirs in timings)
    spearman = float(ranks["score"].corr(ranks["exact"]))
    _print(scores, exact, sizes)
    length = scene.batch.shape[1]
    return {
        "cost_fraction": round(cost, 4),
        "spearman": round(spearman, 4),
        "ours_cpu_seconds_per_miner": round(statistics.median(mine for mine, _ in timings), 4),
        "reference_cpu_seconds_per_miner": round(statistics.median(theirs for _, theirs in timings), 4),
        "num_miners": sizes.num_miners,
        "parameters": scene.layout.num_elements,
        "segment_tokens": sizes.segment * length,
        "batch_tokens": scene.batch.numel(),
        "fresh_tokens": scene.fresh.numel(),
        "sizes": asdict(sizes),
        "holds": (quick or cost <= COST_BAR) and spearman >= RANK_BAR,
    }


def _print(scores: dict[int, float], exact: dict[int, float], sizes: Sizes) -> None:
    table = Table("inner steps", "score", "exact, ten times the tokens", title=f"{sizes.num_miners} miners")
    for grade, steps in enumerate(STEPS):
        uids = range(grade, sizes.num_miners, len(STEPS))
        means = [statistics.fmean(values[uid] for uid in uids) for values in (scores, exact)]
        table.add_row(str(steps), *(f"{mean:.6f}" for mean in means))
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(measured("scoring", __doc__, measure, quick="fewer windows, tokens and rounds"))
