"""Measure what a role costs per window and month: requests, traffic, stored bytes at R2's prices, and GPU hours.

    python -m benchmarks.costs [--miners N] [--quick]

Counted: the requests of every role in real networks of a few miners, one validator and one aggregator, over a real S3
endpoint (`benchmarks.costs_network`), with the rules of `150M` and of `local`. They grow along a line with the number
of miners. A network of 6 miners, and one with the rules of `70B`, must lie on the line of `150M`; `deviation` has the
differences, as a part of all requests.

Derived: payloads, aggregates, checkpoints, backups and GPU hours, from the preset's numbers. A bill is that of a
bucket's owner: R2 charges it for the requests of all who read there. The last line is JSON.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.costs_network import AGGREGATOR, DATASET, ITSELF, MINER, VALIDATOR, Amount, Counts, Item, count
from templar.agreement.retention import BACKUPS_KEPT
from templar.exchange.object_keys import Kind
from templar.exchange.publish import COMPARE_BYTES
from templar.gradient.layout import Layout
from templar.hparams import HParams, load_hparams
from templar.store.s3_protocol import S3Settings
from templar.training.device import PEAK_FLOPS, flops_per_token
from templar.training.model import parameter_shapes

CLASS_A, CLASS_B, GB_MONTH = 4.50e-6, 0.36e-6, 0.015
"""USD of a request that writes or lists, of one that reads, and of a stored GB (10^9 bytes) for a month of 30 days.

Those of Cloudflare's documentation for R2's standard storage, read in November 2026. Deleting and egress are free.
Nothing is subtracted for the free tier: 10 GB, a million requests of class A, ten million of class B per month."""
WRITING, READING = ("put", "list"), ("get", "head")
MONTH_SECONDS = 30 * 86_400.0
UTILISATION = 0.4
"""Share of the peak of dense bfloat16 products that training and evaluation reach, as in docs/miner.md."""
HOSTS = {"150M": ("RTX 4090", 1), "1B": ("H100", 1), "8B": ("H100", 8), "70B": ("H200", 8)}
"""Preset -> the GPUs that its training is meant for; the small presets train on a CPU."""
PRESETS = ("local", *HOSTS)
LARGE = "150M"
"""The preset whose counts stand for all others but `local`, whose peer list is shorter."""
COUNTED, QUICK_COUNTED = {LARGE: (2, 4), "local": (1, 3)}, {LARGE: (1, 2)}
"""Preset -> the numbers of miners of the two networks that its line goes through."""
CHECKED = [(LARGE, 6), ("70B", 4), ("local", 2)]
"""Networks that must lie on the line."""
FEWEST_WINDOWS = 4
ROLES = (MINER, VALIDATOR, AGGREGATOR)
MOST_DEVIATION = 0.02
LISTING = 1000
"""Keys of a page of a listing."""
CLEANUP_SECONDS, BACKUP_SECONDS = 3600.0, 600.0
"""Runs of `bucket-cleanup`, which lists the bucket twice, and `private-backup`, which looks for the newest."""
S3 = S3Settings()


@dataclass(frozen=True)
class Bill:
    """The costs of one member of a role; requests and bytes are per window."""

    class_a: float  # requests to its bucket, by all
    class_b: float
    sent_bytes: float  # by itself, to any bucket
    received_bytes: float
    stored_bytes: float  # in its bucket, once `retention_windows` have passed
    gpu_hours: float
    usd_per_month: float  # of the bucket


class Line:
    """The growth of requests with the number of miners: a straight line through two counted networks.

    Per bucket the line is exact for any number: each miner reads a bucket alike. Per member it is so up to the length
    of the peer list: a miner or an aggregator fetches no more payloads than that has, a validator all.
    """

    def __init__(self, counted: Mapping[int, Counts]) -> None:
        (self._few, few), (self._many, many) = sorted(counted.items())
        self._counts = few, many
        self.items = sorted(few.keys() | many.keys())

    def amount(self, item: Item, miners: int, *, role: str) -> Amount:
        """Return what is counted of an item in a network, for one member of the role that asks or that is asked."""
        few, many = (
            _divided(counts.get(item, Amount()), number if role == MINER else 1)
            for counts, number in zip(self._counts, (self._few, self._many), strict=True)
        )
        part = (miners - self._few) / (self._many - self._few)
        return Amount(*(one + part * (other - one) for one, other in zip(few.parts, many.parts, strict=True)))

    def total(self, item: Item, miners: int) -> float:
        """The requests of an item in a whole network."""
        role = item.owner
        return self.amount(item, miners, role=role).requests * (miners if role == MINER else 1)


@dataclass(frozen=True)
class Sizes:
    """The bytes of a preset's large objects, and its GPU hours."""

    preset: str
    hparams: HParams
    miners: int

    @cached_property
    def layout(self) -> Layout:
        """Return how the model's tensors are cut."""
        hparams = self.hparams
        return Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)

    @property
    def payload(self) -> int:
        """A payload, at most."""
        return self.layout.max_payload_bytes

    @property
    def aggregate(self) -> int:
        """An aggregate: the payloads of the gather tier."""
        return min(self.miners, self.hparams.peers.gather_peer_count) * self.payload

    @property
    def checkpoint(self) -> int:
        """A published checkpoint: the parameters in float32."""
        return self.layout.dense_bytes

    @property
    def backup(self) -> int:
        """A private backup: parameters, error feedback, and the moments of the recipe's optimizer."""
        return (4 if self.hparams.training.recipe == "sparseloco" else 2) * self.layout.dense_bytes

    @property
    def peers(self) -> int:
        """Miners whose payloads a miner fetches at most."""
        peers = self.hparams.peers
        return min(self.miners, peers.gather_peer_count + peers.reserve_peer_count)

    def of(self, kind: str) -> int | None:
        """The bytes of an object whose size follows from the model; None for another, which is as counted."""
        return {Kind.GRADIENT.value: self.payload, Kind.AGGREGATE.value: self.aggregate}.get(kind)

    def gpu_hours(self, role: str) -> float:
        """Hours of one GPU per window: all inner steps of a miner, or the measurements of a validator."""
        if self.preset not in HOSTS or role == AGGREGATOR:
            return 0.0
        training, scoring, length = self.hparams.training, self.hparams.scoring, self.hparams.data.sequence_length
        if role == MINER:
            sequences = float(training.inner_steps * training.batch_size)
        else:
            # A forward and a backward pass over each miner's segment; then forward passes, a third of that cost, of
            # those that are measured exactly, each over its own segment and those of some others.
            segments = 1 + min(scoring.exact_segments, self.miners - 1)
            exact = min(scoring.exact_miners, self.miners) * segments / 3
            sequences = scoring.eval_sequences * (self.miners + exact)
        work = sequences * length * flops_per_token(self.hparams.model, length)
        return work / (UTILISATION * PEAK_FLOPS[HOSTS[self.preset][0]]) / 3600

    def housekeeping(self, role: str, keys: float) -> float:
        """Requests of class A per window of the scheduled flows; `keys` are objects of the role's bucket."""
        storage, seconds = self.hparams.storage, self.hparams.windows.seconds
        found = 2 * math.ceil(keys / LISTING) * seconds / CLEANUP_SECONDS
        if role != MINER:
            return found + uploads(self.checkpoint) / storage.checkpoint_frequency
        if storage.private_backup_windows == 0:
            return found
        return found + seconds / BACKUP_SECONDS + uploads(self.backup) / storage.private_backup_windows

    def scheduled_bytes(self, role: str) -> float:
        """Bytes per window that the scheduled flows send: backups of a miner, checkpoints of the others."""
        storage = self.hparams.storage
        if role != MINER:
            return self.checkpoint / storage.checkpoint_frequency
        return self.backup / storage.private_backup_windows if storage.private_backup_windows else 0.0

    def kept(self, role: str) -> float:
        """Bytes of the objects that do not belong to a single window: backups, or checkpoints and genesis."""
        storage = self.hparams.storage
        if role == MINER:
            return BACKUPS_KEPT * self.backup if storage.private_backup_windows else 0
        return (storage.checkpoints_kept + (role == AGGREGATOR)) * self.checkpoint


def uploads(num_bytes: int) -> int:
    """Requests that put an object: one, or the beginning, the parts and the end of an upload in parts."""
    return 1 if num_bytes < S3.multipart_threshold_bytes else 2 + math.ceil(num_bytes / S3.part_bytes)


def bill(line: Line, sizes: Sizes, role: str) -> Bill:
    """Return what one member of a role costs in a network of `sizes.miners`."""
    # 1. The requests to its bucket, and what a window leaves there.
    class_a = class_b = stored = keys = 0.0
    for item in line.items:
        if item.owner != role:
            continue
        amount, size = line.amount(item, sizes.miners, role=role), sizes.of(item.kind) if item.found else None
        if item.operation == "put":
            class_a += amount.requests * (1 if size is None else uploads(size))
            keys += amount.requests
            stored += amount.sent if size is None else amount.requests * size
        elif item.operation in WRITING:
            class_a += amount.requests
        elif item.operation in READING:
            class_b += _reads(item, amount, size)
    # 2. What the member itself sends and receives.
    sent, received = sizes.scheduled_bytes(role), 0.0
    for item in line.items:
        if item.who != role and not (item.who == ITSELF and item.owner == role):
            continue
        limited = item.owner == MINER and item.who in (MINER, AGGREGATOR) and item.kind == Kind.GRADIENT
        amount = line.amount(item, sizes.peers if limited else sizes.miners, role=role)
        size = sizes.of(item.kind) if item.found else None
        if item.operation == "put":
            sent += amount.sent if size is None else amount.requests * size
        elif item.owner != DATASET:
            received += (
                amount.received if size is None or item.operation == "head" else _reads(item, amount, size) * size
            )
    # 3. The month.
    windows, storage = MONTH_SECONDS / sizes.hparams.windows.seconds, sizes.hparams.storage
    class_a += sizes.housekeeping(role, keys * storage.retention_windows)
    bytes_kept = stored * storage.retention_windows + sizes.kept(role)
    usd = windows * (class_a * CLASS_A + class_b * CLASS_B) + bytes_kept / 1e9 * GB_MONTH
    return Bill(class_a, class_b, sent, received, bytes_kept, sizes.gpu_hours(role), usd)


def _reads(item: Item, amount: Amount, size: int | None) -> float:
    """Requests that read: an owner reads back what it has put only if it is small."""
    compared = item.who == ITSELF and item.operation == "get" and size is not None and size > COMPARE_BYTES
    return max(0.0, amount.requests - 1) if compared else amount.requests


def _divided(amount: Amount, number: int) -> Amount:
    return Amount(*(part / number for part in amount.parts))


def deviation(line: Line, counts: Counts, miners: int) -> float:
    """The distance of counted requests from the line, as a part of all but those of the dataset and of leases."""
    items = [item for item in {*line.items, *counts} if item.owner != DATASET and "lease" not in item.kind]
    apart = sum(abs(counts.get(item, Amount()).requests - line.total(item, miners)) for item in items)
    return apart / sum(counts.get(item, Amount()).requests for item in items)


def run(miners: int, *, quick: bool) -> dict[str, Any]:
    """Count, print the table, and return the figures."""
    plan = QUICK_COUNTED if quick else COUNTED
    networks = [(preset, number) for preset, numbers in plan.items() for number in numbers]
    if not quick:
        networks += CHECKED
    with ThreadPoolExecutor(max_workers=2 if quick else 1) as pool:
        counted = dict(zip(networks, pool.map(lambda network: _count(*network, quick=quick), networks), strict=True))
    lines = {preset: Line({number: counted[preset, number] for number in few}) for preset, few in plan.items()}
    found = {
        f"{preset}, {number} miners": deviation(lines.get(preset, lines[LARGE]), counts, number)
        for (preset, number), counts in counted.items()
        if number not in plan.get(preset, ())
    }
    bills = {preset: dict(_bills(lines.get(preset, lines[LARGE]), preset, miners)) for preset in PRESETS}
    _show(bills, miners)
    figures = {
        preset: {role: _rounded(asdict(each)) for role, each in roles.items()} for preset, roles in bills.items()
    }
    holds = all(each <= MOST_DEVIATION for each in found.values())
    return {"miners": miners, "presets": figures, "deviation": _rounded(found), "holds": holds}


def _count(preset: str, miners: int, *, quick: bool) -> Counts:
    """Count whole rounds of the peer list, or in haste two windows."""
    every = load_hparams(preset).peers.peer_replacement_frequency
    return count(preset, miners, 2 if quick else every * math.ceil(FEWEST_WINDOWS / every))


def _bills(line: Line, preset: str, miners: int) -> Iterator[tuple[str, Bill]]:
    sizes = Sizes(preset, load_hparams(preset), miners)
    for role in ROLES:
        yield role, bill(line, sizes, role)


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{number:.4g}") for name, number in figures.items()}


def _show(bills: Mapping[str, Mapping[str, Bill]], miners: int) -> None:
    title = f"one member in a network of {miners} miners, one validator and one aggregator"
    table = Table("preset", "role", title=title, box=SIMPLE_HEAD)
    for column in ("class A", "class B", "sent MB", "received MB", "stored GB", "GPU hours", "USD/month"):
        table.add_column(column, justify="right", no_wrap=True)
    for preset, roles in bills.items():
        for role, each in roles.items():
            cells = each.class_a, each.class_b, each.sent_bytes / 1e6, each.received_bytes / 1e6
            hours = f"{each.gpu_hours:.4f}" if each.gpu_hours else "-"
            stored = f"{each.stored_bytes / 1e9:,.2f}"
            table.add_row(
                preset, role, *(f"{cell:,.1f}" for cell in cells), stored, hours, f"{each.usd_per_month:,.2f}"
            )
    console = Console(width=100)
    console.print(table)
    console.print("per window, but for what is stored; requests to its bucket, by all; traffic without the dataset")


def main(words: Iterable[str] | None = None) -> int:
    """Parse the command line, measure, print; 0 if the counts lie on the line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--miners", type=int, default=30, help="miners of the network whose costs are shown (30)")
    parser.add_argument(
        "--quick", action="store_true", help="two smaller networks with the rules of 150M, no check, within a minute"
    )
    arguments = parser.parse_args(None if words is None else list(words))
    figures = run(arguments.miners, quick=arguments.quick)
    print(json.dumps(figures))
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
