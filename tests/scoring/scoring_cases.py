"""Strategies that the tests of the scoring room share, and the second implementation's view of their cases."""

from hypothesis import strategies as st

from templar.errors import Reason
from templar.scoring.evidence import Estimate, Likeness, Measurement
from templar.scoring.standing import MU, SIGMA, Rating, ScoreCard
from tests.support.facts import WINDOW, absent, bucket, hotkey, revealed, standing_of, window_of

cards = st.builds(
    ScoreCard,
    uid=st.none() | st.integers(2, 9),
    mu=st.sampled_from([10.0, MU, 40.0]),
    sigma=st.sampled_from([2.0, SIGMA]),
    binary_average=st.sampled_from([-0.5, 0.0, 0.05, 0.3333333333, 0.5, 1.0]),
    advantage=st.sampled_from([-0.1, 0.0, 0.1]),
    own_excess=st.sampled_from([-0.1, 0.0, 0.1]),
    sync=st.sampled_from([0.0, 1.0]),
    final=st.sampled_from([-3.0, 0.0, 1e-4, 1.34e-4, 5.0, 6.6666666667]),
    last_reveal=st.none() | st.just(WINDOW - 1),
    idle=st.sampled_from([0, 1, 2, 3, 5, 24, 25]),
    measured=st.sampled_from([0, 19, 20, 99]),
    applied=st.sampled_from([0, 19, 20]),
    last_exact=st.none() | st.just(50),
    curvature=st.none() | st.sampled_from([-0.5, 0.0, 0.25]),
    predicted_gain=st.sampled_from([-1.0, 0.0, 0.05, 1.0]),
    fruitless=st.sampled_from([0.0, 1.0, 2.5]),
    exclusions=st.sampled_from([0, 3, 11]),
    excluded_until=st.none() | st.sampled_from([WINDOW - 1, WINDOW, WINDOW + 9]),
)
"""Any past of a miner, with ties and the ends of all limits."""


def halves(low, high):
    """Multiples of 1/32, so that equal scores occur; None is missing or not finite."""
    return st.integers(32 * low, 32 * high).map(lambda number: number / 32) | st.none()


losses, gains = halves(0, 5), halves(-2, 2)
estimates = st.builds(
    Estimate,
    own_before=losses,
    own_gain=gains,
    random_before=losses,
    random_gain=gains,
    expected=st.sampled_from([-0.0625, 0.0, 0.0625]),
)
measurements = st.builds(
    Measurement, own_before=losses, own_after=losses, random_before=losses, random_after=losses, random_gain=gains
)
likenesses = st.none() | st.builds(
    Likeness, uid=st.integers(2, 9), share=st.sampled_from([0.0, 0.1, 0.3, 0.39, 0.4, 0.55, 0.74, 0.75, 0.9])
)
tiers = st.sampled_from(["gather", "gather", "reserve", "other"])
seen = st.fixed_dictionaries(
    {
        "tier": tiers,
        "assigned": st.sampled_from([True, True, False]),
        "applied": st.booleans(),
        "windows_behind": st.none() | st.integers(0, 5),
        "sequences": st.sampled_from([1, 40, 40, 160]),
        "norm_ratio": st.sampled_from([0.5, 1.0, 10.0, 10.001]),
        "overlap": likenesses,
        "repeat": likenesses,
        "estimate": st.none() | estimates,
        "measurement": st.none() | measurements,
    }
)
missing = st.fixed_dictionaries({"tier": tiers, "assigned": st.sampled_from([True, True, False])})
reasons = st.none() | st.sampled_from(list(Reason))


@st.composite
def miners(draw, uid):
    """A miner of a window: in its place with its own hotkey, with a swapped one, or registered anew."""
    place = {"hotkey": hotkey(uid + draw(st.sampled_from([0, 0, 0, 18, 40])))}
    place["registered_at"] = uid + draw(st.sampled_from([10, 10, 510]))
    place["bucket"] = draw(st.sampled_from([None, bucket(uid), bucket(uid), bucket(uid // 2)]))
    if draw(st.integers(0, 2)):
        return revealed(uid, **place, **draw(seen))
    return absent(uid, draw(reasons), **place, **draw(missing))


@st.composite
def networks(draw):
    """Some miners with any past."""
    uids = draw(st.lists(st.integers(2, 9), unique=True, max_size=8))
    facts = window_of(*(draw(miners(uid)) for uid in uids), roster=draw(st.sampled_from([None, "d" * 64])))
    past = draw(st.dictionaries(st.integers(2, 9), cards))
    for uid in draw(st.sets(st.integers(2, 9))) & past.keys():
        past[uid] = past[uid].model_copy(update={"uid": uid, "registered_at": uid + 10})
    departed = {}
    for uid, card in draw(st.dictionaries(st.integers(2, 9), cards, max_size=3)).items():
        place = {"uid": uid, "registered_at": uid + 10} if uid not in past and draw(st.booleans()) else {}
        departed[hotkey(uid + 18)] = card.model_copy(update=place)
    subjects = [name(uid) for uid in range(2, 10) for name in (hotkey, bucket)]
    bans = draw(st.dictionaries(st.sampled_from(subjects), st.integers(WINDOW - 1, WINDOW + 300), max_size=3))
    return facts, standing_of(past, departed=departed, bans=bans, baseline=Rating(sigma=draw(st.floats(0.5, 8.5))))


# The second implementation reads JSON.


def plain(value):
    return None if value is None else value.model_dump(mode="json")


def settings_of(hparams):
    return {name: plain(getattr(hparams, name)) for name in ("scoring", "peers", "weights")}


def body_of(facts):
    """The facts in the form of an evidence."""
    return {
        "window": facts.window,
        "roster": facts.roster,
        "miners": [{"facts": plain(miner)} for miner in facts.miners],
    }


def memory_of(standing):
    """A standing in the form of the evidence that left it."""
    return {
        "miners": [{"facts": {"hotkey": key}, "after": plain(card)} for key, card in standing.cards.items()],
        "departed": [{"hotkey": key, "card": plain(card)} for key, card in standing.departed.items()],
        "bans": [{"subject": subject, "last_window": last} for subject, last in standing.bans.items()],
        "baseline_sigma": standing.baseline.sigma,
    }


def alike(ours, theirs):
    """Return whether two values are equal but for the last digit that scores are kept with."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(alike(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return abs(ours - theirs) <= 2e-10 if isinstance(ours, float) and isinstance(theirs, float) else ours == theirs
