"""Who is gathered, how they are scored and paid, and how long things are kept."""

from typing import Literal, Self

from pydantic import Field, model_validator

from templar.hparams.section import Section

MAX_PEERS = 256
"""Payloads of one window, at most: the aggregation's integers hold the sum of so many."""


class Peers(Section):
    """Who is gathered."""

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
    """A miner that is more windows behind counts as out of sync."""
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
    """Objects of a window are deleted when they are this many windows old. All nodes must agree on it: what may have
    expired in a bucket proves nothing by its absence."""
    keep_shards: int = Field(ge=0)
    """Shards that stay on the disk after they were trained on, the newest ones; the current and the next one come on
    top."""
    shard_budget_gib: float | None = Field(gt=0)
    """Most GiB of shards on the disk; null takes what the disk has. Without room for the next shard, only the current
    one is kept; without room for that, its samples are still read one by one."""
    loader_mib: int = Field(ge=1)
    """MiB of memory that reading training data may keep: sequences between two steps (those of the newest assignment
    always stay), and as much again of mapped pages of shards."""
    download_part_mib: int | None = Field(ge=1)
    """MiB of one request of a shard's download; null chooses."""
    download_workers: int | None = Field(ge=1)
    """Requests of a shard's download at the same time; null chooses."""
