"""Evidence as an object: signed, canonical, and small enough for a full subnet."""

from templar.canonical import sha256_hex
from templar.errors import Reason
from templar.exchange.signed import seal, unseal
from templar.hparams import load_hparams
from templar.scoring.evidence import MAX_DEPARTED, Ban, Departed, Evidence, SlashRecord, WeightRecord
from templar.scoring.standing import Event
from tests.support.facts import (
    SIGNER,
    WINDOW,
    absent,
    bucket,
    concluded,
    hotkey,
    like,
    measurement,
    revealed,
    standing_of,
    veteran,
)

FULL = concluded(
    revealed(2, 1 / 3, measurement=measurement(None, 0.1, own=None), repeat=like(3, 0.45)),
    revealed(3, None, estimate=None, windows_behind=None),
    absent(4, Reason.MANIFEST_MISSING, tier="other"),
    absent(5, None, assigned=False, tier="reserve"),
    revealed(6, -1e-9, overlap=like(2, 1.0)),
    hparams=load_hparams("templar-2.1.3"),
    standing=standing_of([veteran(2), veteran(9, final=-1 / 3)], bans={bucket(4): WINDOW + 5}),
)
"""Infinite losses, penalties, a ban, and a departed miner."""


def test_evidence_is_a_signed_object_whose_numbers_survive_their_decimal_form():
    again = unseal(seal(FULL, SIGNER).encode(), Evidence).body
    assert again == FULL
    assert again.digest == FULL.digest == sha256_hex(FULL.canonical())
    assert (again.standing, again.facts) == (FULL.standing, FULL.facts)


def test_a_full_subnet_fits():
    """256 miners with all facts and all penalties, and as many departed ones as are kept."""
    busy = FULL.miners[0]
    worst = [SlashRecord(event=event, reason=Reason.REPEATED_PAYLOAD) for event in Event]
    card = veteran(2, mu=-123.0123456789, sigma=8.0123456789, binary_average=-0.0123456789, sync=0.0123456789,
                   final=-123.0123456789, last_exact=WINDOW, curvature=-0.0123456789,
                   predicted_gain=-0.0123456789, advantage=-0.0123456789, own_excess=-0.0123456789)  # fmt: skip
    crowd = [
        busy.model_copy(
            update={
                "facts": busy.facts.model_copy(
                    update={"uid": uid, "hotkey": hotkey(uid), "overlap": like(255, 0.0123456789)}
                ),
                "before": card,
                "after": card,
                "slashes": tuple(worst),
            }
        )
        for uid in range(256)
    ]
    body = FULL.model_copy(
        update={
            "miners": tuple(crowd),
            "departed": tuple(Departed(hotkey=hotkey(uid), card=card) for uid in range(1000, 1000 + MAX_DEPARTED)),
            "bans": tuple(Ban(subject=bucket(number), last_window=2**40) for number in range(2048)),
            "weights": tuple(WeightRecord(uid=uid, weight=0.0123456789) for uid in range(256)),
        }
    )
    data = seal(body, SIGNER).encode()
    assert len(data) <= Evidence.max_bytes
    assert unseal(data, Evidence).body == body
