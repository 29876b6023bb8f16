import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from templar.data.sampling import pack, pack_flat

EOS = 2
DOCUMENTS = st.lists(st.lists(st.integers(0, 4) | st.just(EOS), max_size=12), max_size=12)
LENGTHS = st.integers(1, 9)


def arrays(*lists: list[int]) -> list[NDArray[np.int32]]:
    return [np.array(tokens, dtype=np.int32) for tokens in lists]


def flat(documents: list[list[int]], dtype: type[np.integer] = np.int32) -> tuple[NDArray, NDArray[np.int64]]:
    tokens = np.array([token for document in documents for token in document], dtype=dtype)
    return tokens, np.cumsum([0, *map(len, documents)], dtype=np.int64)


def definition(documents: list[list[int]], sequence_length: int) -> list[list[int]]:
    """The module's docstring, token by token."""
    stream: list[int] = []
    for document in documents:
        tokens = list(document)
        while tokens and tokens[-1] == EOS:
            tokens.pop()
        stream += [*tokens, EOS] if tokens else []
    whole = len(stream) // sequence_length
    return [stream[i * sequence_length : (i + 1) * sequence_length] for i in range(whole)]


def test_the_references_packing_vector() -> None:
    documents = arrays([5, 6, 7, EOS], [8, 9, EOS], [10, 11, 12, 13, 14, EOS], [15, 16, EOS], [17])
    expected = [[5, 6, 7, 2], [8, 9, 2, 10], [11, 12, 13, 14], [2, 15, 16, 2]]
    packed = pack(documents, 4, EOS)
    np.testing.assert_array_equal(packed, expected)
    assert packed.dtype == np.int32
    # Batches of two sequences, as in the reference: two whole ones, 17 and its end token are left over.
    assert packed.reshape(-1, 2, 4).tolist() == [expected[:2], expected[2:]]


@pytest.mark.parametrize("ends", [0, 1, 2, 3])
def test_a_document_ends_with_exactly_one_end_token(ends: int) -> None:
    assert pack(arrays([7] + [EOS] * ends, [8]), 4, EOS).tolist() == [[7, EOS, 8, EOS]]


def test_an_end_token_within_a_document_stays() -> None:
    assert pack(arrays([7, EOS, 8]), 4, EOS).tolist() == [[7, EOS, 8, EOS]]
    assert pack(arrays([EOS, EOS, 8, EOS, EOS]), 4, EOS).tolist() == [[EOS, EOS, 8, EOS]]


def test_documents_without_tokens_are_left_out() -> None:
    assert pack(arrays([], [EOS, EOS], [7]), 2, EOS).tolist() == [[7, EOS]]


@pytest.mark.parametrize("documents", [arrays(), arrays([]), arrays([1, 3]), arrays([EOS] * 9)])
def test_too_little_for_a_sequence(documents: list[NDArray[np.int32]]) -> None:
    packed = pack(documents, 4, EOS)
    assert packed.shape == (0, 4)
    assert packed.dtype == np.int32


def test_a_sequence_has_a_length() -> None:
    with pytest.raises(ValueError, match="sequence_length"):
        pack(arrays([1]), 0, EOS)


@settings(max_examples=300)
@given(documents=DOCUMENTS, sequence_length=LENGTHS)
@example(documents=[[EOS], [1], [EOS, EOS], [EOS, 1, EOS, EOS], []], sequence_length=1)
def test_packing_equals_the_definition(documents: list[list[int]], sequence_length: int) -> None:
    packed = pack(arrays(*documents), sequence_length, EOS)
    assert packed.tolist() == definition(documents, sequence_length)
    assert packed.flags.c_contiguous


@settings(max_examples=150)
@given(documents=DOCUMENTS, sequence_length=LENGTHS, dtype=st.sampled_from([np.uint16, np.int32, np.int64]))
def test_flat_tokens_keep_their_type_and_are_not_touched(
    documents: list[list[int]], sequence_length: int, dtype: type[np.integer]
) -> None:
    tokens, offsets = flat(documents, dtype)
    before = tokens.copy()
    packed = pack_flat(tokens, offsets, sequence_length, EOS)
    assert packed.dtype == dtype
    assert packed.tolist() == definition(documents, sequence_length)
    np.testing.assert_array_equal(tokens, before)


@settings(max_examples=150)
@given(documents=DOCUMENTS, sequence_length=LENGTHS, cut=st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_offsets_may_choose_some_of_the_tokens(
    documents: list[list[int]], sequence_length: int, cut: tuple[int, int]
) -> None:
    tokens, offsets = flat(documents)
    first, last = (min(place, len(documents)) for place in (cut[0], len(documents) - cut[1]))
    chosen = slice(first, max(first, last))
    packed = pack_flat(tokens, offsets[chosen.start : chosen.stop + 1], sequence_length, EOS)
    assert packed.tolist() == definition(documents[chosen], sequence_length)


def test_mixed_lengths_at_size() -> None:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 40, int(length)).tolist() for length in random.lognormal(4, 1, 500)]
    documents = [document + [EOS] * int(random.integers(0, 3)) for document in documents]
    tokens, offsets = flat(documents, np.uint16)
    assert pack_flat(tokens, offsets, 64, EOS).tolist() == definition(documents, 64)


@pytest.mark.parametrize("offsets", [[], [0, 4], [-1, 3], [0, 2, 1, 3]])
def test_offsets_that_are_none(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"offsets must rise within 0\.\.3"):
        pack_flat(np.zeros(3, dtype=np.int32), np.array(offsets, dtype=np.int64), 2, EOS)


@pytest.mark.parametrize("eos_id", [-1, 2**16])
def test_an_end_token_of_another_type(eos_id: int) -> None:
    with pytest.raises(ValueError, match="uint16"):
        pack_flat(np.zeros(3, dtype=np.uint16), np.array([0, 3]), 2, eos_id)
