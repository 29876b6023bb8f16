"""The commitment of a hotkey: 128 ASCII characters in one raw field of the chain's commitments pallet."""

from typing import Any

from templar.chain.base import COMMITMENT_CHARACTERS
from templar.errors import PermanentError, Reason

_FIELD = f"Raw{COMMITMENT_CHARACTERS}"


def check_commitment(data: str) -> None:
    """Refuse what does not fit the commitment field of a hotkey.

    Raises:
        PermanentError: `chain_refused`; the data is not exactly `COMMITMENT_CHARACTERS` ASCII characters.
    """
    if len(data) != COMMITMENT_CHARACTERS or not data.isascii():
        raise PermanentError(
            Reason.CHAIN_REFUSED,
            f"a commitment must be {COMMITMENT_CHARACTERS} ASCII characters, "
            f"not {len(data)}{'' if data.isascii() else ' with others among them'}: pad or shorten what is committed",
        )


def commitment_info(data: str) -> dict[str, Any]:
    """The pallet's `CommitmentInfo` for a checked commitment."""
    return {"fields": [[{_FIELD: "0x" + data.encode("ascii").hex()}]]}


def commitment_text(record: Any) -> str | None:
    """The text of a `CommitmentOf` record of exactly one raw field of our length; None for any other form."""
    match record:
        case {"info": {"fields": [{**field}]}}:
            value = field.get(_FIELD)
        case _:
            return None
    if not isinstance(value, str):
        return None
    try:
        return bytes.fromhex(value.removeprefix("0x")).decode("ascii")
    except ValueError:
        return None
