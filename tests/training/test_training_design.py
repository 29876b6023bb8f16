"""Presets are what the rules of a design give, and the rules keep their promises for every wish."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.command import exit_status
from deployments.design_network import main
from templar.errors import PermanentError, Reason
from templar.hparams import load_hparams
from templar.training.design import PEAK_FLOPS, Wishes, architecture, busy_fractions, design
from templar.training.device import flops_per_token, num_parameters, num_second_moments
from tests.support.errors import raising

BASE = load_hparams("150M")
PRESETS = {
    "150M": Wishes(20, "4090", parameters=150e6),
    "1B": Wishes(20, "h100", parameters=1e9),
    "8B": Wishes(20, "h100", model=load_hparams("8B").model, devices=8),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_what_the_rules_give(preset):
    hparams = load_hparams(preset)
    assert load_hparams(preset, overrides=design(PRESETS[preset], hparams).preset) == hparams


@settings(max_examples=25)
@given(
    miners=st.integers(2, 256),
    device=st.sampled_from(list(PEAK_FLOPS)),
    parameters=st.floats(2e7, 3e10),
    devices=st.integers(1, 8),
    uplink=st.floats(20, 1000),
)
def test_a_design_is_a_valid_preset_that_keeps_its_device_busy(miners, device, parameters, devices, uplink):
    try:
        made = design(Wishes(miners, device, parameters, devices=devices, uplink=uplink), BASE)
    except PermanentError as error:
        words = ("one inner step takes", "faster links or fewer miners")  # few wishes are too large
        assert any(each in str(error) for each in words)  # noqa: PT017
        return
    hparams, expects = load_hparams("150M", overrides=made.preset), made.expects
    training, windows = hparams.training, hparams.windows
    tokens = training.inner_steps * training.batch_size * hparams.data.sequence_length
    needed = tokens * flops_per_token(hparams.model, 2048) / (devices * 0.4 * PEAK_FLOPS[device])
    assert expects.parameters == num_parameters(hparams.model)
    assert expects.busy_fraction == pytest.approx(needed / windows.seconds)
    assert (expects.busy_fraction >= 0.95) != bool(expects.why_less_busy)
    assert not expects.why_less_busy or windows.blocks_per_window == 125
    assert needed <= windows.seconds - expects.idle_seconds
    assert hparams.data.pages_per_window * hparams.data.samples_per_page >= training.most_sequences
    assert expects.roles["aggregator"].bucket_bytes >= miners * 100 * expects.payload_bytes
    private = 8 * expects.parameters + 4 * num_second_moments(hparams.model, training.optimizer)
    assert expects.roles["miner"].disk_bytes == 20 * expects.parameters + 7 * private
    assert all(each.usd_per_month > 0.015e-9 * each.bucket_bytes for each in expects.roles.values())
    assert expects.shard_samples >= training.most_sequences * (miners + 4)
    warmup = training.schedule.warmup_steps * tokens / training.inner_steps * miners / (20 * expects.parameters)
    assert warmup == pytest.approx(expects.warmup_share)
    assert warmup <= 0.02 or training.schedule.warmup_steps == 1
    assert (expects.outer_steps_to_20 < 1000) == bool(expects.why_fewer)


@settings(max_examples=25)
@given(st.floats(2e7, 1e11))
def test_an_architecture_has_about_the_wished_parameters_and_heads_of_128(parameters):
    model = architecture(Wishes(20, "h100", parameters), BASE.model)
    matrices = num_parameters(model) - 2 * model.vocab_size * model.hidden_size
    assert matrices == pytest.approx(parameters, rel=0.25)
    assert model.attention_size == model.hidden_size
    assert 32 <= model.hidden_size / model.num_hidden_layers <= 256


@pytest.mark.parametrize(
    ("device", "parameters", "uplink"), [("A100", 13e9, 20), ("4090", 1e10, 50), ("h100", 3e10, 100)]
)
def test_a_code_that_leaves_no_time_to_train_is_no_choice(device, parameters, uplink):
    made = design(Wishes(2, device, parameters, uplink=uplink), BASE)
    assert made.preset["training"]["inner_steps"] >= 1


@pytest.mark.parametrize(("downlink", "batches"), [(500.0, 4), (100.0, 1)])
def test_a_slower_device_is_as_busy_and_a_much_faster_one_waits(downlink, batches):
    wishes = Wishes(20, "A100", 1e9, downlink=downlink)
    made = design(wishes, BASE)
    busy = busy_fractions(wishes, BASE, made)
    assert busy["RTX 4090"] == busy["A100"] > 0.9
    assert busy["H100"] == pytest.approx(busy["A100"] * min(1.0, batches * 312 / 989))
    assert made.preset["training"]["max_step_batches"] == batches


@pytest.mark.parametrize(
    ("wishes", "complaint"),
    [
        (Wishes(20, "h100"), "give exactly one of parameters, depth, and a model to keep"),
        (Wishes(20, "h100", 1e9, depth=3), "give exactly one of"),
        (Wishes(20, "abacus", 1e9), "the device 'abacus' is not in the table: choose one of A100"),
        (Wishes(2, "A100", 2e10, uplink=20), "one inner step takes 1475 s, a window has less"),
        (Wishes(256, "A100", 3e10, devices=8, uplink=20), "4864 blocks, not 125: faster links or fewer miners"),
        (Wishes(0, "h100", 1e9), "miners is 0: it must be above 0"),
        (Wishes(20, "h100", 1e9, uplink=0), "uplink is 0: it must be above 0"),
    ],
)
def test_contradictory_wishes_are_refused_in_one_line(wishes, complaint):
    with raising(PermanentError, Reason.BAD_HPARAMS, complaint):
        design(wishes, BASE)


def test_the_command_prints_what_fits_into_the_file(capsys):
    words = ["--parameters", "150M", "--miners", "20", "--device", "4090"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert load_hparams("150M", overrides=found["preset"]) == BASE
    assert {"busy_fraction", "warmup_share", "outer_steps_to_20", "tokens_per_day"} < found.keys()
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in ("busy share of other devices", "aggregator, without the dataset"))
    assert exit_status(main, ["--depth", "12", "--miners", "900", "--device", "h100"]) == 1
    assert "peers.gather_peer_count" in capsys.readouterr().err
