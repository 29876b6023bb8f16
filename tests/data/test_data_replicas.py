from collections.abc import Callable

import pytest

from templar.data.replicas import Replicas
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from tests.support.memory_store import MemoryStore, Read


def stores_with(data: bytes, count: int = 3) -> list[MemoryStore]:
    stores = [MemoryStore(f"store-{number}") for number in range(count)]
    for store in stores:
        store.put("key", data)
    return stores


def unreachable(read: Read) -> TemplarError:
    return TransientError(Reason.STORE_UNREACHABLE, f"no answer for {read.key}")


def test_reads_go_round() -> None:
    stores = stores_with(b"0123456789")
    replicas = Replicas(stores)
    for _ in range(2):
        assert replicas.get("key", max_bytes=10) == b"0123456789"
        assert replicas.get_range("key", 3, 4) == b"3456"
        info = replicas.head("key")
        assert info is not None
        assert info.size == 10
    assert [[read.operation for read in store.reads] for store in stores] == [
        ["get", "get"],
        ["get_range", "get_range"],
        ["head", "head"],
    ]


@pytest.mark.parametrize("operation", [lambda r: r.get("key", max_bytes=9), lambda r: r.get_range("key", 0, 4)])
def test_a_failing_store_is_passed_over(operation: Callable[[Replicas], bytes]) -> None:
    stores = stores_with(b"data")
    stores[0].fail = stores[1].fail = unreachable
    replicas = Replicas(stores)
    assert [operation(replicas) for _ in range(4)] == [b"data"] * 4
    assert len(stores[2].reads) == 4


def test_when_all_fail_the_read_fails_for_now() -> None:
    stores = stores_with(b"data", 2)
    for store in stores:
        store.fail = unreachable
    with pytest.raises(TransientError, match="no answer for key"):
        Replicas(stores).get("key", max_bytes=9)
    assert [len(store.reads) for store in stores] == [1, 1]


def test_a_permanent_error_is_not_hidden() -> None:
    stores = stores_with(b"data", 2)
    stores[0].delete(["key"])
    with pytest.raises(PermanentError) as caught:
        Replicas(stores).get("key", max_bytes=9)
    assert caught.value.reason is Reason.OBJECT_MISSING
    assert stores[1].reads == []


def test_there_must_be_a_store() -> None:
    with pytest.raises(ValueError, match="at least one store"):
        Replicas([])
