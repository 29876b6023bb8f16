"""The documented environment variables, read once, checked, and made into blocks.

Secrets and endpoints come from here and nowhere else; numbers come from `hparams.json`. Every problem is reported at
once, by the variable's name, and never with its value.
"""

import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasPath, BaseModel, Field, SecretStr, TypeAdapter, ValidationError

from blocks.chain import PASSWORD, PASSWORD_FILE, Subnet, Wallet
from blocks.dataset import Dataset
from blocks.neuron import Neuron
from blocks.storage import R2, BucketCredentials, DatasetBucket, NeuronBucket, StorageEndpoint
from templar.errors import PermanentError, Reason
from templar.hparams import DEFAULT_PRESET, PRODUCTION_TRAINER, RENDEZVOUS, TrainerSettings
from templar.store.address import BucketAddress

log = logging.getLogger(__name__)

BUCKET_LIST = "R2_DATASET_BUCKET_LIST"
WRITE_VARIABLES = "R2_DATASET_WRITE"
DATASET_FOLDER = ("DATASET_BINS_PATH", "dataset")  # the variable and its default
STORAGE_VARIABLES = ("TEMPLAR_STORAGE", "TEMPLAR_STORAGE_REGION", "TEMPLAR_STORAGE_ADDRESSING")
DATASET_VARIABLES = ("R2_DATASET_ENDPOINT", "R2_DATASET_REGION", "R2_DATASET_ADDRESSING")
PAGE_VARIABLES = ("R2_PAGE_ENDPOINT", "R2_PAGE_REGION", "R2_PAGE_ADDRESSING")
MODEL_VARIABLES = ("R2_MODEL_ENDPOINT", "R2_MODEL_REGION", "R2_MODEL_ADDRESSING")
"""The address of a storage, its region, and how it is addressed."""
SUCCESSORS = {
    "NODE_TYPE": "TEMPLAR_ROLE",
    "CUDA_DEVICE": "TEMPLAR_DEVICE",
    "INFLUXDB_HOST": "TEMPLAR_SINK_INFLUX_URL",
    "INFLUXDB_DATABASE": "TEMPLAR_SINK_INFLUX_DATABASE",
    "INFLUXDB_TOKEN": "TEMPLAR_SINK_INFLUX_TOKEN",
    "LOKI_URL": "TEMPLAR_SINK_LOKI_URL",
}
"""Variables of the reference that have another name here."""
AUTO = "auto"
_SIZE, _A_SIZE = r"0*[1-9]\d*", "a whole number of at least 1"

B = TypeVar("B", bound=BaseModel)
N = TypeVar("N", int, float)


class _ListedBucket(BaseModel):
    """One item of `R2_DATASET_BUCKET_LIST`, in its documented form."""

    account_id: str
    name: str
    access_key_id: str = Field(validation_alias=AliasPath("credentials", "read", "access_key_id"))
    secret_access_key: SecretStr = Field(validation_alias=AliasPath("credentials", "read", "secret_access_key"))

    def block(self) -> DatasetBucket:
        key = BucketCredentials(access_key_id=self.access_key_id, secret_access_key=self.secret_access_key)
        return DatasetBucket(account_id=self.account_id, bucket=self.name, read=key)


_BUCKETS = TypeAdapter(list[_ListedBucket])


class EnvironmentReader:
    """Reads variables and collects their problems."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: dict[str, str] = {}

    def text(self, name: str, default: str | None = None) -> str:
        """A variable without spaces around it. An empty one counts as missing, which is a problem without a default."""
        return self.exact(name, default).strip()

    def exact(self, name: str, default: str | None = None) -> str:
        """As `text`, as it stands: names and paths may begin or end with a space."""
        value = self._environment.get(name, "")
        if value.strip():
            return value
        if default is None:
            self.problem(name, "is missing")
        return default or ""

    def path(self, name: str, default: str | None = None) -> str:
        """A variable with a path, which becomes absolute."""
        path = self.exact(name, default)
        try:
            return str(Path(path).expanduser().absolute())
        except RuntimeError:
            self.problem(name, f"is {path!r}, and no such home is known: write an absolute path")
            return path

    def network(self) -> str:
        """The chain that `NETWORK` names; `finney` only if there is no such variable, for an empty one is a mistake."""
        if not self._environment.get("NETWORK", "finney").strip():
            self.problem("NETWORK", "is empty: name the network, or leave the variable out for finney")
        return self.text("NETWORK", "finney")

    def number(self, name: str, default: N | None = None, *, kind: type[N]) -> N:
        """A variable that must be a number of this kind."""
        value = self.text(name, None if default is None else str(default))
        try:
            return kind(value)
        except ValueError:
            self.problem(name, "must be a whole number" if kind is int else "must be a number")
            return kind(default or 0)

    def matching(self, name: str, default: str, pattern: str, remedy: str) -> str:
        """A variable whose text must match a pattern; its default where it does not."""
        value = self.text(name, default)
        if re.fullmatch(pattern, value) is not None:
            return value
        self.problem(name, f"is {value!r}: set {remedy}")
        return default

    def problem(self, name: str, text: str) -> None:
        """Note a problem of a variable; the first note on it stands."""
        self.problems.setdefault(name, text)

    def build(self, block_type: type[B], variables: Mapping[str, str], **fields: Any) -> B:
        """Make a block or settings of what was read; fields that it refuses are noted, and it is made unchecked.

        `variables` has, by field, the variable that it was read from; the other fields were checked before.
        """
        try:
            return block_type(**fields)
        except ValidationError as error:
            for place, text in refusals(error):
                field = place.partition(".")[0]
                self.problem(variables.get(field, f"{block_type.__name__}.{place}"), text)
            return block_type.model_construct(**fields)

    def raise_problems(self) -> None:
        """Raise all problems as one error, `bad_environment`."""
        if self.problems:
            listed = "; ".join(f"{name} {text}" for name, text in self.problems.items())
            raise PermanentError(
                Reason.BAD_ENVIRONMENT, f"{listed}: set them in the environment or in .env (see .env.example)"
            )


def refusals(error: ValidationError) -> Iterable[tuple[str, str]]:
    """Place and reason of each value that pydantic refused, without the value, which may be a secret."""
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        place = ".".join(str(part) for part in item["loc"])
        yield place, f"is refused: {item['msg'].removeprefix('Value error, ')}"


def neuron_from_environment(environment: Mapping[str, str]) -> Neuron:
    """Make the neuron's block from environment variables (`.env.example` lists them all).

    `bad_environment` names every variable that is missing or malformed, and the remedy, but no secret.
    """
    for theirs, ours in SUCCESSORS.items():
        if environment.get(theirs, "").strip() and not environment.get(ours, "").strip():
            log.warning("%s is not read: what it was for is %s here", theirs, ours)
    reader = EnvironmentReader(environment)
    role = reader.text("TEMPLAR_ROLE", "miner")
    endpoint = endpoint_block(reader)
    neuron = reader.build(
        Neuron,
        {"role": "TEMPLAR_ROLE", "genesis": "TEMPLAR_GENESIS"},
        role=role,
        wallet=_wallet(reader, environment),
        bucket=_own_bucket(reader, bucket_variables(role), endpoint),
        **network_fields(reader, endpoint),
    )
    if role != "miner" and neuron.trainer.hosts > 1:
        reader.problem("TEMPLAR_HOSTS", f"is {neuron.trainer.hosts}, and the role is {role}: set 1")
    reader.raise_problems()
    return neuron


def network_fields(reader: EnvironmentReader, endpoint: StorageEndpoint) -> dict[str, Any]:
    """The fields of a neuron's block that a reader of its network needs too: all but role, wallet and bucket."""
    return {
        "home": reader.path("TEMPLAR_HOME", "~/.templar"),
        "preset": reader.text("TEMPLAR_PRESET", DEFAULT_PRESET),
        "hparams_path": reader.path("TEMPLAR_HPARAMS", "hparams.json"),
        "genesis": reader.text("TEMPLAR_GENESIS", ""),
        "subnet": reader.build(
            Subnet,
            {"network": "NETWORK", "archives": "NETWORK_ARCHIVES", "netuid": "NETUID"},
            network=reader.network(),
            archives=reader.text("NETWORK_ARCHIVES", ""),
            netuid=reader.number("NETUID", kind=int),
        ),
        "dataset": dataset_block(reader, endpoint),
        "trainer": _trainer(reader),
    }


def dataset_from_environment(environment: Mapping[str, str]) -> Dataset:
    """The dataset of `R2_DATASET_BUCKET_LIST` or `R2_DATASET_*`, for a process that is no neuron; `bad_environment`."""
    reader = EnvironmentReader(environment)
    dataset = dataset_block(reader, endpoint_block(reader))
    reader.raise_problems()
    return dataset


def upload_from_environment(environment: Mapping[str, str]) -> tuple[StorageEndpoint, str, BucketCredentials]:
    """The storage that takes a dataset, its folder there, and the key of `R2_DATASET_WRITE_*`; `bad_environment`."""
    reader = EnvironmentReader(environment)
    endpoint = own_endpoint(reader, DATASET_VARIABLES, endpoint_block(reader))
    found = endpoint, reader.text(*DATASET_FOLDER), key_block(reader, WRITE_VARIABLES)
    reader.raise_problems()
    return found


def bucket_variables(role: str) -> str:
    """The prefix of the variables of a role's own bucket."""
    return "R2_AGGREGATOR" if role == "aggregator" else "R2_GRADIENTS"


def _wallet(reader: EnvironmentReader, environment: Mapping[str, str]) -> Wallet:
    wallet = Wallet(
        path=reader.path("WALLET_PATH", "~/.bittensor/wallets"),
        name=reader.exact("WALLET_NAME"),
        hotkey=reader.exact("WALLET_HOTKEY"),
        password_file=reader.path(PASSWORD_FILE) if reader.text(PASSWORD_FILE, "") else "",
    )
    if password := environment.get(PASSWORD):  # as it stands: it may begin or end with a space
        wallet.know_password(password)
    return wallet


def endpoint_block(reader: EnvironmentReader, variables: tuple[str, str, str] = STORAGE_VARIABLES) -> StorageEndpoint:
    """The network's object storage, or the one of these variables; timeout and tries are the same for all."""
    timeout, attempts = "TEMPLAR_STORAGE_READ_TIMEOUT_SECONDS", "TEMPLAR_STORAGE_MAX_ATTEMPTS"
    url, region, addressing = variables
    return reader.build(
        StorageEndpoint,
        {"url": url, "region": region, "read_timeout_seconds": timeout, "max_attempts": attempts},
        url=reader.text(url, R2),
        region=reader.text(region, AUTO),
        addressing=reader.matching(addressing, "path", "path|virtual", "path or virtual"),
        read_timeout_seconds=reader.number(timeout, 20.0, kind=float),
        max_attempts=reader.number(attempts, 4, kind=int),
    )


def _trainer(reader: EnvironmentReader) -> TrainerSettings:
    """The device that a neuron trains on, and how.

    One thread of the CPU in float32, chosen by name, is the trainer of the simulator: exact, and slower.
    """
    # 1. Words, and numbers that a word may stand for.
    device = reader.matching("TEMPLAR_DEVICE", AUTO, r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")
    precision = reader.matching("TEMPLAR_PRECISION", AUTO, "auto|float32|bfloat16", "auto, float32 or bfloat16")
    sharding = reader.matching("TEMPLAR_SHARDING", AUTO, "auto|replicated|sharded", "auto, replicated or sharded")
    compiles = reader.matching("TEMPLAR_COMPILE", "off", "on|off", "on or off")
    threads = reader.matching("TEMPLAR_THREADS", AUTO, f"auto|{_SIZE}", f"auto or {_A_SIZE}")
    micro_batch = reader.matching("TEMPLAR_MICRO_BATCH", "preset", f"preset|auto|{_SIZE}", f"preset, auto or {_A_SIZE}")
    optimizer = reader.matching("TEMPLAR_OPTIMIZER", "preset", "preset|adamw|muon", "preset, adamw or muon")
    layers = reader.matching("TEMPLAR_CHECKPOINT_LAYERS", "off", f"off|{_SIZE}", f"off or {_A_SIZE}")
    ranks = reader.matching("TEMPLAR_RANKS", "1", f"auto|{_SIZE}", f"auto or {_A_SIZE}")

    # 2. Several hosts have a place to meet.
    hosts, rendezvous = reader.number("TEMPLAR_HOSTS", 1, kind=int), reader.text("TEMPLAR_RENDEZVOUS", "")
    if hosts < 1:
        reader.problem("TEMPLAR_HOSTS", f"is {hosts}: set 1 for this host alone, or their number")
    if re.fullmatch(RENDEZVOUS, rendezvous) is None or (hosts > 1) is not bool(rendezvous):
        reader.problem(
            "TEMPLAR_RENDEZVOUS",
            f"is {rendezvous!r} with TEMPLAR_HOSTS {hosts}: set ADDRESS:PORT of this host in a private network for "
            "several hosts, and nothing for one",
        )

    # 3. Only one rank alone keeps its progress within a window.
    is_alone = _number_or_word(ranks) == 1 and hosts == 1
    usual = PRODUCTION_TRAINER.inner_snapshot_seconds if is_alone else 0.0
    interval = reader.number("TEMPLAR_INNER_SNAPSHOT_SECONDS", usual, kind=float)
    if not 0 <= interval < math.inf:
        reader.problem("TEMPLAR_INNER_SNAPSHOT_SECONDS", f"is {interval}: set seconds, or 0 for off")
    elif interval and not is_alone:
        reader.problem("TEMPLAR_INNER_SNAPSHOT_SECONDS", f"is {interval}: set 0, for several ranks keep no progress")
    repeatable = is_alone and (device, _number_or_word(threads), precision, compiles) == ("cpu", 1, "float32", "off")
    ahead = reader.matching("TEMPLAR_TRAIN_AHEAD", "off" if repeatable else "on", "on|off", "on or off")

    return TrainerSettings.model_construct(  # every value is checked, here or above
        device=device,
        threads=0 if threads == AUTO else int(threads),
        precision=precision,
        micro_batch=_number_or_word(micro_batch),
        compile_layers=compiles == "on",
        checkpoint_layers=0 if layers == "off" else int(layers),
        optimizer=optimizer,
        ranks=_number_or_word(ranks),
        hosts=hosts,
        rendezvous=rendezvous,
        sharding=sharding,
        repeatable=repeatable,
        inner_snapshot_seconds=interval,
        train_ahead=ahead == "on",
    )


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _own_bucket(reader: EnvironmentReader, prefix: str, endpoint: StorageEndpoint) -> NeuronBucket:
    account, name = f"{prefix}_ACCOUNT_ID", f"{prefix}_BUCKET_NAME"
    account_id = reader.text(account)
    if reader.text(name, account_id) != account_id:
        reader.problem(name, f"must be that of {account}: readers know a bucket by its account alone")
    read, write = key_block(reader, f"{prefix}_READ"), key_block(reader, f"{prefix}_WRITE")
    bucket = reader.build(
        NeuronBucket, {"account_id": account}, endpoint=endpoint, account_id=account_id, read=read, write=write
    )
    key_id, secret = f"{prefix}_READ_ACCESS_KEY_ID", f"{prefix}_READ_SECRET_ACCESS_KEY"
    if not reader.problems.keys() & {account, key_id, secret}:
        try:
            BucketAddress(account_id, read.access_key_id, read.secret_access_key.get_secret_value())
        except PermanentError as error:
            wrong = key_id if "access_key_id" in error.message else secret
            reader.problem(wrong, f"cannot be committed on chain: {error.message}")
    return bucket


def key_block(reader: EnvironmentReader, prefix: str) -> BucketCredentials:
    """A key: the two variables whose names begin with the prefix."""
    return BucketCredentials(
        access_key_id=reader.text(f"{prefix}_ACCESS_KEY_ID"),
        secret_access_key=SecretStr(reader.text(f"{prefix}_SECRET_ACCESS_KEY")),
    )


def own_endpoint(
    reader: EnvironmentReader, variables: tuple[str, str, str], network: StorageEndpoint
) -> StorageEndpoint:
    """The storage of these variables if the first one, the address, is set; else the network's."""
    url, *more = variables
    if reader.text(url, ""):
        return endpoint_block(reader, variables)
    for name in more:
        if reader.text(name, ""):
            reader.problem(name, f"is set, and {url} is not: set that, too, or use the network's storage as it is")
    return network


def dataset_block(reader: EnvironmentReader, endpoint: StorageEndpoint) -> Dataset:
    """The buckets of `R2_DATASET_BUCKET_LIST` if it is set, else the single `R2_DATASET_*` bucket.

    `endpoint` is the network's; the dataset may have one of its own.
    """
    endpoint = own_endpoint(reader, DATASET_VARIABLES, endpoint)
    listed = reader.text(BUCKET_LIST, "")
    buckets = _listed_buckets(reader, listed) if listed else [_single_bucket(reader)]
    prefix = reader.text(*DATASET_FOLDER)
    return reader.build(Dataset, {"buckets": BUCKET_LIST}, endpoint=endpoint, buckets=buckets, prefix=prefix)


def _single_bucket(reader: EnvironmentReader) -> DatasetBucket:
    account_id = reader.text("R2_DATASET_ACCOUNT_ID")
    return reader.build(
        DatasetBucket,
        {"account_id": "R2_DATASET_ACCOUNT_ID"},
        account_id=account_id,
        bucket=reader.text("R2_DATASET_BUCKET_NAME", account_id),
        read=key_block(reader, "R2_DATASET_READ"),
    )


def _listed_buckets(reader: EnvironmentReader, text: str) -> list[DatasetBucket]:
    try:
        return [item.block() for item in _BUCKETS.validate_json(text)]
    except ValidationError as error:
        problems = "; ".join(f"{place} {why}".strip() for place, why in refusals(error))
        form = "[{account_id, name, credentials: {read: {access_key_id, secret_access_key}}}, ...]"
        reader.problem(BUCKET_LIST, f"is not a JSON list of the form {form}: {problems}")
        return []
