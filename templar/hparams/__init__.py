"""`hparams.json` as one frozen, typed tree.

Every number that networks may choose stands in `hparams.json` and nowhere else, and each field is documented here, at
the field; the constants of the rules are in docs/protocol.md. An unknown key, a missing key or a value out of range is
an error that names it. Secrets and endpoints are not hyper-parameters: they come from the environment and from blocks.

A preset may name another one in `extends`; its sections are merged over it, key by key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from templar.canonical import canonical_json, sha256_hex
from templar.errors import PermanentError, Reason
from templar.hparams.groups import (
    MAX_PEERS,
    RENDEZVOUS,
    AdamW,
    Data,
    Gradient,
    Model,
    Peers,
    Penalty,
    RopeScaling,
    Schedule,
    Scoring,
    SettingsGroup,
    Storage,
    TrainerSettings,
    Training,
    Weights,
    Windows,
)

__all__ = [
    "DEFAULT_PRESET",
    "HPARAMS_FILE",
    "MAX_PEERS",
    "PRODUCTION_TRAINER",
    "RENDEZVOUS",
    "SETTINGS_FILE",
    "AdamW",
    "Data",
    "Gradient",
    "HParams",
    "Model",
    "Peers",
    "Penalty",
    "RopeScaling",
    "Schedule",
    "Scoring",
    "Storage",
    "TrainerSettings",
    "Training",
    "Weights",
    "Windows",
    "load_hparams",
    "preset_names",
    "with_changes",
]

PRODUCTION_TRAINER = TrainerSettings(
    device="auto", threads=0, precision="auto", repeatable=False, inner_snapshot_seconds=300.0, train_ahead=True
)
"""The settings of a neuron of a real network unless its operator chooses otherwise."""

SETTINGS_FILE = "settings.json"
"""In the folder of a neuron that joined a network: the settings that this started with."""
HPARAMS_FILE = Path("hparams.json")
DEFAULT_PRESET = "local"


class HParams(SettingsGroup):
    """The whole tree. Two nodes with different `digest` are on different networks."""

    windows: Windows
    model: Model
    data: Data
    training: Training
    gradient: Gradient
    peers: Peers
    scoring: Scoring
    weights: Weights
    storage: Storage

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        data, storage, longest = self.data, self.storage, self.model.max_position_embeddings
        if data.sequence_length > longest:
            raise ValueError(f"data.sequence_length is longer than model.max_position_embeddings {longest}")
        gradient, kept = self.gradient, self.training.outer_learning_rate * self.feedback_carry
        if gradient.use_dct and self.feedback_carry:
            raise ValueError("gradient.feedback_carry must be 0 with use_dct: the error feedback is of coefficients")
        if kept > gradient.momentum_decay:
            raise ValueError(
                f"gradient.feedback_carry times training.outer_learning_rate is {kept:g}: it must be at most "
                f"gradient.momentum_decay {gradient.momentum_decay:g}"
            )
        if storage.retention_windows <= storage.checkpoint_frequency:
            least = f"storage.checkpoint_frequency {storage.checkpoint_frequency}"
            raise ValueError(f"storage.retention_windows must be larger than {least}, or a late node cannot catch up")
        if data.layout == "shards" and storage.snapshot_frequency > data.outer_steps_per_shard:
            most = f"data.outer_steps_per_shard {data.outer_steps_per_shard}"
            raise ValueError(f"storage.snapshot_frequency must be at most {most}: rotation follows the newest snapshot")
        return self

    @property
    def feedback_carry(self) -> float:
        """Share of the error feedback that a training begins with: none in `demo`, whose parameters stand still."""
        return 0.0 if self.training.recipe == "demo" else self.gradient.feedback_carry

    @property
    def agreed(self) -> bytes:
        """The canonical JSON of everything that two nodes must agree on.

        These are all sections but `storage`, and of that `retention_windows`: a node must know which objects may have
        expired in others' buckets.
        """
        agreed = self.model_dump(mode="json", exclude={"storage"})
        agreed["storage"] = {"retention_windows": self.storage.retention_windows}
        return canonical_json(agreed)

    @property
    def digest(self) -> str:
        """SHA-256 of `agreed`."""
        return sha256_hex(self.agreed)


def load_hparams(
    preset: str = DEFAULT_PRESET, *, path: Path = HPARAMS_FILE, overrides: dict[str, dict[str, Any]] | None = None
) -> HParams:
    """Read one preset of `hparams.json`.

    Raises:
        PermanentError: `bad_hparams`; the message names the file, the preset, each bad key and what is allowed.
    """
    tree = _resolve(_read(path), preset, path, seen=())
    return _validated(_merge(tree, overrides or {}), f"{path}, preset {preset!r}")


def with_agreed(own: HParams, agreed: bytes) -> HParams:
    """The settings that a network started with, as `agreed` of another release may say them, and the rest of one's own.

    A setting that is not named has its default: the rule of before the setting was there.

    Raises:
        PermanentError: `bad_hparams`; this release does not know a setting or a value.
    """
    what = "the network's settings"
    try:
        tree = json.loads(agreed, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{what}: cannot be read as JSON: {error}") from None
    if not isinstance(tree, dict):
        raise _bad(f"{what}: must be an object")
    tree = _merge({"storage": own.storage.model_dump(mode="json")}, tree)
    try:
        return _validated(tree, what)
    except PermanentError as error:
        remedy = "install a release that knows them, or change your own `storage` where that is named"
        raise _bad(f"{error.message}: {remedy}") from None


def with_changes(hparams: HParams, changes: Mapping[str, Any]) -> HParams:
    """Change settings by their names with dots, such as `training.adamw.learning_rate`.

    Raises:
        PermanentError: `bad_hparams`; the message names each bad key and what is allowed.
    """
    tree = hparams.model_dump(mode="json")
    for name, value in changes.items():
        over: Any = value
        for part in reversed(name.split(".")):
            over = {part: over}
        tree = _merge(tree, over)
    return _validated(tree, "the changed settings")


def _validated(tree: dict[str, Any], what: str) -> HParams:
    try:
        return HParams.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        advices = {"extra_forbidden": "unknown key, remove it", "missing": "is missing, add it"}
        problems = []
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"]) or "preset"
            problems.append(f"{field}: {advices.get(item['type'], item['msg'])}")
        raise _bad(f"{what}: {'; '.join(problems)}") from None


def preset_names(path: Path = HPARAMS_FILE) -> tuple[str, ...]:
    """The presets that a file holds, in its order; `bad_hparams` if it cannot be read."""
    return tuple(_read(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        presets = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except FileNotFoundError:
        raise _bad(f"{path}: no such file; run from the project's root or pass its path") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(presets, dict):
        raise _bad(f"{path}: must hold an object of presets")
    return presets


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of a key that stands twice, one value would be dropped."""
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice in one object: remove one of them")
        found[key] = value
    return found


def _resolve(presets: dict[str, Any], name: str, path: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise _bad(f"{path}: presets extend each other in a circle: {', '.join((*seen, name))}")
    if name not in presets:
        raise _bad(f"{path}: no preset {name!r}; there are {', '.join(sorted(presets))}")
    preset = presets[name]
    if not isinstance(preset, dict):
        raise _bad(f"{path}: preset {name!r} must be an object of sections")
    sections = {key: value for key, value in preset.items() if key != "extends"}
    if "extends" not in preset:
        return sections
    if not isinstance(preset["extends"], str):
        raise _bad(f"{path}: preset {name!r}: extends must be the name of a preset")
    return _merge(_resolve(presets, preset["extends"], path, (*seen, name)), sections)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        merged[key] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _bad(message: str) -> PermanentError:
    return PermanentError(Reason.BAD_HPARAMS, message)
