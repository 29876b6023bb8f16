"""From what was measured in a window to scores, penalties, weights and the next standing.

A pure function of facts, of the standing before and of the numbers: whoever has the evidence of two windows redoes it
exactly. The result does not depend on the order of the miners.
"""

from collections.abc import Mapping
from typing import Any

from templar.errors import Reason
from templar.hparams import HParams, Scoring
from templar.scoring.baseline import Rated, rate_against
from templar.scoring.cards import ScoreCard, Standing
from templar.scoring.curvature import Assumptions
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
from templar.scoring.scores import WindowScore, held_back, next_card, score_payload, shows_nothing
from templar.scoring.skill import advantages, final_score, typical
from templar.scoring.slashing import Slash, overlap_event
from templar.scoring.sync import sync_score
from templar.scoring.verdicts import early_slashes, is_absent, late_slashes
from templar.scoring.weights import compute_weights


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
