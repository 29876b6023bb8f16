import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from templar.data.packing import pack

EOS = 2


def arrays(*lists: list[int]) -> list[NDArray[np.int32]]:
    return [np.array(tokens, dtype=np.int32) for tokens in lists]


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


def test_documents_without_tokens_are_left_out() -> None:
    assert pack(arrays([], [EOS, EOS], [7]), 2, EOS).tolist() == [[7, EOS]]


@pytest.mark.parametrize("documents", [arrays(), arrays([]), arrays([1, 3])])
def test_too_little_for_a_sequence(documents: list[NDArray[np.int32]]) -> None:
    packed = pack(documents, 4, EOS)
    assert packed.shape == (0, 4)
    assert packed.dtype == np.int32


def test_a_sequence_has_a_length() -> None:
    with pytest.raises(ValueError, match="sequence_length"):
        pack(arrays([1]), 0, EOS)


@settings(max_examples=100)
@given(
    documents=st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=12),
    sequence_length=st.integers(1, 9),
)
def test_packing_equals_the_definition(documents: list[list[int]], sequence_length: int) -> None:
    stream: list[int] = []
    for document in documents:
        tokens = list(document)
        while tokens and tokens[-1] == EOS:
            tokens.pop()
        stream += [*tokens, EOS] if tokens else []
    whole = len(stream) // sequence_length
    expected = [stream[i * sequence_length : (i + 1) * sequence_length] for i in range(whole)]
    assert pack(arrays(*documents), sequence_length, EOS).tolist() == expected
