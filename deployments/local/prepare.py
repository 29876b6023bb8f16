"""Preparation of a local network: keys, ledger, buckets, text, environments, genesis."""

import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from blocks.env_file import env_lines, read_env_file
from blocks.environment import bucket_variables
from blocks.neuron import Neuron
from deployments.local.plan import DATASET_PREFIX, NETUID, WALLET_NAME, LocalNeuron, LocalPlan
from deployments.local.wallets import create_wallet
from deployments.network import start_network
from deployments.processes import ProcessRecord, write_private
from deployments.s3_endpoint import AccessKey, BucketKeys, EndpointAdmin, bucket_names, create_bucket_with_keys
from templar.agreement.genesis import Birth
from templar.chain.clock import SystemClock
from templar.chain.ledger import Ledger, create_ledger
from templar.data.corpus import collect_documents
from templar.data.shards.shard_writer import build_shards
from templar.datasets.page_writer import build_dataset, upload_dataset
from templar.errors import PermanentError, Reason
from templar.hparams import HParams
from templar.neuron.configuration import CHAIN_ROLES
from templar.store.address import encode_address
from templar.store.directory import DirectoryStore
from templar.store.s3 import S3Store

CORPUS_BYTES = 4_000_000
SAMPLES_PER_SHARD = 14_336
"""Samples of a shard of the local dataset, which has two of them: four windows of seven slots, and a little more."""
DATASET_ACCOUNT = "dataset"
READ_TIMEOUT_SECONDS = 3.0
JOINED_STAKE = 100.0  # of a validator or aggregator: too little to stop the network when it is stopped


_LOCAL_KEY = AccessKey("local", "local")
LOCAL_KEYS = BucketKeys("local", _LOCAL_KEY, _LOCAL_KEY)  # of a bucket that is a folder


def require_own_folder(plan: LocalPlan) -> None:
    """Refuse (`bad_environment`) a folder that a bring-up would empty although something else lies in it."""
    folder = plan.folder
    if folder.exists() and not plan.marker.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PermanentError(
            Reason.BAD_ENVIRONMENT,
            f"--folder {folder}: it is not a local network's, and would be emptied: name a new folder or an empty one",
        )


def prepare_folder(plan: LocalPlan) -> None:
    """Make the folder anew, for this user alone."""
    shutil.rmtree(plan.folder, ignore_errors=True)
    plan.folder.mkdir(parents=True, mode=0o700)
    plan.marker.touch()


def prepare_chain(plan: LocalPlan, hparams: HParams) -> None:
    """Create the ledger, and a wallet for every member with a registered hotkey that has announced its role."""
    create_ledger(
        plan.ledger,
        netuid=NETUID,
        block_seconds=hparams.windows.block_seconds,
        genesis_time=SystemClock().now(),
        seed=secrets.randbits(63),
    )
    ledger = Ledger(plan.ledger)
    for neuron in plan.neurons:
        hotkey = create_wallet(plan.wallets, WALLET_NAME, neuron.name)
        permit = neuron.role in ("aggregator", "validator")
        ledger.register(hotkey.address, stake=neuron.stake, validator_permit=permit)
        if neuron.role in CHAIN_ROLES:
            announcing = Ledger(plan.ledger, hotkey=hotkey)
            announcing.set_role(CHAIN_ROLES[neuron.role])
            announcing.close()
    ledger.close()


def prepare_dataset(plan: LocalPlan, hparams: HParams) -> None:
    """Cut real text of this machine into the documented dataset layout, with a tokenizer beside it."""
    documents, vocab_size = collect_documents(max_bytes=CORPUS_BYTES), hparams.model.vocab_size
    if hparams.data.layout == "pages":
        build_dataset(documents, plan.dataset, vocab_size=vocab_size)
        return
    length = hparams.data.sequence_length
    build_shards(
        documents, plan.dataset, vocab_size=vocab_size, sequence_length=length, samples_per_shard=SAMPLES_PER_SHARD
    )


def prepare_buckets(plan: LocalPlan) -> dict[str, BucketKeys]:
    """Make every bucket with a read and a write key, and upload the dataset; the keys by account."""
    accounts = [DATASET_ACCOUNT, *(neuron.account_id for neuron in plan.running)]
    if plan.directory_store:
        keys = dict.fromkeys(accounts, LOCAL_KEYS)
        for account in accounts:
            (plan.buckets / account).mkdir(parents=True)
    else:
        admin = EndpointAdmin.load(plan.admin_file)
        keys = {account: create_bucket_with_keys(admin, account) for account in accounts}
    own = DirectoryStore(plan.buckets / DATASET_ACCOUNT) if plan.directory_store else None
    store = own or _endpoint_store(plan.storage_url, DATASET_ACCOUNT, keys[DATASET_ACCOUNT].write)
    upload_dataset(plan.dataset, store, DATASET_PREFIX)
    return keys


def _endpoint_store(url: str, bucket: str, key: AccessKey) -> S3Store:
    secret = key.secret_access_key
    return S3Store(bucket, endpoint_url=url, access_key_id=key.access_key_id, secret_access_key=secret)


def write_environments(plan: LocalPlan, keys: Mapping[str, BucketKeys]) -> None:
    """Write each neuron's environment and a reader's as an operator's `.env` would hold it, for this user alone."""
    public = _public_environment(plan, keys[DATASET_ACCOUNT].read)
    for neuron in plan.running:
        values = {
            **public,
            **own_environment(plan, neuron, keys[neuron.account_id]),
            "TEMPLAR_STORAGE_READ_TIMEOUT_SECONDS": str(plan.pace * READ_TIMEOUT_SECONDS),
            "TEMPLAR_STORAGE_MAX_ATTEMPTS": "1",  # retries are the task's: they are seen in the UI
            **plan.settings.get(neuron.name, {}),
        }
        write_private(plan.env_file(neuron.name), "".join(env_lines(values)).encode())
    write_private(plan.network_env, "".join(env_lines(public)).encode())


def keep_buckets(plan: LocalPlan) -> None:
    """Copy every bucket, which the S3 endpoint has in memory, into the network's folder, and lead readers there.

    Those of neurons that joined are among them. Objects keep their times. The dataset is copied from the folder that it
    was uploaded from.
    """
    admin = EndpointAdmin.load(plan.admin_file)
    for bucket in set(bucket_names(admin)) - {DATASET_ACCOUNT}:
        source, folder = _endpoint_store(admin.endpoint_url, bucket, admin.key), plan.buckets / bucket
        folder.mkdir(parents=True, exist_ok=True)
        for info in source.list():
            stamped = DirectoryStore(folder, clock=partial(float, info.last_modified))
            try:
                data = source.get(info.key, max_bytes=info.size)
            except PermanentError as error:
                if error.reason not in (Reason.OBJECT_MISSING, Reason.WRONG_SIZE):
                    raise
                continue  # a neuron that joined still runs, and has changed it
            stamped.put(info.key, data)
        source.close()
    (plan.buckets / DATASET_ACCOUNT).mkdir(exist_ok=True)
    upload_dataset(plan.dataset, DirectoryStore(plan.buckets / DATASET_ACCOUNT), DATASET_PREFIX)
    values = {**read_env_file(plan.network_env), "TEMPLAR_STORAGE": plan.buckets.as_uri()}
    write_private(plan.network_env, "".join(env_lines(values)).encode())


def announce_bucket(block: Neuron) -> None:
    """Commit a neuron's bucket before the first window opens: a window knows no bucket that is committed later."""
    chain = block.subnet.open(block.wallet)
    chain.set_commitment(encode_address(block.bucket.open().address))


def publish_network(plan: LocalPlan, publisher: Neuron, *, opens_in_seconds: float) -> Birth:
    """Publish genesis checkpoint and start window under the hotkey of the `publisher`, the aggregator."""
    folder, opened = plan.folder / "genesis", plan.folder / "opened"
    return start_network(publisher, opens_in_seconds=opens_in_seconds, folder=folder, data_folder=opened).birth


def own_environment(plan: LocalPlan, neuron: LocalNeuron, bucket: BucketKeys) -> dict[str, str]:
    """The variables that are a neuron's own: role, folder, wallet and bucket."""
    own, account = bucket_variables(neuron.role), neuron.account_id
    return {
        "TEMPLAR_ROLE": neuron.role,
        "TEMPLAR_HOME": str(plan.home(neuron)),
        "WALLET_PATH": str(plan.wallets),
        "WALLET_NAME": WALLET_NAME,
        "WALLET_HOTKEY": neuron.name,
        f"{own}_ACCOUNT_ID": account,
        f"{own}_BUCKET_NAME": account,
        f"{own}_READ_ACCESS_KEY_ID": bucket.read.access_key_id,
        f"{own}_READ_SECRET_ACCESS_KEY": bucket.read.secret_access_key,
        f"{own}_WRITE_ACCESS_KEY_ID": bucket.write.access_key_id,
        f"{own}_WRITE_SECRET_ACCESS_KEY": bucket.write.secret_access_key,
    }


def _public_environment(plan: LocalPlan, dataset: AccessKey) -> dict[str, str]:
    """Return where the network is, and how its programs compute on this machine."""
    return {
        "TEMPLAR_HOME": str(plan.folder / "reader"),
        "TEMPLAR_PRESET": plan.preset,
        "TEMPLAR_HPARAMS": str(plan.hparams_path),
        "TEMPLAR_DEVICE": "cpu",  # several neurons share this machine: each trains on one thread
        "TEMPLAR_THREADS": "1",
        "TEMPLAR_PRECISION": "float32",
        "TEMPLAR_INNER_SNAPSHOT_SECONDS": "0",
        "TEMPLAR_STORAGE": plan.storage_url,
        "NETWORK": f"ledger:{plan.ledger}",
        "NETUID": str(NETUID),
        "R2_DATASET_ACCOUNT_ID": DATASET_ACCOUNT,
        "R2_DATASET_BUCKET_NAME": DATASET_ACCOUNT,
        "R2_DATASET_READ_ACCESS_KEY_ID": dataset.access_key_id,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": dataset.secret_access_key,
        "DATASET_BINS_PATH": DATASET_PREFIX,
    }


def join_local(folder: Path, role: str, hotkey: str) -> dict[str, str]:
    """Give a neuron that is started by hand a place in the local network of a folder: hotkey, registration, bucket.

    A validator or an aggregator gets stake and a permit. `hotkey` is a name that no neuron of the network has. Returns
    the variables of the neuron's `.env`.

    Raises:
        PermanentError: `bad_environment`, no network runs there; `bad_wallet`, the network has this hotkey already.
        TransientError: The S3 endpoint does not answer.
    """
    # 1. The network, where `make up` left its addresses.
    plan = LocalPlan(folder.absolute())
    if not plan.network_env.exists() or not ProcessRecord(plan.processes).running():
        raise PermanentError(Reason.BAD_ENVIRONMENT, f"--local {folder}: no network runs there; `make up` starts one")
    public = read_env_file(plan.network_env)
    # 2. The hotkey, registered with its stake.
    neuron = LocalNeuron(hotkey, role, stake=0.0 if role == "miner" else JOINED_STAKE)
    address = create_wallet(plan.wallets, WALLET_NAME, hotkey).address
    ledger = Ledger(plan.ledger)
    ledger.register(address, stake=neuron.stake, validator_permit=role != "miner")
    ledger.close()
    # 3. The bucket: a folder, or one at the S3 endpoint with a key that reads and one that writes.
    if public["TEMPLAR_STORAGE"].startswith("file:"):
        (plan.buckets / neuron.account_id).mkdir()
        keys = LOCAL_KEYS
    else:
        keys = create_bucket_with_keys(EndpointAdmin.load(plan.admin_file), neuron.account_id)
    return public | own_environment(plan, neuron, keys)
