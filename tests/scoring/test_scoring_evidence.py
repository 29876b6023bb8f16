import math
from typing import Any

import pytest
from pydantic import ValidationError

from templar.chain.keys import hotkey_from_seed
from templar.errors import Reason
from templar.exchange.sealing import seal, unseal
from templar.scoring.evidence import Evidence, Measurement, MinerRecord, SlashRecord, WeightRecord

VALIDATOR = hotkey_from_seed(bytes(31) + b"\x01")
MINER = hotkey_from_seed(bytes(31) + b"\x02")
LOSSES = Measurement(own_before=5.0, own_after=None, random_before=4.1, random_after=4.0)


def record(uid: int, **changes: Any) -> MinerRecord:
    values: dict[str, Any] = {
        "uid": uid,
        "hotkey": MINER.address,
        "tier": "gather",
        "payload_sha256": "a" * 64,
        "reason": None,
        "measurement": LOSSES,
        "gradient_score": 1 / 3,
        "indicator": -1,
        "windows_behind": 0,
        "mu_before": 25.0,
        "sigma_before": 25 / 3,
        "mu": 24.9,
        "sigma": 8.1,
        "binary_average": -0.05,
        "sync": 1.0,
        "final": -0.0,
        "slashes": (SlashRecord(reason=Reason.DESYNC, factor=0.75),),
    }
    return MinerRecord(**(values | changes))


def evidence(**changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "netuid": 3,
        "genesis": "b" * 64,
        "uid": 1,
        "hotkey": VALIDATOR.address,
        "window": 12,
        "roster": None,
        "root_before": "c" * 64,
        "seed_block": 400,
        "loss": 4.5,
        "miners": (record(2), record(3, payload_sha256=None, reason=Reason.MANIFEST_MISSING, measurement=None)),
        "weights": (WeightRecord(uid=2, weight=1.0),),
    }
    return Evidence(**(values | changes))


def test_evidence_is_signed_and_read_back_exactly() -> None:
    body = evidence()
    assert unseal(seal(body, VALIDATOR).encode(), Evidence).body == body
    assert Evidence.model_validate_json(body.canonical()) == body


def test_a_full_subnet_fits() -> None:
    crowd = tuple(record(uid, slashes=record(0).slashes * 16) for uid in range(256))
    body = evidence(miners=crowd, weights=tuple(WeightRecord(uid=uid, weight=1 / 3) for uid in range(256)))
    data = seal(body, VALIDATOR).encode()
    assert len(data) <= Evidence.max_bytes
    assert unseal(data, Evidence).body == body


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(number: float) -> None:
    for bad in ({"loss": number}, {"weights": ({"uid": 1, "weight": number},)}):
        with pytest.raises(ValidationError, match="finite"):
            evidence(**bad)
    with pytest.raises(ValidationError, match="finite"):
        record(2, final=number)


@pytest.mark.parametrize(
    "change",
    [
        {"tier": "friends"},
        {"indicator": 2},
        {"payload_sha256": "A" * 64},
        {"reason": "because"},
        {"hotkey": "me"},
        {"x": 1},
    ],
)
def test_what_is_not_in_the_schema_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        record(2, **change)
