"""The commitment of a hotkey on chain: where its bucket is and the key that reads it, in exactly 128 ASCII characters.

    account id 32 | read key id 32 | read secret 64

The bucket has the account's name. Values of Cloudflare R2 fill their fields; shorter values of a local endpoint are
padded on the right with a character that no value contains, so an address has exactly one encoding and every text
decodes to at most one address.
"""

import re
from dataclasses import dataclass, field

from templar.errors import PermanentError, Reason

ACCOUNT_CHARACTERS = 32
KEY_ID_CHARACTERS = 32
SECRET_CHARACTERS = 64
ADDRESS_CHARACTERS = ACCOUNT_CHARACTERS + KEY_ID_CHARACTERS + SECRET_CHARACTERS
PAD = "~"  # outside the alphabets of account ids, of bucket names and of keys (base64 in both its forms)
# A bucket's name and, in production, a label of a host name: no character with a meaning in a URL is allowed.
_ACCOUNT = re.compile(r"[a-z0-9][a-z0-9-]{1,30}[a-z0-9]")
_PRINTABLE = re.compile(r"[!-}]+")


def is_account_id(text: str) -> bool:
    """Whether `text` may stand for an account: 3 to 32 lower-case letters, digits and inner hyphens."""
    return _ACCOUNT.fullmatch(text) is not None


@dataclass(frozen=True)
class BucketAddress:
    """Read access to one bucket.

    PermanentError: `commitment_malformed`; a value is empty, too long or has an illegal character.
    """

    account_id: str  # of the store's provider, and name of the bucket
    access_key_id: str  # of a key that may only read
    secret_access_key: str = field(repr=False)  # public by its purpose, and still kept out of logs

    def __post_init__(self) -> None:
        if not is_account_id(self.account_id):
            raise _malformed("account_id", "3 to 32 lower-case letters, digits and inner hyphens")
        _check_value("access_key_id", self.access_key_id, KEY_ID_CHARACTERS)
        _check_value("secret_access_key", self.secret_access_key, SECRET_CHARACTERS)


def encode_address(address: BucketAddress) -> str:
    """The address as `ADDRESS_CHARACTERS` ASCII characters."""
    return (
        address.account_id.ljust(ACCOUNT_CHARACTERS, PAD)
        + address.access_key_id.ljust(KEY_ID_CHARACTERS, PAD)
        + address.secret_access_key.ljust(SECRET_CHARACTERS, PAD)
    )


def decode_address(text: str) -> BucketAddress:
    """Read back what `encode_address` wrote; `encode_address(decode_address(text)) == text` for all it accepts.

    PermanentError: `commitment_malformed`; any other text.
    """
    if len(text) != ADDRESS_CHARACTERS:
        raise PermanentError(
            Reason.COMMITMENT_MALFORMED, f"commitment has {len(text)} characters, not {ADDRESS_CHARACTERS}"
        )
    key_start = ACCOUNT_CHARACTERS
    secret_start = ACCOUNT_CHARACTERS + KEY_ID_CHARACTERS
    return BucketAddress(
        account_id=text[:key_start].rstrip(PAD),
        access_key_id=text[key_start:secret_start].rstrip(PAD),
        secret_access_key=text[secret_start:].rstrip(PAD),
    )


def _check_value(name: str, value: str, most: int) -> None:
    if len(value) > most or _PRINTABLE.fullmatch(value) is None:
        raise _malformed(name, f"1 to {most} printable ASCII characters without spaces and {PAD!r}")


def _malformed(name: str, rule: str) -> PermanentError:
    # The value stays out of the message: it may be a secret in the wrong field.
    return PermanentError(Reason.COMMITMENT_MALFORMED, f"{name} of a bucket address must be {rule}")
