"""The sections of `hparams.json`: windows, model, data, training, gradient, peers, scoring, weights, storage."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SettingsGroup(BaseModel):
    """A frozen group of settings that refuses unknown keys, and numbers that are not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )


class Windows(SettingsGroup):
    """Length of a window, and the times within it (docs/protocol.md 3)."""

    blocks_per_window: int = Field(ge=2)
    """Chain blocks in a window."""
    block_seconds: float = Field(gt=0)
    """Seconds between two blocks when the chain is healthy; used to estimate, never to decide."""
    commit_guard_seconds: int = Field(ge=1)
    """A commitment must be stored at least this long before the close of its window."""
    time_window_delta_seconds: int = Field(ge=1)
    """Grace after the close in which manifest and payload must be stored."""
    read_margin_seconds: int = Field(ge=0)
    """Wait after the grace before nodes rely on the stored objects."""
    roster_slot_seconds: int = Field(ge=1)
    """Length of one roster slot."""
    roster_ranks: int = Field(ge=1)
    """Number of validators, drawn by stake, that may publish a roster, each in its own slot."""
    quorum: float = Field(ge=1 / 2, le=2 / 3)
    """A window is decided by validators with more than this share of the announced stake (docs/protocol.md 11)."""
    plan_notice_windows: int = Field(ge=2)
    """Fewest windows between the one whose roster adopts an entry of the plan and the first that it changes."""
    train_margin_seconds: float = Field(ge=0)
    """Training stops this long, or longer, before the last moment for the commitment, so that it can be compressed."""

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
        """Most seconds of a window that agreement may take."""
        return self.commit_guard_seconds + self.settle_delay_seconds + self.roster_ranks * self.roster_slot_seconds

    @property
    def poll_seconds(self) -> float:
        """Pause between two looks at what validators publish while a window is decided."""
        return min(max(self.roster_slot_seconds / 8, 0.25), 2.0)

    @model_validator(mode="after")
    def _half_is_left_for_training(self) -> Self:
        if self.reserved_seconds * 2 > self.seconds:
            raise ValueError(
                f"guard, delta, margins and roster slots take {self.reserved_seconds} s of a window of "
                f"{self.seconds:g} s; they must leave at least half of it for training: "
                "raise blocks_per_window or lower roster_slot_seconds, roster_ranks or time_window_delta_seconds"
            )
        return self


class RopeScaling(SettingsGroup):
    """The frequencies of the rotary embedding stretched for longer texts, in transformers' terms."""

    rope_type: Literal["llama3"]
    """The rule of Llama 3.1: slow frequencies are divided by `factor`, fast ones stay, those between are mixed."""
    factor: float = Field(ge=1)
    """How many times longer texts become."""
    low_freq_factor: float = Field(gt=0)
    """Frequencies of fewer rotations than this in the original length are slow."""
    high_freq_factor: float = Field(gt=0)
    """Frequencies of more rotations than this in the original length are fast."""
    original_max_position_embeddings: int = Field(ge=2)
    """The length that the model was first trained on."""

    @model_validator(mode="after")
    def _slow_is_below_fast(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor is not below high_freq_factor {self.high_freq_factor:g}")
        return self


class Model(SettingsGroup):
    """The architecture, in transformers' terms: Llama's, or Qwen 3's with `query_key_norm`."""

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
    head_dim: int | None = Field(ge=2, multiple_of=2)
    """Width of a head; null for `hidden_size / num_attention_heads`."""
    rope_theta: float = Field(gt=1)
    """Base of the rotary embedding's frequencies; larger ones suit longer texts."""
    rope_scaling: RopeScaling | None
    """How the frequencies are stretched; null if they are not."""
    rms_norm_eps: float = Field(gt=0)
    """Added to the mean square before its root is taken."""
    attention_bias: bool
    """Whether the attention's projections have biases."""
    query_key_norm: bool
    """Whether queries and keys are normalised, each head by itself, as Qwen 3 does."""
    initializer_seed: int = Field(ge=0)
    """Seed of the genesis weights; only the publisher of the genesis checkpoint ever uses it."""

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * (self.head_dim or self.hidden_size // self.num_attention_heads)

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is not a multiple of num_attention_heads {self.num_attention_heads}, and head_dim is null"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_attention_heads is not a multiple of num_key_value_heads {self.num_key_value_heads}")
        return self


class Data(SettingsGroup):
    """The dataset, and the shares of it that a window trains on."""

    layout: Literal["pages", "shards"]
    """`pages`: text in Parquet files, tokenised by the miner. `shards`: pretokenised samples, one shard at a time."""
    tokenizer_name: str = Field(min_length=1)
    """A Hugging Face id, a local folder, or `embedded`: the tokenizer that lies beside the dataset."""
    sequence_length: int = Field(ge=2)
    """Tokens per training sequence."""
    rows_per_page: int = Field(ge=1)
    """Layout `pages`: consecutive Parquet rows in a page."""
    samples_per_page: int = Field(ge=1)
    """Layout `shards`: consecutive samples in a page; more of them make fewer, longer reads."""
    outer_steps_per_shard: int = Field(ge=1)
    """Layout `shards`: outer steps between two shards."""
    pages_per_window: int = Field(ge=1)
    """Pages assigned to one miner in one window."""
    spare_slots: int = Field(ge=1)
    """Slots of a window for newcomers, beyond those of the miners registered at the epoch's start."""
    other_dataset: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """Digest of the dataset, once the plan has changed it; null for the network's first one."""

    @property
    def shard_steps(self) -> int | None:
        """Outer steps between two shards; None if the dataset has none."""
        return self.outer_steps_per_shard if self.layout == "shards" else None


class AdamW(SettingsGroup):
    """The inner optimizer of `sparseloco`."""

    learning_rate: float = Field(gt=0)
    """Peak inner learning rate."""
    beta1: float = Field(ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(gt=0)
    """Added to the denominator to keep the division finite."""
    weight_decay: float = Field(ge=0)
    """Decoupled weight decay."""


class Schedule(SettingsGroup):
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


class Training(SettingsGroup):
    """One window of training at one miner."""

    recipe: Literal["sparseloco", "demo"]
    """`sparseloco`: inner AdamW steps and a pseudo-gradient. `demo`: one averaged gradient and a sign step."""
    batch_size: int = Field(ge=1, le=2**20)
    """Sequences per inner step (sparseloco) or per backward pass (demo)."""
    micro_batch_size: int = Field(ge=1)
    """Sequences per forward pass; divides batch_size."""
    inner_steps: int = Field(ge=1, le=2**20)
    """Inner steps per window that every miner should have time for (sparseloco), or most batches averaged (demo)."""
    max_step_batches: int = Field(default=1, ge=1, le=2**10)
    """Most batches whose gradients a faster miner averages for one inner step (sparseloco)."""
    max_grad_norm: float = Field(gt=0)
    """Clip of the inner gradient's norm (sparseloco)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Inner optimizer of the matrices between hidden states (sparseloco); AdamW moves embedding, head and norms."""
    adamw: AdamW
    """Inner optimizer of sparseloco."""
    muon_learning_rate: float = Field(default=0.02, gt=0)
    """Peak inner learning rate of Muon, by the rule of its authors: the same for matrices of every width."""
    schedule: Schedule
    """Schedule of the inner learning rate (sparseloco, in inner steps) or of the outer one (demo, in outer steps)."""
    outer_learning_rate: float = Field(gt=0)
    """Step size of the outer SGD: its constant value (sparseloco) or its peak (demo)."""
    weight_decay: float = Field(ge=0)
    """Decoupled decay of the parameters in demo's outer step."""

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size is not a multiple of micro_batch_size {self.micro_batch_size}")
        if self.recipe == "demo" and self.max_step_batches > 1:
            raise ValueError(f"max_step_batches {self.max_step_batches} must be 1 with demo, which takes one step")
        return self

    @property
    def most_sequences(self) -> int:
        """Sequences of a window of a miner that runs out of nothing."""
        return self.inner_steps * self.max_step_batches * self.batch_size


class Gradient(SettingsGroup):
    """Compression of a miner's pseudo-gradient."""

    momentum_decay: float = Field(ge=0, lt=1)
    """Decay of the error-feedback buffer."""
    feedback_carry: float = Field(default=0.0, ge=0, lt=1)
    """Share of the error feedback by which a training's first parameters are less than the agreed ones (sparseloco)."""
    topk_compression: int = Field(ge=1)
    """Coefficients kept per chunk."""
    target_chunk: int = Field(ge=1, le=64)
    """Largest chunk edge; 64 keeps a two-dimensional chunk within 4096 coefficients."""
    use_dct: bool
    """Transform each chunk with an orthonormal DCT-II before the selection."""
    mean_over: Literal["contributors", "payloads", "parts"] = "contributors"
    """What sums are divided by: payloads that have the value, all that are not 0, or parts: a loud one has two."""


MAX_PEERS = 256  # most payloads of one window: the integers of the aggregation hold the sum of this many


class Peers(SettingsGroup):
    """The choice of peers: who takes part, and who is gathered."""

    validator_min_stake: float = Field(ge=0)
    """Least stake of a validator, in the chain's unit: with less it publishes no roster, and it decides nothing."""
    gather_peer_count: int = Field(ge=1, le=MAX_PEERS)
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


class Penalty(SettingsGroup):
    """Effect of an event on a miner's scores. Scores that are not positive stay: no penalty may raise a score."""

    final: float = Field(ge=0, le=1)
    """Factor of a positive final score: 1 keeps it, 0 clears it."""
    average: float = Field(ge=0, le=1)
    """Factor of a positive moving average of the binary indicator."""
    reset: bool = False
    """Whether the rating is reset to a new miner's, or kept where it is worse than that."""
    ban_windows: int = Field(default=0, ge=0)
    """Number of further windows in which hotkey and bucket are banned: not measured, and on no new peer list."""


class Slashing(SettingsGroup):
    """The events that are penalised, and the penalty of each."""

    missing: Penalty
    """No payload that counts: nothing was revealed, or too late."""
    missing_low_success: Penalty
    """The same in a window in which most of the gather tier failed (see `Scoring.low_success_rate`)."""
    invalid: Penalty
    """A revealed payload that is not valid, or that makes losses infinite or NaN."""
    desync: Penalty
    """State behind the network by more than `Scoring.sync_max_steps_behind` windows."""
    oversized: Penalty
    """A norm of more than `Scoring.oversized_ratio` times the median."""
    unassigned_data: Penalty
    """The average of the binary indicator is below `Scoring.own_data_min_average`: the miner is presumed to train on
    unassigned data. Its score also counts as at most 0 in the rating."""
    inactivity: Penalty
    """Each window without a reveal, once a miner was active and more than `Peers.recent_windows` have passed."""
    inactivity_reset: Penalty
    """The same after more than `Scoring.reset_inactivity_windows`."""
    banned: Penalty
    """Each window of a ban, which applies to the hotkey and to the bucket."""
    registered_again: Penalty
    """A hotkey that returns with another uid."""


class Scoring(SettingsGroup):
    """The rules by which a validator turns payloads into scores."""

    validator_offset: int = Field(ge=0)
    """Blocks after the settling block at which a validator starts to evaluate."""
    eval_sequences: int = Field(ge=1)
    """Sequences of its own data that each miner is measured on; those of all miners are the evaluation batch."""
    eval_micro_batch_size: int = Field(ge=1)
    """Sequences per forward pass of a measurement; part of what two validators must share to get the same bits."""
    eval_lr_factor: float = Field(gt=0, le=1)
    """Fraction of the outer step at which one payload is measured alone."""
    eval_step_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the window's outer step that is taken first: with a half, all values add up to about its gain."""
    exact_miners: int = Field(ge=0)
    """Miners per window that are measured exactly, drawn by the time since their last exact measurement."""
    exact_segments: int = Field(ge=1)
    """Own segments of other miners that an exact measurement uses, besides the miner's own."""
    curvature_ma_alpha: float = Field(gt=0, le=1)
    """Weight of the newest exact measurement in the moving averages of the predicted gain and of its shortfall."""
    large_prediction_ratio: float = Field(gt=1)
    """A predicted gain is large above this many times the median; a measured shortfall is evidence for predicted gains
    up to this many times the measured one."""
    binary_score_ma_alpha: float = Field(gt=0, le=1)
    """Weight of the newest window in the moving averages of the binary indicator and of the advantage."""
    openskill_beta: float = Field(gt=0)
    """Plackett-Luce: variance of a performance."""
    openskill_tau: float = Field(ge=0)
    """Plackett-Luce: drift of the uncertainty."""
    baseline_share: float = Field(ge=0, lt=1)
    """Work of the virtual miner whose rating is the zero of final scores, as a share of the median miner's work."""
    rating_decay: float = Field(ge=0, lt=1)
    """Share of its distance from the baseline that a rating loses in each window in which its miner is scored."""
    median_skill: float = Field(gt=0)
    """Skill of a miner with the median advantage, if its rating supports it."""
    advantage_cap: float = Field(gt=1)
    """Scores are capped at this many times the median of the positive ones in the advantage: outliers may be noise."""
    sync_max_steps_behind: int = Field(ge=0)
    """A miner that is more windows behind counts as out of sync."""
    reset_inactivity_windows: int = Field(ge=1)
    """Windows without a reveal after which every score of a miner is reset."""
    low_success_rate: float = Field(ge=0, le=1)
    """Share of the gather tier that must succeed; below it, missing miners are penalised as `missing_low_success`."""
    oversized_ratio: float = Field(gt=1)
    """Ratio of a payload's norm to the median norm above which it is oversized. Every applied payload is clipped."""
    own_data_min_average: float = Field(ge=-1, le=1)
    """Average of the binary indicator below which a miner is presumed to train on unassigned data."""
    own_data_windows: int = Field(ge=1)
    """Least number of measured windows before `own_data_min_average` applies."""
    overlap_level: float = Field(gt=0, le=1)
    """Share of common coefficients, beyond chance, from which two payloads are alike, and are paid as one."""
    overlap_grace_windows: int = Field(ge=0)
    """Windows in which a miner's payload is applied before `overlap_level` counts for it: first updates are similar."""
    overlap_copy_level: float = Field(gt=0, le=1)
    """The share that counts before: no honest updates have so much in common."""
    exclusion_after: float = Field(gt=0)
    """Clear windows without a gain after which a miner without an average advantage leaves the gather tier."""
    exclusion_windows: int = Field(ge=1)
    """Windows of a miner's first exclusion from the gather tier; each later one is twice as long."""
    slashing: Slashing
    """Effect of each event on the scores."""


class Weights(SettingsGroup):
    """The rules by which scores become weights on chain."""

    rule: Literal["value", "ramp", "power"]
    """`value`: in proportion to the value of the work; by rating, as the reference: `ramp`, `power` (demo)."""
    value_exponent: float = Field(ge=1)
    """Exponent of the advantage in the rule `value`: above 1, a large payload earns more than two of half its value."""
    own_data_exponent: float = Field(default=1.0, ge=1)
    """Exponent of the own-data factor in `value`: larger where codes are dense, and a part gains as a whole does."""
    windows_per_weights: int = Field(ge=1)
    """Weights are set in windows that are a multiple of this.

    The time between should be longer than the subnet's limit on weights (often 100 blocks) by half a window: the step
    does not come at the same block of each window.
    """
    power_normalisation: float = Field(gt=0)
    """Exponent of the power rule."""
    gather_share: float = Field(ge=0, le=1)
    """Share of the gather tier in the weight that is not burnt."""
    gather_top_ratio: float = Field(ge=1)
    """Weight of the first of the gather tier over that of the last."""
    reserve_decay_ratio: float = Field(gt=0, le=1)
    """Weight of each reserve miner over that of the one before."""
    burn_rate: float = Field(ge=0, le=1)
    """Share of the emission that goes to the burn uid."""
    burn_uid: int | None = Field(ge=0)
    """The uid that receives the burnt share; null when burn_rate is 0. It is never a miner."""

    @model_validator(mode="after")
    def _burn_has_a_uid(self) -> Self:
        if self.burn_rate > 0 and self.burn_uid is None:
            raise ValueError(f"burn_uid is null, and burn_rate {self.burn_rate:g}: name the uid or set burn_rate to 0")
        return self


class Storage(SettingsGroup):
    """Retention of snapshots, checkpoints, objects and shards, and memory for reading them."""

    snapshot_frequency: int = Field(ge=1)
    """Windows between two local snapshots of a neuron's state."""
    snapshots_kept: int = Field(ge=2)
    """Local snapshots kept; two at least, so that a node can leave a minority."""
    checkpoint_frequency: int = Field(ge=1)
    """Windows between two published checkpoints."""
    checkpoints_kept: int = Field(ge=1)
    """Newest published checkpoints that are kept; genesis is never deleted."""
    checkpoint_age_windows: int = Field(ge=0)
    """Published checkpoints up to this many windows old are kept as well."""
    checkpoint_keeper_windows: int | None = Field(ge=1)
    """The first published checkpoint in every so many windows is kept for ever; null keeps none of them."""
    private_backup_windows: int = Field(ge=0)
    """Windows between two backups of a miner's private state in its bucket; 0 makes none. Each takes about four times
    the float32 parameters, and two are kept."""
    retention_windows: int = Field(ge=2)
    """Objects of a window are deleted when they are this many windows old. All nodes must agree on it: the absence of
    an object that may have expired proves nothing."""
    keep_shards: int = Field(ge=0)
    """Newest finished shards that stay on the disk, besides the current and the next one."""
    shard_budget_gib: float | None = Field(gt=0)
    """Most GiB of shards on the disk; null uses the whole disk. Without room for the next shard, only the current one
    is kept; without room for that, its samples are read one by one."""
    loader_mib: int = Field(ge=1)
    """MiB of memory that reading training data may keep: sequences between two steps (those of the newest assignment
    always stay), and as much again of mapped pages of shards."""
    download_part_mib: int | None = Field(ge=1)
    """MiB of one request of a shard's download; null chooses."""
    download_workers: int | None = Field(ge=1)
    """Requests of a shard's download at the same time; null chooses."""


# Not a section of hparams.json: what one operator chooses for one host.
RENDEZVOUS = r"^([^:\s]+:[0-9]{1,5})?$"  # ADDRESS:PORT, or nothing


class TrainerSettings(SettingsGroup):
    """Training on the neuron's host. The defaults are those of the simulator and the tests: one thread, exact."""

    device: str = Field(default="cpu", pattern="^(auto|cpu|cuda(:[0-9]+)?)$")
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes the first CUDA device, else the CPU."""
    threads: int = Field(default=1, ge=0)
    """Threads of torch's operations on the CPU; 0 takes all that this process is given."""
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the products; all else is float32. `auto`: bfloat16 where the device is faster with it."""
    micro_batch: int | Literal["preset", "auto"] = "preset"
    """Sequences per forward pass, a divisor of the batch; `preset`: `training.micro_batch_size`; `auto`: what fits."""
    compile_layers: bool = False
    """Whether torch.compile compiles the layers of the model; it needs a C++ compiler at run time."""
    checkpoint_layers: int = Field(default=0, ge=0)
    """Activation checkpointing of every n-th layer: 1 for every layer, 0 for none. It saves memory and costs time."""
    optimizer: Literal["preset", "adamw", "muon"] = "preset"
    """Inner optimizer of the matrices between hidden states; `preset` takes `training.optimizer`."""
    ranks: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Processes that train together on a host, one per device; `auto` takes one per CUDA device, and 1 on a CPU."""
    hosts: int = Field(default=1, ge=1)
    """Hosts that train together, with as many ranks each; this one is the first."""
    rendezvous: str = Field(default="", pattern=RENDEZVOUS)
    """Address and port of this host where the ranks of other hosts find the first one, in a private network."""
    sharding: Literal["auto", "replicated", "sharded"] = "auto"
    """Whether each of several ranks has the whole model or a part; `auto` takes parts if the whole does not fit."""
    repeatable: bool = True
    """Whether training uses the operations of a validator's measurement, on one thread, so that it gives the same bits
    everywhere. Without it, faster operations compute the loss and AdamW's step."""
    inner_snapshot_seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Least seconds between two writes of a window's training progress to the disk; 0 writes none."""
    train_ahead: bool = False
    """Whether the next window's training begins while a window settles (docs/miner.md)."""

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise ValueError(f"micro_batch {self.micro_batch} must be at least 1")
        if (self.hosts > 1) is not bool(self.rendezvous):
            raise ValueError("hosts above 1 and rendezvous belong together")
        is_alone = (self.ranks, self.hosts) == (1, 1)
        if self.inner_snapshot_seconds and not is_alone:
            raise ValueError("inner_snapshot_seconds is for one rank alone")
        if self.repeatable and (self.device, self.threads, self.precision, is_alone) != ("cpu", 1, "float32", True):
            raise ValueError("repeatable training takes one rank and one thread of the CPU in float32")
        return self
