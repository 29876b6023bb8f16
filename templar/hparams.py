"""`hparams.json` as one frozen, typed tree.

Every number that decides something stands in `hparams.json` and nowhere else; every field is documented here, at the
field. An unknown key, a missing key or a value out of range is an error that names it. Secrets and endpoints are not
hyper-parameters: they come from the environment and from blocks.

A preset may name another one in `extends`; its sections are merged over it, key by key.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from templar.canonical import canonical_json, sha256_hex
from templar.errors import PermanentError, Reason

HPARAMS_FILE = Path("hparams.json")
DEFAULT_PRESET = "local"


class Section(BaseModel):
    """A frozen group of settings that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True)


class Windows(Section):
    """The window clock and the times that PROTOCOL 2-7 are made of."""

    blocks_per_window: int = Field(ge=2)
    """Chain blocks in a window."""
    block_seconds: float = Field(gt=0)
    """Seconds between two blocks when the chain is healthy; used to estimate, never to decide."""
    commit_guard_seconds: int = Field(ge=1)
    """A commitment must be stored at least this long before the close of its window."""
    time_window_delta_seconds: int = Field(ge=1)
    """Grace after the close in which manifest and payload must be stored."""
    read_margin_seconds: int = Field(ge=0)
    """Wait after the grace before anybody relies on what is stored."""
    roster_slot_seconds: int = Field(ge=1)
    """Length of one roster slot."""
    roster_ranks: int = Field(ge=1)
    """How many validators, by stake, may publish a roster, each in its own slot."""
    train_margin_seconds: float = Field(ge=0)
    """Training stops this long before the last moment for the commitment, for compression and the upload of it."""
    inclusive_close: bool
    """Compatibility: accept objects stored in the very second of the close, as the reference does."""

    @property
    def seconds(self) -> float:
        """Expected length of a window in seconds."""
        return self.blocks_per_window * self.block_seconds

    @property
    def settle_delay_seconds(self) -> int:
        """S(w) - C(w): grace, one second of resolution, and the read margin."""
        return self.time_window_delta_seconds + 1 + self.read_margin_seconds

    @property
    def reserved_seconds(self) -> int:
        """Seconds of a window that agreement may take at the worst."""
        return self.commit_guard_seconds + self.settle_delay_seconds + self.roster_ranks * self.roster_slot_seconds

    @model_validator(mode="after")
    def _half_is_left_for_training(self) -> Self:
        if self.reserved_seconds * 2 > self.seconds:
            raise ValueError(
                f"guard, delta, margins and roster slots take {self.reserved_seconds} s of a window of "
                f"{self.seconds:g} s; they must leave at least half of it for training: "
                "raise blocks_per_window or lower roster_slot_seconds, roster_ranks or time_window_delta_seconds"
            )
        return self


class Model(Section):
    """The Llama architecture, in transformers' terms."""

    vocab_size: int = Field(ge=2)
    """Size of the vocabulary; the tokenizer may use fewer ids, never more."""
    hidden_size: int = Field(ge=1)
    """Width of the residual stream."""
    intermediate_size: int = Field(ge=1)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = Field(ge=1)
    """Number of transformer blocks."""
    num_attention_heads: int = Field(ge=1)
    """Query heads per layer."""
    num_key_value_heads: int = Field(ge=1)
    """Key and value heads per layer."""
    max_position_embeddings: int = Field(ge=2)
    """Longest sequence that the rotary embedding is made for."""
    tie_word_embeddings: bool
    """Whether the output projection is the embedding."""
    initializer_seed: int = Field(ge=0)
    """Seed of the genesis weights; only the publisher of the genesis checkpoint ever uses it."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        return self


class Data(Section):
    """What a window's training data is cut from."""

    tokenizer_name: str = Field(min_length=1)
    """A Hugging Face id, a local folder, or `embedded`: the tokenizer that lies beside the dataset."""
    sequence_length: int = Field(ge=2)
    """Tokens per training sequence."""
    rows_per_page: int = Field(ge=1)
    """Consecutive Parquet rows in a page."""
    pages_per_window: int = Field(ge=1)
    """Pages assigned to one miner in one window."""
    spare_slots: int = Field(ge=1)
    """Slots of a window beyond those of the miners that were there at the epoch's start: for newcomers."""


class AdamW(Section):
    """The inner optimizer of `sparseloco`."""

    learning_rate: float = Field(gt=0)
    """Peak inner learning rate."""
    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(gt=0)
    """Term that keeps the division finite."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay."""


class Schedule(Section):
    """Learning rate over steps: a linear warm-up, then a cosine."""

    warmup_steps: int = Field(ge=0)
    """Steps of the linear warm-up."""
    warmup_start_factor: float = Field(gt=0, le=1)
    """Factor at step 0."""
    t_max: int = Field(ge=1)
    """Half period of the cosine, in steps after the warm-up."""
    eta_min_factor: float = Field(ge=0, le=1)
    """Factor at the foot of the cosine."""
    restarts: bool
    """Warm restarts, each period twice as long as the last (demo), or one cosine (sparseloco)."""


class Training(Section):
    """One window of training at one miner."""

    recipe: Literal["sparseloco", "demo"]
    """`sparseloco`: inner AdamW steps and a pseudo-gradient. `demo`: one averaged gradient and a sign step."""
    batch_size: int = Field(ge=1)
    """Sequences per inner step (sparseloco) or per backward pass (demo)."""
    micro_batch_size: int = Field(ge=1)
    """Sequences per forward pass; divides batch_size."""
    inner_steps: int = Field(ge=1)
    """Inner steps per window (sparseloco) or most batches averaged (demo)."""
    max_grad_norm: float = Field(gt=0)
    """Clip of the inner gradient's norm (sparseloco)."""
    adamw: AdamW
    """Inner optimizer of sparseloco."""
    schedule: Schedule
    """Schedule of the inner learning rate (sparseloco, in inner steps) or of the outer one (demo, in outer steps)."""
    outer_learning_rate: float = Field(gt=0)
    """Step size of the outer SGD: its constant value (sparseloco) or its peak (demo)."""
    weight_decay: float = Field(ge=0)
    """Decoupled decay of the parameters in demo's outer step."""

    @model_validator(mode="after")
    def _micro_batches_fill_a_batch(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        return self


class Gradient(Section):
    """Compression of what a miner learnt."""

    momentum_decay: float = Field(ge=0, lt=1)
    """Decay of the error-feedback buffer."""
    topk_compression: int = Field(ge=1)
    """Coefficients kept per chunk."""
    target_chunk: int = Field(ge=1, le=64)
    """Largest chunk edge; 64 keeps a two-dimensional chunk within 4096 coefficients."""
    use_dct: bool
    """Transform each chunk with an orthonormal DCT-II before the selection."""


class Peers(Section):
    """Who is gathered."""

    gather_peer_count: int = Field(ge=1)
    """Miners in the gather tier."""
    reserve_peer_count: int = Field(ge=0)
    """Miners that fill the places of failed ones, in order."""
    minimum_peers: int = Field(ge=1)
    """A peer list with fewer is not published."""
    peer_replacement_frequency: int = Field(ge=1)
    """Windows between two peer lists."""
    peer_list_window_margin: int = Field(ge=1)
    """A list takes effect this many windows after the window in which it is published."""
    recent_windows: int = Field(ge=1)
    """A miner is active if it revealed in one of this many past windows."""


class Slashing(Section):
    """Factors that an event leaves of a positive score (1 keeps it, 0 clears it)."""

    missing: float = Field(ge=0, le=1)
    """No valid payload in a window."""
    invalid: float = Field(ge=0, le=1)
    """A payload that was revealed and is not valid."""
    desync: float = Field(ge=0, le=1)
    """State behind the network by more than sync_max_steps_behind windows."""
    inactivity: float = Field(ge=0, le=1)
    """Each window without any reveal, once a miner was active."""


class Scoring(Section):
    """How a validator turns payloads into weights."""

    validator_offset: int = Field(ge=0)
    """Blocks after the settling block at which a validator starts to evaluate."""
    eval_sequences: int = Field(ge=1)
    """Sequences of its own data, and as many of others' data, that each miner is measured on."""
    eval_micro_batch_size: int = Field(ge=1)
    """Sequences per forward pass of a measurement; part of what two validators must share to get the same bits."""
    eval_lr_factor: float = Field(gt=0, le=1)
    """Fraction of the outer step at which one payload is measured alone."""
    binary_score_ma_alpha: float = Field(gt=0, le=1)
    """Weight of the newest binary indicator in its moving average."""
    openskill_beta: float = Field(gt=0)
    """Plackett-Luce: variance of a performance."""
    openskill_tau: float = Field(ge=0)
    """Plackett-Luce: drift of the uncertainty."""
    sync_max_steps_behind: int = Field(ge=0)
    """Windows behind at which a miner counts as out of sync."""
    reset_inactivity_windows: int = Field(ge=1)
    """Windows without a reveal after which every score of a miner is reset."""
    slashing: Slashing
    """Effect of each event on the scores."""


class Weights(Section):
    """How scores become weights on chain."""

    rule: Literal["ramp", "power"]
    """`ramp`: gather tier and reserve tier with a burn (sparseloco). `power`: power normalisation (demo)."""
    windows_per_weights: int = Field(ge=1)
    """Weights are set in windows that are a multiple of this."""
    power_normalisation: float = Field(gt=0)
    """Exponent of the power rule."""
    gather_share: float = Field(ge=0, le=1)
    """Share of the gather tier in what is not burnt."""
    gather_top_ratio: float = Field(ge=1)
    """Weight of the first of the gather tier over that of the last."""
    reserve_decay_ratio: float = Field(gt=0, le=1)
    """Weight of each reserve miner over that of the one before."""
    burn_rate: float = Field(ge=0, le=1)
    """Share of the emission that goes to the burn uid."""
    burn_uid: int | None = Field(ge=0)
    """The uid that burns; null when burn_rate is 0. It is never a miner."""

    @model_validator(mode="after")
    def _burn_has_a_uid(self) -> Self:
        if self.burn_rate > 0 and self.burn_uid is None:
            raise ValueError(
                f"burn_rate is {self.burn_rate:g} but burn_uid is null: name the uid or set burn_rate to 0"
            )
        return self


class Storage(Section):
    """What is kept, and for how long."""

    snapshot_frequency: int = Field(ge=1)
    """Windows between two local snapshots of a neuron's state."""
    snapshots_kept: int = Field(ge=2)
    """Local snapshots kept; two at least, so that a node can leave a minority."""
    checkpoint_frequency: int = Field(ge=1)
    """Windows between two published checkpoints."""
    checkpoints_kept: int = Field(ge=1)
    """Published checkpoints kept, besides genesis, which is never deleted."""
    retention_windows: int = Field(ge=2)
    """Objects of a window are deleted when they are this many windows old."""
    outer_steps_per_shard: int = Field(ge=1)
    """Outer steps between two shards of the sharded dataset."""


class HParams(Section):
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
        if self.data.sequence_length > self.model.max_position_embeddings:
            raise ValueError(
                f"data.sequence_length {self.data.sequence_length} is longer than "
                f"model.max_position_embeddings {self.model.max_position_embeddings}"
            )
        if self.storage.retention_windows <= self.storage.checkpoint_frequency:
            raise ValueError(
                f"storage.retention_windows {self.storage.retention_windows} must be larger than "
                f"storage.checkpoint_frequency {self.storage.checkpoint_frequency}, or a late node cannot catch up"
            )
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of every section that two nodes must agree on (all but storage)."""
        return sha256_hex(canonical_json(self.model_dump(mode="json", exclude={"storage"})))


def load_hparams(
    preset: str = DEFAULT_PRESET,
    *,
    path: Path = HPARAMS_FILE,
    overrides: dict[str, dict[str, Any]] | None = None,
) -> HParams:
    """Read one preset of `hparams.json`.

    Args:
        preset: Name of the preset.
        path: The file.
        overrides: Sections merged over the preset, for tests and command lines.

    Raises:
        PermanentError: `bad_hparams`; the message names the file, the preset, each bad key and what is allowed.
    """
    try:
        presets = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PermanentError(
            Reason.BAD_HPARAMS, f"{path}: no such file; run from the project's root or pass its path"
        ) from None
    except (OSError, ValueError) as error:
        raise PermanentError(Reason.BAD_HPARAMS, f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(presets, dict):
        raise PermanentError(Reason.BAD_HPARAMS, f"{path}: must hold an object of presets")
    tree = _resolve(presets, preset, path, seen=())
    if overrides:
        tree = _merge(tree, overrides)
    try:
        return HParams.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise PermanentError(Reason.BAD_HPARAMS, _explain(error, path, preset)) from None


def preset_names(path: Path = HPARAMS_FILE) -> tuple[str, ...]:
    """The presets that a file holds, in its order."""
    return tuple(json.loads(path.read_text(encoding="utf-8")))


def _resolve(presets: dict[str, Any], name: str, path: Path, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise PermanentError(Reason.BAD_HPARAMS, f"{path}: presets extend each other in a circle: {(*seen, name)}")
    preset = presets.get(name)
    if not isinstance(preset, dict):
        raise PermanentError(Reason.BAD_HPARAMS, f"{path}: no preset {name!r}; there are {', '.join(sorted(presets))}")
    sections = {key: value for key, value in preset.items() if key != "extends"}
    if "extends" not in preset:
        return sections
    return _merge(_resolve(presets, preset["extends"], path, (*seen, name)), sections)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        known = merged.get(key)
        merged[key] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def _explain(error: ValidationError, path: Path, preset: str) -> str:
    problems = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"]) or "preset"
        advice = {"extra_forbidden": "unknown key, remove it", "missing": "is missing"}.get(item["type"], item["msg"])
        problems.append(f"{field}: {advice}")
    return f"{path}, preset {preset!r}: " + "; ".join(problems)
