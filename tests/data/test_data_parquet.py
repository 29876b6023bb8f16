"""Values that are cached within a bound, and columns of text in each of Arrow's types for it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.pages.parquet import BoundedCache, TextColumnError, require_texts, texts_of

Make = Callable[[list[str | None]], Any]


KINDS: dict[str, Make] = {
    "string": lambda texts: pa.array(texts, pa.string()),
    "large_string": lambda texts: pa.array(texts, pa.large_string()),
    "string_view": lambda texts: pa.array(texts, pa.string_view()),
    "dictionary": lambda texts: pa.array(texts, pa.string()).dictionary_encode(),
    "dictionary of large strings": lambda texts: pa.array(texts, pa.large_string()).dictionary_encode(),
    "null in the dictionary": lambda texts: pa.DictionaryArray.from_arrays(
        pa.array(range(len(texts)), pa.int32()), pa.array(texts, pa.string())
    ),
    "runs": lambda texts: pa.RunEndEncodedArray.from_arrays(range(1, len(texts) + 1), pa.array(texts, pa.string())),
    "extension": lambda texts: pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(texts, pa.string())),
}


def test_a_value_beyond_the_bound_and_an_error_are_handed_out_and_not_kept():
    cache: BoundedCache[str, str] = BoundedCache(3, len)
    assert cache.get("small", lambda: "abc") == "abc"
    assert cache.get("large", lambda: "abcd") == "abcd"
    assert cache.get("small", lambda: "other") == "abc"
    assert cache.get("large", lambda: "other") == "other"
    with pytest.raises(ZeroDivisionError):
        cache.get("failed", lambda: str(1 / 0))
    assert cache.get("failed", lambda: "abc") == "abc"


class Asked(dict[str, Any]):
    """The loads that are under way, which count the threads that look for theirs."""

    def __init__(self):
        super().__init__()
        self.threads = threading.Semaphore(0)

    def get(self, key, default=None):
        self.threads.release()
        return super().get(key, default)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_ask_at_once_share_one_load(fails):
    """The load ends only when every other thread has looked for it; other keys are served meanwhile."""
    cache: BoundedCache[str, int] = BoundedCache(2, lambda value: 1)
    cache._loading = asked = Asked()
    loads: list[int] = []

    def load():
        loads.append(1)
        assert cache.get("b", lambda: 1) == 1
        assert all(asked.threads.acquire(timeout=30) for _ in range(5))
        if fails:
            raise OSError("shared")
        return 7

    def ask():
        try:
            return cache.get("a", load)
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        answers = {future.result(30) for future in [pool.submit(ask) for _ in range(4)]}
    assert (answers, loads) == ({"shared" if fails else 7}, [1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(texts=st.lists(st.none() | st.text(), min_size=1))
def test_every_type_of_text_gives_the_same(kind, texts):
    column = KINDS[kind](texts)
    for rows in (pa.record_batch([column], ["text"]), pa.table({"text": pa.chunked_array([column, column])})):
        require_texts(rows.schema, "text")
        if None in texts:
            with pytest.raises(TextColumnError, match=rf"row {7 + texts.index(None)} of column 'text' is null"):
                texts_of(rows, "text", 7)
        else:
            assert texts_of(rows, "text").to_pylist() == texts * (len(rows) // len(texts))


@pytest.mark.parametrize("large", [False, True])
def test_a_row_that_is_not_utf8_is_named(large):
    for wrong in (b"caf\xe9", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"):
        raw = pa.array([b"good", wrong], pa.large_binary() if large else pa.binary())
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
def test_another_column_is_refused(names, columns, words):
    with pytest.raises(TextColumnError, match=words):
        texts_of(pa.Table.from_arrays([pa.array(column) for column in columns], names), "text")
