"""The environment of a neuron: the documented variables, read once, checked, and saved as blocks.

Secrets and endpoints come from here and nowhere else; numbers come from `hparams.json`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from blocks.chain import Subnet, Wallet
from blocks.dataset import Dataset
from blocks.neuron import Neuron
from blocks.reading import EnvironmentReader
from blocks.storage import R2, BucketCredentials, DatasetBucket, NeuronBucket, StorageEndpoint
from templar.hparams import DEFAULT_PRESET


def neuron_from_environment(environment: Mapping[str, str]) -> Neuron:
    """Make the neuron's block from environment variables (`.env.example` lists them all).

    Raises:
        PermanentError: `bad_environment`; the message names every variable that is missing or malformed, and the
            remedy. No secret is part of it.
    """
    reader = EnvironmentReader(environment)
    role = reader.text("TEMPLAR_ROLE", "miner")
    own = "R2_AGGREGATOR" if role == "aggregator" else "R2_GRADIENTS"
    endpoint = reader.build(
        StorageEndpoint,
        url=reader.text("TEMPLAR_STORAGE", R2),
        read_timeout_seconds=reader.number("TEMPLAR_STORAGE_READ_TIMEOUT_SECONDS", 20.0),
        max_attempts=int(reader.number("TEMPLAR_STORAGE_MAX_ATTEMPTS", 4)),
    )
    subnet = reader.build(Subnet, network=reader.text("NETWORK", "finney"), netuid=int(reader.number("NETUID")))
    wallet = reader.build(
        Wallet,
        path=reader.text("WALLET_PATH", "~/.bittensor/wallets"),
        name=reader.text("WALLET_NAME"),
        hotkey=reader.text("WALLET_HOTKEY"),
    )
    bucket = _own_bucket(reader, own, endpoint)
    dataset = reader.build(
        Dataset, endpoint=endpoint, buckets=_dataset_buckets(reader), prefix=reader.text("DATASET_BINS_PATH", "dataset")
    )
    neuron = reader.build(
        Neuron,
        role=role,
        actor=reader.text("TEMPLAR_ACTOR", "honest"),
        home=str(Path(reader.text("TEMPLAR_HOME", "~/.templar")).expanduser()),
        preset=reader.text("TEMPLAR_PRESET", DEFAULT_PRESET),
        hparams_path=reader.text("TEMPLAR_HPARAMS", "hparams.json"),
        genesis=reader.text("TEMPLAR_GENESIS", ""),
        subnet=subnet,
        wallet=wallet,
        bucket=bucket,
        dataset=dataset,
    )
    reader.raise_problems()
    return neuron


def _own_bucket(reader: EnvironmentReader, prefix: str, endpoint: StorageEndpoint) -> NeuronBucket:
    account_id = reader.text(f"{prefix}_ACCOUNT_ID")
    name = reader.text(f"{prefix}_BUCKET_NAME", account_id)
    if name != account_id:
        reader.problem(
            f"{prefix}_BUCKET_NAME is {name!r}: readers know a bucket by its account alone, so it must be named "
            f"like {prefix}_ACCOUNT_ID"
        )
    return reader.build(
        NeuronBucket,
        endpoint=endpoint,
        account_id=account_id,
        read=_key(reader, f"{prefix}_READ"),
        write=_key(reader, f"{prefix}_WRITE"),
    )


def _key(reader: EnvironmentReader, prefix: str) -> BucketCredentials:
    return BucketCredentials(
        access_key_id=reader.text(f"{prefix}_ACCESS_KEY_ID"),
        secret_access_key=SecretStr(reader.text(f"{prefix}_SECRET_ACCESS_KEY")),
    )


def _dataset_buckets(reader: EnvironmentReader) -> list[DatasetBucket]:
    """`R2_DATASET_BUCKET_LIST` if it is set, else the single `R2_DATASET_*` bucket."""
    text = reader.text("R2_DATASET_BUCKET_LIST", "")
    if not text:
        account_id = reader.text("R2_DATASET_ACCOUNT_ID")
        name = reader.text("R2_DATASET_BUCKET_NAME", account_id)
        return [DatasetBucket(account_id=account_id, bucket=name, read=_key(reader, "R2_DATASET_READ"))]
    try:
        return [_listed_bucket(item) for item in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        reader.problem(
            f"R2_DATASET_BUCKET_LIST is not a JSON list of {{account_id, name, credentials: {{read: {{access_key_id, "
            f"secret_access_key}}}}}} ({type(error).__name__} at {str(error)[:60]!r})"
        )
        return []


def _listed_bucket(item: Mapping[str, Any]) -> DatasetBucket:
    read = item["credentials"]["read"]
    key = BucketCredentials(access_key_id=read["access_key_id"], secret_access_key=SecretStr(read["secret_access_key"]))
    return DatasetBucket(account_id=item["account_id"], bucket=item["name"], read=key)
