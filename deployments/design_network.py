"""Design a network: from a size, miners and a device to the settings of a preset, and what to expect of it.

    templar network design --parameters 150M --miners 20 --device 4090 [--json]
    templar network design --model 8B --miners 20 --device h100 --devices 8

The rules and their sources are in `templar/training/design.py`; what no rule covers is taken from a preset (`--base`).
Nothing is written: the sections that are printed go into hparams.json.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console

from deployments.neuron.status import folding_table
from deployments.options import command_parser
from templar.arguments import positive, whole_number
from templar.hparams import load_hparams
from templar.training.design import ENOUGH, Design, RoleCosts, Wishes, busy_fractions, design

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def size(text: str) -> float:
    """Parse a number of parameters, such as 150M or 1.2B."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMB]?)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, such as 150M or 1.2B")
    return float(match[1]) * UNITS[match[2]]


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, design, print."""
    parser = command_parser("templar network design", __doc__, "--json")
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--parameters", type=size, help="of the matrices between the embeddings, such as 150M")
    shape.add_argument("--depth", type=whole_number(1), help="layers")
    shape.add_argument("--model", metavar="PRESET", help="keep this preset's architecture")
    parser.add_argument("--miners", type=whole_number(1), required=True, help="miners of the gather tier")
    parser.add_argument("--device", required=True, help="what a miner trains on, such as 4090 or h100")
    parser.add_argument("--devices", type=whole_number(1), default=1, help="of each miner")
    parser.add_argument("--uplink", type=positive, default=100.0, metavar="MBIT", help="Mbit/s of a miner")
    parser.add_argument("--downlink", type=positive, default=500.0, metavar="MBIT", help="Mbit/s of a miner")
    parser.add_argument("--base", default="150M", metavar="PRESET", help="what no rule covers")
    chosen = parser.parse_args(words)

    base = load_hparams(chosen.base)
    wishes = Wishes(
        miners=chosen.miners,
        device=chosen.device,
        parameters=chosen.parameters,
        depth=chosen.depth,
        model=None if chosen.model is None else load_hparams(chosen.model).model,
        devices=chosen.devices,
        uplink=chosen.uplink,
        downlink=chosen.downlink,
    )
    made = design(wishes, base)
    load_hparams(chosen.base, overrides=made.preset)  # the sections fit together
    busy = busy_fractions(wishes, base, made)
    if chosen.json:
        print(json.dumps(asdict(made.expects) | {"busy_by_device": busy, "preset": made.preset}))
        return 0
    show(made, busy, 24 * wishes.devices, Console(width=120))
    return 0


def costs(role: RoleCosts) -> str:
    """Say what a role moves and stores, and what its bucket costs."""
    return (
        f"{role.up_bytes_per_day / 1e9:.3g} GB up and {role.down_bytes_per_day / 1e9:.3g} GB down per day, "
        f"{role.disk_bytes / 1e9:.3g} GB of disk, {role.bucket_bytes / 1e9:.3g} GB in its bucket "
        f"for {role.usd_per_month:.2f} USD per month on R2"
    )


def show(made: Design, busy: Mapping[str, float], hours: int, console: Console) -> None:
    """Print the sections, and a table of what to expect."""
    console.print_json(json.dumps(made.preset))
    expects = made.expects
    rows = {
        "parameters, with embeddings": f"{expects.parameters:,}",
        "tokens per second of a miner": f"{expects.tokens_per_second:,.0f}",
        "busy share of a window": f"{expects.busy_fraction:.3f}; {expects.idle_seconds:.0f} s are not for training",
        "tokens per day": f"{expects.tokens_per_day:.3g}",
        f"to {ENOUGH} tokens per parameter": f"{expects.days_to_20:.3g} days, {expects.outer_steps_to_20:.3g} windows",
        "share of these in the warm-up": f"{expects.warmup_share:.3f}",
        "loss then": f"{expects.expected_loss:.2f} nats per token by Hoffmann's fit, about 0.1 more by the code; "
        "another text differs by more than that",
        "a payload": f"{expects.payload_bytes / 1e6:.3g} MB",
        **{f"{role}, without the dataset": costs(each) for role, each in expects.roles.items()},
        "a shard of the dataset": f"{expects.shard_samples:,} samples; with fewer, texts come again before the next",
        "a miner's device hours per day": str(hours),
        "busy share of other devices": ", ".join(f"{name} {share:.2f}" for name, share in busy.items()),
        "why so few windows": expects.why_fewer,
        "why not 0.95 busy": expects.why_less_busy,
    }
    said = [row for row in rows.items() if row[1]]
    console.print(folding_table("expected", "", rows=said, title="a design, not a measurement"))
