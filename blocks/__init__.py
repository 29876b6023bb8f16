"""Prefect blocks: typed settings and secrets that build stores, chains and wallets."""

from blocks.chain import Subnet, Wallet
from blocks.dataset import Dataset
from blocks.neuron import Neuron
from blocks.storage import BucketCredentials, DatasetBucket, NeuronBucket, StorageEndpoint

__all__ = [
    "BucketCredentials",
    "Dataset",
    "DatasetBucket",
    "Neuron",
    "NeuronBucket",
    "StorageEndpoint",
    "Subnet",
    "Wallet",
]
