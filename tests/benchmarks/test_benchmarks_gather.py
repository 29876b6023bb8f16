"""The benchmark of the gather runs with few and small payloads, and its last line holds what it promises."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from benchmarks import gather
from benchmarks.command import measured
from templar.store.s3_client import make_client

SMALL = replace(gather.QUICK, num_peers=3, payload_bytes=300_000, rounds=2)


def test_the_figures(monkeypatch, measure):
    monkeypatch.setattr(gather, "QUICK", SMALL)
    code, table, figures = measure(partial(measured, "gather", gather.__doc__, gather.run, quick="fewer rounds"))
    assert code == (0 if figures["holds"] else 1)
    assert figures["holds"] == (figures["cpu_x"] <= gather.BAR and figures["wall_x"] <= gather.BAR)
    for name in ("cpu", "wall"):
        ratio = figures[f"gather_{name}_seconds"] / figures[f"bare_{name}_seconds"]
        assert figures[f"{name}_x"] == pytest.approx(ratio, rel=0.05)
    assert (figures["num_peers"], figures["payload_bytes"]) == (3, 300_000)
    assert "3 peers, 0.3 MB each" in "\n".join(table)


def test_both_make_the_same_requests(tmp_path, monkeypatch):
    asked: Counter[str] = Counter()
    with gather.serving(tmp_path) as endpoint:
        scene = gather.Scene(tmp_path, SMALL)
        clients = _counting_clients(monkeypatch, asked)
        gather.bare_loop(scene, endpoint)()
        bare, before = Counter(asked), len(clients)
        asked.clear()
        gather.whole_gather(scene, endpoint)()
    assert asked == bare
    assert sum(bare.values()) == 8 * SMALL.num_peers
    assert (before, len(clients)) == (1, 1 + SMALL.num_peers)


def _counting_clients(monkeypatch, asked):
    """Every boto3 client that is made from now on; its requests are counted."""
    clients: list[object] = []

    def counting(service, **options):
        client = make_client(service, **options)
        events = client.meta.events
        events.register("before-send.s3", lambda request, **_: asked.update([f"{request.method} {request.url}"]))
        clients.append(client)
        return client

    for module in ("benchmarks.loader", "templar.store.s3"):
        monkeypatch.setattr(f"{module}.make_client", counting)
    return clients
