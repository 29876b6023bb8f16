"""A column of texts is read from each of Arrow's types for it, and what is no text is named."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.text_column import TextColumnError, require_texts, texts_of

Make = Callable[[list[str | None]], Any]


def run_ends(texts: list[str | None]) -> Any:
    return pa.RunEndEncodedArray.from_arrays(range(1, len(texts) + 1), pa.array(texts, pa.string()))


KINDS: dict[str, Make] = {
    "string": lambda texts: pa.array(texts, pa.string()),
    "large_string": lambda texts: pa.array(texts, pa.large_string()),
    "string_view": lambda texts: pa.array(texts, pa.string_view()),
    "dictionary": lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
    "dictionary of large strings": lambda texts: pa.array(texts, pa.large_string()).dictionary_encode(),
    "null in the dictionary": lambda texts: pa.DictionaryArray.from_arrays(
        pa.array(range(len(texts)), pa.int32()), pa.array(texts, pa.string())
    ),
    "runs": run_ends,
    "extension": lambda texts: pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(texts, pa.string())),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(texts=st.lists(st.none() | st.text(), min_size=1))
def test_every_type_of_text_gives_the_same(kind: str, texts: list[str | None]) -> None:
    column = KINDS[kind](texts)
    for rows in (pa.record_batch([column], ["text"]), pa.table({"text": pa.chunked_array([column, column])})):
        require_texts(rows.schema, "text")
        if None in texts:
            with pytest.raises(TextColumnError, match=rf"row {7 + texts.index(None)} of column 'text' is null"):
                texts_of(rows, "text", 7)
        else:
            assert texts_of(rows, "text").to_pylist() == texts * (len(rows) // len(texts))


@pytest.mark.parametrize("large", [False, True])
def test_a_row_that_is_not_utf8_is_named(large: bool) -> None:
    raw = pa.array([b"good", b"caf\xe9"], pa.large_binary() if large else pa.binary())
    texts = raw.view(pa.large_string() if large else pa.string())
    for column in (texts, texts.dictionary_encode()):
        with pytest.raises(TextColumnError, match="row 3 of column 'text' is not UTF-8"):
            texts_of(pa.record_batch([column], ["text"]), "text", 2)


@pytest.mark.parametrize(
    ("names", "columns", "words"),
    [
        (["body"], [["a"]], "no column 'text'; there are body"),
        (["text", "text"], [["a"], ["b"]], "2 columns have the name 'text': rename"),
        (["text"], [[1]], "holds int64, not strings"),
        (["text"], [[b"a"]], "holds binary, not strings"),
        (["text"], [pa.array([1]).dictionary_encode()], "not strings"),
    ],
)
def test_another_column_is_refused(names: list[str], columns: list[Any], words: str) -> None:
    with pytest.raises(TextColumnError, match=words):
        texts_of(pa.Table.from_arrays([pa.array(column) for column in columns], names), "text")
