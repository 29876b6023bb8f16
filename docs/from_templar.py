"""The tables of docs/from-templar.md: a word of the reference (templar 2.1.3 and 0.2.x), and what has its place here.

A name between backquotes in the last column is held against the code: a setting of `hparams.json`, a variable of
`.env.example`, a command, a flow, a figure, an object key, or `file.py:name`. What is not there is a ValueError.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from blocks.environment import SUCCESSORS
from deployments.command import COMMANDS
from templar.exchange.object_keys import Kind
from templar.hparams import load_hparams
from templar.reports.metrics import HELP

ROOT = Path(__file__).resolve().parent.parent
PRESET = "templar-2.1.3"
Row = tuple[str, str]

SETTINGS: tuple[Row, ...] = (
    ("blocks_per_window", "`windows.blocks_per_window`"),
    ("time_window_delta_seconds", "`windows.time_window_delta_seconds`"),
    ("validator_offset, in windows", "`scoring.validator_offset`, in blocks: validators measure a window at once"),
    ("inner_steps", "`training.inner_steps`, and `training.max_step_batches` for fast devices"),
    ("batch_size, micro_batch_size", "`training.batch_size`, `training.micro_batch_size`"),
    ("target_batch_size", "the data of a window is what its steps can use: `data.pages_per_window`"),
    (
        "optimizer.adamw.learning_rate",
        "`training.adamw.learning_rate`; its schedule is `training.schedule.t_max`, `training.schedule.warmup_steps`",
    ),
    (
        "optimizer.type, optimizer.muon",
        "`training.optimizer`, `training.muon_learning_rate`; an operator's `TEMPLAR_OPTIMIZER`",
    ),
    ("outer_learning_rate", "`training.outer_learning_rate`"),
    ("learning_rate (0.2.x)", "`training.outer_learning_rate`, in the recipe demo"),
    ("weight_decay", "`training.weight_decay` of the outer step, `training.adamw.weight_decay` of the inner one"),
    ("momentum_decay", "`gradient.momentum_decay`"),
    (
        "topk_compression, target_chunk, use_dct",
        "`gradient.topk_compression`, `gradient.target_chunk`, `gradient.use_dct`",
    ),
    ("quantization_bins, quantization_range", "none: signs and one scale for each chunk"),
    ("sequence_length, tokenizer_name", "`data.sequence_length`, `data.tokenizer_name`"),
    ("pages_per_window, outer_steps_per_shard", "`data.pages_per_window`, `data.outer_steps_per_shard`"),
    ("model_size, hidden_size, ...", "a preset, `TEMPLAR_PRESET`; `model.hidden_size` and the rest of its section"),
    ("gather_peer_count, reserve_peer_count", "`peers.gather_peer_count`, `peers.reserve_peer_count`"),
    ("max_topk_peers, topk_peers (0.2.x)", "`peers.gather_peer_count`"),
    ("minimum_peers, peer_replacement_frequency", "`peers.minimum_peers`, `peers.peer_replacement_frequency`"),
    ("peer_list_window_margin", "`peers.peer_list_window_margin`"),
    (
        "recent_windows, active_check_interval",
        "`peers.recent_windows`; a reveal that counts is the activity, nobody polls",
    ),
    (
        "uids_per_window, num_evaluation_bins",
        "none: every miner is measured in every window, `scoring.exact_miners` of them twice",
    ),
    ("validator_sample_rate, validator_sample_micro_bs", "`scoring.eval_sequences`"),
    ("eval_lr_factor", "`scoring.eval_lr_factor`"),
    ("binary_score_ma_alpha", "`scoring.binary_score_ma_alpha`"),
    ("openskill_beta, openskill_tau", "`scoring.openskill_beta`, `scoring.openskill_tau`"),
    (
        "sync_max_steps_behind, reset_inactivity_windows",
        "`scoring.sync_max_steps_behind`, `scoring.reset_inactivity_windows`",
    ),
    ("gather_peers_slash_threshold", "`scoring.low_success_rate`"),
    ("idx_overlap_threshold", "`scoring.overlap_level`, beyond chance"),
    (
        "gather_share, gather_top_ratio, reserve_decay_ratio",
        "`weights.gather_share`, `weights.gather_top_ratio`, `weights.reserve_decay_ratio`: one of three rules",
    ),
    (
        "power_normalisation, burn_rate",
        "`weights.power_normalisation` with the rule power, `weights.burn_rate`, `weights.burn_uid`",
    ),
    ("windows_per_weights, checkpoint_frequency", "`weights.windows_per_weights`, `storage.checkpoint_frequency`"),
    ("checkpoint_init_version, checkpoint_init_window", "`templar network init` with --from a model"),
    (
        "torchtitan.dp_shard, activation_checkpoint, compile",
        "`TEMPLAR_RANKS`, `TEMPLAR_SHARDING`, `TEMPLAR_CHECKPOINT_LAYERS`, `TEMPLAR_COMPILE`",
    ),
    ("spec_version, project, windows_per_sync, catch_up_threshold, ...", "none: nothing read them"),
)
ENVIRONMENT: tuple[Row, ...] = (
    (
        "R2_GRADIENTS_*, R2_AGGREGATOR_*, R2_DATASET_*",
        "the same names: `R2_GRADIENTS_ACCOUNT_ID`, `R2_AGGREGATOR_ACCOUNT_ID`, `R2_DATASET_ACCOUNT_ID`, ...",
    ),
    ("R2_DATASET_BUCKET_LIST, DATASET_BINS_PATH", "the same; `R2_DATASET_ENDPOINT` if it is at another vendor"),
    ("WALLET_NAME, WALLET_HOTKEY, NETWORK, NETUID", "the same; `NETUID` has no default"),
    (", ".join(SUCCESSORS), ", ".join(f"`{each}`" for each in SUCCESSORS.values()) + "; a neuron's commands say so"),
    ("WANDB_API_KEY", "the same, or `TEMPLAR_SINK_WANDB_TOKEN`, with `TEMPLAR_SINK_WANDB_PROJECT`"),
    ("HF_TOKEN", "`HF_TOKEN`"),
    ("DOWNLOAD_MAX_WORKERS, TPLR_S3_PART_SIZE", "`storage.download_workers`, `storage.download_part_mib`"),
)
FLAGS: tuple[Row, ...] = (
    (
        "miner.py, validator.py, aggregator.py",
        "`templar neuron start`, with `TEMPLAR_ROLE`; or the flow `miner-window/default`",
    ),
    ("--netuid, --subtensor.network, --wallet.name, ...", "the same, of `templar neuron start`"),
    ("--local, localnet/", "`templar run`, `templar up`"),
    ("--test", "none: `peers.gather_peer_count` says whom to gather"),
    ("--device, --amp-dtype, --actual-batch-size", "`TEMPLAR_DEVICE`, `TEMPLAR_PRECISION`, `TEMPLAR_MICRO_BATCH`"),
    ("--local_rank, torchrun", "`TEMPLAR_RANKS`: `templar neuron start` runs torchrun"),
    ("--project, --use_wandb", "`TEMPLAR_SINK_WANDB_PROJECT`"),
    ("--debug, --trace", "the log of the run in the UI; `templar neuron logs`"),
    ("--profile-iters", "the figures `mfu`, `tokens_per_sec`, `share/training`"),
)
METHODS: tuple[Row, ...] = (
    ("Comms", "`templar/exchange/buckets.py:Buckets`, `templar/store/base.py:ObjectStore`"),
    ("comms.put(gradient)", "`templar/exchange/reveal.py:publish_commit`, `templar/exchange/reveal.py:publish_reveal`"),
    ("comms.get, get_with_retry", "`templar/exchange/reveal.py:fetch_reveal`"),
    ("comms.gather, gather_with_reserve", "`templar/exchange/gather.py:Gatherer`"),
    ("post_peer_list, get_peer_list", "`templar/exchange/peers.py:PeerBook`"),
    ("post_start_window, get_start_window", "`templar/agreement/genesis.py:find_birth`"),
    ("try_commit, get_commitments", "`templar/exchange/buckets.py:announce`"),
    ("TransformDCT, CompressDCT", "`templar/gradient/compress.py:compress_each`, `templar/gradient/dct.py:to_chunks`"),
    ("prepare_gradient_dict", "`templar/neuron/miner.py:compress`"),
    ("outer_step", "`templar/gradient/aggregate.py:outer_step`"),
    ("catchup_with_aggregation_server", "`templar/neuron/catchup.py:catch_up`"),
    ("evaluate_model_on_batches", "`templar/scoring/measure.py:measure`"),
    ("SharedShardedDataset", "`templar/data/assignment.py:Assignment`"),
    ("StreamingDataset", "`templar/datasets/streaming.py:StreamingDataset`, in other programs"),
)
OBJECTS: tuple[Row, ...] = (
    (
        "gradient-{w}-{uid}-v{ver}.pt",
        "`gradient-{window}-{uid}-v{protocol}.bin`, with a `commit` and a `manifest`; no pickle",
    ),
    ("aggregator-{w}-v{ver}.pt", "`aggregator-{window}-v{protocol}.bin`, with a `roster`"),
    (
        "peers_{w}_v{ver}.json, start_window_v{ver}.json",
        "`peers_{window}_v{protocol}.json`, `start_window_v{protocol}.json`",
    ),
    ("debug-{w}-{uid}-v{ver}.pt", "`debug-{window}-{uid}-v{protocol}.json`; a `proof` decides"),
    ("checkpoints/{ver}/{w}/, _LATEST.json", "`checkpoint-{window}-{uid}-v{protocol}/manifest.json` and safetensors"),
)
SCRIPTS: tuple[Row, ...] = (
    ("cleanup_bucket.py", "`templar bucket purge` --temporary or --wipe; `temporary-cleanup/default`"),
    ("s3_manager.py", "`templar bucket ls`, `templar bucket purge` --older-than, --prefix, --suffix or --wipe"),
    (
        "clean_versions.py, delete_gather.py",
        "`templar bucket purge` --version or --aggregates; `bucket-purge/default` does the same from the UI",
    ),
    ("validate_r2_access.py", "`templar bucket access`, `validate-storage-access/default`"),
    ("evaluator.py", "`evaluate-checkpoint/default`, `templar model evaluate`"),
    ("download_dataset.py, shard_scanner.py", "`shard-rotation/default`, `templar dataset verify`"),
    ("analyser.py, get_gradients.py", "`templar why`, `templar audit`"),
)
METRICS: tuple[Row, ...] = (
    (
        "loss, window_entry_loss, tokens_per_sec, batch_tokens",
        "`loss`, `window_entry_loss`, `tokens_per_sec`, `batch_tokens`",
    ),
    (
        "global_step, gather/success_rate, gather_peers",
        "`network/step`, `gather/success_rate`, `gather/successful_uids`",
    ),
    (
        "timing/{gather,training,...}",
        "`timing/gather`, `timing/training`, `timing/window_total`, and shares such as `share/waiting`",
    ),
    (
        "loss/{own,random}/{before,after,improvement}",
        "`loss/own/before`, `loss/own/after`, `loss/own/improvement`, and the same of random",
    ),
    ("gpu_memory_allocated", "`gpu_memory_allocated`"),
)
TABLES = {
    "Hyper-parameters": SETTINGS,
    "Environment": ENVIRONMENT,
    "Command line": FLAGS,
    "Scripts": SCRIPTS,
    "Methods": METHODS,
    "Objects": OBJECTS,
    "Figures": METRICS,
}


def tables() -> str:
    """All tables; ValueError if one names what is not there."""
    return "\n".join(line for title, rows in TABLES.items() for line in _table(title, rows))


def _table(title: str, rows: tuple[Row, ...]) -> Iterator[str]:
    yield from (f"## {title}\n", "| templar | here |", "|---|---|")
    for theirs, ours in rows:
        yield f"| {theirs} | {re.sub('`([^`]+)`', lambda found: held(found[1], title), ours)} |"
    yield ""


def held(name: str, title: str) -> str:
    """The name as it stands in the page, a setting of the first table with its value; ValueError if it is nowhere."""
    section, _, setting = name.partition(".")
    known = _preset()
    if section in known and setting:
        value = known
        for part in name.split("."):
            value = value[part]
        return f"`{name}` ({value})" if title == "Hyper-parameters" else f"`{name}`"
    if not any(_kinds(name)):
        raise ValueError(f"docs/from_templar.py names {name!r} in {title!r}: there is no such thing")
    return f"`{name}`"


@cache
def _preset() -> dict[str, Any]:
    return load_hparams(PRESET).model_dump(mode="json")


def _kinds(name: str) -> Iterator[bool]:
    """Whether a name is that of each kind of thing."""
    file, _, member = name.partition(":")
    yield any(name == f"templar {command.words}" for command in COMMANDS)
    yield (
        re.search(rf"^#? ?{re.escape(name)}=", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
        is not None
    )
    yield name.endswith("/default") and (ROOT / "flows" / f"{name.partition('/')[0].replace('-', '_')}.py").exists()
    yield name in HELP
    yield re.split("[-_]", name)[0] in {kind.partition("_")[0] for kind in Kind}
    yield (ROOT / file).is_file() and re.search(
        rf"(def|class) {member}\b", (ROOT / file).read_text(encoding="utf-8")
    ) is not None
