"""Measure what a network loses by its code, and which optimizer, rule of aggregation and error feedback lose least.

    python -m benchmarks.quality [--quick] [--size SIZE] [--rows short] [--seeds N] [--windows N] [--device cuda]
        [--results FILE]

Four workers train a small model on real text (`exchange_rules`), once for every row of the grid and every seed, on the
same data. The table has the held-out loss after the last window in nats per token, mean and spread over the seeds, how
far it is above the best dense exchange with AdamW, and how many times fewer bytes a trained token takes than float32
every ten inner steps: by smaller payloads, or by fewer. With `--results` each network's outcome is appended to a file
with commit and machine, and what the file has is not trained again.

The last line is JSON: the gaps to that exchange of the plain code at its best rate (64 of 4096, error feedback 0.95)
and of the best row that is as small, and what Muon gains over AdamW with dense payloads and with coded ones (negative:
it loses).
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.command import command_line, figures_table, finish
from benchmarks.exchange_rules import Outcome, Row, learn
from benchmarks.pseudo_gradients import Setup, Text, embedded_text
from templar.hparams import HParams, load_hparams

NUM_WORKERS = 4
RATES = (0.001, 0.0014, 0.002)
USUAL_STEPS, LONG_STEPS = 10, 80  # inner steps of a window
SAME_BYTES = 0.99  # a row is as small as the plain one if its payloads are, to a per cent
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "0.25M": {"model": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}},
    "3M": {
        "model": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6},
        "training": {"batch_size": 4, "micro_batch_size": 4},
    },
}

DENSE, PLAIN = Row(code="dense"), Row()
CARRIED = replace(PLAIN, decay=0.8, carry=0.4)
MANY = replace(PLAIN, k=1024)
MUON_MANY = replace(MANY, optimizer="muon", rule="all")
GRID: dict[str, Row] = {
    # 1. What the code costs.
    **{f"dense, AdamW {rate}": replace(DENSE, learning_rate=rate) for rate in (*RATES, 0.004)},
    "dense, AdamW 0.0014, outer 1.2": replace(DENSE, learning_rate=0.0014, outer_rate=1.2),
    "dense, Muon 0.02": replace(DENSE, optimizer="muon"),
    "decay 0.95": PLAIN,
    **{f"decay 0.95, rate {rate}": replace(PLAIN, learning_rate=rate) for rate in RATES},
    # 2. Error feedback: its decay, and a share of it at the beginning of a training.
    "decay 0.8": replace(PLAIN, decay=0.8),
    "decay 0.8, carry 0.4": CARRIED,
    **{f"decay 0.8, carry 0.4, rate {rate}": replace(CARRIED, learning_rate=rate) for rate in (0.001, 0.002, 0.008)},
    # 3. More coefficients, and the divisor of their sum.
    **{f"decay 0.95, {k} of 4096": replace(PLAIN, k=k) for k in (256, 1024, 4096)},
    "decay 0.95, 1024 of 4096, rate 0.0014": replace(MANY, learning_rate=0.0014),
    "decay 0.95, 1024 of 4096, sum / R": replace(MANY, rule="all"),
    "decay 0.95, 1024 of 4096, sum / R, rate 0.0014": replace(MANY, rule="all", learning_rate=0.0014),
    # 4. Muon through the code.
    "Muon 0.01, carry 0.4": replace(CARRIED, optimizer="muon", matrix_rate=0.01),
    "Muon 0.02, 4096 of 4096": replace(PLAIN, optimizer="muon", k=4096),
    "Muon 0.02, 1024 of 4096, sum / R": MUON_MANY,
    "Muon 0.02, 1024 of 4096, sum / R, rate 0.001": replace(MUON_MANY, learning_rate=0.001),
    "Muon 0.02, 1024 of 4096, sum / R, rate 0.001, outer 1.2": replace(MUON_MANY, learning_rate=0.001, outer_rate=1.2),
}
QUICK = (
    "dense, AdamW 0.004",
    "decay 0.95",
    "decay 0.8, carry 0.4, rate 0.008",
    "dense, Muon 0.02",
    "Muon 0.01, carry 0.4",
)
SHORT: Mapping[str, Sequence[str]] = {  # by size: a larger model wants lower rates
    "0.25M": (
        "dense, AdamW 0.002",
        "dense, AdamW 0.004",
        "decay 0.95",
        "decay 0.8",
        "decay 0.8, carry 0.4",
        "decay 0.8, carry 0.4, rate 0.008",
    ),
    "3M": (
        *(f"dense, AdamW {rate}" for rate in RATES),
        *(f"decay 0.95, rate {rate}" for rate in RATES),
        "decay 0.95, 1024 of 4096, rate 0.0014",
        "decay 0.95, 1024 of 4096, sum / R, rate 0.0014",
        "decay 0.8, carry 0.4, rate 0.001",
        "decay 0.8, carry 0.4, rate 0.002",
    ),
}

LONG: Mapping[str, Sequence[str]] = {  # windows of many inner steps: more coefficients at the same bytes per token
    "0.25M": (
        "dense, AdamW 0.004",
        "decay 0.95",
        *(f"{LONG_STEPS} steps, {name}" for name in ("dense, AdamW 0.004", "dense, Muon 0.02", "decay 0.95")),
        *(f"{LONG_STEPS} steps, decay 0.95, {k} of 4096" for k in (256, 1024, 4096)),
        f"{LONG_STEPS} steps, decay 0.95, 1024 of 4096, sum / R",
        f"{LONG_STEPS} steps, Muon 0.02, 4096 of 4096",
        f"{LONG_STEPS} steps, Muon 0.02, 1024 of 4096, sum / R",
    ),
    "3M": (
        "dense, AdamW 0.0014",
        "decay 0.95, rate 0.0014",
        f"{LONG_STEPS} steps, Muon 0.02, 1024 of 4096, sum / R, rate 0.001",
        f"{LONG_STEPS} steps, Muon 0.02, 1024 of 4096, sum / R, rate 0.001, outer 1.2",
    ),
}
GRID |= {
    name: replace(GRID[name.removeprefix(f"{LONG_STEPS} steps, ")], inner_steps=LONG_STEPS)
    for names in LONG.values()
    for name in names
    if name not in GRID
}

ROWS = {"all": 30, "short": 30, "long": 64}  # and their windows
Outcomes = Mapping[str, Sequence[Outcome]]  # by name of the row, one for each seed


def network(size: str, seed: int, inner_steps: int = USUAL_STEPS) -> HParams:
    """The hyper-parameters of a size, with the chunks of large models."""
    base: dict[str, dict[str, Any]] = {
        "model": {"max_position_embeddings": 128, "initializer_seed": seed},
        "data": {"sequence_length": 128, "pages_per_window": -(-inner_steps // USUAL_STEPS)},
        "training": {"inner_steps": inner_steps, "batch_size": 8, "micro_batch_size": 8},
        "gradient": {"target_chunk": 64, "topk_compression": 64},
    }
    for section, settings in SIZES[size].items():
        base[section] |= settings
    return load_hparams("local", overrides=base)


def measure(
    names: Sequence[str], size: str, *, seeds: int, windows: int, device: str, results: Path | None
) -> dict[str, list[Outcome]]:
    """Train the networks of these rows, seed by seed, on the same number of tokens; those that the file has are read.

    Args:
        names: The rows.
        size: Parameters of the model.
        seeds: Networks of each row.
        windows: Of the usual number of inner steps; a row with longer windows has fewer.
        device: Of torch.
        results: The file.
    """
    known = dict(_read(results)) if results is not None and results.exists() else {}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    with embedded_text() as text:
        for seed in range(seeds):
            setup_of = cache(partial(_setup, text, size, seed, windows))
            for name in track(names, description=f"seed {seed}", console=Console(stderr=True)):
                key = json.dumps([size, seed, windows, device, asdict(GRID[name])], sort_keys=True)
                if key not in known:
                    known[key] = learn(GRID[name], setup_of(GRID[name].inner_steps), device)
                    _append(results, name, key, known[key])
                outcomes[name].append(known[key])
    return outcomes


def _setup(text: Text, size: str, seed: int, windows: int, inner_steps: int) -> Setup:
    count = windows * USUAL_STEPS // inner_steps
    return Setup.of(text, seed=seed, workers=NUM_WORKERS, windows=count, hparams=network(size, seed, inner_steps))


def _read(path: Path) -> Iterator[tuple[str, Outcome]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        yield json.dumps(entry["network"], sort_keys=True), Outcome(tuple(entry["losses"]), entry["bits"])


def _append(path: Path | None, name: str, key: str, outcome: Outcome) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        entry = {"name": name, "network": json.loads(key), **asdict(outcome), **_origin()}
        file.write(json.dumps(entry) + "\n")


@cache
def _origin() -> dict[str, str]:
    """The commit and the machine that an outcome comes from."""
    words = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return {"commit": commit.stdout.strip() or "unknown", "machine": machine}


def mean_loss(outcomes: Sequence[Outcome]) -> float:
    """The mean over the seeds of the loss after the last window."""
    return statistics.fmean(one.losses[-1] for one in outcomes)


def ratio(name: str, found: Sequence[Outcome]) -> float:
    """How many times fewer bytes a trained token takes than float32 does every ten inner steps."""
    return found[0].ratio * GRID[name].inner_steps / USUAL_STEPS


def figures_of(outcomes: Outcomes) -> dict[str, Any]:
    """The figures of the last line."""

    def best(*optimizers: str, dense: bool) -> str | None:
        rows = [
            name
            for name, found in outcomes.items()
            if GRID[name].optimizer in optimizers and (GRID[name].code == "dense") == dense
            if dense or ratio(name, found) >= smallest
        ]
        return min(rows, key=lambda name: mean_loss(outcomes[name]), default=None)

    plain = [name for name in outcomes if replace(GRID[name], learning_rate=PLAIN.learning_rate) == PLAIN]
    today = min(mean_loss(outcomes[name]) for name in plain)
    smallest = SAME_BYTES * ratio(plain[0], outcomes[plain[0]])
    dense, coded = best("adamw", dense=True), best("adamw", dense=False)
    chosen = best("adamw", "muon", dense=False)
    if dense is None or coded is None or chosen is None:
        raise ValueError("the rows have no dense exchange and no coded one")
    floor = mean_loss(outcomes[dense])
    figures: dict[str, Any] = {
        "gap_today": today - floor,
        "gap_best": mean_loss(outcomes[chosen]) - floor,
        "best": chosen,
        "dense": dense,
    }
    for name, is_dense, base in (("muon_dense_gain", True, dense), ("muon_coded_gain", False, coded)):
        muon = best("muon", dense=is_dense)
        figures[name] = None if muon is None else mean_loss(outcomes[base]) - mean_loss(outcomes[muon])
    figures["holds"] = figures["gap_best"] <= figures["gap_today"] / 2
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}


def _print(outcomes: Outcomes, base: str, size: str, windows: int) -> None:
    floor = outcomes[base]
    title = f"{size} parameters, {NUM_WORKERS} workers, {windows} windows, {len(floor)} seeds"
    table = figures_table(title, "network", "times smaller", "held-out loss", "spread", f"above {base}, by seed")
    for name, found in outcomes.items():
        last = [one.losses[-1] for one in found]
        gaps = " ".join(f"{one - other.losses[-1]:+.3f}" for one, other in zip(last, floor, strict=True))
        spread = max(last) - min(last)
        table.add_row(name, f"{ratio(name, found):.0f}", f"{mean_loss(found):.3f}", f"{spread:.3f}", gaps)
    Console(width=140).print(table)


def main() -> int:
    """Parse the command line, measure, print."""
    parser = command_line("quality", __doc__, quick="five rows, one seed, four windows")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--size", choices=SIZES, default="0.25M", help="parameters of the model")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each row")
    parser.add_argument(
        "--rows",
        choices=ROWS,
        default="all",
        help="`short`: what decides the error feedback; `long`: windows of many inner steps",
    )
    parser.add_argument("--windows", type=int, help="of ten inner steps; 30, for `long` 64")
    parser.add_argument("--device", default="cpu", help="device of torch")
    parser.add_argument("--results", type=Path, metavar="FILE", help="outcomes so far, and where new ones are appended")
    chosen = parser.parse_args()
    named = {"all": tuple(GRID), "short": SHORT[chosen.size], "long": LONG[chosen.size]}
    names = QUICK if chosen.quick else named[chosen.rows]
    seeds, windows = (1, 4) if chosen.quick else (chosen.seeds, chosen.windows or ROWS[chosen.rows])
    found = measure(names, chosen.size, seeds=seeds, windows=windows, device=chosen.device, results=chosen.results)
    figures = figures_of(found)
    _print(found, figures["dense"], chosen.size, windows)
    holds = chosen.quick or figures["holds"]
    return finish(figures | {"size": chosen.size, "seeds": seeds, "windows": windows, "holds": holds})


if __name__ == "__main__":
    sys.exit(main())
