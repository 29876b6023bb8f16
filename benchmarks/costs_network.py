"""Count what a small network asks of its buckets: a real S3 endpoint, a server per member, simulated time.

Which requests a node makes follows from the preset's windows, peer list and rules, not from the size of its model. So
the network has the preset's numbers but for a tiny model, and its requests are counted where they arrive: by who asks,
whose bucket it is, the operation and the kind of object.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from benchmarks.real_window import ACTOR, S3Stage, Traffic, opened
from deployments.s3_endpoint import Application
from lab.simulate.run import run_nodes
from lab.simulate.world import (
    DATASET_BUCKET,
    DATASET_PREFIX,
    GENESIS_TIME,
    START_WINDOW,
    Member,
    Weather,
    World,
)
from templar.data.dataset import TrainingData, open_training, transfer_of
from templar.exchange.object_keys import parse_key
from templar.hparams import HParams, load_hparams
from templar.shared_results import sharing
from templar.store.base import ObjectStore
from templar.store.files import memory_folder
from templar.timeline import first_block

SEED = 7
TINY: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    "data": {
        "tokenizer_name": "embedded",
        "layout": "pages",
        "sequence_length": 32,
        "rows_per_page": 8,
        "pages_per_window": 1,
    },
    "training": {"batch_size": 4, "micro_batch_size": 4, "inner_steps": 2},
    "scoring": {"eval_sequences": 4, "eval_micro_batch_size": 4},
}
"""Changes to every preset: they make the network small and leave its requests as they are."""
WARM_UP_WINDOWS = 2
"""Not counted: nodes join, the first peer list is made, and the first windows have no window before them."""
MINER, VALIDATOR, AGGREGATOR = "miner", "validator", "aggregator"
DATASET, ITSELF = "dataset", "itself"


class Item(NamedTuple):
    """The key under which requests are counted together."""

    who: str  # role of the one that asks; `itself` if the bucket is its own
    owner: str  # role of the bucket's owner, or `dataset`
    operation: str  # put, list, get, head or delete
    kind: str  # first word of the object's key; of the dataset's objects `dataset`
    found: bool  # False if there was no such object


@dataclass(frozen=True)
class Amount:
    """Requests and bytes of bodies, per window."""

    requests: float = 0.0
    sent: float = 0.0
    received: float = 0.0

    @property
    def parts(self) -> tuple[float, float, float]:
        """All three."""
        return self.requests, self.sent, self.received


Counts = Mapping[Item, Amount]
"""The counts of one network, of all members together."""


@dataclass
class Recorder(Traffic):
    """The requests of one member, where they arrive at the endpoint."""

    now: Callable[[], float] = field(kw_only=True)
    requests: list[tuple[float, str, str, str, bool, int, int]] = field(default_factory=list)

    def counting(self, application: Application) -> Application:
        """The application as one member reaches it."""

        def counted(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            statuses, received = list[str](), 0

            def started(status: str, *arguments: Any) -> Any:
                statuses.append(status)
                return start_response(status, *arguments)

            began = self.now()
            for piece in application(environ, started):
                received += len(piece)
                yield piece
            sent = int(environ.get("CONTENT_LENGTH") or 0)
            found = not statuses[-1].startswith("404")
            self.requests.append((began, *operation_of(environ), found, sent, received))

        return counted


def operation_of(environ: Mapping[str, Any]) -> tuple[str, str, str]:
    """The bucket that a request is about, its operation, and the kind of object."""
    _, bucket, *rest = environ["PATH_INFO"].split("/", 2)
    name, query = "".join(rest), parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    method = environ["REQUEST_METHOD"].lower()
    if not name:
        return bucket, "delete" if "delete" in query else "list", ""
    if query.keys() & {"uploads", "uploadId", "partNumber"}:
        raise ValueError(f"{name} came in parts: the counted network is meant to have no object of that size")
    key = parse_key(name)
    return bucket, method, DATASET if key is None else key.kind.value


class CountedWorld(World):
    """A network whose members reach the endpoint each at an address of its own."""

    def __init__(self, root: Path, hparams: HParams, num_miners: int, stage: S3Stage) -> None:
        self._s3 = stage
        weather = Weather(reader=self._seen, own=self._own)
        super().__init__(root, hparams, seed=SEED, actors=[ACTOR] * num_miners, stage=stage, weather=weather)

    def open_dataset(self, home: Path) -> TrainingData:
        """The training split, as the member reads it that has this folder."""
        url = self._s3.urls.get(home.name.rpartition("-")[2], self._s3.urls[""])
        store = opened(url, DATASET_BUCKET, self._s3.keys(DATASET_BUCKET).read)
        transfer = transfer_of(self.hparams.storage)
        return open_training([store], DATASET_PREFIX, self.hparams.data, home / "shards", transfer)

    def _seen(self, observer: Member | None, owner: Member | None, store: ObjectStore) -> ObjectStore:
        if observer is None or owner is None:
            return store
        return opened(self._s3.urls[str(observer.uid)], owner.account_id, self._s3.keys(owner.account_id).read)

    def _own(self, member: Member, store: ObjectStore) -> ObjectStore:
        del store
        return opened(self._s3.urls[str(member.uid)], member.account_id, self._s3.keys(member.account_id).write)


def count(preset: str, num_miners: int, windows: int) -> Counts:
    """Run a network with a preset's rules, and count so many of its windows; in a process of its own.

    The endpoint enforces its keys for a whole process and for good, so a second network needs another one.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(counted_here, (preset, num_miners, windows))


def counted_here(preset: str, num_miners: int, windows: int) -> Counts:
    """As `count`, in this process."""
    logging.disable(logging.WARNING)
    hparams = load_hparams(preset, overrides=TINY)
    with ExitStack() as resources:
        resources.enter_context(sharing())
        folder = Path(resources.enter_context(TemporaryDirectory(prefix="templar-costs-", dir=memory_folder())))
        uids = [str(uid) for uid in range(num_miners + 3)]  # aggregator, validator, and a uid that is burnt
        stage = S3Stage(uids, resources, lambda clock: Recorder(now=clock.now))
        world = CountedWorld(folder, hparams, num_miners, stage)
        # The last counted window goes on, as do all others, while the next one is open.
        nodes = run_nodes(world, WARM_UP_WINDOWS + windows + 1)
        for node in nodes.values():
            node.stop()
        first = START_WINDOW + WARM_UP_WINDOWS
        begin, end = (_opening(window, hparams) for window in (first, first + windows))
        return _summed(world, stage, begin, end, windows)


def _opening(window: int, hparams: HParams) -> float:
    return GENESIS_TIME + hparams.windows.block_seconds * first_block(window, hparams.windows)


def _summed(world: World, stage: S3Stage, begin: float, end: float, windows: int) -> Counts:
    """The requests between two instants, per window."""
    roles = {member.account_id: MINER if member.role == ACTOR else member.role for member in world.members}
    members = {str(member.uid): member.account_id for member in world.members}
    sums: dict[Item, list[int]] = {}
    for uid, recorder in stage.traffic.items():
        account = members.get(uid)
        for time, bucket, operation, kind, found, sent, received in getattr(recorder, "requests", ()):
            if account is None or not begin <= time < end:
                continue
            who = ITSELF if bucket == account else roles[account]
            total = sums.setdefault(Item(who, roles.get(bucket, DATASET), operation, kind, found), [0, 0, 0])
            for index, number in enumerate((1, sent, received)):
                total[index] += number
    return {item: Amount(*(number / windows for number in total)) for item, total in sums.items()}
