"""The benchmark of quality: the plain row is what the product does, rows differ by what they say, outcomes are kept."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks import pseudo_gradients, quality
from benchmarks.exchange_rules import Outcome, Row, code, combine, learn
from benchmarks.pseudo_gradients import Setup, chosen_coefficients, embedded_text, train
from benchmarks.quality import GRID, QUICK
from templar.gradient.codec.values import encode_values


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(pseudo_gradients, "TEXT_BYTES", 600_000)
    monkeypatch.setattr(pseudo_gradients, "NUM_HELD_OUT", 32)
    monkeypatch.setattr(quality, "NUM_WORKERS", 2)


@pytest.fixture
def text(_small):
    with embedded_text() as opened:
        yield opened


@pytest.mark.slow
def test_the_plain_row_learns_as_the_product_does_and_counts_its_bytes(text):
    setup = Setup.of(text, seed=0, workers=2, windows=4)
    *_, last = train(setup)
    found = learn(Row(learning_rate=0.002), setup)
    assert found.losses[-1] == pytest.approx(setup.held_out_loss(last.net), abs=0.01)
    assert found.losses[-1] < found.losses[0]
    exact = 8 * sum(last.exchange.num_bytes) / len(last.exchange.num_bytes) / setup.layout.num_elements
    assert found.bits == pytest.approx(exact, rel=0.1)
    assert learn(Row(learning_rate=0.002), setup) == found


@pytest.mark.slow
def test_workers_share_no_data_and_publish_what_was_chosen(text):
    setup = Setup.of(text, seed=0, workers=2, windows=2)
    shares = [share for window in setup.sequences for share in window]
    rows = [{tuple(row) for row in share.tolist()} for share in (*shares, setup.held_out)]
    assert not any(rows[first] & rows[second] for first in range(5) for second in range(first))
    *_, last = train(setup)
    chosen = list(chosen_coefficients(last.learnt))
    assert len(chosen) == 2
    for worker, compressed in zip(chosen, last.exchange.compressed, strict=True):
        assert worker.keys() == set(last.learnt.layout.names)
        for tensor in last.learnt.layout.tensors:
            coefficients = worker[tensor.name]
            coded = encode_values(coefficients.indices, coefficients.values)
            assert coded == compressed.tensors[tensor.name]


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_it_compares_the_rows_and_goes_on_from_its_file(monkeypatch, measure, tmp_path):
    monkeypatch.setattr(quality, "QUICK", QUICK[:2] + QUICK[3:])
    arguments = ("--quick", "--results", str(tmp_path / "found.jsonl"))
    status, _, figures = measure(quality.main, *arguments)
    assert (status, figures["dense"], figures["seeds"]) == (0, QUICK[0], 1)
    assert figures["best"] in {"decay 0.95", QUICK[-1]}
    assert figures["gap_best"] <= figures["gap_today"]
    monkeypatch.setattr(quality, "learn", None)
    assert measure(quality.main, *arguments) == (status, _, figures), "every outcome is read"


def test_an_outcome_of_another_device_is_not_read(monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr(quality, "embedded_text", nullcontext)
    monkeypatch.setattr(quality, "_setup", lambda *_: None)
    monkeypatch.setattr(quality, "learn", lambda row, setup, device: trained.append(device) or Outcome((1.0,), 1.0))
    sizes = {"seeds": 1, "windows": 1, "results": tmp_path / "found.jsonl"}
    for device in ("cpu", "cuda", "cpu"):
        quality.measure(QUICK[:1], "0.25M", device=device, **sizes)
    assert trained == ["cpu", "cuda"]


@pytest.mark.parametrize("name", GRID)
def test_every_code_is_smaller_than_float32_and_close_to_what_it_codes(name):
    """Dense is exact; every other one keeps the sign of each coefficient that it publishes."""
    row = GRID[name]
    wanted = torch.randn(128, 192, generator=torch.Generator().manual_seed(1))
    hparams = quality.network("0.25M", 0)
    tensor = pseudo_gradients.Layout.of({"layers.0.weight": wanted.shape}, hparams.gradient, "sparseloco").tensors[0]
    received, bits = code(row, wanted, tensor)
    assert (bits == 32 * wanted.numel()) == torch.equal(received, wanted) == (row.code == "dense")
    assert bits <= 32 * wanted.numel()
    assert torch.dist(received, wanted) < wanted.norm()


def test_an_update_is_the_mean_over_its_contributors_with_loud_ones_clipped():
    quiet, loud = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.0, 300.0, 400.0])
    assert combine([quiet, quiet, loud], "contributors").tolist() == pytest.approx([3.0, 11 / 3, 4.0])
    assert combine([quiet, loud], "all").tolist() == pytest.approx([1.5, 3.5, 2.0])
