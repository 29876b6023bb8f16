import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.data.pages.parquet import BoundedCache


def test_a_value_is_loaded_once() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    assert cache.get("a", lambda: 1) == 1
    assert cache.get("a", lambda: 2) == 1


def test_what_was_used_last_stays() -> None:
    cache: BoundedCache[str, str] = BoundedCache(2)
    for key in ("a", "b", "a", "c"):
        cache.get(key, lambda key=key: key)
    assert cache.get("a", lambda: "again") == "a"
    assert cache.get("b", lambda: "again") == "again"


@settings(max_examples=50)
@given(values=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=40))
def test_the_weight_stays_within_the_bound(values: list[tuple[int, int]]) -> None:
    cache: BoundedCache[int, str] = BoundedCache(10, len)
    for key, length in values:
        value = cache.get(key, lambda length=length: "x" * length)
        assert set(value) <= {"x"}
        assert 0 <= cache.weight <= 10


def test_a_value_beyond_the_bound_is_handed_out_and_not_kept() -> None:
    cache: BoundedCache[str, str] = BoundedCache(3, len)
    assert cache.get("small", lambda: "abc") == "abc"
    assert cache.get("large", lambda: "abcd") == "abcd"
    assert cache.weight == 3
    assert cache.get("large", lambda: "other") == "other"


def test_an_error_is_not_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)

    def fail() -> int:
        raise OSError("once")

    with pytest.raises(OSError, match="once"):
        cache.get("a", fail)
    assert cache.get("a", lambda: 5) == 5


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_ask_at_once_share_one_load(fails: bool) -> None:
    """The load ends only when every other thread has looked the key up, which is seen by its hash being taken."""
    cache: BoundedCache[str, int] = BoundedCache(2)
    loads: list[int] = []
    askers: set[int] = set()
    started, all_asked = threading.Event(), threading.Event()

    class Announcing(str):
        __slots__ = ()

        def __hash__(self) -> int:
            askers.add(threading.get_ident())
            if len(askers) == 3:
                all_asked.set()
            return super().__hash__()

    def load() -> int:
        loads.append(1)
        started.set()
        assert all_asked.wait(30)
        if fails:
            raise OSError("shared")
        return 7

    def ask(key: str) -> int | str:
        try:
            return cache.get(key, load)
        except OSError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask, "a")
        assert started.wait(30)
        # While "a" loads, other keys are served: the lock is not held.
        assert cache.get("b", lambda: 1) == 1
        others = [pool.submit(ask, Announcing("a")) for _ in range(3)]
        answers = {future.result(30) for future in (first, *others)}
    assert answers == ({"shared"} if fails else {7})
    assert len(loads) == 1
