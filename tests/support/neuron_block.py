"""A neuron's block whose keys are words: `id-read` and `hush-read`."""

from typing import Any

from pydantic import SecretStr

from blocks import BucketCredentials, Dataset, DatasetBucket, Neuron, NeuronBucket, StorageEndpoint, Subnet, Wallet


def key(word):
    return BucketCredentials(access_key_id=f"id-{word}", secret_access_key=SecretStr(f"hush-{word}"))


def neuron_block(url="http://127.0.0.1:9000", *, places=("data-1",), prefix="text", **changes):
    """A neuron whose dataset lies in the buckets `places`."""
    endpoint = StorageEndpoint(url=url, read_timeout_seconds=3.5, max_attempts=2)
    buckets: Any = [DatasetBucket(account_id=place, bucket=place, read=key(place)) for place in places]
    return Neuron(
        **{
            "role": "miner",
            "home": "/srv/neuron",
            "preset": "150M",
            "subnet": Subnet(network="ledger:/srv/ledger.sqlite", netuid=3),
            "wallet": Wallet(path="/srv/wallets", name="cold", hotkey="hot"),
            "bucket": NeuronBucket(endpoint=endpoint, account_id="own-account", read=key("read"), write=key("write")),
            "dataset": Dataset(endpoint=endpoint, buckets=buckets, prefix=prefix),
            **changes,
        }
    )
