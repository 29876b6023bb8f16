"""Where a network is seen from by somebody who only reads: chain, buckets and dataset, and no hotkey."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from blocks.chain import Subnet
from blocks.dataset import Dataset
from blocks.environment import dataset_block, endpoint_block
from blocks.neuron import Neuron
from blocks.reading import EnvironmentReader
from blocks.storage import StorageEndpoint
from templar.audit.evidence_audit import Auditor
from templar.exchange.buckets import Buckets
from templar.hparams import DEFAULT_PRESET, HParams, load_hparams
from templar.neuron.node import Node, NodeSettings, Surroundings

FOLDER = "audit"
"""In a neuron's folder: where the audit keeps its own state, apart from the neuron's."""


@dataclass(frozen=True)
class Viewpoint:
    """Where a network is seen from.

    Attributes:
        subnet: Its chain.
        endpoint: The object storage that its buckets are on.
        dataset: Its training text.
        hparams: Its numbers.
        home: A folder of this host; what is seen is kept in a folder of its own below it.
        genesis: Genesis hash to insist on; None takes the network's.
    """

    subnet: Subnet
    endpoint: StorageEndpoint
    dataset: Dataset
    hparams: HParams
    home: Path
    genesis: str | None = None

    @classmethod
    def of(cls, block: Neuron) -> "Viewpoint":
        """That of a neuron of this host.

        Raises:
            PermanentError: `bad_hparams`.
        """
        endpoint, home = block.bucket.endpoint, Path(block.home)
        return cls(block.subnet, endpoint, block.dataset, block.hparams(), home, block.genesis or None)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Viewpoint":
        """That of a stranger: the variables of `.env.example` that say where the network is; no wallet, no bucket.

        Raises:
            PermanentError: `bad_environment`, which names every variable that is missing or malformed; `bad_hparams`.
        """
        reader = EnvironmentReader(environment)
        endpoint = endpoint_block(reader)
        subnet = reader.build(
            Subnet,
            {"network": "NETWORK", "netuid": "NETUID"},
            network=reader.text("NETWORK", "finney"),
            netuid=reader.whole_number("NETUID"),
        )
        dataset = dataset_block(reader, endpoint)
        preset, file = reader.text("TEMPLAR_PRESET", DEFAULT_PRESET), reader.text("TEMPLAR_HPARAMS", "hparams.json")
        home = Path(reader.text("TEMPLAR_HOME", "~/.templar")).expanduser().absolute()
        genesis = reader.text("TEMPLAR_GENESIS", "") or None
        reader.raise_problems()
        return cls(subnet, endpoint, dataset, load_hparams(preset, path=Path(file).expanduser()), home, genesis)

    def node(self) -> Node:
        """A node that reads, not started. A live neuron of the same folder is not touched: this one has its own.

        Raises:
            TransientError: The chain cannot be reached.
        """
        chain = self.subnet.open(None)
        buckets = Buckets(chain, self.endpoint.open_reader)
        opening = partial(self.dataset.open, self.hparams, self.home)  # shards that the neuron has need not come again
        settings = NodeSettings(FOLDER, self.home / FOLDER, pinned_genesis=self.genesis)
        return Node(settings, self.hparams, Surroundings(chain, buckets, None, opening))


@contextmanager
def auditing(node: Node, tolerance: float) -> Iterator[Auditor]:
    """An auditor with a node of its own, as long as the context lasts.

    Args:
        node: The node, not started; see `Viewpoint.node`.
        tolerance: As in `Auditor`.

    Raises:
        PermanentError: `already_running`: another audit uses the folder; and as `Node.start`.
        TransientError: As `Node.start`.
    """
    node.start()
    try:
        yield Auditor(node, tolerance=tolerance)
    finally:
        node.stop()
