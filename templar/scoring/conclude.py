"""From what was measured in a window to scores, penalties, weights and the next standing.

A pure function of facts, of the standing before and of the numbers: whoever has the evidence of two windows redoes it
exactly. The result does not depend on the order of the miners.

From final scores to weights on chain: the reference's two rules.

Who has the same score gets the same weight: of those who share some places each gets the mean of these places' shares.
"""

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from templar.errors import Reason
from templar.hparams import HParams, Peers, Scoring, Weights
from templar.scoring.evidence import (
    MAX_BANS,
    MAX_DEPARTED,
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
    Assumptions,
    Rated,
    WindowScore,
    advantages,
    final_score,
    held_back,
    next_card,
    rate_against,
    score_payload,
    shows_nothing,
    sync_score,
    typical,
)
from templar.scoring.slashing import Slash, early_slashes, is_absent, late_slashes, overlap_event
from templar.scoring.standing import DIGITS, ScoreCard, Standing


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


def conclude(facts: WindowFacts, standing: Standing, hparams: HParams, author: Mapping[str, Any]) -> Evidence:
    """The score cards after a window, what they amount to, and all that they follow from.

    Order: penalties that follow from the past, ratings of the scored miners, their moving averages and final scores,
    then the penalties of the window.

    Args:
        facts: What was seen and measured.
        standing: What was remembered before.
        hparams: The network's numbers.
        author: The fields that say whose evidence it is (`Exchange.author`).
    """
    scoring, window = hparams.scoring, facts.window
    miners = {miner.uid: miner for miner in facts.miners}
    before = {uid: standing.card(miner.hotkey) for uid, miner in miners.items()}
    slashes: dict[int, list[Slash]] = {}
    cards: dict[int, ScoreCard] = {}
    for uid, miner in miners.items():
        banned = standing.is_banned(window, miner.hotkey, miner.bucket)
        slashes[uid] = early_slashes(before[uid], miner, facts, banned=banned, hparams=hparams)
        cards[uid] = _slashed(before[uid], slashes[uid], scoring).model_copy(update={"uid": uid})
    early, scores = dict(cards), _scores(miners, cards, scoring)
    rated = rate_against(
        standing.baseline,
        {uid: cards[uid].rating for uid in scores},
        {uid: score.gradient_score for uid, score in scores.items()},
        scoring,
    )
    scored, usual = _cards_after(facts, cards, scores, rated, scoring)
    cards |= scored
    for uid, miner in miners.items():
        inactive = any(each.reason is Reason.INACTIVE for each in slashes[uid])
        late = late_slashes(early[uid], miner, facts, scoring, inactive=inactive)
        idle = 0 if miner.payload_sha256 is not None else cards[uid].idle + is_absent(miner, facts)
        slashes[uid] += late
        cards[uid] = _slashed(cards[uid].model_copy(update={"idle": idle}), late, scoring)
    weights = compute_weights({uid: card.final for uid, card in cards.items()}, hparams.weights, hparams.peers)
    return Evidence(
        **author,
        window=window,
        previous=standing.evidence,
        previous_window=standing.window,
        roster=facts.roster,
        root_before=facts.root_before,
        outer_steps=facts.outer_steps,
        seed_block=facts.seed_block,
        loss=facts.loss,
        miners=tuple(
            _record(miners[uid], before[uid], scores.get(uid), slashes[uid], cards[uid], scoring=scoring)
            for uid in sorted(miners)
        ),
        baseline_sigma=rated.baseline.sigma,
        typical_advantage=usual,
        departed=_departed(standing, facts),
        bans=_bans(standing, miners, slashes, window),
        weights=tuple(WeightRecord(uid=uid, weight=weight) for uid, weight in weights.items()),
    )


def _scores(
    miners: Mapping[int, MinerFacts], cards: Mapping[int, ScoreCard], scoring: Scoring
) -> dict[int, WindowScore]:
    """What the payloads showed, as it is rated."""
    assumed = Assumptions.of(
        [miner.estimate for miner in miners.values() if miner.estimate is not None],
        [miner.measurement for miner in miners.values() if miner.measurement is not None],
        scoring.large_promise_ratio,
    )
    scores = {
        uid: score_payload(miner.estimate, miner.measurement, cards[uid], assumed)
        for uid, miner in miners.items()
        if miner.estimate is not None
    }
    return {uid: held_back(score, cards[uid], scoring) for uid, score in scores.items()}


def _cards_after(
    facts: WindowFacts,
    cards: Mapping[int, ScoreCard],
    scores: Mapping[int, WindowScore],
    rated: Rated,
    scoring: Scoring,
) -> tuple[dict[int, ScoreCard], float]:
    """The cards of the scored miners after the window, before its penalties; and their typical advantage."""
    syncs = {miner.uid: _sync(miner, cards[miner.uid]) for miner in facts.miners}
    gained = advantages({uid: score.gradient_score for uid, score in scores.items()}, rated.least, scoring)
    after = {
        uid: next_card(
            cards[uid],
            score,
            rated.ratings[uid],
            gained=gained[uid],
            sync=syncs[uid],
            window=facts.window,
            scoring=scoring,
        )
        for uid, score in scores.items()
    }
    usual = typical([card.advantage for card in after.values()])
    finals = {uid: final_score(card, rated.baseline, usual, scoring) for uid, card in after.items()}
    return {uid: card.model_copy(update={"final": finals[uid]}) for uid, card in after.items()}, usual


def _sync(miner: MinerFacts, card: ScoreCard) -> float:
    """The sync score; that of the last time if it cannot be told now."""
    return card.sync if miner.windows_behind is None else sync_score(miner.windows_behind)


def _slashed(card: ScoreCard, slashes: list[Slash], scoring: Scoring) -> ScoreCard:
    """The card after penalties. Who is held back stays so: a cleared average is no fresh start for it."""
    after = card
    for slash in slashes:
        after = slash.apply(after)
    return after.model_copy(update={"measured": card.measured}) if shows_nothing(card, scoring) else after


def _record(
    miner: MinerFacts,
    before: ScoreCard,
    score: WindowScore | None,
    slashes: list[Slash],
    after: ScoreCard,
    *,
    scoring: Scoring,
) -> MinerRecord:
    likenesses = [each for each in (miner.overlap, miner.repeat) if each is not None]
    return MinerRecord(
        facts=miner,
        before=before,
        gradient_score=None if score is None else score.gradient_score,
        indicator=None if score is None else score.indicator,
        copied=any(overlap_event(each.share, scoring) is not None for each in likenesses),
        slashes=tuple(SlashRecord(event=slash.event, reason=slash.reason) for slash in slashes),
        after=after,
    )


def _departed(standing: Standing, facts: WindowFacts) -> tuple[Departed, ...]:
    """Cards of those who are not registered any more; of too many, those who revealed last are kept."""
    present = {miner.hotkey for miner in facts.miners}
    gone = {hotkey: card for hotkey, card in {**standing.departed, **standing.cards}.items() if hotkey not in present}
    kept = sorted(gone, key=lambda hotkey: (-(gone[hotkey].last_reveal or 0), hotkey))[:MAX_DEPARTED]
    return tuple(Departed(hotkey=hotkey, card=gone[hotkey]) for hotkey in sorted(kept))


def _bans(
    standing: Standing, miners: Mapping[int, MinerFacts], slashes: Mapping[int, list[Slash]], window: int
) -> tuple[Ban, ...]:
    """Bans of later windows: those that go on, and the new ones, of hotkey and bucket.

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
