"""The means of readers of a network, such as an audit: chain, buckets and dataset, and no hotkey."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blocks.dataset import Dataset
from blocks.environment import EnvironmentReader, endpoint_block, network_fields
from blocks.neuron import Neuron
from blocks.storage import StorageEndpoint
from templar.audit.evidence_audit import Auditor
from templar.exchange.buckets import Buckets
from templar.hparams import load_hparams
from templar.neuron.configuration import NeuronConfig
from templar.neuron.node import Node

AUDIT_FOLDER = "audit"  # in a neuron's folder: where the audit keeps its own state, apart from the neuron's


@dataclass(frozen=True)
class PublicNetwork:
    """A network as everybody may read it."""

    config: NeuronConfig
    dataset: Dataset
    preset: str  # the name of its numbers on this host


def network_of(block: Neuron, folder: str = AUDIT_FOLDER) -> PublicNetwork:
    """The network of a neuron, for a reader that keeps its own files in this folder of the neuron's.

    `bad_hparams`; a TransientError while the chain cannot be reached.
    """
    return _network(dict(block), block.bucket.endpoint, folder)


def network_from_environment(environment: Mapping[str, str], folder: str = AUDIT_FOLDER) -> PublicNetwork:
    """The same from the variables of `.env.example` that say where the network is; no wallet, no bucket.

    Errors as in `network_of`, and `bad_environment`, which names every variable that is missing or malformed.
    """
    reader = EnvironmentReader(environment)
    endpoint = endpoint_block(reader)
    fields = network_fields(reader, endpoint)
    reader.raise_problems()
    return _network(fields, endpoint, folder)


def _network(fields: Mapping[str, Any], endpoint: StorageEndpoint, folder: str) -> PublicNetwork:
    """The network of these fields of a neuron's block; see `network_fields`."""
    hparams = load_hparams(fields["preset"], path=Path(fields["hparams_path"]))
    home, dataset = Path(fields["home"]), fields["dataset"]
    chain = fields["subnet"].open(None)
    preset = NeuronConfig(
        folder,
        home / folder,
        hparams,
        chain,
        Buckets(chain, endpoint.open_reader),
        signer=None,
        open_dataset=partial(dataset.open, hparams, home),  # shards that the neuron has need not come again
        pinned_genesis=fields["genesis"] or None,
        trainer=fields["trainer"],
    )
    return PublicNetwork(preset.of_network(), dataset, fields["preset"])


@contextmanager
def auditing(config: NeuronConfig, tolerance: float | None) -> Iterator[Auditor]:
    """An auditor with a node of its own, as long as the context manager is open.

    `already_running` if another audit uses the folder; other errors as `Node`.
    """
    node = Node(config)
    try:
        yield Auditor(node, tolerance=tolerance)
    finally:
        node.stop()
