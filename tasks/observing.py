"""The means of readers of a network, such as an audit: chain, buckets and dataset, and no hotkey."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blocks.chain import Subnet
from blocks.dataset import Dataset
from blocks.environment import EnvironmentReader, dataset_block, endpoint_block, trainer_settings
from blocks.neuron import Neuron
from blocks.storage import StorageEndpoint
from templar.audit.evidence_audit import Auditor
from templar.exchange.buckets import Buckets
from templar.hparams import DEFAULT_PRESET, HParams, TrainerSettings, load_hparams
from templar.neuron.configuration import NeuronConfig
from templar.neuron.node import Node

FOLDER = "audit"  # in a neuron's folder: where the audit keeps its own state, apart from the neuron's


@dataclass(frozen=True)
class PublicNetwork:
    """A network as everybody may read it."""

    config: NeuronConfig
    dataset: Dataset
    preset: str
    """The name of its numbers on this host."""


def context_of(block: Neuron) -> NeuronConfig:
    """Return what an audit on a neuron's host works with: no hotkey, and a folder of its own beside the neuron's state.

    Raises:
        PermanentError: `bad_hparams`.
        TransientError: The chain cannot be reached.
    """
    return network_of(block, FOLDER).config


def context_from_environment(environment: Mapping[str, str]) -> NeuronConfig:
    """The same from the variables of `.env.example` that say where the network is; no wallet, no bucket.

    Raises:
        PermanentError: `bad_environment`, which names every variable that is missing or malformed; `bad_hparams`.
        TransientError: The chain cannot be reached.
    """
    return network_from_environment(environment, FOLDER).config


def network_of(block: Neuron, folder: str) -> PublicNetwork:
    """The network of a neuron, for a reader that keeps its own files in this folder of the neuron's.

    Raises:
        PermanentError: `bad_hparams`.
        TransientError: The chain cannot be reached.
    """
    return _network(
        block.subnet,
        block.bucket.endpoint,
        block.dataset,
        hparams=block.hparams(),
        preset=block.preset,
        home=Path(block.home),
        folder=folder,
        genesis=block.genesis or None,
        trainer=block.trainer,
    )


def network_from_environment(environment: Mapping[str, str], folder: str) -> PublicNetwork:
    """The same from the environment; errors as in `context_from_environment`."""
    reader = EnvironmentReader(environment)
    endpoint = endpoint_block(reader)
    subnet = reader.build(
        Subnet,
        {"network": "NETWORK", "netuid": "NETUID"},
        network=reader.network(),
        netuid=reader.whole_number("NETUID"),
    )
    dataset = dataset_block(reader, endpoint)
    preset, file = reader.text("TEMPLAR_PRESET", DEFAULT_PRESET), reader.path("TEMPLAR_HPARAMS", "hparams.json")
    home = Path(reader.path("TEMPLAR_HOME", "~/.templar"))
    genesis = reader.text("TEMPLAR_GENESIS", "") or None
    trainer = trainer_settings(reader)
    reader.raise_problems()
    hparams = load_hparams(preset, path=Path(file))
    return _network(
        *(subnet, endpoint, dataset),
        hparams=hparams,
        preset=preset,
        home=home,
        folder=folder,
        genesis=genesis,
        trainer=trainer,
    )


def _network(
    subnet: Subnet,
    endpoint: StorageEndpoint,
    dataset: Dataset,
    *,
    hparams: HParams,
    preset: str,
    home: Path,
    folder: str,
    genesis: str | None,
    trainer: TrainerSettings,
) -> PublicNetwork:
    chain = subnet.open(None)
    config = NeuronConfig(
        folder,
        home / folder,
        hparams,
        chain,
        Buckets(chain, endpoint.open_reader),
        signer=None,
        open_dataset=partial(dataset.open, hparams, home),  # shards that the neuron has need not come again
        pinned_genesis=genesis,
        trainer=trainer,
    )
    return PublicNetwork(config, dataset, preset)


@contextmanager
def auditing(config: NeuronConfig, tolerance: float | None) -> Iterator[Auditor]:
    """An auditor with a node of its own, as long as the context manager is open.

    Raises:
        PermanentError: `already_running`: another audit uses the folder; and as `Node`.
        TransientError: As `Node`.
    """
    node = Node(config)
    try:
        yield Auditor(node, tolerance=tolerance)
    finally:
        node.stop()
