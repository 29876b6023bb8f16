"""The benchmark of the codec's quality runs, repeats itself, and its last line holds the figures of docs/codec.md."""

import pytest

from benchmarks import codec_quality, pseudo_gradients
from benchmarks.codec_quality import OURS, REFERENCE
from benchmarks.pseudo_gradients import Setup, chosen_coefficients, embedded_text, ours, train
from templar.gradient.codec.values import SignAndScale
from tests.support.threads import threads

NAMES = {"ours", "reference"}


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(pseudo_gradients, "TEXT_BYTES", 600_000)
    monkeypatch.setattr(pseudo_gradients, "NUM_HELD_OUT", 32)
    monkeypatch.setattr(codec_quality, "NUM_WORKERS", 2)
    monkeypatch.setattr(codec_quality, "WINDOWS_PER_EVALUATION", 1)


@pytest.fixture
def text(_small):
    with embedded_text() as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_it_compares_the_codes(monkeypatch, measure):
    run = codec_quality.run
    monkeypatch.setattr(codec_quality, "run", lambda _windows, _seeds, plot: run(2, 1, plot))
    code, _, figures = measure(codec_quality.main)
    keys = {f"{figure}_{name}" for figure in ("loss", "bytes") for name in NAMES}
    assert figures.keys() == keys | {"ratio", "windows", "seeds", "parameters", "holds"}
    assert (figures["windows"], figures["seeds"]) == (2, 1)
    assert figures["parameters"] == 147_776
    assert all(4 < figures[f"loss_{name}"] < 6.2 for name in NAMES)  # less than log(512): something was learnt
    assert figures["ratio"] == pytest.approx(figures["loss_ours"] / figures["loss_reference"], abs=1e-4)
    assert figures["bytes_ours"] < figures["bytes_reference"] / 2
    assert (code, figures["holds"]) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OURS, REFERENCE], ids=["ours", "reference"])
def test_the_number_of_threads_changes_no_figure(text, kind):
    setup = Setup.of(text, seed=1, workers=2, windows=1)
    curves = []
    for number in (1, 2):
        with threads(number):
            curves.append(codec_quality.measure([setup], kind))
    assert curves[0] == curves[1]


@pytest.mark.slow
def test_workers_share_no_data_and_publish_what_was_chosen(text):
    setup = Setup.of(text, seed=0, workers=2, windows=2)
    shares = [share for window in setup.sequences for share in window]
    rows = [{tuple(row) for row in share.tolist()} for share in (*shares, setup.held_out)]
    assert not any(rows[first] & rows[second] for first in range(5) for second in range(first))
    *_, last = train(setup, ours)
    chosen = list(chosen_coefficients(last.learnt))
    assert len(chosen) == 2
    for worker, compressed in zip(chosen, last.exchange.compressed, strict=True):
        assert worker.keys() == set(last.learnt.layout.names)
        for tensor in last.learnt.layout.tensors:
            coefficients = worker[tensor.name]
            assert coefficients.values.shape == coefficients.indices.shape == (tensor.num_chunks, tensor.k)
            coded = SignAndScale().encode(coefficients.indices, coefficients.values)
            assert coded == compressed.tensors[tensor.name]
