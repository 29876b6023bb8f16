"""Encrypted containers: read back exactly by their owner, and refused with a reason in every other case."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.hotkeys import hotkey_from_seed
from templar.errors import Reason, RejectedError
from templar.exchange.encryption import HEADER_BYTES, TAG_BYTES, Binding, decrypt, encrypt
from tests.support.errors import raising

CHUNK = 16
STORED = CHUNK + TAG_BYTES
OWNER, STRANGER = (hotkey_from_seed(bytes([number]) * 32) for number in (1, 2))
BINDING = Binding(1, "a" * 64, OWNER.address, 7)
contents = st.binary(max_size=5 * CHUNK)


def sealed(content, *, binding=BINDING, pieces=7):
    target = io.BytesIO()
    blocks = (content[start : start + pieces] for start in range(0, len(content), pieces))
    encrypt(blocks, len(content), target, signer=OWNER, binding=binding, chunk_bytes=CHUNK)
    return target.getvalue()


def opened(data, *, binding=BINDING, signer=OWNER):
    return decrypt(io.BytesIO(data), len(data), signer=signer, binding=binding, chunk_bytes=CHUNK)


def assert_refused(data, content, **changes):
    """It is refused, and what was given out before that is a beginning of the content."""
    got = b""
    with raising(RejectedError, Reason.BACKUP_BROKEN):
        for chunk in opened(data, **changes):
            got += chunk
    assert content.startswith(got)
    assert len(got) < max(1, len(content))


@given(contents, st.integers(1, 3 * CHUNK))
def test_the_owner_reads_back_what_was_written_in_blocks_of_any_length(content, pieces):
    data = sealed(content, pieces=pieces)
    assert b"".join(opened(data)) == content
    assert len(data) == HEADER_BYTES + len(content) + TAG_BYTES * max(1, -(-len(content) // CHUNK))


def test_the_same_content_never_looks_the_same_and_shows_nothing_of_itself():
    content = b"a secret of many bytes" * 9
    first, second = sealed(content), sealed(content)
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]
    assert b"secret" not in first


@given(contents, st.data())
def test_any_changed_byte_is_refused(content, data):
    container = bytearray(sealed(content))
    place = data.draw(st.integers(0, len(container) - 1))
    container[place] ^= data.draw(st.integers(1, 255))
    assert_refused(bytes(container), content)


@given(contents, st.data())
def test_any_other_length_is_refused(content, data):
    container = sealed(content)
    length = data.draw(st.integers(0, len(container) - 1))
    assert_refused(container[:length], content)
    assert_refused(container + data.draw(st.binary(min_size=1, max_size=2 * STORED)), content)


@given(st.integers(2, 5), st.data())
def test_chunks_that_were_exchanged_dropped_or_repeated_are_refused(total, data):
    content = bytes(range(total)) * CHUNK
    container = sealed(content)
    chunks = [container[start : start + STORED] for start in range(HEADER_BYTES, len(container), STORED)]
    order = data.draw(
        st.lists(st.integers(0, total - 1), max_size=total + 2).filter(lambda found: found != list(range(total)))
    )
    assert_refused(container[:HEADER_BYTES] + b"".join(chunks[number] for number in order), content)


def test_chunks_of_another_container_of_the_same_window_are_refused():
    content = bytes(3 * CHUNK)
    assert_refused(sealed(content)[: HEADER_BYTES + STORED] + sealed(content)[HEADER_BYTES + STORED :], content)


def test_another_key_network_hotkey_or_window_is_refused():
    assert_refused(sealed(b"content"), b"content", signer=STRANGER)
    for other in ({"netuid": 2}, {"genesis": "b" * 64}, {"hotkey": STRANGER.address}, {"window": 8}):
        binding = replace(BINDING, **other)
        assert_refused(sealed(b"content"), b"content", binding=binding)
        assert_refused(sealed(b"content", binding=binding), b"content")


@pytest.mark.parametrize("length", [0, 6, 8])
def test_another_length_than_announced_is_a_fault_of_the_caller(length):
    with pytest.raises(ValueError, match="7 bytes"):
        encrypt([b"content"], length, io.BytesIO(), signer=OWNER, binding=BINDING)
