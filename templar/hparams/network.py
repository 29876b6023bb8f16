"""The window clock, the model, and the data that a window is cut from."""

from typing import Literal, Self

from pydantic import Field, model_validator

from templar.hparams.section import Section


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
    """Slots of a window beyond those of the miners that were there at the epoch's start: for newcomers."""

    @property
    def shard_steps(self) -> int | None:
        """Outer steps between two shards; None if the dataset has none."""
        return self.outer_steps_per_shard if self.layout == "shards" else None
