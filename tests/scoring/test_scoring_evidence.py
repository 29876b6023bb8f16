"""Evidence as an object: signed, strict, canonical, and small enough for a full subnet."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from templar.canonical import sha256_hex
from templar.errors import Reason, RejectedError
from templar.exchange.signed import seal, unseal
from templar.hparams import load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import (
    MAX_DEPARTED,
    Ban,
    Departed,
    Evidence,
    MinerFacts,
    MinerRecord,
    SlashRecord,
    WeightRecord,
)
from templar.scoring.standing import Event, Standing
from tests.support.facts import (
    AUTHOR,
    SIGNER,
    WINDOW,
    absent,
    bucket,
    hotkey,
    like,
    measurement,
    revealed,
    standing_of,
    veteran,
    window_of,
)

HPARAMS = load_hparams("templar-2.1.3")


def concluded(*miners: MinerFacts, after: Standing | None = None, **changes: Any) -> Evidence:
    return conclude(window_of(*miners, **changes), standing_of() if after is None else after, HPARAMS, AUTHOR)


FULL = concluded(
    revealed(2, 1 / 3, measurement=measurement(None, 0.1, own=None), repeat=like(3, 0.45)),
    revealed(3, None, estimate=None, windows_behind=None),
    absent(4, Reason.MANIFEST_MISSING, tier="other"),
    absent(5, None, assigned=False, tier="reserve"),
    revealed(6, -1e-9, overlap=like(2, 1.0)),
    after=standing_of([veteran(2), veteran(9, final=-1 / 3)], bans={bucket(4): WINDOW + 5}),
)
"""Something of everything: losses that are not finite, penalties, a ban, somebody who left."""


def without(evidence: Evidence, **changes: Any) -> Evidence:
    return Evidence.model_validate({**evidence.model_dump(), **changes})


def test_evidence_is_an_object_of_its_validator() -> None:
    data = seal(FULL, SIGNER).encode()
    assert unseal(data, Evidence).body == FULL
    assert FULL.digest == sha256_hex(FULL.canonical()) == Evidence.model_validate_json(FULL.canonical()).digest


def test_numbers_survive_their_decimals() -> None:
    again = Evidence.model_validate_json(FULL.canonical())
    assert again == FULL
    assert again.standing == FULL.standing
    assert again.facts == FULL.facts
    assert (again.miners[0].facts.measurement, again.miners[0].slashes) == (
        FULL.miners[0].facts.measurement,
        FULL.miners[0].slashes,
    )


def test_a_changed_byte_breaks_the_signature() -> None:
    data = seal(FULL, SIGNER).encode()
    forged = data.replace(b'"seed_block":4000', b'"seed_block":4001')
    assert forged != data
    with pytest.raises(RejectedError) as caught:
        unseal(forged, Evidence)
    assert caught.value.reason is Reason.BAD_SIGNATURE


def test_every_number_changes_the_digest() -> None:
    dump = FULL.model_dump(mode="json")
    changed = [
        {"loss": 4.000001},
        {"previous": None},
        {"previous_window": None},
        {"roster": None},
        {"outer_steps": 1001},
        {"weights": dump["weights"][1:]},
        {"bans": dump["bans"][1:]},
        {"departed": []},
        {"miners": dump["miners"][1:]},
    ]
    digests = {Evidence.model_validate_json(FULL.model_copy().canonical()).digest}
    digests |= {without(FULL, **change).digest for change in changed}
    assert len(digests) == len(changed) + 1


def test_a_full_subnet_fits() -> None:
    """256 miners of whom everything is known and all were punished for all, and as many that left as are remembered."""
    busy = FULL.miners[0]
    worst = [SlashRecord(event=event, reason=Reason.REPEATED_PAYLOAD) for event in Event]
    card = veteran(2, mu=-123.0123456789, sigma=8.0123456789, binary_average=-0.0123456789, sync=0.0123456789,
                   final=-123.0123456789, last_exact=WINDOW, curvature=-0.0123456789,
                   promise=-0.0123456789)  # fmt: skip
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


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(number: float) -> None:
    for bad in ({"loss": number}, {"weights": ({"uid": 1, "weight": number},)}):
        with pytest.raises(ValidationError, match="finite"):
            without(FULL, **bad)
    record = FULL.miners[0]
    for bad in ({"gradient_score": number}, {"after": {**record.after.model_dump(), "final": number}}):
        with pytest.raises(ValidationError, match="finite"):
            MinerRecord.model_validate({**record.model_dump(), **bad})
    for bad in ({"norm_ratio": number}, {"overlap": {"uid": 1, "share": number}}):
        with pytest.raises(ValidationError, match="finite"):
            MinerFacts.model_validate({**record.facts.model_dump(), **bad})


@pytest.mark.parametrize(
    "change",
    [{"tier": "friends"}, {"payload_sha256": "A" * 64}, {"reason": "because"}, {"hotkey": "me"}, {"bucket": "mine"},
     {"windows_behind": -1}, {"assigned": 1}, {"uid": -1}, {"x": 1}],
)  # fmt: skip
def test_facts_that_are_not_in_the_schema_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MinerFacts.model_validate({**revealed(2).model_dump(), **change})


@pytest.mark.parametrize(
    "change", [{"indicator": 2}, {"slashes": ({"event": "bad luck", "reason": "desync"},)}, {"before": None}, {"x": 1}]
)
def test_records_that_are_not_in_the_schema_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MinerRecord.model_validate({**FULL.miners[0].model_dump(), **change})


@pytest.mark.parametrize("subject", ["me", "a" * 63, "A" * 64, hotkey(2) + "0", ""])
def test_a_ban_is_of_a_hotkey_or_of_a_bucket(subject: str) -> None:
    for legal in (hotkey(2), bucket(2)):
        assert Ban(subject=legal, last_window=3).subject == legal
    with pytest.raises(ValidationError):
        Ban(subject=subject, last_window=3)
