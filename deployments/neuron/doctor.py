"""Look at everything that a neuron needs, and say of each thing whether it is good: `templar neuron doctor`.

    templar neuron doctor --env-file .env [--json]

Nothing is changed, but for probe objects in the own bucket that are removed again. What does not answer hides only
what is behind it. The exit status is 0 unless something is bad.
"""

import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path

from prefect.settings import PREFECT_API_URL, temporary_settings
from rich.console import Console
from rich.text import Text

from blocks.buckets import credentials_of
from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.neuron.folder import HOME_LOCK, Address, NeuronFolder, foreign_home
from deployments.neuron.status import folding_table, service_problems
from deployments.neuron.subnet import DoubtError, backups, looks_at_subnet
from deployments.options import NEURON, command_parser, environment_of
from deployments.prefect_server import exposes_keys, require_database, require_guarded
from deployments.processes import PROJECT_ROOT, holder_of, http_serves
from deployments.work_pool import is_outage, require_server_address
from templar.chain.base import Chain, NeuronInfo
from templar.chain.remote import public_address
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.lease import Claimant, Terms, foreign_holder
from templar.gradient.kernels.machine import cache_folder
from templar.gradient.layout import Layout
from templar.housekeeping.access import check_access
from templar.housekeeping.bucket_cleanup import PROBE_PREFIX
from templar.hparams import HParams
from templar.neuron import lock
from templar.neuron.configuration import CHAIN_ROLES
from templar.resources import available_bytes
from templar.scoring.meter import Meter
from templar.store.address import encode_address
from templar.store.base import ObjectStore
from templar.training.cluster import interface_to, rank_count
from templar.training.device import choose_device, num_parameters, num_second_moments
from templar.training.memory import MicroBatches
from templar.training.model import inner_optimizer, parameter_shapes

PINNED = ("prefect", "SQLAlchemy", "torch", "bittensor", "numpy", "transformers")
"""Packages whose version decides whether the neuron works as it was tested."""
STALE_BLOCKS = 10  # a chain whose newest block is so many blocks old stands still, or this machine's clock is wrong
LONGEST_OFFSET_SECONDS = 1.0
LARGEST_PROBE = 2**22  # bytes of the object that measures the bandwidth, if a payload is not smaller
NOTE = b"This object was written to look at the bucket. It may be deleted.\n"


class Verdict(StrEnum):
    """The condition of something."""

    GOOD = "good"
    DOUBTFUL = "doubtful"  # it may be meant so, or mend itself
    BAD = "bad"  # the neuron will not work, or not earn


@dataclass(frozen=True)
class Line:
    """A finding about one thing; what is not good says what to do."""

    topic: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Patient:
    """The neuron that is looked at, as far as its settings say."""

    name: str
    environment: Mapping[str, str]
    block: Neuron
    hparams: HParams
    address: str  # of the hotkey
    home: Path

    @cached_property
    def store(self) -> ObjectStore:
        """Its bucket."""
        return self.block.bucket.open().store


def examine(name: str, environment: Mapping[str, str]) -> Iterator[Line]:
    """Everything about the neuron `name` of this host, line by line as it is found."""
    # 1. The settings. Nothing else can be looked at without them.
    try:
        block = neuron_from_environment(dict(environment))
        hparams, address = block.hparams(), block.wallet.open().address
    except TemplarError as error:
        yield Line("settings", Verdict.BAD, str(error))
        return
    yield Line("settings", Verdict.GOOD, f"{block.role} {address}, preset {block.preset}")
    patient = Patient(name, environment, block, hparams, address, Path(block.home).expanduser())

    # 2. This machine.
    yield _line("wallet", lambda: _wallet(block))
    yield _line("versions", _versions)
    yield _line("disk", lambda: _disk(patient))
    yield _line("kernels", _kernels)
    if block.role != "aggregator":
        yield _line("device", lambda: _device(patient))

    # 3. The bucket, and the clock beside its times.
    yield from _lines("bucket keys", _access(patient))
    yield _line("bandwidth", lambda: _bandwidth(patient))
    yield _line("clock", lambda: _clock(patient.store, hparams.windows.commit_guard_seconds))

    # 4. The chain, and what it has of this neuron.
    head = _line("chain", lambda: _chain(patient, block.subnet.open(block.wallet)))
    yield head
    if head.verdict is not Verdict.BAD:
        chain = block.subnet.open(block.wallet)
        yield from _lines("subnet", (_line(topic, look) for topic, look in looks_at_subnet(chain, hparams)))
        yield from _lines("registration", _registration(patient, chain))
        network = _line("network", lambda: _network(patient))
        yield network
        if block.role == "miner" and network.verdict is Verdict.GOOD:
            yield _line("backups", lambda: _backups(patient))

    # 5. The dataset, and Prefect.
    yield _line("dataset", lambda: f"digest {block.dataset.open(hparams, patient.home).digest[:12]}")
    yield _line("Prefect server", lambda: _prefect(patient))
    if not environment.get("PREFECT_API_URL"):
        yield _line("Prefect database", lambda: require_database(environment))
    yield _line("processes", lambda: _processes(patient))
    folder = NeuronFolder(name)
    if (server := folder.address) is not None and holder_of(folder.lock) is not None:
        yield _line("scheduled work", partial(_scheduled, name, server))


def _line(topic: str, look: Callable[[], str]) -> Line:
    try:
        return Line(topic, Verdict.GOOD, look())
    except DoubtError as doubt:
        return Line(topic, Verdict.DOUBTFUL, str(doubt))
    except TemplarError as error:
        return Line(topic, Verdict.BAD, str(error))


def _lines(topic: str, found: Iterator[Line]) -> Iterator[Line]:
    """Yield what is found, and at last the error that ends the search."""
    try:
        yield from found
    except TemplarError as error:
        yield Line(topic, Verdict.BAD, str(error))


def _versions() -> str:
    pins = dict(
        line.strip().split("==")
        for line in (PROJECT_ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    found = {name: metadata.version(name) for name in PINNED}
    other = [f"{name} {found[name]}, not {pins[name]}" for name in PINNED if found[name].split("+")[0] != pins[name]]
    if other:
        raise DoubtError(f"{', '.join(other)}: install with `make .venv`, which takes what constraints.txt has")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _wallet(block: Neuron) -> str:
    wallet = block.wallet
    files = [Path(wallet.path, wallet.name, "hotkeys", wallet.hotkey)]
    files += [Path(wallet.password_file)] if wallet.password_file else []
    for file in files:
        if not file.is_file():
            raise PermanentError(Reason.BAD_ENVIRONMENT, f"{file} is not there: correct WALLET_HOTKEY_PASSWORD_FILE")
        if file.stat().st_mode & 0o077:
            raise DoubtError(f"{file} can be read by others on this machine: chmod 600 {file}")
    return f"{' and '.join(map(str, files))}: for the owner alone"


def _disk(patient: Patient) -> str:
    """Docs/miner.md has the formula; the folder's own files count as room that it has already."""
    home, kept = patient.home, patient.hparams.storage
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    model, trainer = patient.hparams.model, patient.block.trainer
    size, optimizer = num_parameters(model), inner_optimizer(patient.hparams.training, trainer)
    private = 4 * size if optimizer is None else 8 * size + 4 * num_second_moments(model, optimizer)
    num_private = kept.snapshots_kept + kept.snapshot_frequency + (2 if trainer.inner_snapshot_seconds else 0)
    needed = 4 * size * (kept.snapshots_kept + 2) + (private * num_private if patient.block.role == "miner" else 0)
    used = sum(file.stat().st_size for file in home.rglob("*") if file.is_file()) if home.exists() else 0
    free = shutil.disk_usage(there).free
    text = (
        f"{there} has {_gib(free)} free and the neuron {_gib(used)} there; it takes up to {_gib(needed)}, and payloads"
    )
    if free + used < needed:
        raise PermanentError(Reason.BAD_ENVIRONMENT, f"{text}: choose another TEMPLAR_HOME, or lower snapshots_kept")
    if home.exists() and home.stat().st_mode & 0o077:
        raise DoubtError(f"{home} can be read by others on this machine: chmod 700 {home}")
    return text


def _kernels() -> str:
    folder = cache_folder()
    if folder is None:
        what = "no folder for compiled kernels can be written, so each process compiles them anew"
        raise DoubtError(f"{what}: let NUMBA_CACHE_DIR name one that only this user can write to")
    return f"compiled once, into {folder}"


def _device(patient: Patient) -> str:
    """Open what trains or evaluates: it measures what `auto` has to know, and checks whether the settings suit."""
    settings, hparams = patient.block.trainer, patient.hparams
    available = f"{_gib(available_bytes())} of memory available"
    try:
        if patient.block.role == "validator":
            meter = Meter(settings)
            meter.check(hparams)
            device = meter.device
        else:
            device, ranks = choose_device(settings), rank_count(settings) * settings.hosts
            if settings.rendezvous:
                interface_to(settings.rendezvous, is_own=True)
            micro_batches = MicroBatches(hparams.model, settings, device, ranks=ranks)
            micro_batches.check(hparams.training, hparams.data.sequence_length)
    except PermanentError as error:
        if error.reason is Reason.OUT_OF_MEMORY and (own := holder_of(NeuronFolder(patient.name).lock)) is not None:
            problem = f"process {own.pid} is this neuron and has a part of the memory: look again when it is stopped"
            raise DoubtError(f"{error.message}; {problem}") from error
        raise
    return f"{device.why or device.name}; {available}"


def _access(patient: Patient) -> Iterator[Line]:
    report = check_access(credentials_of(patient.block, patient.environment))
    for reason, text in report.problems:
        yield Line("bucket keys", Verdict.BAD, f"[{reason}] {text}: correct the key's rights where the bucket is")
    if not report.problems:
        is_known = not report.unknown or not patient.block.bucket.endpoint.enforces_keys
        yield Line("bucket keys", Verdict.GOOD if is_known else Verdict.DOUBTFUL, report.summary)


@contextmanager
def _probe(store: ObjectStore, what: str, body: bytes) -> Iterator[str]:
    """Store an object under a name that `bucket-cleanup` knows, and remove it in the end; its key."""
    key = f"{PROBE_PREFIX}{secrets.token_hex(8)}-{what}"
    store.put(key, body)
    try:
        yield key
    finally:
        store.delete([key])


def _stamp(store: ObjectStore, key: str) -> int:
    """The bucket's time of an object, in whole seconds."""
    info = store.head(key)
    if info is None:
        problem = f"{store.name} does not show an object that it took: ask its provider"
        raise PermanentError(Reason.OBJECT_MISSING, problem)
    return info.last_modified


def _clock(store: ObjectStore, guard_seconds: int) -> str:
    """Store an object, and compare its stamp with this clock before and after."""
    before = time.time()
    with _probe(store, "clock", NOTE) as key:
        after = time.time()
        stamp = _stamp(store, key)
    ahead, behind = before - (stamp + 1), stamp - after
    offset, allowed = max(ahead, behind), min(LONGEST_OFFSET_SECONDS, guard_seconds / 2)
    if offset > allowed:
        way = "ahead of" if ahead > 0 else "behind"
        problem = f"this machine's clock is {offset:.1f} s or more {way} the bucket's: synchronise it (timedatectl)"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    return f"agrees with the bucket's to within {after - before + 1:.1f} s"


def _bandwidth(patient: Patient) -> str:
    """Send and fetch an object, and compare with the largest objects of a window. Payloads are fetched in parallel."""
    hparams, store, is_miner = patient.hparams, patient.store, patient.block.role == "miner"
    # 1. What a window moves: a miner reveals its payload, the others store an aggregate; all read payloads.
    layout = Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)
    payload, peers = layout.max_payload_bytes, hparams.peers.gather_peer_count + hparams.peers.reserve_peer_count
    sent = payload if is_miner else payload * hparams.peers.gather_peer_count
    rules = hparams.windows
    time_to_send = rules.time_window_delta_seconds if is_miner else rules.roster_slot_seconds
    # 2. How fast this machine moves an object.
    body = secrets.token_bytes(min(payload, LARGEST_PROBE))
    began = time.perf_counter()
    with _probe(store, "bandwidth", body) as key:
        stored = time.perf_counter()
        store.get(key, max_bytes=len(body))
        fetched = time.perf_counter()
    up, down = len(body) / (stored - began), len(body) / (fetched - stored)
    seconds_up, seconds_down = sent / up, peers * payload / down
    text = (
        f"{up / 1e6:.1f} MB/s up and {down / 1e6:.1f} MB/s down: up to {sent / 1e6:.2f} MB take {seconds_up:.1f} s "
        f"of the {time_to_send} s for them, {peers} payloads {seconds_down:.1f} s of a window's {rules.seconds:.0f} s"
    )
    if seconds_up > time_to_send or seconds_down > rules.seconds / 2:
        raise DoubtError(f"{text}: the line or the bucket is too slow for this preset")
    return text


def _chain(patient: Patient, chain: Chain) -> str:
    newest = chain.head()
    age = time.time() - chain.block_time(newest, finalized=False)
    seconds, where = patient.hparams.windows.block_seconds, public_address(patient.block.subnet.network)
    text = f"{where}, subnet {chain.netuid}: block {newest} is {age:.0f} s old"
    if abs(chain.block_seconds - seconds) > 1e-6:
        expected = f"preset {patient.block.preset!r} expects {seconds:g} s: set TEMPLAR_PRESET to the network's"
        problem = f"{where} has a block in {chain.block_seconds:g} s, and {expected}"
        raise PermanentError(Reason.BAD_HPARAMS, problem)
    if age > STALE_BLOCKS * seconds or age < -seconds:
        problem = f"{text}: the endpoint is behind, or this clock is wrong; name another NETWORK"
        raise PermanentError(Reason.CHAIN_UNREACHABLE, problem)
    return text


def _registration(patient: Patient, chain: Chain) -> Iterator[Line]:
    def fees() -> str:
        chain.require_fees()
        return "the coldkey can pay them"

    neuron = chain.metagraph().by_hotkey(patient.address)
    if neuron is None:
        problem = f"{patient.address} is not registered on subnet {chain.netuid}: register it there"
        yield Line("registration", Verdict.BAD, f"[{Reason.NOT_REGISTERED}] {problem}")
        return
    yield Line("registration", Verdict.GOOD, f"uid {neuron.uid}, stake {neuron.stake:g}")
    yield _line("role", partial(_role, patient, neuron))
    yield _line("read access on chain", partial(_committed, patient, neuron))
    yield _line("lease", partial(_lease, patient, chain.netuid, neuron.uid))
    yield _line("fees", fees)


def _role(patient: Patient, neuron: NeuronInfo) -> str:
    role, least = patient.block.role, patient.hparams.peers.validator_min_stake
    if role != "miner" and not neuron.validator_permit:
        problem = f"uid {neuron.uid} has no validator permit, so a {role} has no say: add stake to it"
        raise PermanentError(Reason.NOT_REGISTERED, problem)
    if role != "miner" and neuron.stake < least:
        problem = f"uid {neuron.uid} has {neuron.stake:g} of stake, and a {role} needs {least:g}: add some"
        raise PermanentError(Reason.NOT_REGISTERED, problem)
    if neuron.role is not CHAIN_ROLES[role]:
        raise DoubtError(f"the chain has the role {neuron.role or 'none'}: `templar neuron start` announces {role}")
    return f"announced as {neuron.role}"


def _committed(patient: Patient, neuron: NeuronInfo) -> str:
    own = encode_address(patient.block.bucket.open().address)
    if neuron.commitment is None:
        raise DoubtError(
            "the chain has none: the neuron commits it when it starts, and takes part from the next window on"
        )
    if neuron.commitment != own:
        raise DoubtError("the chain has that of another bucket or key: the neuron commits this one when it starts")
    return "the chain has this bucket and its read key"


def _lease(patient: Patient, netuid: int, uid: int) -> str:
    """Whether a process with another folder or on another machine runs this neuron."""
    home, store = patient.home, patient.store
    holder = lock.holder_of(home) if (home / lock.HOLDER_FILE).exists() else secrets.token_hex(16)
    role = CHAIN_ROLES[patient.block.role].value
    claimant = Claimant(netuid, uid, patient.address, role, holder, lock.this_machine())
    with _probe(store, "lease", NOTE) as key:
        other = foreign_holder(store, claimant, Terms.of(patient.hparams.windows), _stamp(store, key))
    if other is not None:
        raise PermanentError(Reason.ALREADY_RUNNING, f"{other}: stop it there first")
    return "no other folder or machine runs this neuron"


def _network(patient: Patient) -> str:
    birth = patient.block.config(patient.name).birth()
    genesis, first = birth.network.genesis, birth.start.start_window
    return f"genesis {genesis[:12]}, published by uid {birth.publisher.uid}, first window {first}"


def _backups(patient: Patient) -> str:
    network = patient.block.config(patient.name).birth().network
    return backups(patient.store, patient.block.wallet.open(), netuid=network.netuid, genesis=network.genesis)


def _prefect(patient: Patient) -> str:
    address = NeuronFolder(patient.name).address
    url = patient.environment.get("PREFECT_API_URL") or (address.api_url if address else None)
    if url is None:
        raise DoubtError("none is known: `templar neuron start` starts one, or set PREFECT_API_URL")
    with temporary_settings({PREFECT_API_URL: url}):
        require_server_address()  # as `templar neuron start` and the clock do, with the proxies that they use
    if not http_serves(f"{url.rstrip('/')}/health"):
        if patient.environment.get("PREFECT_API_URL"):
            problem = f"PREFECT_API_URL is {url}, which does not answer: start that server"
            raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
        raise DoubtError(f"{url} does not answer: `templar neuron start` starts it")
    require_guarded(url)
    if exposed := exposes_keys(url):
        raise DoubtError(exposed)
    return f"{url} answers, and asks for a password"


def _processes(patient: Patient) -> str:
    folder = NeuronFolder(patient.name)
    supervisor = holder_of(folder.lock)
    if supervisor is None:
        if (other := holder_of(patient.home / HOME_LOCK)) is not None:
            raise PermanentError(Reason.ALREADY_RUNNING, foreign_home(patient.home, other.pid))
        raise DoubtError(f"neuron {patient.name!r} does not run: `templar neuron start --name {patient.name}`")
    return f"process {supervisor.pid} keeps {len(folder.record.running())} running"


def _scheduled(name: str, server: Address) -> str:
    """Whether the schedules of a neuron that runs fire, and whether the log of its Prefect server repeats an error."""
    try:
        problems = service_problems([name], server)
    except Exception as error:
        if not is_outage(error):
            raise
        raise DoubtError(f"{server.api_url} does not answer: {type(error).__name__}") from None
    if problems:
        raise PermanentError(Reason.SCHEDULE_STALLED, "; ".join(problems))
    return "every active schedule has a planned run"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and look; 1 if something is bad."""
    parser = command_parser("templar neuron doctor", __doc__, *NEURON, "--json")
    arguments = parser.parse_args(words)
    lines = list(examine(arguments.name, environment_of(arguments)))
    if arguments.json:
        print(json.dumps([asdict(line) for line in lines]))
    else:
        colours = {Verdict.GOOD: "green", Verdict.DOUBTFUL: "yellow", Verdict.BAD: "red"}
        rows = ((line.topic, Text(line.verdict, colours[line.verdict]), line.text) for line in lines)
        Console().print(folding_table("what", "verdict", "found", rows=rows))
    return 1 if any(line.verdict is Verdict.BAD for line in lines) else 0
