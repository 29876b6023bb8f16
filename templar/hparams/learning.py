"""Training, compression and the two steps of the recipes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from templar.hparams.section import Section


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
    magnitude_bits: int = Field(ge=0, le=1)
    """Bits of magnitude of each coefficient beside its sign: 0, one scale per chunk; 1, two."""
    use_dct: bool
    """Transform each chunk with an orthonormal DCT-II before the selection."""
