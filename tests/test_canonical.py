import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import canonical_json, file_sha256, sha256_hex

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50)
@given(values)
def test_what_is_written_reads_back_and_is_written_the_same_again(value):
    data = canonical_json(value)
    assert json.loads(data) == value
    assert canonical_json(json.loads(data)) == data


def test_values_that_are_not_json_are_refused():
    for value in (float("nan"), -float("inf"), {1, 2}, b"bytes", Path(), {(1, 2): 3}, {1: "a", "b": 2}):
        with pytest.raises(ValueError, match="JSON"):
            canonical_json([value])


def test_hashes(tmp_path):
    assert sha256_hex(b"abc") == ABC_SHA256
    file = tmp_path / "abc"
    file.write_bytes(b"abc")
    assert file_sha256(file) == ABC_SHA256
    file.write_bytes(bytes(3_000_000))
    assert file_sha256(file) == hashlib.sha256(bytes(3_000_000)).hexdigest()
