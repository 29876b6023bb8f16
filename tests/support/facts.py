"""Made-up facts and standings of validators: miners of a window, and the evidence concluded from them."""

from collections.abc import Mapping
from typing import Any

from lab.hotkeys import hotkey_from_seed
from templar.canonical import sha256_hex
from templar.errors import Reason
from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Estimate, Likeness, Measurement, MinerFacts, WindowFacts
from templar.scoring.standing import ScoreCard, Standing

SIGNER = hotkey_from_seed(bytes(31) + b"\x01")
AUTHOR: dict[str, Any] = {"netuid": 3, "genesis": "b" * 64, "uid": 0, "hotkey": SIGNER.address}
"""A validator, as its evidence begins."""
LOCAL = load_hparams("local")
WINDOW = 100
ROSTER = "d" * 64
LOSS = 4.0
"""What every segment of every batch has before."""


def hotkey(number):
    """An address, as far as an object can tell."""
    return "5Miner" + str(number).replace("0", "A").rjust(42, "x")


def bucket(number):
    """The digest of a bucket's address."""
    return sha256_hex(f"bucket {number}".encode())


def estimate(random, own=None, *, expected=0.0):
    """A linear score from relative gains; the own one is the other's double if none is given."""
    own = 2 * abs(random) + 0.01 if own is None and random is not None else own
    return Estimate(
        own_before=LOSS,
        own_gain=None if own is None else own * LOSS,
        random_before=LOSS,
        random_gain=None if random is None else random * LOSS,
        expected=expected,
    )


def measurement(random, predicted, own=0.5):
    """An exact measurement from relative gains; None is a loss, or a predicted, that is not finite."""
    return Measurement(
        own_before=LOSS,
        own_after=None if own is None else LOSS - own * LOSS,
        random_before=LOSS,
        random_after=None if random is None else LOSS - random * LOSS,
        random_gain=None if predicted is None else predicted * LOSS,
    )


def revealed(uid, gain=0.1, **changes):
    """A miner whose payload counts and was measured; `gain` is the relative one on the data of others."""
    values: dict[str, Any] = {
        "uid": uid,
        "hotkey": hotkey(uid),
        "registered_at": uid + (500 if "hotkey" in changes else 10),  # another hotkey is another registration
        "bucket": bucket(uid),
        "tier": "gather",
        "assigned": True,
        "payload_sha256": f"{uid:064x}",
        "applied": True,
        "reason": None,
        "windows_behind": 0,
        "estimate": estimate(gain),
        "measurement": None,
        "sequences": 40,
        "norm_ratio": 1.0,
        "overlap": None,
        "repeat": None,
    }
    return MinerFacts(**(values | changes))


def absent(uid, reason=Reason.COMMIT_MISSING, **changes):
    """A miner of whom no payload counts."""
    return revealed(uid, **({"applied": False, "reason": reason, **NOTHING_COUNTS} | changes))


NOTHING_COUNTS = dict.fromkeys(
    ("payload_sha256", "windows_behind", "estimate", "measurement", "sequences", "norm_ratio", "overlap", "repeat")
)
"""The facts of a miner of whom no payload counts."""


def like(uid, share):
    """A payload of which so much is also in that of a miner."""
    return Likeness(uid=uid, share=share)


def window_of(*miners, **changes):
    """What was seen in a window: late enough that everything counts, with a roster."""
    values: dict[str, Any] = {
        "window": WINDOW,
        "roster": ROSTER,
        "root_before": "c" * 64,
        "outer_steps": 1000,
        "seed_block": 4000,
        "loss": LOSS,
        "miners": tuple(sorted(miners, key=lambda miner: miner.uid)),
    }
    return WindowFacts(**(values | changes))


def veteran(uid, **changes):
    """The card of a miner that is doing well and was scored in the window before."""
    values: dict[str, Any] = {
        "uid": uid,
        "measured": 9,
        "mu": 40.0,
        "sigma": 2.0,
        "binary_average": 0.8,
        "sync": 1.0,
        "final": 20.0,
        "last_reveal": WINDOW - 1,
    }
    return ScoreCard(**(values | changes))


def standing_of(cards=(), **changes):
    """What was remembered after the window before: the cards of these uids, or of those that the cards name."""
    pairs = cards.items() if isinstance(cards, Mapping) else ((card.uid, card) for card in cards)
    named = {hotkey(uid): card for uid, card in pairs if uid is not None}
    return Standing(**({"window": WINDOW - 1, "evidence": "e" * 64, "cards": named} | changes))


def concluded(*miners, standing=None, hparams=LOCAL, **changes):
    """The evidence of a window with these miners, after this standing."""
    return conclude(window_of(*miners, **changes), standing or standing_of(), hparams, AUTHOR)


def concluded_again(true, facts, standing, hparams):
    """What the author of an evidence concludes from these facts after this standing."""
    return conclude(facts, standing, hparams, {name: getattr(true, name) for name in AUTHOR})


def record_of(evidence, uid):
    return next(record for record in evidence.miners if record.uid == uid)


def cards_of(evidence):
    """Uid -> card after the window."""
    return {record.uid: record.after for record in evidence.miners}
