"""What a validator measured and concluded in one window, signed and public, so that anybody can check it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from templar.errors import Reason
from templar.exchange.keys import Kind
from templar.exchange.sealing import ENVELOPE_BYTES, Count, Hex64, Hotkey, Uid, WindowBody

Finite = Annotated[float, Field(allow_inf_nan=False, strict=False)]


class Record(BaseModel):
    """A frozen part of the evidence."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Measurement(Record):
    """Mean losses of one miner's payload in nats per token, before and after it is applied alone.

    A loss that is not finite is recorded as None: it is a verdict, not an error.
    """

    own_before: Finite | None
    own_after: Finite | None
    random_before: Finite | None
    random_after: Finite | None


class SlashRecord(Record):
    """A penalty: its reason code and the factor that it left of a positive score."""

    reason: Annotated[Reason, Field(strict=False)]
    factor: Finite


class MinerRecord(Record):
    """All that a window meant for one miner.

    Attributes:
        uid: The miner.
        hotkey: Its address.
        tier: `gather`, `reserve` or `other`: why its payload was fetched.
        payload_sha256: The payload that was measured; None if none counted.
        reason: Why none counted.
        measurement: The losses; None if nothing was measured.
        gradient_score: Relative fall of the loss on others' data.
        indicator: +1 if the loss fell more on the own data, else -1.
        windows_behind: Windows that its state was behind.
        mu_before: Rating before the window.
        sigma_before: Its uncertainty.
        mu: Rating after the window.
        sigma: Its uncertainty.
        binary_average: Moving average of the indicator after the window.
        sync: Sync score.
        final: Final score after the window and its penalties.
        slashes: Penalties of the window.
    """

    uid: Uid
    hotkey: Hotkey
    tier: Annotated[str, Field(pattern="^(gather|reserve|other)$")]
    payload_sha256: Hex64 | None
    reason: Annotated[Reason, Field(strict=False)] | None
    measurement: Measurement | None
    gradient_score: Finite | None
    indicator: Annotated[int, Field(ge=-1, le=1)] | None
    windows_behind: Count | None
    mu_before: Finite
    sigma_before: Finite
    mu: Finite
    sigma: Finite
    binary_average: Finite
    sync: Finite
    final: Finite
    slashes: Annotated[tuple[SlashRecord, ...], Field(strict=False, max_length=16)]


class WeightRecord(Record):
    """One weight that the validator would set now."""

    uid: Uid
    weight: Finite


class Evidence(WindowBody):
    """The evidence of one validator for one window.

    Attributes:
        roster: Digest of the decided roster; None for a null window.
        root_before: State root that everything was measured on.
        seed_block: The block that settled the window; its hash seeds the evaluation plan.
        loss: Mean loss on the evaluation batch before the window's step; None if nothing was measured.
        miners: One record per registered miner, in uid order.
        weights: What the scores amount to, in uid order.
    """

    kind = Kind.EVIDENCE
    max_bytes = ENVELOPE_BYTES + 2 * 1024 * 1024

    roster: Hex64 | None
    root_before: Hex64
    seed_block: Count
    loss: Finite | None
    miners: Annotated[tuple[MinerRecord, ...], Field(strict=False, max_length=4096)]
    weights: Annotated[tuple[WeightRecord, ...], Field(strict=False, max_length=4096)]
