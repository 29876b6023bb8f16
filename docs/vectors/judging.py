"""Six windows of the tiny network as a validator saw them, and the evidence that follows from it.

Numbers that a reader can check by eye; every rule of scores, penalties and bans has its say somewhere.
"""

from collections.abc import Mapping
from typing import Any

from docs.vectors.scenario import MINER_UIDS, WINDOW, hotkey, layout_of, payload, root_before
from templar.canonical import sha256_hex
from templar.errors import Reason
from templar.exchange.buckets import account_digest
from templar.gradient.codec.wire import encode
from templar.hparams import HParams, Peers, Scoring, Weights, load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Estimate, Evidence, Likeness, MeasuredOn, Measurement, MinerFacts, WindowFacts
from templar.scoring.standing import Standing

PEERS = Peers(
    validator_min_stake=1.0,
    gather_peer_count=3,
    reserve_peer_count=2,
    minimum_peers=2,
    peer_replacement_frequency=2,
    peer_list_window_margin=1,
    recent_windows=1,
)
WEIGHTS = Weights(
    rule="value",
    value_exponent=1.5,
    windows_per_weights=2,
    power_normalisation=2.0,
    gather_share=0.75,
    gather_top_ratio=2.0,
    reserve_decay_ratio=0.5,
    burn_rate=0.5,
    burn_uid=0,
)
SCORING = Scoring.model_validate(
    {
        "validator_offset": 0,
        "eval_sequences": 4,
        "eval_micro_batch_size": 2,
        "eval_lr_factor": 0.25,
        "exact_miners": 1,
        "exact_segments": 2,
        "curvature_ma_alpha": 0.5,
        "large_prediction_ratio": 1.25,
        "binary_score_ma_alpha": 0.25,
        "openskill_beta": 7.0,
        "openskill_tau": 0.1,
        "baseline_share": 0.25,
        "rating_decay": 0.125,
        "median_skill": 4.5,
        "advantage_cap": 1.25,
        "sync_max_steps_behind": 3,
        "reset_inactivity_windows": 2,
        "low_success_rate": 0.4,
        "oversized_ratio": 10.0,
        "own_data_min_average": 0.125,
        "own_data_windows": 2,
        "overlap_level": 0.4,
        "overlap_grace_windows": 1,
        "overlap_copy_level": 0.8125,
        "exclusion_after": 1.5,
        "exclusion_windows": 2,
        "slashing": {
            "missing": {"final": 0.75, "average": 0.75},
            "missing_low_success": {"final": 0.0, "average": 0.0},
            "invalid": {"final": 0.0, "average": 1.0},
            "desync": {"final": 0.75, "average": 0.75},
            "oversized": {"final": 0.0, "average": 0.75, "ban_windows": 2},
            "unassigned_data": {"final": 0.0, "average": 1.0},
            "inactivity": {"final": 0.75, "average": 1.0},
            "inactivity_reset": {"final": 0.0, "average": 0.0, "reset": True},
            "banned": {"final": 0.0, "average": 0.0, "reset": True},
            "registered_again": {"final": 0.0, "average": 0.0, "reset": True},
        },
    }
)


def settings(rule: str = "value") -> HParams:
    """Hyper-parameters with these numbers; scores follow from no others."""
    weights = WEIGHTS.model_copy(update={"rule": rule})
    return load_hparams("local").model_copy(update={"scoring": SCORING, "weights": weights, "peers": PEERS})


def evidences(author: Mapping[str, Any], roster: str) -> list[Evidence]:
    """The evidence of all windows, each following the one before.

    Args:
        author: The fields that say whose it is.
        roster: Digest of the first window's roster.
    """
    found: list[Evidence] = []
    standing = Standing()
    for facts in _windows(roster):
        found.append(conclude(facts, standing, settings(), author))
        standing = found[-1].standing
    return found


def _windows(roster: str) -> tuple[WindowFacts, ...]:
    return (
        _window(WINDOW, _everybody_is_measured(), roster=roster, steps=0),
        _window(WINDOW + 1, _one_is_late_and_one_repeats(), roster=sha256_hex(b"roster 2"), steps=1),
        _window(WINDOW + 2, _two_are_alike_and_one_breaks_the_loss(), roster=sha256_hex(b"roster 3"), steps=2),
        _window(WINDOW + 3, _the_store_fails_and_two_are_banned(), roster=None, steps=3),
        _window(WINDOW + 5, _most_fail_and_one_is_back(), roster=sha256_hex(b"roster 6"), steps=4),
        _window(WINDOW + 6, _some_predict_large_gains(), roster=sha256_hex(b"roster 7"), steps=5),
    )


_REPEATABLE = MeasuredOn(device="cpu", precision="float32", repeatable=True)
_FAST = MeasuredOn(device="cuda", precision="bfloat16", repeatable=False)


def _window(window: int, miners: tuple[MinerFacts, ...], *, roster: str | None, steps: int) -> WindowFacts:
    is_measured = any(miner.estimate for miner in miners)
    return WindowFacts(
        window=window,
        roster=roster,
        root_before=root_before() if steps == 0 else sha256_hex(f"root {window - 1}".encode()),
        outer_steps=steps,
        seed_block=18 * window + 22,
        loss=4.0 if is_measured else None,
        measured_on=(_REPEATABLE, _FAST)[steps % 2] if is_measured else None,
        miners=miners,
    )


def _everybody_is_measured() -> tuple[MinerFacts, ...]:
    """One exactly; two with equal scores, much alike while the network is too young for that to count."""
    digests = {uid: sha256_hex(encode(payload(uid, "sparseloco"), layout_of("sparseloco"))) for uid in MINER_UIDS}
    exact = Measurement(own_before=4.0, own_after=3.5625, random_before=4.0, random_after=3.78125, random_gain=0.25)
    return (
        _measured(2, 0.5, 0.25, measurement=exact, payload_sha256=digests[2], overlap=_like(3, 0.03125)),
        _measured(3, 0.25, 0.25, expected=0.015625, payload_sha256=digests[3], overlap=_like(4, 0.875)),
        _measured(4, 0.5, 0.25, payload_sha256=digests[4], overlap=_like(3, 0.875)),
    )


def _one_is_late_and_one_repeats() -> tuple[MinerFacts, ...]:
    return (
        _measured(2, 0.375, 0.125, windows_behind=None, repeat=_like(3, 0.25)),
        _measured(3, 0.5, 0.1875, windows_behind=2, repeat=_like(4, 0.4375)),
        _absent(4, Reason.REVEAL_LATE),
        _absent(5, Reason.BAD_PAYLOAD),
        _absent(6, Reason.COMMIT_MISSING, tier="reserve"),
    )


def _two_are_alike_and_one_breaks_the_loss() -> tuple[MinerFacts, ...]:
    """Of the two, one has a bucket that another miner, which waits for a slot, names as well."""
    exact = Measurement(own_before=4.0, own_after=3.75, random_before=4.0, random_after=3.875, random_gain=0.1875)
    broken = Measurement(own_before=4.0, own_after=3.75, random_before=4.0, random_after=None, random_gain=None)
    return (
        _measured(2, 0.25, 0.1875, measurement=exact, overlap=_like(5, 0.75)),
        _measured(3, 0.25, None, measurement=broken, windows_behind=5),
        _absent(4, Reason.COMMIT_MISSING),
        _measured(5, 0.25, 0.25, tier="reserve", norm_ratio=12.0, overlap=_like(2, 0.75)),
        _absent(6, None, tier="other", assigned=False, bucket=_bucket(2)),
    )


def _the_store_fails_and_two_are_banned() -> tuple[MinerFacts, ...]:
    """Uid 5 is a stranger now, whose bucket is that of the hotkey that had the uid before. Uid 3 shows nothing."""
    return (
        _absent(2, Reason.BANNED),
        _measured(3, 0.25, 0.125),
        _absent(4, Reason.STORE_UNREACHABLE),
        _absent(5, Reason.BANNED, key=9, bucket=_bucket(5)),
        _absent(6, Reason.STORE_UNREACHABLE),
    )


def _most_fail_and_one_is_back() -> tuple[MinerFacts, ...]:
    """The validator was away for a window. The hotkey that had uid 5 has uid 7 now."""
    return (
        _absent(2, Reason.COMMIT_MISSING),
        _absent(3, Reason.REVEAL_LATE),
        _absent(4, Reason.COMMIT_MISSING),
        _measured(6, 0.5, 0.25, tier="other", own_before=None),
        _measured(7, 0.25, 0.5, key=5),
    )


def _some_predict_large_gains() -> tuple[MinerFacts, ...]:
    """Uid 7 reaches half of it; 2 has reached more of about as much before, 6 predicts more than was ever measured.

    Uid 6 has swapped its hotkey. Uid 4 does little. Uid 3 still shows nothing, for all its penalties, and its payload
    is like that of uid 2.
    """
    exact = Measurement(own_before=4.0, own_after=3.0, random_before=4.0, random_after=3.5, random_gain=1.0)
    return (
        _measured(2, 0.5, 0.25),
        _measured(3, 0.5, 0.125, overlap=_like(2, 0.5)),
        _measured(4, 0.5, 0.03125),
        _measured(6, 3.0, 2.0, key=8, registered_at=60, bucket=_bucket(6)),
        _measured(7, 2.0, 0.125, key=5, measurement=exact),
    )


def _measured(
    uid: int,
    own_gain: float | None,
    random_gain: float | None,
    *,
    own_before: float | None = 4.0,
    expected: float = 0.0,
    **fields: Any,
) -> MinerFacts:
    estimate = Estimate(
        own_before=own_before,
        own_gain=None if own_before is None else own_gain,
        random_before=4.0,
        random_gain=random_gain,
        expected=expected,
    )
    usual = {"payload_sha256": sha256_hex(f"payload {uid}".encode()), "windows_behind": 0, "norm_ratio": 1.0}
    applied = fields.get("tier", "gather") == "gather"
    return _absent(uid, None, **{"estimate": estimate, "applied": applied, **usual, **fields})


def _absent(uid: int, reason: Reason | None, *, key: int | None = None, **fields: Any) -> MinerFacts:
    usual = {
        "hotkey": hotkey(key or uid).address,
        "registered_at": 10 * (key or uid),
        "bucket": _bucket(key or uid),
        "tier": "gather",
        "assigned": True,
        "payload_sha256": None,
        "applied": False,
        "windows_behind": None,
        "estimate": None,
        "measurement": None,
        "norm_ratio": None,
        "overlap": None,
        "repeat": None,
    }
    return MinerFacts.model_validate({"uid": uid, "reason": reason, **usual, **fields})


def _bucket(key: int) -> str:
    return account_digest(f"bucket-{key}")


def _like(uid: int, share: float) -> Likeness:
    return Likeness(uid=uid, share=share)
