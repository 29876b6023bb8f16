import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from templar.data.pages.parquet import BoundedCache


def test_a_value_beyond_the_bound_and_an_error_are_handed_out_and_not_kept() -> None:
    cache: BoundedCache[str, str] = BoundedCache(3, len)
    assert cache.get("small", lambda: "abc") == "abc"
    assert cache.get("large", lambda: "abcd") == "abcd"
    assert cache.get("small", lambda: "other") == "abc"
    assert cache.get("large", lambda: "other") == "other"
    with pytest.raises(ZeroDivisionError):
        cache.get("failed", lambda: str(1 / 0))
    assert cache.get("failed", lambda: "abc") == "abc"


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_ask_at_once_share_one_load(fails: bool) -> None:
    """The load ends only when every other thread has looked the key up, which calls its hash."""
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
