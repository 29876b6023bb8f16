"""Vectors of the evaluation: what is drawn, measured and alike, and what scores, penalties and weights follow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from docs.vectors.exchange import evidences
from docs.vectors.judging import PEERS, SCORING, WEIGHTS
from docs.vectors.scenario import MINER_UIDS, SETTLING_HASH, SHAPES, hotkey, layout_of, payload, payloads, tensors_hex
from templar.gradient import Recipe
from templar.gradient.aggregate import target_norms
from templar.gradient.codec.wire import Payload, encode
from templar.gradient.product import UpdateProducts
from templar.hparams import Weights
from templar.scoring.conclude import compute_weights
from templar.scoring.evaluation_plan import Candidate, draw_plan
from templar.scoring.evidence import Estimate, Measurement
from templar.scoring.measure import find_likenesses, norm_ratios
from templar.scoring.score import CurvaturePrior, WindowScore, score_payload
from templar.scoring.standing import ScoreCard

# Uid -> sequences that it was assigned, windows since it was measured exactly.
_CROWD: Mapping[int, tuple[int, int]] = {2: (5, 1), 3: (3, 40), 4: (9, 2), 7: (0, 3), 8: (6, 3), 9: (7, 50)}


def evaluation_vectors() -> dict[str, Any]:
    """Plans, products, likenesses, assumptions, scores, weights, and six windows from facts to evidence."""
    chain = [{"digest": each.digest, "body": each.model_dump(mode="json")} for each in evidences()]
    numbers = {"scoring": SCORING, "peers": PEERS, "weights": WEIGHTS}
    return {
        "plans": [_plan(_CROWD, 2, 2), _plan(_CROWD, 99, 99), _plan({3: (3, 1)}, 1, 2), _plan({7: (0, 1)}, 1, 2)],
        "products": [_products("sparseloco"), _products("demo")],
        "likeness": _likeness(),
        "assumptions": [_assumptions(*case) for case in _WINDOWS],
        "scores": [_score(*case) for case in _SCORES],
        "weights": [_weights({"rule": rule}) for rule in ("value", "ramp", "power")]
        + [_weights({"rule": "ramp", "gather_share": 0.25})],
        "settings": {name: section.model_dump(mode="json") for name, section in numbers.items()},
        "windows": chain,
    }


def _plan(miners: Mapping[int, tuple[int, int]], exact_miners: int, exact_segments: int) -> dict[str, Any]:
    candidates = {uid: Candidate(hotkey(uid).address, *numbers) for uid, numbers in miners.items()}
    numbers: dict[str, Any] = {
        "num_spare": 4 if len(miners) == 1 else 0,
        "num_sequences": 3,
        "trained_first": 6,
        "exact_miners": exact_miners,
        "exact_segments": exact_segments,
        "block_hash": SETTLING_HASH,
    }
    plan = draw_plan(candidates, **numbers)
    return {
        "miners": {str(uid): vars(each) for uid, each in candidates.items()},
        **numbers,
        "segments": [[uid, list(places)] for uid, places in plan.segments.items()],
        "exact": [[uid, list(others)] for uid, others in plan.exact.items()],
    }


def _products(recipe: Recipe) -> dict[str, Any]:
    """Inner products of the updates of aggregate.json's payloads, each alone, with a gradient."""
    layout, three = layout_of(recipe), payloads(recipe)
    gradients = _gradients()
    found = UpdateProducts(three, layout, target_norms(three, layout)).with_gradients(gradients, range(len(three)))
    products = {str(uid): product for uid, product in zip(MINER_UIDS, found, strict=True)}
    return {"recipe": recipe, "gradients": tensors_hex(gradients), "products": products}


def _gradients() -> dict[str, Tensor]:
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return {
        name: torch.tensor([((5 * place) % 7 - 3) / 4 for place in range(sizes[name])]).reshape(shape)
        for name, shape in SHAPES.items()
    }


def _likeness() -> dict[str, Any]:
    """Four payloads, and three of the window before: of these, one was applied and one is that of another miner.

    Uid 5 publishes what uid 3 published in both windows.
    """
    now = {uid: payload(uid, "sparseloco") for uid in MINER_UIDS} | {5: payload(3, "sparseloco")}
    earlier = {2: payload(4, "sparseloco"), 3: payload(3, "sparseloco"), 4: payload(4, "sparseloco")}
    layout, applied = layout_of("sparseloco"), frozenset({3})
    threshold, rostered = SCORING.overlap_level, (2, 5)
    overlaps, repeats = find_likenesses(now, earlier, applied, layout, threshold=threshold)
    return {
        "payloads": _encoded(now),
        "earlier": _encoded(earlier),
        "applied": sorted(applied),
        "threshold": threshold,
        "rostered": rostered,
        "overlaps": {str(uid): each.model_dump() for uid, each in overlaps.items()},
        "repeats": {str(uid): each.model_dump() for uid, each in repeats.items()},
        "norm_ratios": {str(uid): ratio for uid, ratio in norm_ratios(now, layout, rostered).items()},
    }


def _encoded(found: Mapping[int, Payload]) -> dict[str, str]:
    return {str(uid): encode(each, layout_of("sparseloco")).hex() for uid, each in found.items()}


Losses = Sequence[float | None]

# Random loss and gain of the estimates; of the measurements the random losses before and after, and the predicted gain.
_WINDOWS: tuple[tuple[Sequence[Losses], Sequence[Losses]], ...] = (
    ((), ()),
    ((), ((4.0, 3.75, 0.5),)),
    (((4.0, 0.25), (4.0, 0.5), (4.0, 1.0)), ()),
    (((4.0, 0.25), (4.0, 0.5), (4.0, 1.0)), ((4.0, 3.75, 0.5),)),
    (((4.0, 0.25), (4.0, 0.5), (4.0, 0.5), (4.0, 4.0)), ((4.0, 3.75, 0.5), (4.0, 3.25, 2.0), (4.0, 3.5, 0.25))),
    (((3.7, 0.13), (3.6, 0.11), (3.9, 0.9)), ((3.7, 3.3, 0.9), (3.5, 3.45, 0.7), (3.1, 3.4, 1.1), (3.0, 2.9, 0.12))),
    (((4.0, 0.25), (4.0, None), (None, None)), ((4.0, None, 0.5), (4.0, 3.5, None), (None, None, None))),
    (((4.0, -0.25), (4.0, -0.5)), ((4.0, 4.25, -0.25), (4.0, 4.0, 0.0))),
    (((4.0, 0.25), (4.0, 0.5)), ((4.0, 2.5, 1.0), (4.0, 3.0, 0.5))),
    (((4.0, 0.25), (4.0, 0.5)), ((4.0, 9.0, 1.0), (4.0, 3.5, 0.5625), (4.0, 0.5, 3.0))),
)


def _assumptions(estimates: Sequence[Losses], measurements: Sequence[Losses]) -> dict[str, Any]:
    linear = [
        Estimate(own_before=None, own_gain=None, random_before=before, random_gain=gain, expected=0.0)
        for before, gain in estimates
    ]
    exact = [
        Measurement(own_before=None, own_after=None, random_before=before, random_after=after, random_gain=gain)
        for before, after, gain in measurements
    ]
    return {
        "estimates": [each.model_dump() for each in linear],
        "measurements": [each.model_dump() for each in exact],
        "prior": _prior(CurvaturePrior.of(linear, exact, SCORING.large_prediction_ratio)),
    }


def _prior(prior: CurvaturePrior) -> dict[str, Any]:
    return {"typical": prior.typical, "large": prior.large, "shortfalls": prior.shortfalls, "ratio": prior.ratio}


Known = tuple[float | None, float]
_UNKNOWN: Known = (None, 0.0)
_NOTHING, _TYPICAL = CurvaturePrior(), CurvaturePrior(typical=-0.125)
_LARGE = CurvaturePrior(typical=-0.0625, large=0.25, shortfalls=((0.3125, -0.75), (0.375, -0.5)), ratio=2.0)
_UNPROVEN = replace(_LARGE, shortfalls=())

# The estimate: own loss and gain, random loss and gain, and what others gain more on the own data. The measurement, if
# any: own losses before and after, random ones, and the predicted random gain. The card's curvature, and the predicted
# gain that it is of. The window's prior.
_SCORES: tuple[tuple[Losses, Losses | None, Known, CurvaturePrior], ...] = (
    ((4.0, 0.5, 4.0, 0.25, 0.0), None, _UNKNOWN, _NOTHING),
    ((4.0, 0.5, 4.0, 0.25, 0.0625), None, _UNKNOWN, _NOTHING),
    ((4.0, 0.5, 4.0, 0.25, 0.0), None, _UNKNOWN, _TYPICAL),
    ((4.0, 0.5, 4.0, 0.25, 0.0), None, (-0.03125, 0.0625), _TYPICAL),
    ((4.0, 0.5, 4.0, 0.25, 0.0), (4.0, 3.625, 3.0, 2.875, 0.25), (-0.03125, 0.0625), _TYPICAL),
    ((4.0, 0.5, 4.0, 0.25, 0.0), (4.0, 3.625, 3.0, 9.0, 0.25), _UNKNOWN, _TYPICAL),
    ((4.0, 0.5, 4.0, 0.25, 0.0), (4.0, 3.625, 3.0, None, 0.25), _UNKNOWN, _TYPICAL),
    ((4.0, 0.5, 4.0, 0.25, 0.0), (4.0, 3.625, 3.0, 2.875, None), (-0.03125, 0.0625), _TYPICAL),
    ((4.0, 0.5, 4.0, 0.25, -0.25), (4.0, 4.125, 3.0, 2.875, 0.25), _UNKNOWN, _NOTHING),
    ((4.0, 0.5, 4.0, 0.25, 0.0), (None, None, None, None, None), _UNKNOWN, _TYPICAL),
    ((4.0, 0.5, 4.0, None, 0.0), None, _UNKNOWN, _NOTHING),
    ((4.0, 0.5, 4.0, -9.0, 0.0), None, (0.5, 1.0), _NOTHING),
    ((None, None, 4.0, 0.25, -0.125), None, _UNKNOWN, _NOTHING),
    ((4.0, 0.5, None, None, 0.0), None, _UNKNOWN, _NOTHING),
    ((3.0, 0.1, 3.0, 0.2, -0.1), None, _UNKNOWN, _NOTHING),
    ((4.0, -0.25, 4.0, -0.5, 0.0), None, _UNKNOWN, _NOTHING),
    ((4.0, 0.5, 4.0, 1.0, 0.0), None, _UNKNOWN, _LARGE),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, _UNKNOWN, _LARGE),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (-0.5, 0.4375), _LARGE),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (-0.125, 0.25), _LARGE),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (-0.125, 0.1875), _LARGE),
    ((4.0, 0.5, 4.0, 2.625, 0.0), None, _UNKNOWN, _LARGE),
    ((4.0, 0.5, 4.0, 3.5, 0.0), None, (-0.875, 0.25), _LARGE),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (-0.125, 0.25), _UNPROVEN),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (0.125, 0.25), _UNPROVEN),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (-0.125, 0.1875), _UNPROVEN),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, (-0.75, 0.1875), _UNPROVEN),
    ((4.0, 0.5, 4.0, 2.0, 0.0), None, _UNKNOWN, _UNPROVEN),
    ((3.7, 0.5, 3.7, 1.3, 0.0), None, (-0.07, 0.23), _UNPROVEN),
    ((4.0, 3.0, 4.0, 2.0, 0.0), (4.0, 3.625, 3.0, 2.875, 0.25), _UNKNOWN, _LARGE),
)


def _score(linear: Losses, exact: Losses | None, known: Known, prior: CurvaturePrior) -> dict[str, Any]:
    estimate = Estimate.model_validate(dict(zip(Estimate.model_fields, linear, strict=True)))
    measurement = None
    if exact is not None:
        measurement = Measurement.model_validate(dict(zip(Measurement.model_fields, exact, strict=True)))
    card = ScoreCard(curvature=known[0], predicted_gain=known[1])
    return {
        "estimate": estimate.model_dump(),
        "measurement": None if measurement is None else measurement.model_dump(),
        "card": card.model_dump(),
        "prior": _prior(prior),
        **_window_score(score_payload(estimate, measurement, card, prior)),
    }


def _window_score(score: WindowScore) -> dict[str, Any]:
    return {
        "gradient_score": score.gradient_score,
        "indicator": score.indicator,
        "curvature": score.curvature,
        "predicted_gain": score.predicted,
        "own_excess": score.own_excess,
    }


def _weights(changes: Mapping[str, Any]) -> dict[str, Any]:
    settings = Weights.model_validate(WEIGHTS.model_dump() | changes)
    finals = {0: 9.0, 2: 4.0, 3: -1.0, 4: 2.0, 5: 1.0, 6: 0.5, 7: 0.5, 8: 0.125, 9: 0.125}
    weights, nobody = (compute_weights(each, settings, PEERS) for each in (finals, {2: 0.0}))
    return {
        "settings": settings.model_dump(),
        "finals": {str(uid): final for uid, final in finals.items()},
        "weights": {str(uid): weight for uid, weight in weights.items()},
        "weights_if_nobody_earned": {str(uid): weight for uid, weight in nobody.items()},
    }
