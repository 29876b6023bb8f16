"""A neuron: everything that a process needs to be one, from blocks and hyper-parameters to the live node."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from prefect.blocks.core import Block
from pydantic import Field, HttpUrl, ValidationError, field_validator

from blocks.chain import Subnet, Wallet
from blocks.dataset import Dataset
from blocks.schema import SchemaOnce
from blocks.storage import NeuronBucket
from templar.chain.remote import public_address
from templar.errors import PermanentError, Reason
from templar.exchange.buckets import Buckets
from templar.hparams import PRODUCTION_TRAINER, SETTINGS_FILE, HParams, TrainerSettings, load_hparams, with_agreed

if TYPE_CHECKING:
    from templar.neuron.configuration import NeuronConfig
    from templar.neuron.node import Node

B = TypeVar("B", bound=Block)

Role = Literal["miner", "validator", "aggregator"]


class Neuron(SchemaOnce, Block):
    """One neuron of this host."""

    _documentation_url = HttpUrl("https://docs.learnbittensor.org/learn/neurons")

    role: Role = Field(description="What it does: miner, validator or aggregator.")
    home: str = Field(description="Its folder on this host.")
    preset: str = Field(description="Preset of hparams.json.")
    hparams_path: str = Field(default="hparams.json", description="Path of hparams.json.")
    genesis: str = Field(default="", description="Genesis hash to insist on, or nothing to take the network's.")
    subnet: Subnet = Field(description="The subnet.")
    wallet: Wallet = Field(description="Its keys.")
    bucket: NeuronBucket = Field(description="Its bucket.")
    dataset: Dataset = Field(description="The training text.")
    trainer: TrainerSettings = Field(default=PRODUCTION_TRAINER, description="The device that it trains on, and how.")

    @field_validator("genesis")
    @classmethod
    def _is_a_hash(cls, genesis: str) -> str:
        if genesis and re.fullmatch("[0-9a-f]{64}", genesis) is None:
            raise ValueError("a genesis hash is 64 lower-case hex digits; leave it empty to take the network's")
        return genesis

    def save_with_parts(self, name: str) -> None:
        """Save the neuron under a name, and each block in it as a document of its own, `{name}-{field}`.

        The UI shows and changes only blocks with documents of their own. What is saved under these names is replaced.
        """
        _save(self, name)

    def hparams(self) -> HParams:
        """The numbers of the network that the folder joined, or else the preset's; `bad_hparams`."""
        own, joined = self.preset_hparams(), Path(self.home) / SETTINGS_FILE
        return with_agreed(own, joined.read_bytes()) if joined.exists() else own

    def preset_hparams(self) -> HParams:
        """The preset's numbers, of which a neuron that joined a network has its own storage alone; `bad_hparams`."""
        return load_hparams(self.preset, path=Path(self.hparams_path))

    def config(self, name: str) -> "NeuronConfig":
        """Return what the node and the housekeeping of this neuron work with; nothing is changed.

        Raises:
            PermanentError: `bad_hparams`, `bad_wallet`, `bad_environment`, ...
            TransientError: The chain cannot be reached.
        """
        from templar.neuron.configuration import NeuronConfig

        hparams, hotkey, home = self.preset_hparams(), self.wallet.open(), Path(self.home)
        chain = self.subnet.open(self.wallet)
        own = self.bucket.open(chain.clock.now)  # a directory's stamps follow the chain, also on simulated time
        buckets = Buckets(chain, self.bucket.endpoint.open_reader, own=own, hotkey=hotkey.address)
        open_dataset = partial(self.dataset.open, hparams, home)
        pinned = self.genesis or None
        preset = NeuronConfig(name, home, hparams, chain, buckets, hotkey, open_dataset, pinned, trainer=self.trainer)
        return preset.of_network()

    def build(self, name: str) -> "Node":
        """The node, started.

        Errors as in `config`; what keeps a node from starting, such as `already_running`; a TransientError if stores
        could not be reached, or the network has not started.
        """
        kind, config = self.node_class(), self.config(name)
        chain, hparams = config.chain, config.hparams
        if abs(chain.block_seconds - hparams.windows.block_seconds) > 1e-6:
            raise PermanentError(
                Reason.BAD_HPARAMS,
                f"windows.block_seconds is {hparams.windows.block_seconds:g} in preset {self.preset!r}, but a block of "
                f"{public_address(self.subnet.network)} takes {chain.block_seconds:g} s: choose the network's preset",
            )
        return kind(config)

    def node_class(self) -> "type[Node]":
        """The class of this neuron's node."""
        from templar.neuron.aggregator import Aggregator
        from templar.neuron.miner import Miner
        from templar.neuron.validator import Validator

        return {"miner": Miner, "validator": Validator, "aggregator": Aggregator}[self.role]


def _save(block: Block, name: str) -> None:
    for field in type(block).model_fields:
        part = getattr(block, field)
        if isinstance(part, Block):
            _save(part, f"{name}-{field}")
    block._block_document_id = None  # a loaded or copied block would replace the document that it came from
    block.save(name, overwrite=True)


def load_saved(kind: type[B], name: str, *, remedy: str, instead: Callable[[], B | None] = lambda: None) -> B:
    """Load a block by its name; `bad_environment` if there is none, or another release saved it.

    `instead` may give the one to take where there is none.
    """
    try:
        block = kind.load(name)
    except ValueError:
        if (other := instead()) is not None:
            return other
        problem = "there is none"
    except RuntimeError as error:  # the client also raises it for a server that does not answer
        if not isinstance(error.__cause__, ValidationError):
            raise
        problem = "it is not of this release"
    else:
        assert isinstance(block, kind)  # noqa: S101 - `load` is declared to return a coroutine as well
        return block
    slug = kind.get_block_type_slug()
    raise PermanentError(Reason.BAD_ENVIRONMENT, f"{slug} block {name!r}: {problem}: {remedy}")
