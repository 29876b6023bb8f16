"""From final scores to weights on chain: the reference's two rules.

Who has the same score gets the same weight: of those who share some places each gets the mean of these places' shares.
"""

import math
from collections.abc import Mapping
from itertools import groupby

import numpy as np

from templar.hparams import Peers, Weights
from templar.scoring.cards import DIGITS


def compute_weights(finals: Mapping[int, float], weights: Weights, peers: Peers) -> dict[int, float]:
    """Weights of one validator; they sum to 1, or there are none at all.

    Only a positive final score earns a weight. The burn uid never earns one, whatever its score.

    Args:
        finals: Uid -> final score.
        weights: The rule and its numbers.
        peers: Sizes of the two tiers.

    Returns:
        Uid -> weight, positive weights only, in uid order.
    """
    earning = {uid: score for uid, score in finals.items() if score > 0 and uid != weights.burn_uid}
    rule = _ramp if weights.rule == "ramp" else _power
    shares = rule(earning, weights, peers)
    total = math.fsum(shares.values())
    burn = weights.burn_rate if total > 0 else 1.0
    if total > 0:
        shares = {uid: share / total * (1 - burn) for uid, share in shares.items()}
    if weights.burn_uid is not None and burn > 0:
        shares[weights.burn_uid] = burn
    return {uid: round(shares[uid], DIGITS) for uid in sorted(shares) if round(shares[uid], DIGITS) > 0}


def _power(finals: Mapping[int, float], weights: Weights, peers: Peers) -> dict[int, float]:
    """Power normalisation (demo): score to the power, over the sum."""
    return {uid: score**weights.power_normalisation for uid, score in finals.items()}


def _ramp(finals: Mapping[int, float], weights: Weights, peers: Peers) -> dict[int, float]:
    """Two tiers (sparseloco): a linear ramp for the best, a geometric tail for the reserve.

    The best of the reserve never gets as much as the last of the gather tier.
    """
    ranked = sorted(finals, key=lambda uid: (-finals[uid], uid))
    top = ranked[: peers.gather_peer_count]
    tail = ranked[peers.gather_peer_count : peers.gather_peer_count + peers.reserve_peer_count]
    ramp = np.linspace(weights.gather_top_ratio, 1.0, num=len(top))
    shares = _scaled(top, ramp, weights.gather_share)
    decay = weights.reserve_decay_ratio ** np.arange(len(tail))
    reserve = _scaled(tail, decay, 1 - weights.gather_share)
    if reserve and max(reserve.values()) > min(shares.values()):
        factor = min(shares.values()) / max(reserve.values()) * weights.reserve_decay_ratio
        reserve = {uid: share * factor for uid, share in reserve.items()}
    shares |= reserve
    for _, group in groupby(ranked, key=lambda uid: finals[uid]):
        tied = list(group)
        mean = math.fsum(shares.get(uid, 0.0) for uid in tied) / len(tied)
        shares |= dict.fromkeys(tied, mean)
    return shares


def _scaled(uids: list[int], values: np.ndarray, total: float) -> dict[int, float]:
    if not uids:
        return {}
    return {uid: float(value) for uid, value in zip(uids, values / values.sum() * total, strict=True)}
