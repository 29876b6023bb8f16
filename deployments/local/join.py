"""A place in the local network for a neuron that is started by hand: `templar neuron init --local`.

The subnet's owner would register the hotkey, and the store's provider would make the bucket and its keys: on this
machine both are done here. The neuron itself is set up and started as any other one.
"""

from pathlib import Path

from blocks.env_file import read_env_file
from deployments.local.plan import WALLET_NAME, LocalNeuron, LocalPlan
from deployments.local.prepare import LOCAL_KEYS, own_environment
from deployments.local.wallets import create_wallet
from deployments.processes import ProcessRecord
from deployments.s3_endpoint import EndpointAdmin, create_bucket_with_keys
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason

STAKE = 100.0  # of a validator or aggregator: too little to stop the network when it is stopped


def join_local(folder: Path, role: str, hotkey: str) -> dict[str, str]:
    """Make and register a hotkey in the local network that runs in a folder, and make its bucket.

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
    neuron = LocalNeuron(hotkey, role, stake=0.0 if role == "miner" else STAKE)
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
