import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import canonical_json, file_sha256, keyed_seed, sha256_hex

ABC_SHA256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_canonical_json_is_sorted_dense_and_ascii():
    value = {"b": [1, 2.5, None, True], "a": {"ü": "\n"}, "": -0.0, "c": 1.0}
    assert canonical_json(value) == b'{"":-0.0,"a":{"\\u00fc":"\\n"},"b":[1,2.5,null,true],"c":1.0}'


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


def test_a_seed_is_the_first_half_of_the_hash_of_domain_and_parts():
    data = b"domain" + (2).to_bytes(8, "little") + b"ab" + (1).to_bytes(8, "little") + b"7"
    assert keyed_seed("domain", "ab", 7) == int.from_bytes(hashlib.sha256(data).digest()[:16], "little")


parts = st.lists(st.text(max_size=4), max_size=4)


@settings(max_examples=50)
@given(parts, parts)
def test_seeds_of_different_lists_differ(left, right):
    assert 0 <= keyed_seed("d", *left) < 2**128
    assert (keyed_seed("d", *left) == keyed_seed("d", *right)) == (left == right)
    assert keyed_seed("d", *left) != keyed_seed("e", *left)
