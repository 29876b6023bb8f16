"""The table of docs/troubles.md: a symptom, what shows its cause, and the usual causes with their remedies.

Each name between backquotes is held against the code, as those of docs/from_templar.py; a reason code against the list.
"""

import re

from docs.from_templar import held
from templar.errors import Reason
from templar.window import Missed

Row = tuple[str, str, str]
STATES = {*map(str, Missed), "CatchingUp", "WeightsRefused", "Skipped"}
TABLES = {"gather", "time", "dataset", "training", "local", "cleanup", "findings"}
"""Table artifacts are called `{kind}-{neuron}`."""

ROWS: tuple[Row, ...] = (
    (
        "The neuron does not start",
        "the line that it ends with; `templar neuron doctor` looks at everything and goes on after the first fault",
        "`bad_environment`: the variables are named. `bad_hparams`: take the network's preset. `bad_wallet`: a hotkey, "
        "or its password. `port_taken`, `already_running`: the message names the process",
    ),
    (
        "No window starts",
        "`templar neuron status`: which process is missing, and until when the newest windows went",
        "`genesis_missing`: the network has not begun. `not_registered`: a hotkey takes part from the window after its "
        "registration. `chain_unreachable`: `NETWORK`. A process that ends again and again: `templar neuron logs`",
    ),
    (
        "Windows end as `Skipped` or `CatchingUp`",
        "the reason in the run's message",
        "`window_finished`: nothing is wrong. `window_passed`: the run came late. "
        "`decision_missing`, `roster_missing`: validators are "
        "away; the node waits. `aggregate_missing`: it takes a checkpoint by itself",
    ),
    (
        "`NothingPublished`",
        "the run's message; `time-{neuron}` for where the time went; `training-{neuron}` for the speed",
        "`no_time_left`: other work on the machine, or a device below the preset's. "
        "`out_of_memory`: `TEMPLAR_MICRO_BATCH`, `TEMPLAR_CHECKPOINT_LAYERS`. `trainer_failed`: the log "
        "of the ranks",
    ),
    (
        "`NothingScored`",
        "the run's message; `gather-{neuron}` has a reason for each miner",
        "`no_time_left`: a device too slow to measure. `commit_unseen`: the validator looked too late. One reason for "
        "all miners: this node's network or clock",
    ),
    (
        "Access denied",
        "`templar bucket access`: each right of each key, and whether it should have it",
        "`access_denied`: a key, a right or the local clock. `read_key_writes`: replace the public key. "
        "`write_key_refused`: a right is missing. `bucket_missing`: the account. `store_refused`: "
        "`TEMPLAR_STORAGE_REGION`, `R2_DATASET_REGION`",
    ),
    (
        "Weights refused",
        "the task `WeightsRefused` with the chain's own words; `templar neuron doctor` for permit, stake and fees",
        "`no_validator_permit`, `not_enough_stake`: stake. `cannot_pay_fees`: the coldkey. `chain_rate_limited`: wait. "
        "`weights_version`: the subnet asks for another release.",
    ),
    (
        "A miner earns nothing",
        "`templar why` with --uid and --window; `templar leaderboard`; `templar neuron rehearse` before it begins",
        "`commit_late`, `reveal_late`: bandwidth, or the store's clock. `time_unproven`: versions or parts. "
        "`no_assignment`: more miners than slots. `own_data_unlearnt`, `index_overlap`, `repeated_payload`: "
        "train on the own assignment. "
        "`desync`: keep it running",
    ),
    (
        "Slow data",
        "`dataset-{neuron}`: reads and failures of each endpoint; `time-{neuron}`",
        "`too_slow`, `store_unreachable`: name several buckets, `R2_DATASET_BUCKET_LIST`. Shards that are fetched "
        "within a window: `shard-rotation/default` has not run, or `disk_full`",
    ),
    (
        "Disk full",
        "`templar neuron doctor`: what is free and what a window writes; `local-{neuron}`",
        "`disk_full`: `storage.shard_budget_gib`. `local_file`: `local-cleanup/default`, `storage.snapshots_kept`, or "
        "another `TEMPLAR_HOME`",
    ),
    (
        "The bucket grows",
        "`templar bucket ls`; `cleanup-{neuron}`",
        "`bucket-cleanup/default` does not run: `templar neuron status`. Uploads that broke off: "
        "`temporary-cleanup/default`. An older release's objects: `templar bucket purge`",
    ),
    (
        "Scheduled work stands still",
        "`templar neuron status`, which is not green if a schedule stalls",
        "`schedule_stalled`: start the neuron again. `server_errors`: the Prefect server's log. A schedule that was "
        "paused stays so, and shows in the UI alone",
    ),
    (
        "The state differs from the others'",
        "`findings-{neuron}`; `templar audit` of the window",
        "`minority`, `root_differs`: it returns to a snapshot by itself. If it repeats: `self_check_failed`, memory or "
        "disk. `plan_unknown`: the owners changed a setting that this release does not know",
    ),
)


def table() -> str:
    """The table; ValueError if it names what is not there."""
    lines = ["| what you see | what shows the cause | usual causes |", "|---|---|---|"]
    for row in ROWS:
        cells = (re.sub("`([^`]+)`", lambda found: _held(found[1]), cell) for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _held(name: str) -> str:
    kind = name.removesuffix("-{neuron}")
    if re.fullmatch("[a-z]+(_[a-z]+)+", name) and name not in set(Reason):
        raise ValueError(f"docs/troubles.py names {name!r}: there is no such reason code")
    if name in STATES or name in set(Reason) or (kind != name and kind in TABLES):
        return f"`{name}`"
    return held(name, "troubles")
