import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from templar import PROTOCOL_VERSION
from templar.exchange.object_keys import Kind, ObjectKey, parse_current_key, parse_key
from templar.store.base import is_key
from tests.support.subnet import LEASES, PER_WINDOW, SINGLE

ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

numbers = st.one_of(st.integers(0, 12), st.integers(0, 10**12 - 1))
versions = st.text(ALPHANUMERIC + ".+", min_size=1, max_size=32)
files = st.builds(str.__add__, st.sampled_from(ALPHANUMERIC), st.text(ALPHANUMERIC + "._-", min_size=0, max_size=127))
keys = st.one_of(
    st.builds(ObjectKey, st.sampled_from(PER_WINDOW), numbers, numbers, versions),
    st.builds(ObjectKey, st.just(Kind.CHECKPOINT), numbers, numbers, versions, files),
    st.builds(
        lambda kind, window, version: ObjectKey(kind, window, None, version),
        st.sampled_from([Kind.AGGREGATE, Kind.PEERS]),
        numbers,
        versions,
    ),
    st.builds(lambda kind, version: ObjectKey(kind, version=version), st.sampled_from(SINGLE), versions),
    st.builds(
        lambda kind, version, role, holder: ObjectKey(kind, version=version, role=role, holder=holder),
        st.sampled_from(LEASES),
        versions,
        st.text("abcxyz", min_size=1, max_size=16),
        st.text("0123456789abcdef", min_size=32, max_size=32),
    ),
)


@given(keys)
@settings(max_examples=100)
@example(ObjectKey(Kind.PROOF, 1, 11))
@example(ObjectKey(Kind.PEERS, 7, version=f"{PROTOCOL_VERSION}1"))
@example(ObjectKey(Kind.PEERS, 7, version=f"{PROTOCOL_VERSION}.json"))
@example(ObjectKey(Kind.COMMIT, 1, 2, "1.json"))
@example(ObjectKey(Kind.GRADIENT, 1, 2, "1.bin"))
@example(ObjectKey(Kind.CHECKPOINT, 1, 2, "1", "a-v1.json"))
def test_a_key_is_read_back_as_what_it_was(key):
    assert parse_key(str(key)) == key
    assert parse_current_key(str(key)) == (key if key.version == PROTOCOL_VERSION else None)
    assert is_key(str(key))


@given(keys, st.data())
@settings(max_examples=100)
def test_a_damaged_key_is_another_key_or_none(key, data):
    text = str(key)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 3)))
    piece = data.draw(st.text("0129-_v./\n abz٣", max_size=3))
    damaged = text[:start] + piece + text[end:]
    found = parse_key(damaged)
    assert found is None or str(found) == damaged
    assert found != key or damaged == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gradient-1-2-v1.json",
        "x/gradient-1-2-v1.bin",
        "gradient-01-2-v1.bin",
        "gradient-1000000000000-2-v1.bin",
        "gradient-1-2-v1/2.bin",
        "gradient-1-2-v" + "1" * 33 + ".bin",
        "checkpoint-1-2-v1/..",
        "checkpoint-1-2-v1/" + "a" * 129,
        "aggregator-1-2-v1.bin",
        "peers_1_2_v1.json",
        "lease-miner-" + "0" * 31 + "-v1.json",
        "lease-Miner-" + "0" * 32 + "-v1.json",
    ],
)
def test_nothing_else_is_a_key(text):
    assert parse_key(text) is None


def test_the_documented_stems_of_leases_are_kept():
    """docs/vectors has the others."""
    holder = "0a" * 16
    for kind in (Kind.LEASE, Kind.HEARTBEAT):
        text = f"{kind}-miner-{holder}-v{PROTOCOL_VERSION}.json"
        assert str(ObjectKey(kind, role="miner", holder=holder)) == text
