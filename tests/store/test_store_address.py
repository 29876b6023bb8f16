import string
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.chain.base import COMMITMENT_CHARACTERS
from templar.errors import PermanentError, Reason
from templar.store.address import ADDRESS_CHARACTERS, PAD, BucketAddress, decode_address, encode_address
from tests.support.errors import raising

LABEL = string.ascii_lowercase + string.digits
PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != PAD)

accounts = st.builds(
    lambda first, middle, last: first + middle + last,
    st.sampled_from(LABEL),
    st.text(alphabet=LABEL + "-", min_size=1, max_size=30),
    st.sampled_from(LABEL),
)
addresses = st.builds(
    BucketAddress,
    account_id=accounts,
    access_key_id=st.text(alphabet=PRINTABLE, min_size=1, max_size=32),
    secret_access_key=st.text(alphabet=PRINTABLE, min_size=1, max_size=64),
)


def test_a_known_address():
    address = BucketAddress("local-miner-1", "AKIAEXAMPLE", "s3cret/+=")
    text = "local-miner-1" + "~" * 19 + "AKIAEXAMPLE" + "~" * 21 + "s3cret/+=" + "~" * 55
    assert encode_address(address) == text
    assert len(text) == ADDRESS_CHARACTERS == COMMITMENT_CHARACTERS
    assert decode_address(text) == address
    assert "s3cret" not in repr(address)


@settings(max_examples=60)
@given(addresses, st.integers(0, ADDRESS_CHARACTERS - 1), st.sampled_from(PRINTABLE + PAD + " \n\0é"))
def test_an_address_comes_back_and_every_text_that_is_accepted_is_canonical(address, index, character):
    text = encode_address(address)
    assert text.isascii()
    assert decode_address(text) == address
    text = text[:index] + character + text[index + 1 :]
    with suppress(PermanentError):
        assert encode_address(decode_address(text)) == text


@given(st.text(max_size=140))
def test_any_text_is_decoded_or_refused(text):
    with raising(PermanentError, Reason.COMMITMENT_MALFORMED):
        decode_address(text)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("account_id", ["", "ab", "a" * 33, "UPPER-case", "evil.example/x", "-abc", "abc\n"]),
        ("access_key_id", ["", "k" * 33, "with space", "with~pad", "é"]),
        ("secret_access_key", ["", "s" * 65, "new\nline"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_and_not_quoted(field, values):
    good = {"account_id": "account", "access_key_id": "key", "secret_access_key": "secret"}
    for value in values:
        with raising(PermanentError, Reason.COMMITMENT_MALFORMED, match=field) as caught:
            BucketAddress(**{**good, field: value})
        assert not value or value not in str(caught.value)
