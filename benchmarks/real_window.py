"""One window of the preset `150M`, from the training to the audit, with every role in a process of its own.

    python -m benchmarks.real_window [--quick]

Model, sequence length, layout and all other numbers are the preset's, but for a batch of 8 sequences, one inner step,
two sequences of evaluation, and the tokenizer: the preset's has to be downloaded, so one with as many ids is trained on
this machine's text. A miner trains, compresses, commits and reveals; an aggregator and a validator decide, the latter
measures and publishes its evidence; all three apply; then an auditor without a hotkey rebuilds the window from public
objects. Their buckets are on the embedded S3 endpoint, whose stamps are those of the network's clock: time is
simulated, so a slow machine misses no deadline. One process computes at a time.

Memory is the peak of a process's resident memory (VmHWM) less what it held before it opened its node. Activations of
one sequence, logits and compiled code count, which `benchmarks.neuron_memory`, a slope, leaves out. Bytes written are
those of the system's write calls (`wchar` of /proc/self/io), to which objects sent to the endpoint do not count: of the
window, which has no snapshot, and a quarter of a snapshot that is taken after it, as one lies in every 4 windows. Bytes
sent and received are bodies, counted by the endpoint. The last line is JSON.
"""

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.command import measured
from benchmarks.neuron_memory import BARS, SNAPSHOT_FREQUENCY, AskingClock, status
from deployments.s3_endpoint import (
    HOST,
    AccessKey,
    Application,
    BucketKeys,
    EndpointAdmin,
    create_bucket_with_keys,
    enforcing_application,
    open_server,
)
from lab.hotkeys import hotkey_from_seed
from lab.simulate.world import (
    DATASET_BUCKET,
    DATASET_PREFIX,
    GENESIS_TIME,
    START_WINDOW,
    Member,
    World,
    hotkey_seed,
)
from templar.audit.evidence_audit import Auditor
from templar.chain.clock import SimulatedClock
from templar.chain.ledger import Ledger
from templar.data.dataset import open_training, transfer_of
from templar.exchange.buckets import Buckets, OwnBucket
from templar.hparams import PRODUCTION_TRAINER, HParams, load_hparams
from templar.neuron.aggregator import Aggregator
from templar.neuron.configuration import NeuronConfig
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.neuron.validator import Validator
from templar.neuron.window_time import StepTime, WindowTime
from templar.store.address import BucketAddress
from templar.store.s3 import S3Store
from templar.store.s3_protocol import S3Settings
from templar.timeline import first_block
from templar.training.model import parameter_shapes
from templar.window import Action, open_window, take_steps

SEED = 7
PRESET, QUICK_PRESET = "150M", "simulation"
BATCH, INNER_STEPS, EVAL_SEQUENCES = 8, 1, 2
TRAINER = PRODUCTION_TRAINER.model_copy(update={"micro_batch": 1, "checkpoint_layers": 1, "inner_snapshot_seconds": 0})
"""The settings of a miner that has little memory."""
AUDITOR = "auditor"
ROLES: dict[str, type[Node]] = {"aggregator": Aggregator, "validator": Validator, "miner": Miner}
ACTOR = "honest"
"""The name of this miner in the world."""
READ_SECONDS, PART_BYTES = 300.0, 128 << 20
"""The endpoint's silence that a store waits for, and its parts: for each the endpoint reads the whole object."""


def hparams_of(preset: str) -> HParams:
    """The preset with the numbers of this benchmark."""
    return load_hparams(
        preset,
        overrides={
            "training": {"batch_size": BATCH, "inner_steps": INNER_STEPS},
            "scoring": {"eval_sequences": EVAL_SEQUENCES},
            "data": {"tokenizer_name": "embedded"},
        },
    )


@dataclass
class Traffic:
    """Bodies that a role exchanged with the endpoint, in bytes."""

    sent: int = 0
    received: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def counting(self, application: Application) -> Application:
        """The application as one role reaches it."""

        def counted(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            with self.lock:
                self.sent += int(environ.get("CONTENT_LENGTH") or 0)
            for piece in application(environ, start_response):
                with self.lock:
                    self.received += len(piece)
                yield piece

        return counted


class S3Stage:
    """Buckets on the embedded endpoint, on simulated time; a `Stage`. Every role has an address of its own there."""

    genesis_time = GENESIS_TIME
    gather_concurrency = 1

    def __init__(
        self,
        roles: Sequence[str],
        resources: ExitStack,
        traffic_of: Callable[[SimulatedClock], Traffic] = lambda clock: Traffic(),
    ) -> None:
        self._clock = SimulatedClock(GENESIS_TIME)
        stamp = lambda: datetime.fromtimestamp(self._clock.now(), UTC).replace(tzinfo=None)  # noqa: E731
        application, key = enforcing_application()
        resources.enter_context(patch("moto.s3.models.utcnow", stamp))
        self.traffic = {role: traffic_of(self._clock) for role in ("", *roles)}
        self.urls = {}
        for role, traffic in self.traffic.items():
            server = open_server(traffic.counting(application), 0)
            self.urls[role] = f"http://{HOST}:{server.server_port}"
            threading.Thread(target=server.serve_forever, name=f"endpoint-{role}", daemon=True).start()
            resources.callback(server.shutdown)
        self._admin = EndpointAdmin(self.urls[""], key)
        self._keys: dict[str, BucketKeys] = {}

    @property
    def clock(self) -> SimulatedClock:
        """Simulated time, which the endpoint stamps as well."""
        return self._clock

    def keys(self, bucket: str) -> BucketKeys:
        """The keys of a bucket, which is made when needed."""
        if bucket not in self._keys:
            self._keys[bucket] = create_bucket_with_keys(self._admin, bucket)
        return self._keys[bucket]

    def open_store(self, bucket: str) -> S3Store:
        """A bucket with write rights."""
        return opened(self.urls[""], bucket, self.keys(bucket).write)

    def open_reader(self, address: BucketAddress) -> S3Store:
        """An account's bucket."""
        return reader(self.urls[""], address)

    def address_of(self, member: Member) -> BucketAddress:
        """The account and the key that may only read."""
        read = self.keys(member.account_id).read
        return BucketAddress(member.account_id, read.access_key_id, read.secret_access_key)

    def run(self, participants: Sequence[Callable[[], None]]) -> None:
        """One at a time, in the same order every time."""
        self._clock.run(participants)


def opened(url: str, bucket: str, key: AccessKey) -> S3Store:
    """A bucket, opened with a key."""
    settings = S3Settings(read_timeout_seconds=READ_SECONDS, part_bytes=PART_BYTES, concurrency=1)
    return S3Store(
        bucket,
        endpoint_url=url,
        access_key_id=key.access_key_id,
        secret_access_key=key.secret_access_key,
        settings=settings,
    )


def reader(url: str, address: BucketAddress) -> S3Store:
    """An account's bucket, opened with the key that its owner committed on chain."""
    return opened(url, address.bucket, AccessKey(address.access_key_id, address.secret_access_key))


@dataclass(frozen=True)
class Given:
    """The settings that the process of a role is given."""

    role: str
    preset: str
    folder: Path
    url: str
    dataset: AccessKey
    uid: int | None = None  # none for the auditor
    address: BucketAddress | None = None
    write: AccessKey | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of the window in one process."""

    role: str
    message: str
    parameters: int
    base_bytes: int  # peak of the resident memory before the node was opened
    peak_bytes: int  # of the resident memory, at the end
    steps: dict[str, StepTime]  # the opening of the node first
    written_bytes: int = 0  # in the window
    snapshot_bytes: int = 0
    root: str | None = None
    problems: tuple[str, ...] = ()  # reasons of rejected peers and missed duties, findings, differences
    payload_bytes: int | None = None
    loss: float | None = None  # of the training, or of the evaluation
    scored: int | None = None  # payloads that a validator measured exactly

    @property
    def memory(self) -> float:
        """Bytes of memory per parameter, above those of the process without a node."""
        return (self.peak_bytes - self.base_bytes) / self.parameters

    @property
    def written(self) -> float:
        """Bytes per parameter written to the disk per window, with a snapshot in every fourth one."""
        return (self.written_bytes + self.snapshot_bytes / SNAPSHOT_FREQUENCY) / self.parameters

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of every step, without the wait for the network's time."""
        return {name: step.seconds for name, step in self.steps.items()}


def context_of(given: Given, clock: AskingClock) -> NeuronConfig:
    """Return what the node of a process works with: the network's ledger and buckets, and a folder of its own."""
    hparams, home = hparams_of(given.preset), given.folder / given.role
    hotkey = None if given.uid is None else hotkey_from_seed(hotkey_seed(SEED, given.uid))
    chain = Ledger(given.folder / "ledger.sqlite", hotkey=hotkey, clock=clock, durable=False)
    own = None
    if given.address is not None and given.write is not None:
        own = OwnBucket(given.address, opened(given.url, given.address.bucket, given.write))
    address = None if hotkey is None else hotkey.address
    buckets = Buckets(chain, partial(reader, given.url), own=own, hotkey=address)
    dataset, transfer = opened(given.url, DATASET_BUCKET, given.dataset), transfer_of(hparams.storage)
    data = partial(open_training, [dataset], DATASET_PREFIX, hparams.data, home / "shards", transfer)
    return NeuronConfig(given.role, home, hparams, chain, buckets, hotkey, data, gather_concurrency=1, trainer=TRAINER)


def live(given: Given, line: Connection) -> None:
    """Be a role's process: do its part of the window, and send what came of it."""
    config = context_of(given, AskingClock(line))
    outcome = audited(config) if given.uid is None else lived(ROLES[given.role], config)
    line.send(outcome)


def lived(kind: type[Node], config: NeuronConfig) -> Outcome:
    """The window of a miner, an aggregator or a validator."""
    base, opening_time, results = resident(), WindowTime(), dict[str, Any]()
    with opening_time.spent("open", "other"):
        node = kind(config)
    before = status("io", "wchar")
    opening = open_window(node, START_WINDOW)
    if opening.action is not Action.RUN:
        raise RuntimeError(f"the {config.name} does not take part: {opening.reason} {opening.detail}")

    # 1. The window, as every driver takes it; the results of some steps are kept.
    def kept(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            results[name] = step(*arguments)
            return results[name]

        return call

    for name in ("train", "compress", "gather", "rate", "close_window"):
        if (step := getattr(node, name, None)) is not None:
            setattr(node, name, kept(name, step))
    result = take_steps(node, START_WINDOW)
    written = status("io", "wchar") - before

    # 2. A snapshot, which most windows have none of.
    before = status("io", "wchar")
    node.begin_snapshot()
    node.snapshots.wait()
    snapshot = status("io", "wchar") - before

    # 3. What there is to say of it.
    report, audit, evidence = results["gather"], results["close_window"], results.get("rate")
    problems = [f"{each.value}: {count} peers" for each, count in report.rejected.items()]
    problems += [str(finding) for finding in audit.findings] + ([str(result.reason)] if result.missed else [])
    scored = None if evidence is None else sum(each.facts.measurement is not None for each in evidence.miners)
    trained = results.get("train")
    outcome = Outcome(
        config.name,
        result.message,
        parameters_of(config.hparams),
        base,
        resident(),
        {**opening_time.steps, **node.time.steps},
        written,
        snapshot,
        node.state.root,
        tuple(problems),
        results["compress"].num_bytes if "compress" in results else None,
        trained.first_loss if trained is not None else evidence.loss if evidence is not None else None,
        scored,
    )
    node.stop()
    return outcome


def audited(config: NeuronConfig) -> Outcome:
    """The audit of the window by a process that had no part in it."""
    config.chain.wait_for_block(first_block(START_WINDOW + 3, config.hparams.windows))
    base, taken = resident(), WindowTime()
    with taken.spent("open", "other"):
        node = Node(config)
    with taken.spent("audit", "evaluating"):
        audit = Auditor(node).audit(START_WINDOW)
    problems = [part.summary for part in audit.parts if not part.verified]
    parameters = parameters_of(config.hparams)
    outcome = Outcome(AUDITOR, audit.summary, parameters, base, resident(), taken.steps, problems=tuple(problems))
    node.stop()
    return outcome


def resident() -> int:
    """Peak of this process's resident memory, in bytes."""
    return 1024 * status("status", "VmHWM")


def parameters_of(hparams: HParams) -> int:
    """Number of the model's parameters."""
    return sum(math.prod(shape) for shape in parameter_shapes(hparams.model).values())


def stand_in(clock: SimulatedClock, line: Connection, outcomes: list[Outcome]) -> None:
    """Wait for a process where it has its turn: as it waits, until it sends what came of the window."""
    while True:
        try:
            said = line.recv()
        except EOFError:
            raise RuntimeError("a process ended before its window did; its error is above") from None
        if isinstance(said, Outcome):
            outcomes.append(said)
            return
        clock.sleep_until(said)
        line.send(clock.now())


@contextmanager
def processes(given: Sequence[Given]) -> Iterator[list[Connection]]:
    """A process for each role, and the line to it; all end with the context."""
    spawn, started = get_context("spawn"), []
    with ExitStack() as resources:
        lines = []
        for each in given:
            ours, theirs = spawn.Pipe()
            resources.enter_context(ours)
            process = spawn.Process(target=live, args=(each, theirs), name=each.role, daemon=True)
            process.start()
            theirs.close()
            started.append(process)
            lines.append(ours)
        try:
            yield lines
        finally:
            for process in started:
                process.terminate()
                process.join()


def window(preset: str) -> tuple[list[Outcome], dict[str, Traffic]]:
    """Run the window; the outcome of every role, and its traffic."""
    with ExitStack() as resources:
        folder = Path(resources.enter_context(TemporaryDirectory(prefix="templar-window-")))
        stage = S3Stage([*ROLES, AUDITOR], resources)
        world = World(folder, hparams_of(preset), seed=SEED, actors=[ACTOR], stage=stage)
        dataset = stage.keys(DATASET_BUCKET).read
        given = [Given(AUDITOR, preset, folder, stage.urls[AUDITOR], dataset)]
        for member in world.members:
            role = "miner" if member.role == ACTOR else member.role
            if role in ROLES:
                address, write = stage.address_of(member), stage.keys(member.account_id).write
                given.append(Given(role, preset, folder, stage.urls[role], dataset, member.uid, address, write))
        outcomes: list[Outcome] = []
        with processes(given) as lines:
            stage.run([partial(stand_in, stage.clock, line, outcomes) for line in lines])
    return sorted(outcomes, key=lambda each: [*ROLES, AUDITOR].index(each.role)), stage.traffic


def run(quick: bool) -> dict[str, Any]:
    """Run the window, print the tables, and return the figures."""
    outcomes, traffic = window(QUICK_PRESET if quick else PRESET)
    return report(QUICK_PRESET if quick else PRESET, outcomes, traffic)


def report(preset: str, outcomes: Sequence[Outcome], traffic: Mapping[str, Traffic]) -> dict[str, Any]:
    """Print the tables; the figures of the last line."""
    by_role = {each.role: each for each in outcomes}
    console, num_parameters = Console(), by_role["miner"].parameters
    console.print(steps_table(f"one window of {preset}, {num_parameters:,} parameters: seconds", outcomes))
    console.print(sizes_table(outcomes, traffic))
    for each in outcomes:
        console.print(f"{each.role}: {each.message}", highlight=False)
    tokenizer = load_hparams(preset).data.tokenizer_name
    console.print(f"tokenizer: one of this machine's text, with the model's vocabulary, in place of {tokenizer}")

    # A small model's memory is that of its activations and buffers: the bars are for the preset alone.
    figures = {
        "miner_bytes_per_parameter": round(by_role["miner"].memory, 2),
        "validator_bytes_per_parameter": round(by_role["validator"].memory, 2),
        "written_bytes_per_parameter": round(max(by_role[role].written for role in ROLES), 2),
    }
    roots = {by_role[role].root for role in ROLES}
    facts = {
        "payload_bytes": by_role["miner"].payload_bytes,
        "training_loss": by_role["miner"].loss,
        "evaluation_loss": by_role["validator"].loss,
        "scored": by_role["validator"].scored,
        "roots_agree": len(roots) == 1,
        "audited": not by_role[AUDITOR].problems,
        "problems": [f"{each.role}: {problem}" for each in outcomes for problem in each.problems],
    }
    within = preset != PRESET or all(figures[name] <= bar for name, bar in BARS.items())
    whole = facts["roots_agree"] and facts["scored"] == 1 and not facts["problems"]
    seconds = {each.role: {name: round(number, 2) for name, number in each.seconds.items()} for each in outcomes}
    return {"preset": preset, **figures, **facts, "seconds": seconds, "holds": bool(within and whole)}


def steps_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Seconds of every step, by role."""
    table = Table("step", *(each.role for each in outcomes), title=title)
    for name in dict.fromkeys(name for each in outcomes for name in each.seconds):
        seconds = [each.seconds.get(name) for each in outcomes]
        table.add_row(name, *("" if number is None else f"{number:.1f}" for number in seconds))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def sizes_table(outcomes: Sequence[Outcome], traffic: Mapping[str, Traffic]) -> Table:
    """Memory, disk and network of every role."""
    table = Table("role", title="megabytes, and bytes per parameter")
    for column in ("without a node", "peak", "peak/parameter", "written", "snapshot", "written/parameter"):
        table.add_column(column, justify="right")
    for column in ("sent", "received", "payload"):
        table.add_column(column, justify="right")
    for each in outcomes:
        moved, payload = traffic[each.role], "" if each.payload_bytes is None else megabytes(each.payload_bytes)
        table.add_row(
            *(each.role, megabytes(each.base_bytes), megabytes(each.peak_bytes), f"{each.memory:.2f}"),
            *(megabytes(each.written_bytes), megabytes(each.snapshot_bytes), f"{each.written:.2f}"),
            *(megabytes(moved.sent), megabytes(moved.received), payload),
        )
    return table


def megabytes(num_bytes: int) -> str:
    """Bytes in MB."""
    return f"{num_bytes / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(measured("real_window", __doc__, run, quick="the same window with the smallest preset"))
