import pytest

from templar import resources
from templar.datasets.units import most_threads
from templar.resources import available_bytes, given_threads


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_container_gives_no_more_threads_than_its_share_of_time(quota, threads, monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: set(range(8)))
    assert given_threads() == most_threads(None) == threads


@pytest.mark.parametrize(("limit", "available"), [("max", 900), ("1000", 500), ("5000", 900), ("300", 0)])
def test_a_container_gives_no_more_memory_than_its_limit_leaves(limit, available, monkeypatch, tmp_path):
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("", (), {"available": 900}))
    assert available_bytes() == 900
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 50\ninactive_file 150\nshmem 100\n")
    assert available_bytes() == available
