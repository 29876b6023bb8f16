"""The benchmarks of the codec's size and speed run on small tensors, and their last lines hold the README's figures."""

import pytest
import torch

from benchmarks import codec_size, codec_speed, large_model, pseudo_gradients

TINY = large_model.MODEL.model_copy(
    update={
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(large_model, "MODEL", TINY)
    monkeypatch.setattr(codec_speed, "EDGE", 128)
    monkeypatch.setattr(codec_speed, "PEERS", 3)
    monkeypatch.setattr(pseudo_gradients, "TEXT_BYTES", 600_000)
    monkeypatch.setattr(pseudo_gradients, "NUM_HELD_OUT", 16)


@pytest.mark.slow
def test_sizes_and_errors(monkeypatch):
    train_small = codec_size.train_small
    monkeypatch.setattr(codec_size, "train_small", lambda _windows, _last: train_small(2, 1))
    figures = codec_size.run(quick=True)
    assert isinstance(figures["holds"], bool)
    assert 7 < figures["bits_k64"] < figures["bits_k32"] < 14  # header and vectors weigh more in a tiny model
    assert 0 < figures["value_error"] < 0.1
    assert 0 < figures["value_error_reference"] < 0.1


def test_speeds():
    threads = torch.get_num_threads()
    figures = codec_speed.run(quick=True)
    assert figures.keys() == codec_speed.BARS.keys() | {"holds"}
    assert all(figures[name] > 0 for name in codec_speed.BARS)
    assert torch.get_num_threads() == threads


def test_the_least_bits_for_an_index():
    assert codec_size.index_floor(64) == pytest.approx(7.364, abs=5e-4)
    assert codec_size.index_floor(32) == pytest.approx(8.318, abs=5e-4)
