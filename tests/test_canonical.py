import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import canonical_json

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
