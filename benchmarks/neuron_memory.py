"""Measure how much memory and disk a miner and a validator take per parameter, over whole windows.

    python -m benchmarks.neuron_memory [--quick]

A miner or a validator runs in a process of its own, with its files on the disk, in a network on simulated time whose
other nodes are in this process. It does so with models of two depths that are equal otherwise: the slope of the peak
of its resident memory (VmHWM, from the process's start to the end of its last window) is what one more parameter
takes. Activations grow with the depth as well; the batch is small, so that they are a small part of it.

Bytes written are those that the measured process gave to the system's write calls (`wchar` of /proc/self/io), objects
in its bucket included, in as many windows as lie between two snapshots, as the slope between the same two depths. The
last line is JSON; `holds` says whether all three are within their bars.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.command import figures_table, measured
from lab.hotkeys import hotkey_from_seed
from lab.simulate.world import DATASET_BUCKET, DATASET_PREFIX, START_WINDOW, Member, World, hotkey_seed
from templar import interrupt
from templar.chain.ledger import Ledger
from templar.data.dataset import open_training, transfer_of
from templar.exchange.buckets import Buckets, OwnBucket
from templar.hparams import HParams, load_hparams
from templar.neuron.configuration import NeuronConfig
from templar.neuron.miner import Miner
from templar.neuron.validator import Validator
from templar.shared_results import sharing
from templar.store.address import BucketAddress
from templar.store.directory import DirectoryStore
from templar.timeline import first_block
from templar.training.model import parameter_shapes
from templar.window import Action, drive_window

T = TypeVar("T")

SEED = 7
MINERS = 1
SNAPSHOT_FREQUENCY = 4
FIRST_COUNTED = 2  # the first window whose writes count: the one before it also has the downloads of a first start
WINDOWS = FIRST_COUNTED - 1 + SNAPSHOT_FREQUENCY
BARS = {"miner_bytes_per_parameter": 30.0, "validator_bytes_per_parameter": 20.0, "written_bytes_per_parameter": 14.0}
ROLES = {"miner": (Miner, "honest"), "validator": (Validator, "validator")}


@dataclass(frozen=True)
class Footprint:
    """The memory and disk that one process took."""

    parameters: int
    peak: int  # bytes of resident memory
    written: int  # bytes per window


class AskingClock:
    """The time of the network in another process, which stands still until this one waits."""

    def __init__(self, line: Connection) -> None:
        self._line, self._now = line, 0.0
        self.sleep_until(0.0)

    def now(self) -> float:
        """The time when this process waited last."""
        return self._now

    def sleep_until(self, timestamp: float) -> None:
        """Let the time pass there."""
        with interrupt.waiting():
            self._line.send(timestamp)
            self._now = self._line.recv()

    def compute(self, work: Callable[[], T]) -> T:
        """Work takes no time."""
        return work()


def hparams_of(layers: int) -> HParams:
    """A model whose layers have 1.5 M parameters each, and which is trained on few tokens at a time."""
    model = {"hidden_size": 384, "intermediate_size": 896, "num_hidden_layers": layers, "num_attention_heads": 6}
    return load_hparams(
        "local",
        overrides={
            "model": {**model, "num_key_value_heads": 6, "vocab_size": 512, "max_position_embeddings": 32},
            "data": {"sequence_length": 32, "rows_per_page": 4, "pages_per_window": 1},
            "training": {"batch_size": 2, "micro_batch_size": 1, "inner_steps": 2},
            "scoring": {"eval_sequences": 2, "eval_micro_batch_size": 1},
            "storage": {"snapshot_frequency": SNAPSHOT_FREQUENCY, "checkpoint_frequency": 50},
        },
    )


def footprint(role: str, layers: int) -> Footprint:
    """Run a network whose measured node is in a process of its own."""
    with TemporaryDirectory(prefix="templar-memory-") as folder:
        world = World(Path(folder), hparams_of(layers), seed=SEED, actors=["honest"] * MINERS)
        members = world.running
        subject = next(member for member in members if member.role == ROLES[role][1])
        world.stage.open_store(subject.account_id)
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "benchmarks.neuron_memory", "--process", role, str(layers), folder]
        command += [str(subject.uid), str(theirs.fileno())]
        with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE) as process:  # noqa: S603
            theirs.close()
            lives = [partial(live, world, each) if each != subject else partial(wait, world, ours) for each in members]
            with sharing():
                world.stage.run(lives)
            output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"the measured {role} ended with {process.returncode}")
    return Footprint(**json.loads(output))


def live(world: World, member: Member) -> None:
    """Live through the windows as a node in this process."""
    node = world.node(member)
    for window in range(START_WINDOW, START_WINDOW + WINDOWS):
        node.chain.wait_for_block(first_block(window, world.hparams.windows))
        drive_window(node, window)
    node.stop()


def wait(world: World, line: Connection) -> None:
    """Stand in for the measured process, where it has its turn: wait as it waits."""
    with suppress(EOFError):
        while True:
            world.clock.sleep_until(line.recv())
            line.send(world.clock.now())


def context_of(hparams: HParams, root: Path, uid: int, role: str, clock: AskingClock) -> NeuronConfig:
    """Return what the measured node works with: the network's ledger and buckets, and a folder of its own."""
    hotkey = hotkey_from_seed(hotkey_seed(SEED, uid))
    account = Member(role, role, hotkey, uid).account_id

    def opened(bucket: str, *, writable: bool = False) -> DirectoryStore:
        return DirectoryStore(root / "buckets" / bucket, clock=clock.now, writable=writable)

    chain = Ledger(root / "ledger.sqlite", hotkey=hotkey, clock=clock, durable=False)
    own = OwnBucket(BucketAddress(account, "local", "local"), opened(account, writable=True))
    buckets = Buckets(chain, lambda address: opened(address.account_id), own=own, hotkey=hotkey.address)
    home = root / "measured"
    stores, folder, transfer = [opened(DATASET_BUCKET)], home / "shards", transfer_of(hparams.storage)
    opening = partial(open_training, stores, DATASET_PREFIX, folder=folder, transfer=transfer)
    return NeuronConfig(role, home, hparams, chain, buckets, hotkey, opening, gather_concurrency=1)


def process(role: str, layers: str, folder: str, uid: str, line: str) -> None:
    """Be the measured process: live through all windows, and print what that took."""
    hparams = hparams_of(int(layers))
    with Connection(int(line)) as connection:
        node = ROLES[role][0](context_of(hparams, Path(folder), int(uid), role, AskingClock(connection)))
        before = 0
        for window in range(START_WINDOW, START_WINDOW + WINDOWS):
            if window == FIRST_COUNTED:
                before = status("io", "wchar")
            node.chain.wait_for_block(first_block(window, hparams.windows))
            if drive_window(node, window).action is not Action.RUN or node.state.mark.null:
                raise RuntimeError(f"window {window} was not lived through")
        written = (status("io", "wchar") - before) // SNAPSHOT_FREQUENCY
        parameters = sum(node.state.params[name].numel() for name in parameter_shapes(hparams.model))
        print(json.dumps({"parameters": parameters, "peak": 1024 * status("status", "VmHWM"), "written": written}))
        node.stop()


def status(file: str, name: str) -> int:
    """A number that the kernel keeps of this process."""
    lines = Path("/proc/self", file).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def slope(pair: tuple[Footprint, Footprint], count: Callable[[Footprint], int]) -> float:
    """Bytes that one more parameter takes."""
    shallow, deep = pair
    return round((count(deep) - count(shallow)) / (deep.parameters - shallow.parameters), 2)


def run(quick: bool) -> dict[str, Any]:
    """Measure, print the table, and return the figures."""
    deepest = 4 if quick else 7
    found = {role: (footprint(role, 1), footprint(role, deepest)) for role in ROLES}
    figures = {f"{role}_bytes_per_parameter": slope(each, lambda taken: taken.peak) for role, each in found.items()}
    figures["written_bytes_per_parameter"] = slope(found["miner"], lambda taken: taken.written)
    title = f"windows of a network of one miner, a snapshot in every {SNAPSHOT_FREQUENCY}th"
    table = figures_table(title, "role", "parameters", "peak memory, MB", "written per window, MB")
    for role, each in found.items():
        for taken in each:
            table.add_row(role, f"{taken.parameters:,}", f"{taken.peak / 1e6:.1f}", f"{taken.written / 1e6:.1f}")
    Console().print(table)
    return {**figures, "holds": all(figures[name] <= bar for name, bar in BARS.items())}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        process(*sys.argv[2:])
    else:
        sys.exit(measured("neuron_memory", __doc__, run, quick="a smaller difference between the depths"))
