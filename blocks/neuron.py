"""A neuron: everything that a process needs to be one, from blocks and hyper-parameters to the live node."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, field_validator

from blocks.chain import Subnet, Wallet
from blocks.dataset import Dataset
from blocks.storage import NeuronBucket
from templar.chain.remote import public_address
from templar.errors import PermanentError, Reason
from templar.exchange.buckets import Buckets
from templar.hparams import HParams, load_hparams

if TYPE_CHECKING:
    from templar.housekeeping.maintenance import Premises
    from templar.neuron.node import Node

Role = Literal["miner", "validator", "aggregator"]
HONEST = "honest"
"""The actor that every miner of a real network is."""


class Neuron(Block):
    """One neuron of this host.

    Attributes:
        role: What it does.
        actor: For miners: `honest`, or the name of a bad actor in a test network.
        home: Its folder on this host: journal, snapshots, payloads.
        preset: Preset of hparams.json.
        hparams_path: The file.
        genesis: Genesis hash to insist on; empty takes the network's.
        subnet: The subnet.
        wallet: Its keys.
        bucket: Its bucket.
        dataset: The training text.

    Example:
        Load a stored neuron:
        ```python
        from blocks import Neuron

        neuron = Neuron.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Neuron"
    _block_type_slug = "neuron"
    _documentation_url = HttpUrl("https://docs.learnbittensor.org/learn/neurons")

    role: Role = Field(description="What it does: miner, validator or aggregator.")
    actor: str = Field(default=HONEST, description="For miners: honest, or a bad actor of a test network.")
    home: str = Field(description="Its folder on this host.")
    preset: str = Field(description="Preset of hparams.json.")
    hparams_path: str = Field(default="hparams.json", description="Path of hparams.json.")
    genesis: str = Field(default="", description="Genesis hash to insist on, or nothing to take the network's.")
    subnet: Subnet = Field(description="The subnet.")
    wallet: Wallet = Field(description="Its keys.")
    bucket: NeuronBucket = Field(description="Its bucket.")
    dataset: Dataset = Field(description="The training text.")

    @field_validator("genesis")
    @classmethod
    def _is_a_hash(cls, genesis: str) -> str:
        if genesis and re.fullmatch("[0-9a-f]{64}", genesis) is None:
            raise ValueError("a genesis hash is 64 lower-case hex digits; leave it empty to take the network's")
        return genesis

    def hparams(self) -> HParams:
        """The network's numbers.

        Raises:
            PermanentError: `bad_hparams`.
        """
        return load_hparams(self.preset, path=Path(self.hparams_path))

    def premises(self) -> "Premises":
        """What scheduled work needs of this neuron, without the live state.

        Raises:
            PermanentError: As `build`.
            TransientError: As `build`.
        """
        from templar.housekeeping.maintenance import Premises

        hotkey, chain = self.wallet.open(), self.subnet.open(self.wallet)
        buckets = Buckets(chain, self.bucket.endpoint.open_reader, own=self.bucket.open(), hotkey=hotkey.address)
        return Premises(Path(self.home), self.hparams(), chain, buckets, hotkey, self.genesis or None)

    def build(self, name: str) -> "Node":
        """The node, not started.

        Args:
            name: Name of the neuron on this host.

        Raises:
            PermanentError: `bad_hparams`, `bad_wallet`, `bad_environment`, ...
            TransientError: The chain cannot be reached.
        """
        from templar.neuron.node import NodeSettings, Surroundings

        hparams, hotkey, own = self.hparams(), self.wallet.open(), self.bucket.open()
        chain = self.subnet.open(self.wallet)
        if abs(chain.block_seconds - hparams.windows.block_seconds) > 1e-6:
            raise PermanentError(
                Reason.BAD_HPARAMS,
                f"windows.block_seconds is {hparams.windows.block_seconds:g} in preset {self.preset!r}, but a block of "
                f"{public_address(self.subnet.network)} takes {chain.block_seconds:g} s: choose the network's preset",
            )
        buckets = Buckets(chain, self.bucket.endpoint.open_reader, own=own, hotkey=hotkey.address)
        open_dataset = partial(self.dataset.open, hparams, Path(self.home))
        settings = NodeSettings(name, Path(self.home), pinned_genesis=self.genesis or None)
        return self._kind()(settings, hparams, Surroundings(chain, buckets, hotkey, open_dataset))

    def _kind(self) -> "type[Node]":
        from templar.adversary.actors import ACTORS
        from templar.neuron.aggregator import Aggregator
        from templar.neuron.validator import Validator

        kinds: dict[str, type[Node]] = {"validator": Validator, "aggregator": Aggregator}
        kind = kinds.get(self.role) or ACTORS.get(self.actor)
        if kind is None:
            raise PermanentError(
                Reason.BAD_ENVIRONMENT, f"TEMPLAR_ACTOR is {self.actor!r}; there are {', '.join(ACTORS)}"
            )
        return kind
