"""The design of a network: from a wish and a device to the settings of a preset, and what to expect of them.

Every rule stands here, with its source:

* **Architecture.** Heads are 128 wide (nanochat, MuLoCo). Width over depth grows from 64 at 100 M parameters without
  embeddings (nanochat) to 128 at 8 B (Llama 3). The feed-forward layer is 8/3 of the width (LLaMA, arXiv 2302.13971).
* **Time.** A device is busy when it trains. What a window needs besides is fixed: settling, transfer, the outer step,
  compression, and the commitment's guard. A window is so long that these are less than 5 % of it, but no longer than
  125 blocks: a node needs the chain's state of the window before, and endpoints keep that of about 256 blocks. Inner
  steps begin when the reveals of the gather tier are there (training ahead); on a chain that is not final at once, and
  for a miner that does not train ahead, there is time for fewer.
* **Batch.** All miners together take 2^19 tokens at 235 M parameters, more with the power 0.38 of the parameters
  (nanochat); but a miner takes at most 500 inner steps in a window (DiLoCo, arXiv 2311.08105), so fast devices take
  larger batches.
* **Data.** Tokens in shards: a node would need minutes to tokenise the text of a window. A shard serves as many windows
  as hold about 2^34 tokens, which are 34 GB at 16 bits, and no fewer than a snapshot. Faster devices get
  data for steps of 4 or 2 batches (docs/validator.md), if shards then need at most a tenth of the downlink.
* **Rates.** AdamW's peak is 1.5e-3 at 124 M parameters (modded-nanogpt, track 3) and falls with the power 0.4, as the
  rates of GPT-3 do (arXiv 2005.14165, table 2.1). The warm-up is at most 2 % of 20 tokens per parameter. Then the rate
  is constant: an open network does not know its end.
* **Density.** The more inner steps a window has, the more coefficients a payload needs: with 80 of them, 64 of 4096
  lose a nat to a dense exchange, and 1024 a seventh of that (docs/codec.md). A chunk keeps the largest share of its
  coefficients with which the device is busy enough, or less busy by at most 2 %.
* **Mean.** Where miners share most coefficients in time, each of them sends its own part, and a mean over those that
  send one now moves it too far: with 1024 of 4096, a mean over all payloads ends 0.66 nats lower (docs/codec.md). With
  64, few miners share one in a window, and a mean over all would be as much too slow. Where faster devices take larger
  batches, the payload of one counts as two parts (docs/validator.md).
* **Scoring.** A payload is measured at the step that it really takes: where sums are divided by payloads, one of as
  many as there are miners. At a fifth of the step alone, four times that, twenty honest miners of a network that learns
  little more seem to do harm. Each of three parts of one run gains as much as a whole there, so the own-data factor,
  which tells them, is squared (docs/validator.md).
* **Optimizer.** Muon for the matrices where payloads are dense: there it keeps what it gains over AdamW, and at equal
  bytes it ends lower than AdamW through a sparse code. Through sparse codes it loses (docs/codec.md). The iterations of
  Newton and Schulz are 1 to 2 % more operations at these batches.
* **Outer rate.** 1.1 where payloads are dense, which counts twice, in the payload and in the outer step: what decays in
  the error feedback is lost, and a dense exchange, which loses nothing, is worse for it (docs/codec.md).
* **Error feedback.** A decay of 0.95, all of it at the end of a training (SparseLoCo, arXiv 2508.15706, at 512 M). What
  is better for a quarter of a million parameters is worse for three (docs/codec.md).
* **Loss.** Hoffmann et al. (arXiv 2203.15556, approach 3), on their text: a direction, not a promise.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from templar.errors import PermanentError, Reason
from templar.hparams import HParams, Model
from templar.training.device import (
    COPIED_BYTES_PER_SECOND,
    PEAK_FLOPS,
    finish_seconds,
    flops_per_token,
    num_parameters,
    num_second_moments,
)
from templar.training.model import InnerOptimizer

HEAD = 128
WIDTHS = range(256, 16385, 256)
SMALL, LARGE = (1e8, 64.0), (8e9, 128.0)  # parameters without embeddings, width over depth
GROUPED_FROM = 4e9  # parameters from which four query heads share a key head, as in Llama 3
MFU = 0.40  # assumed: nanochat 41 % at 0.11 B on an H100; this trainer 43 % and 51 % on an H200 (docs/miner.md)
BUSY = 0.95  # least share of a window that the reference device's inner steps take
BATCH_TOKENS, BATCH_PARAMETERS, BATCH_POWER = 2**19, 235e6, 0.38
MAX_INNER_STEPS = 500
SHARD_TOKENS = 2**34
STEP_BATCHES, SHARD_LINK = (4, 2), 0.1  # batches of a faster device's step; share of the downlink for shards
SAMPLES_PER_PAGE = 64
SHARED = 64  # a large batch is a multiple of it, so that so many devices or fewer can share it
WEIGHTS_BLOCKS = 100  # between two settings of weights, on most subnets
RATE, RATE_PARAMETERS, RATE_POWER = 1.5e-3, 124e6, -0.4
ENOUGH = 20  # tokens per parameter (Hoffmann et al.)
WARMUP_SHARE = 0.02
DENSITIES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)  # of the coefficients of a chunk
DENSITY_COST = 0.02  # of a window, for a denser code than the sparsest
DENSE = 1 / 16  # from here on sums are divided by the number of payloads
DENSE_OUTER_RATE, DENSE_OWN_EXPONENT = 1.1, 2.0
MIDDLE, SLOW_AVERAGE = 0.5, 0.025  # where payloads of a dense code are measured, and how fast their averages move
MANY = 10  # miners from which on it is so: a payload of fewer is a large part of the step, and bends it by itself
FEEDBACK_DECAY, FEEDBACK_CARRY = 0.95, 0.0
WANTED_OUTER_STEPS = 1000  # to learn as well as in one place (hypertrain's assumption: 1,000 to 3,000)
MOST_BLOCKS = 125  # of a window
GRACE_BLOCKS = 2.5  # with 1.5, three of 140 networks with difficult chains lost a window; with this, none did
WHY_LESS_BUSY = f"a window has at most {MOST_BLOCKS} blocks: endpoints keep the chain's state of 256, of two windows"
DECIDING_SECONDS = 6.0  # to see who published, to vote and to see the decision
TRAIN_MARGIN_SECONDS = 6.0
FOUND_SECONDS = 5.0  # from the close until a miner knows all reveals, without transfers (benchmarks.idle)
DECIDED_SECONDS = 11.0  # from the settling second until the window is decided and proven (benchmarks.idle)
LEARNED_MARGIN_SECONDS = 3.0  # what a miner spares for a commitment once it knows that it takes a second
COMBINE_SECONDS = 2e-9  # per coefficient of a peer, on four threads: on one 7.3e-9 were measured
SPARE_TRANSFER = 3.0  # times that a transfer may take what the link allows
PART_BYTES, PART_USD, READ_USD, GB_USD = 2**24, 4.5e-6, 0.36e-6, 0.015  # R2's prices: per write, read, GB and month
SMALL_WRITES, READS = 6, {"miner": 10.0, "validator": 7.5, "aggregator": 17.5}  # counted, per window; by member


@dataclass(frozen=True)
class Wishes:
    """What a network is designed for."""

    miners: int
    device: str  # a part of a CUDA device's name, as in `PEAK_FLOPS`
    parameters: float | None = None  # without embeddings; None with a depth or a model
    depth: int | None = None
    model: Model | None = None  # an architecture to keep
    devices: int = 1  # of each miner
    uplink: float = 100.0  # Mbit/s of a miner
    downlink: float = 500.0


@dataclass(frozen=True)
class RoleCosts:
    """What a role moves and stores, without the dataset (docs/storage.md, "What it costs")."""

    up_bytes_per_day: float
    down_bytes_per_day: float
    bucket_bytes: float  # once `retention_windows` have passed
    disk_bytes: float
    usd_per_month: float  # of its bucket, in 30 days


@dataclass(frozen=True)
class Expectation:
    """What to expect of a design, at the tokens per second that the rules assume."""

    parameters: int  # with embeddings
    tokens_per_second: float  # of a miner while it trains
    idle_seconds: float  # of a window
    busy_fraction: float
    warmup_share: float  # of the tokens to 20 per parameter
    outer_steps_to_20: float
    tokens_per_day: float  # of the network
    days_to_20: float
    expected_loss: float  # nats per token after 20 tokens per parameter
    payload_bytes: float
    roles: dict[str, RoleCosts]  # miner, validator, aggregator
    shard_samples: int  # that a shard should have, so that its windows read none twice
    why_fewer: str  # than a thousand outer steps; empty if there are as many
    why_less_busy: str  # than 95 % of a window; empty if the device is


@dataclass(frozen=True)
class Design:
    """A preset's sections that follow from the wishes, and what to expect."""

    preset: dict[str, dict[str, Any]]
    expects: Expectation


def design(wishes: Wishes, base: HParams) -> Design:
    """Design a network; what no rule covers stays as in `base`.

    Raises:
        PermanentError: `bad_hparams`; the wishes contradict each other, or no network fits them.
    """
    peak = _checked(wishes)
    model = wishes.model or architecture(wishes, base.model)
    chosen = _with_density(wishes, base, model, peak, DENSITIES[0])
    busy = min(BUSY, chosen.expects.busy_fraction - DENSITY_COST)
    for density in DENSITIES[1:]:
        with suppress(PermanentError):  # its transfers leave no time for an inner step
            denser = _with_density(wishes, base, model, peak, density)
            if denser.expects.busy_fraction >= busy:
                chosen = denser
    return chosen


def _with_density(wishes: Wishes, base: HParams, model: Model, peak: float, density: float) -> Design:
    """The design whose payloads have this share of the coefficients."""
    count, length = num_parameters(model), base.data.sequence_length
    coefficients = max(1, round(density * base.gradient.target_chunk**2))
    payload = count * bits_per_parameter(base.gradient.target_chunk**2, coefficients) / 8
    speed = wishes.devices * MFU * peak / flops_per_token(model, length)
    optimizer: InnerOptimizer = "muon" if density >= DENSE else "adamw"
    windows, idle = _windows(wishes, base, model, optimizer, payload, density=density)
    work = _work(wishes, base, count, speed, idle=idle, least_blocks=windows["blocks_per_window"])
    tokens, seconds = work.steps * work.batch * length, work.blocks * base.windows.block_seconds
    samples = (wishes.miners + base.data.spare_slots) * work.steps * work.batch  # assigned in a window, for each batch
    shard_share = 8e-6 * (2 if model.vocab_size <= 2**16 else 4) * samples * length / (seconds * wishes.downlink)
    batches = next((each for each in STEP_BATCHES if each * shard_share <= SHARD_LINK), 1)
    samples *= batches
    enough, per_step = float(ENOUGH * count), work.batch * length * wishes.miners
    warmup = max(1, int(WARMUP_SHARE * enough / per_step))

    preset: dict[str, dict[str, Any]] = {
        "windows": windows | {"blocks_per_window": work.blocks},
        "model": model.model_dump(mode="json", exclude={"initializer_seed", "max_position_embeddings"}),
        "data": _data(base, work, batches, samples),
        "training": {
            "batch_size": work.batch,
            "micro_batch_size": min(base.training.micro_batch_size, work.batch),
            "inner_steps": work.steps,
            "max_step_batches": batches,
            "optimizer": optimizer,
            "adamw": {"learning_rate": float(f"{RATE * (count / RATE_PARAMETERS) ** RATE_POWER:.2g}")},
            "schedule": {"warmup_steps": warmup, "warmup_start_factor": 0.01, "eta_min_factor": 1.0},
            "outer_learning_rate": DENSE_OUTER_RATE if density >= DENSE else base.training.outer_learning_rate,
        },
        "gradient": {
            "momentum_decay": FEEDBACK_DECAY,
            "feedback_carry": FEEDBACK_CARRY,
            "topk_compression": coefficients,
            "mean_over": "contributors" if density < DENSE else "parts" if batches > 1 else "payloads",
        },
        "peers": {"gather_peer_count": wishes.miners, "reserve_peer_count": _reserve(wishes.miners)},
        "scoring": measuring(wishes.miners, density),
        "weights": _weights(work.blocks, density),
        "storage": {"private_backup_windows": _backup_windows(wishes, model, optimizer, seconds)},
    }
    outer, per_day = enough / (tokens * wishes.miners), 86_400 / seconds
    expects = Expectation(
        parameters=count,
        tokens_per_second=speed,
        idle_seconds=idle,
        busy_fraction=tokens / speed / seconds,
        warmup_share=warmup * per_step / enough,
        outer_steps_to_20=outer,
        tokens_per_day=tokens * wishes.miners * per_day,
        days_to_20=outer / per_day,
        expected_loss=1.69 + 406.4 / count**0.34 + 410.7 / enough**0.28,
        payload_bytes=payload,
        roles=_role_costs(wishes, base, model, optimizer, payload, seconds=seconds),
        shard_samples=preset["data"]["outer_steps_per_shard"] * samples,
        why_fewer=_why_fewer(outer, seconds, count),
        why_less_busy="" if tokens / speed >= BUSY * seconds else WHY_LESS_BUSY,
    )
    return Design(preset, expects)


def architecture(wishes: Wishes, base: Model) -> Model:
    """The shape whose matrices have about as many parameters as wished, or that is as deep as wished."""
    best, least = None, math.inf
    for width in WIDTHS:
        inner = HEAD * round(8 * width / 3 / HEAD)
        heads = width // HEAD
        for groups in {1, 4} if heads % 4 == 0 else {1}:
            layer = 2 * width * width * (1 + 1 / groups) + 3 * width * inner
            depth = wishes.depth or max(1, round((wishes.parameters or 0) / layer))
            count = depth * layer
            if (groups == 4) != (count >= GROUPED_FROM):
                continue
            cost = 0.5 * abs(math.log(width / depth / _aspect(count)))
            cost += 0.0 if wishes.parameters is None else abs(math.log(count / wishes.parameters))
            if cost < least:
                least, best = cost, (width, inner, depth, heads, heads // groups)
    if best is None:
        raise _refused("no architecture of these rules fits: choose other parameters or another depth")
    width, inner, depth, heads, key_heads = best
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth, "head_dim": HEAD}
    return base.model_copy(update=shape | {"num_attention_heads": heads, "num_key_value_heads": key_heads})


def busy_fractions(wishes: Wishes, base: HParams, made: Design) -> dict[str, float]:
    """The share of a window in which each known device would train in this network, with as many to a miner."""
    seconds = made.preset["windows"]["blocks_per_window"] * base.windows.block_seconds
    peak, training = device_peak(wishes.device), seconds - made.expects.idle_seconds
    peak *= made.preset["training"]["max_step_batches"]
    return {name: min(1.0, peak / other) * training / seconds for name, other in PEAK_FLOPS.items()}


def device_peak(name: str) -> float:
    """The peak of a device of the table, FLOP/s; `bad_hparams` with the known names if it is not there."""
    matches = [peak for known, peak in PEAK_FLOPS.items() if name.upper() in (known.upper(), *known.upper().split())]
    if not matches:
        raise _refused(f"the device {name!r} is not in the table: choose one of {', '.join(PEAK_FLOPS)}")
    return max(matches)


def _checked(wishes: Wishes) -> float:
    given = [each for each in (wishes.parameters, wishes.depth, wishes.model) if each is not None]
    if len(given) != 1:
        raise _refused("give exactly one of parameters, depth, and a model to keep")
    for name in ("miners", "devices", "uplink", "downlink", "parameters", "depth"):
        value = getattr(wishes, name)
        if value is not None and not 0 < value < math.inf:
            raise _refused(f"{name} is {value}: it must be above 0")
    return device_peak(wishes.device)


def _windows(
    wishes: Wishes, base: HParams, model: Model, optimizer: InnerOptimizer, payload: float, *, density: float
) -> tuple[dict[str, Any], float]:
    """The section of windows, and the seconds of a window in which the reference device does not train."""
    old, count = base.windows, num_parameters(model)
    up, down = payload * 8e-6 / wishes.uplink, payload * _listed(wishes.miners) * 8e-6 / wishes.downlink
    windows = {
        "commit_guard_seconds": old.commit_guard_seconds,
        "time_window_delta_seconds": math.ceil(GRACE_BLOCKS * old.block_seconds + SPARE_TRANSFER * up),
        "roster_slot_seconds": math.ceil(4 * DECIDING_SECONDS + SPARE_TRANSFER * down),
        "train_margin_seconds": TRAIN_MARGIN_SECONDS,
    }
    changed = old.model_copy(update=windows)
    combine = COMBINE_SECONDS * density * count * wishes.miners
    step = 4 * count / COPIED_BYTES_PER_SECOND + combine  # the outer step at the speed of a copy
    rest = step + finish_seconds(model, optimizer) + changed.commit_guard_seconds
    gathered = max(changed.settle_delay_seconds, up + down)  # nodes fetch what is revealed before it settles
    decided = gathered + DECIDED_SECONDS + rest + TRAIN_MARGIN_SECONDS
    least = min(MOST_BLOCKS, math.ceil(decided / (1 - BUSY) / old.block_seconds))
    shortest = math.ceil(2 * changed.reserved_seconds / old.block_seconds)
    if shortest > MOST_BLOCKS:
        raise _refused(f"payloads need windows of {shortest} blocks, not {MOST_BLOCKS}: faster links or fewer miners")
    found = FOUND_SECONDS + up + payload * wishes.miners * 8e-6 / wishes.downlink
    return windows | {"blocks_per_window": max(least, shortest)}, found + rest + LEARNED_MARGIN_SECONDS


@dataclass(frozen=True)
class _Work:
    """What a miner does in a window of so many blocks."""

    blocks: int
    batch: int  # sequences
    steps: int


def _work(wishes: Wishes, base: HParams, count: int, speed: float, *, idle: float, least_blocks: int) -> _Work:
    """Batch and whole inner steps that fill the shortest window in which the device is busy enough."""
    length, block = base.data.sequence_length, base.windows.block_seconds
    wanted = BATCH_TOKENS * (count / BATCH_PARAMETERS) ** BATCH_POWER / wishes.miners
    most = speed * (least_blocks * block - idle) / MAX_INNER_STEPS
    sequences = max(1.0, wanted / length, most / length)
    shares = sequences / SHARED
    batch = SHARED * math.ceil(shares) if shares > 1 else int(2 ** math.ceil(math.log2(sequences)))
    step_seconds, blocks = batch * length / speed, least_blocks
    while (steps := int((blocks * block - idle) / step_seconds)) * step_seconds < BUSY * blocks * block:
        if blocks >= MOST_BLOCKS:
            break
        blocks += 1
    if not steps:
        raise _refused(f"one inner step takes {step_seconds:.0f} s, a window has less: take more or faster devices")
    return _Work(blocks, batch, steps)


def bits_per_parameter(length: int, k: int) -> float:
    """Of a matrix: a chunk of this length has the places of k coefficients, a sign for each, and one scale."""
    return (place_bits(length, k) + k + 8) / length


def place_bits(length: int, k: int) -> float:
    """Bits that the places of k coefficients of a chunk take on the wire: the logarithm of their number, and 1.5 %."""
    number = math.lgamma(length + 1) - math.lgamma(k + 1) - math.lgamma(length - k + 1)
    return 1.015 * number / math.log(2)


def _aspect(count: float) -> float:
    (small, low), (large, high) = SMALL, LARGE
    share = min(1.0, max(0.0, math.log(count / small) / math.log(large / small)))
    return low * (high / low) ** share


def _private_bytes(model: Model, optimizer: InnerOptimizer) -> float:
    """Of a private state: error feedback and moments."""
    return 8.0 * num_parameters(model) + 4.0 * num_second_moments(model, optimizer)


def _backup_windows(wishes: Wishes, model: Model, optimizer: InnerOptimizer, seconds: float) -> int:
    """Windows of so many seconds between two backups: four hours, or what takes a tenth of the uplink."""
    backup = 4.0 * num_parameters(model) + _private_bytes(model, optimizer)
    return math.ceil(max(4 * 3600.0, 8e-6 * backup / (0.1 * wishes.uplink)) / seconds)


def _reserve(miners: int) -> int:
    return math.ceil(miners / 2)


def _listed(miners: int) -> int:
    return miners + _reserve(miners)


def _data(base: HParams, work: _Work, batches: int, samples: int) -> dict[str, Any]:
    """The section of data: as many pages as the inner steps take, and shards that last for some windows."""
    return {
        "layout": "shards",
        "samples_per_page": SAMPLES_PER_PAGE,
        "pages_per_window": math.ceil(batches * work.steps * work.batch / SAMPLES_PER_PAGE),
        "outer_steps_per_shard": max(
            SHARD_TOKENS // (samples * base.data.sequence_length), base.storage.snapshot_frequency
        ),
    }


def measuring(miners: int, density: float) -> dict[str, Any]:
    """How payloads are measured: of a dense code and many miners in the middle of the step (docs/validator.md)."""
    dense, middle = density >= DENSE, density >= DENSE and miners >= MANY
    return {
        "eval_lr_factor": round(1 / miners, 4) if dense else 0.2,
        "eval_step_share": MIDDLE if middle else 0.0,
        "binary_score_ma_alpha": SLOW_AVERAGE if middle else 0.05,
    }


def _weights(blocks: int, density: float) -> dict[str, Any]:
    """The section of weights, with windows of so many blocks."""
    exponent = DENSE_OWN_EXPONENT if density >= DENSE else 1.0
    return {"windows_per_weights": math.ceil(WEIGHTS_BLOCKS / blocks + 0.5), "own_data_exponent": exponent}


def _role_costs(
    wishes: Wishes, base: HParams, shape: Model, optimizer: InnerOptimizer, payload: float, *, seconds: float
) -> dict[str, RoleCosts]:
    """What each role moves and stores in windows of so many seconds."""
    storage, miners, model = base.storage, wishes.miners, 4.0 * num_parameters(shape)
    private = _private_bytes(shape, optimizer)
    per_day, kept, backup = 86_400 / seconds, storage.snapshots_kept, model + private
    snapshots, privates = model * (kept + 2), private * (kept + storage.snapshot_frequency)
    received = payload * _listed(miners) * per_day
    checkpoint, checkpoints = model / storage.checkpoint_frequency, model * storage.checkpoints_kept
    payloads = storage.retention_windows * payload

    def costs(role: str, sent: float, stored: float, disk: float) -> RoleCosts:
        """Of what it sends in a window, and what its bucket has in the end."""
        requests = PART_USD * (SMALL_WRITES + sent / PART_BYTES) + READ_USD * READS[role] * (miners + 2)
        return RoleCosts(sent * per_day, received, stored, disk, 30 * per_day * requests + 1e-9 * GB_USD * stored)

    uploads = payload + backup / _backup_windows(wishes, shape, optimizer, seconds)
    published = checkpoints + model + miners * payloads  # by the aggregator
    return {
        "miner": costs("miner", uploads, payloads + 2 * backup, snapshots + privates),
        "validator": costs("validator", checkpoint, checkpoints, snapshots),
        "aggregator": costs("aggregator", checkpoint + miners * payload, published, snapshots),
    }


def _why_fewer(outer: float, seconds: float, count: int) -> str:
    if outer >= WANTED_OUTER_STEPS:
        return ""
    larger = count * math.sqrt(WANTED_OUTER_STEPS / outer)
    return (
        f"a window of {seconds:.0f} s keeps the devices busy, and they reach {ENOUGH} tokens per parameter after "
        f"{outer:.3g} of them: {WANTED_OUTER_STEPS} outer steps would need {WANTED_OUTER_STEPS / outer:.3g} times the "
        f"tokens, or a model of about {larger / 1e9:.2g} billion parameters"
    )


def _refused(why: str) -> PermanentError:
    return PermanentError(Reason.BAD_HPARAMS, why)
