import json
from typing import Any

import pytest

from templar.errors import PermanentError, Reason
from templar.hparams import DEFAULT_PRESET, HPARAMS_FILE, HParams, load_hparams, preset_names
from templar.neuron.window_time import TrainingEnd
from templar.training.device import finish_seconds, flops_per_token, num_parameters
from tests.support.errors import raising

TREE: dict[str, Any] = json.loads(HPARAMS_FILE.read_text(encoding="utf-8"))


def refused(call):
    """The message of the error that a call must end with."""
    with raising(PermanentError, Reason.BAD_HPARAMS) as caught:
        call()
    return caught.value.message


def file_with(tmp_path, presets):
    path = tmp_path / "numbers.json"
    path.write_text(presets if isinstance(presets, str) else json.dumps(presets), encoding="utf-8")
    return path


LARGE = ("templar-0.2.82", "templar-2.1.3", "150M", "1B", "8B", "70B")


def test_every_preset_of_the_file_loads():
    names = preset_names()
    assert names == tuple(TREE)
    assert {DEFAULT_PRESET, *LARGE} < {*names}
    assert len({load_hparams(name).digest for name in names}) == len(names)


PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496}
"""Preset -> the number of parameters that Llama 3 of this size has."""


@pytest.mark.parametrize("preset", PARAMETERS)
def test_presets_of_a_published_model_have_its_size(preset):
    assert num_parameters(load_hparams(preset).model) == PARAMETERS[preset]


@pytest.mark.parametrize("preset", LARGE)
def test_weights_are_not_due_just_when_the_usual_limit_on_them_ends(preset):
    """Subnets take weights once in 100 blocks, and the step comes some blocks earlier in one window than in another."""
    hparams = load_hparams(preset)
    blocks = hparams.windows.blocks_per_window
    assert hparams.weights.windows_per_weights * blocks >= 100 + blocks / 2


def test_a_window_of_70b_leaves_time_for_all_inner_steps_at_40_percent_of_eight_h200():
    """Of the presets that are designed, `busy_fraction` says it."""
    hparams = load_hparams("70B")
    windows, training, length = hparams.windows, hparams.training, hparams.data.sequence_length
    tokens = training.batch_size * training.inner_steps * length
    needed = tokens * flops_per_token(hparams.model, length) / (0.4 * 8 * 989e12)
    # A window's training begins once the window before is decided, early in the first roster slot.
    begins = windows.settle_delay_seconds + min(windows.roster_slot_seconds, 8)
    finish, latest = finish_seconds(hparams.model, "adamw"), windows.seconds - windows.commit_guard_seconds
    end = TrainingEnd(finish, windows.train_margin_seconds, lambda: begins)
    end.begin(latest)
    assert end.at + finish <= latest - windows.train_margin_seconds
    assert needed <= end.at - begins


def test_presets_and_overrides_are_merged_key_by_key():
    local, demo = load_hparams("local"), load_hparams("local-demo")
    assert (demo.training.recipe, demo.training.schedule.warmup_steps) == ("demo", 5)
    assert demo.training.schedule.eta_min_factor == local.training.schedule.eta_min_factor
    assert (demo.training.adamw, demo.model, demo.windows) == (local.training.adamw, local.model, local.windows)
    oversized = local.scoring.slashing.oversized
    changed = load_hparams("local", overrides={"scoring": {"slashing": {"oversized": {"ban_windows": 3}}}})
    assert changed.scoring.slashing.oversized == oversized.model_copy(update={"ban_windows": 3})
    assert changed.scoring.slashing.desync == local.scoring.slashing.desync


@pytest.mark.parametrize(
    ("section", "change", "complaint"),
    [
        ("windows", {"blocks_per_windw": 18}, "windows.blocks_per_windw: unknown key, remove it"),
        ("scoring", {"slashing": {"missing": 0.75}}, "scoring.slashing.missing: Input should be an object"),
        ("scoring", {"overlap_level": 1.1}, "scoring.overlap_level: Input should be less than or equal to 1"),
        ("training", {"outer_learning_rate": float("inf")}, "training.outer_learning_rate: Input should be a finite"),
        ("windows", {"roster_ranks": 4}, "raise blocks_per_window or lower roster_slot_seconds"),
        ("training", {"micro_batch_size": 5}, "batch_size is not a multiple of micro_batch_size 5"),
        ("training", {"recipe": "demo", "max_step_batches": 2}, "max_step_batches 2 must be 1 with demo"),
        ("model", {"num_attention_heads": 5}, "hidden_size is not a multiple of num_attention_heads 5"),
        ("model", {"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ("weights", {"burn_uid": None}, "burn_uid is null, and burn_rate 0.5: name the uid or set burn_rate to 0"),
        ("data", {"sequence_length": 65}, "is longer than model.max_position_embeddings 64"),
        ("storage", {"retention_windows": 5}, "must be larger than storage.checkpoint_frequency 10"),
    ],
)
def test_a_bad_value_is_named_with_file_preset_key_and_remedy(tmp_path, section, change, complaint):
    presets = {**TREE, "mine": {"extends": "local", section: change}}
    path = file_with(tmp_path, presets)
    message = refused(lambda: load_hparams("mine", path=path))
    assert message.startswith(f"{path}, preset 'mine': ")
    assert complaint in message


def test_a_missing_key_is_named(tmp_path):
    for section, key in (("windows", "block_seconds"), ("peers", None)):
        mine = json.loads(json.dumps(TREE["local"]))
        del (mine[section] if key else mine)[key or section]
        message = refused(lambda mine=mine: load_hparams("mine", path=file_with(tmp_path, {"mine": mine})))
        name = f"{section}.{key}" if key else section
        assert message == f"{tmp_path}/numbers.json, preset 'mine': {name}: is missing, add it"


TWICE = [
    '{"mine": {}, "mine": {}}',
    '{"mine": {"training": {"batch_size": 1}, "training": {}}}',
    '{"mine": {"training": {"adamw": {"beta1": 0.9, "beta1": 0.9}}}}',
]


@pytest.mark.parametrize(
    ("presets", "complaint"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1, 2]", "must hold an object of presets"),
        ({"other": {}}, "no preset 'mine'; there are other"),
        ({"mine": 3}, "preset 'mine' must be an object of sections"),
        ({"mine": {"extends": "gone"}}, "no preset 'gone'; there are mine"),
        ({"mine": {"extends": ["local"]}}, "preset 'mine': extends must be the name of a preset"),
        (
            {"mine": {"extends": "b"}, "b": {"extends": "c"}, "c": {"extends": "mine"}},
            "presets extend each other in a circle: mine, b, c, mine",
        ),
        *((text, "stands twice in one object: remove one of them") for text in TWICE),
    ],
)
def test_a_file_that_holds_no_such_preset_is_refused(tmp_path, presets, complaint):
    path = file_with(tmp_path, presets)
    message = refused(lambda: load_hparams("mine", path=path))
    assert message.startswith(str(path))
    assert complaint in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    gone = tmp_path / "gone.json"
    for call in (lambda: load_hparams("local", path=gone), lambda: preset_names(gone)):
        assert refused(call) == f"{gone}: no such file; run from the project's root or pass its path"
    assert refused(lambda: load_hparams("local", path=tmp_path)).startswith(f"{tmp_path}: cannot be read")
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"größe": {}}'.encode("latin-1"))
    assert refused(lambda: load_hparams("local", path=latin)).startswith(f"{latin}: cannot be read")


CHANGES: dict[str, dict[str, Any]] = {
    "windows": {"read_margin_seconds": 0},
    "model": {"initializer_seed": 43},
    "data": {"pages_per_window": 4},
    "training": {"adamw": {"epsilon": 1e-7}},
    "gradient": {"topk_compression": 65},
    "peers": {"recent_windows": 4},
    "scoring": {"slashing": {"desync": {"final": 0.5}}},
    "weights": {"gather_share": 0.7},
    "storage": {"snapshots_kept": 4, "checkpoints_kept": 5, "snapshot_frequency": 2},
}


def test_the_digest_covers_every_section_that_nodes_must_agree_on_and_how_long_objects_are_kept():
    local = load_hparams("local")
    for section in HParams.model_fields:
        changed = load_hparams("local", overrides={section: CHANGES[section]})
        assert getattr(changed, section) != getattr(local, section)
        assert (changed.digest == local.digest) == (section == "storage")
    kept = local.storage.retention_windows
    longer = load_hparams("local", overrides={"storage": {"retention_windows": kept + 1}})
    assert longer.digest != local.digest
    assert load_hparams("local").digest == local.digest
