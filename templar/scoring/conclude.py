"""Conclude a window: from facts, the standing before and the settings to scores, penalties, weights and evidence.

`conclude` is a pure function: with the evidence of two windows anybody redoes it exactly. The result does not depend on
the order of the miners.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from templar.errors import PermanentError, Reason
from templar.hparams import HParams, Peers, Scoring, Weights
from templar.scoring.evidence import (
    MAX_BANS,
    MAX_DEPARTED,
    OF_THE_WINDOW,
    Ban,
    Departed,
    Evidence,
    MinerFacts,
    MinerRecord,
    SlashRecord,
    WeightRecord,
    WindowFacts,
)
from templar.scoring.score import (
    CurvaturePrior,
    Rated,
    Typical,
    WindowScore,
    capped,
    counted_against,
    final_score,
    next_card,
    placed,
    presumed_unassigned,
    rate_against,
    score_payload,
    sync_score,
)
from templar.scoring.slashing import Discount, Slash, early_slashes, find_discounts, is_absent, is_alike, late_slashes
from templar.scoring.standing import DIGITS, ScoreCard, Standing, round_score

MAX_WEIGHT_ERROR = 1e-4  # weights add up to 1 but for their rounding


def conclude(facts: WindowFacts, standing: Standing, hparams: HParams, author: Mapping[str, Any]) -> Evidence:
    """Return the evidence of a window: facts, cards after it, and weights; `author` has the fields of its author."""
    scoring, window = hparams.scoring, facts.window
    miners = {miner.uid: miner for miner in facts.miners}
    standing = standing.following((each.uid, each.registered_at, each.hotkey) for each in facts.miners)
    before = {uid: standing.card(miner.hotkey) for uid, miner in miners.items()}
    # 1. Penalties that follow from the past.
    slashes = {}
    for uid, miner in miners.items():
        banned = standing.is_banned(window, miner.hotkey, miner.bucket)
        slashes[uid] = early_slashes(before[uid], miner, facts, banned=banned, hparams=hparams)
    seats = {uid: {"uid": uid, "registered_at": miner.registered_at} for uid, miner in miners.items()}
    early = {uid: _slashed(before[uid], slashes[uid], scoring).model_copy(update=seats[uid]) for uid in miners}
    # 2. Scores and ratings of the measured miners.
    discounts = find_discounts(miners, early, scoring)
    scores = _scores(miners, early, discounts, scoring)
    ratings = {uid: early[uid].rating for uid in scores}
    gains = {uid: score.gradient_score for uid, score in scores.items()}
    rated = rate_against(standing.baseline, ratings, gains, scoring)
    # 3. Their moving averages and final scores.
    scored, typical = _scored_cards(facts, early, scores, rated, hparams)
    cards = early | scored
    # 4. Penalties of the window itself, which follow from the card as it was before the window was scored.
    for uid, miner in miners.items():
        inactive = any(each.reason is Reason.INACTIVE for each in slashes[uid])
        late = late_slashes(early[uid], miner, facts, scoring, inactive=inactive)
        slashes[uid] += late
        cards[uid] = _slashed(_counted(cards[uid], miner, facts), late, scoring)
    # 5. Weights from final scores, and a record of each miner.
    weights = compute_weights({uid: card.final for uid, card in cards.items()}, hparams.weights, hparams.peers)
    records = []
    for uid, miner in sorted(miners.items()):
        score, discount = scores.get(uid), discounts.get(uid)
        record = MinerRecord(
            facts=miner,
            before=before[uid],
            gradient_score=None if score is None else score.gradient_score,
            indicator=None if score is None else score.indicator,
            copied=is_alike(miner.overlap, scoring) or is_alike(miner.repeat, scoring),
            discount=None if discount is None else discount.reason,
            slashes=tuple(SlashRecord(event=each.event, reason=each.reason) for each in slashes[uid]),
            after=cards[uid],
        )
        records.append(record)
    return Evidence(
        **author,
        **{name: getattr(facts, name) for name in OF_THE_WINDOW},
        previous=standing.evidence,
        previous_window=standing.window,
        miners=tuple(records),
        baseline_sigma=rated.baseline.sigma,
        typical_advantage=typical.advantage,
        typical_own_excess=typical.own_excess,
        departed=_departed(standing, facts),
        bans=_bans(standing, miners, slashes, window),
        weights=tuple(WeightRecord(uid=uid, weight=weight) for uid, weight in weights.items()),
    )


def _counted(card: ScoreCard, miner: MinerFacts, facts: WindowFacts) -> ScoreCard:
    """Return the card with the window counted as idle, or as applied."""
    idle = 0 if miner.payload_sha256 is not None else card.idle + is_absent(miner, facts)
    return card.model_copy(update={"idle": idle, "applied": card.applied + miner.applied})


def _slashed(card: ScoreCard, slashes: list[Slash], scoring: Scoring) -> ScoreCard:
    """Return the card after penalties. A cleared average frees nobody from the presumption of unassigned data."""
    after = card
    for slash in slashes:
        after = slash.apply(after)
    return after.model_copy(update={"measured": card.measured}) if presumed_unassigned(card, scoring) else after


def _scores(
    miners: Mapping[int, MinerFacts],
    cards: Mapping[int, ScoreCard],
    discounts: Mapping[int, Discount],
    scoring: Scoring,
) -> dict[int, WindowScore]:
    """Return uid -> the score of its payload as it enters the rating, of miners that were measured."""
    prior = CurvaturePrior.of(
        [miner.estimate for miner in miners.values() if miner.estimate is not None],
        [miner.measurement for miner in miners.values() if miner.measurement is not None],
        scoring.large_prediction_ratio,
    )
    scores = {}
    for uid, miner in miners.items():
        if miner.estimate is not None:
            score = score_payload(miner.estimate, miner.measurement, cards[uid], prior)
            # Unassigned data improve the model like all others: the gain alone would rank the miner among honest ones.
            if presumed_unassigned(cards[uid], scoring):
                score = replace(score, gradient_score=min(score.gradient_score, 0.0))
            scores[uid] = discounts[uid].apply(score) if uid in discounts else score
    return scores


def _scored_cards(
    facts: WindowFacts,
    cards: Mapping[int, ScoreCard],
    scores: Mapping[int, WindowScore],
    rated: Rated,
    hparams: HParams,
) -> tuple[dict[int, ScoreCard], Typical]:
    """Return the cards of the scored miners before the window's penalties, and what is typical of them."""
    scoring = hparams.scoring
    behind = {miner.uid: miner.windows_behind for miner in facts.miners}
    limited = capped({uid: each.gradient_score for uid, each in scores.items()}, scoring)
    gained = {uid: score - rated.baseline_score for uid, score in limited.items()}
    # A sequence among many is learnt by less of a step than one among few: their sum compares equal work.
    sequences = {miner.uid: miner.sequences or 0 for miner in facts.miners}
    excesses = capped({uid: round_score(each.own_excess * sequences[uid]) for uid, each in scores.items()}, scoring)
    after = {}
    for uid, score in scores.items():
        lag, card = behind[uid], cards[uid]
        sync = card.sync if lag is None else sync_score(lag)  # an unknown lag keeps the last sync score
        after[uid] = next_card(
            card,
            score,
            rated.ratings[uid],
            gained=gained[uid],
            excess=excesses[uid],
            sync=sync,
            window=facts.window,
            scoring=scoring,
        )
    typical = Typical.of(after.values())
    fruitless = counted_against(gained, [uid for uid, card in after.items() if card.advantage > 0])
    for uid, card in after.items():
        final = final_score(card, rated.baseline, typical, hparams)
        after[uid] = placed(card.model_copy(update={"final": final}), fruitless[uid], facts.window, scoring)
    return after, typical


def _departed(standing: Standing, facts: WindowFacts) -> tuple[Departed, ...]:
    """Return the cards of hotkeys that are not registered any more; of too many, those that revealed last are kept."""
    present = {miner.hotkey for miner in facts.miners}
    gone = {hotkey: card for hotkey, card in {**standing.departed, **standing.cards}.items() if hotkey not in present}
    kept = sorted(gone, key=lambda hotkey: (-(gone[hotkey].last_reveal or 0), hotkey))[:MAX_DEPARTED]
    return tuple(Departed(hotkey=hotkey, card=gone[hotkey]) for hotkey in sorted(kept))


def _bans(
    standing: Standing, miners: Mapping[int, MinerFacts], slashes: Mapping[int, list[Slash]], window: int
) -> tuple[Ban, ...]:
    """Return the bans that hold in later windows, of hotkeys and buckets.

    A bucket that another miner names as well is not banned: anybody can commit another's address.
    """
    bans = {subject: last for subject, last in standing.bans.items() if last > window}
    for uid, miner in miners.items():
        length = max((slash.penalty.ban_windows for slash in slashes[uid]), default=0)
        if length:
            shared = sum(other.bucket == miner.bucket for other in miners.values()) > 1
            for subject in (miner.hotkey, None if shared else miner.bucket):
                if subject is not None:
                    bans[subject] = max(bans.get(subject, 0), window + length)
    kept = sorted(bans, key=lambda subject: (-bans[subject], subject))[:MAX_BANS]
    return tuple(Ban(subject=subject, last_window=bans[subject]) for subject in sorted(kept))


def compute_weights(finals: Mapping[int, float], weights: Weights, peers: Peers) -> dict[int, float]:
    """Return uid -> weight, positive weights only, in uid order; they sum to 1, or there are none.

    Only a positive final score earns a weight. The burn uid never earns one, and gets all if nobody earns.
    """
    earning = {uid: score for uid, score in finals.items() if score > 0 and uid != weights.burn_uid}
    if weights.rule == "value":
        shares = earning
    elif weights.rule == "ramp":
        shares = _ramp(earning, weights, peers)
    else:
        shares = {uid: score**weights.power_normalisation for uid, score in earning.items()}
    total = math.fsum(shares.values())
    burn = weights.burn_rate if total > 0 else 1.0
    if total > 0:
        shares = {uid: share / total * (1 - burn) for uid, share in shares.items()}
    if weights.burn_uid is not None and burn > 0:
        shares[weights.burn_uid] = burn
    return {uid: round(shares[uid], DIGITS) for uid in sorted(shares) if round(shares[uid], DIGITS) > 0}


def check_weights(evidence: Evidence, weights: Weights) -> None:
    """Check that an evidence pays nobody without a positive final score, and no more than there is.

    If not, PermanentError `self_check_failed`.
    """
    earning = {record.uid for record in evidence.miners if record.final > 0} | {weights.burn_uid}
    for paid in evidence.weights:
        if not 0 <= paid.weight <= 1 or paid.uid not in earning:
            raise PermanentError(
                Reason.SELF_CHECK_FAILED,
                f"window {evidence.window}: uid {paid.uid} would get the weight {paid.weight}, which no score explains",
            )
    total = math.fsum(paid.weight for paid in evidence.weights)
    if evidence.weights and abs(total - 1) > MAX_WEIGHT_ERROR:
        raise PermanentError(
            Reason.SELF_CHECK_FAILED, f"window {evidence.window}: the weights add up to {total}, not to 1"
        )


def _ramp(finals: Mapping[int, float], weights: Weights, peers: Peers) -> dict[int, float]:
    """Return the shares of the two-tier rule: a linear ramp for the best, a geometric tail for the reserve."""
    ranked = sorted(finals, key=lambda uid: (-finals[uid], uid))
    top = ranked[: peers.gather_peer_count]
    tail = ranked[peers.gather_peer_count : peers.gather_peer_count + peers.reserve_peer_count]
    shares = _scaled(top, np.linspace(weights.gather_top_ratio, 1.0, num=len(top)), weights.gather_share)
    decay = weights.reserve_decay_ratio ** np.arange(len(tail))
    reserve = _scaled(tail, decay, 1 - weights.gather_share)
    # The best of the reserve never gets as much as the last of the gather tier.
    if reserve and max(reserve.values()) > min(shares.values()):
        factor = min(shares.values()) / max(reserve.values()) * weights.reserve_decay_ratio
        reserve = {uid: share * factor for uid, share in reserve.items()}
    shares |= reserve
    # Equal scores get equal weights: the mean of their places' shares.
    for _, group in groupby(ranked, key=lambda uid: finals[uid]):
        tied = list(group)
        mean = math.fsum(shares.get(uid, 0.0) for uid in tied) / len(tied)
        shares |= dict.fromkeys(tied, mean)
    return shares


def _scaled(uids: list[int], values: np.ndarray, total: float) -> dict[int, float]:
    if not uids:
        return {}
    return {uid: float(value) for uid, value in zip(uids, values / values.sum() * total, strict=True)}
