"""The configuration of a neuron, and what it takes to join a network: its genesis, the lease, the role on chain."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from templar.agreement.genesis import Birth, check_settings, find_birth, read_settings, validators_now
from templar.canonical import sha256_hex
from templar.chain.base import Chain, NeuronInfo, Role
from templar.chain.hotkey import Signer
from templar.data.dataset import TrainingData
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.lease import Claimant, NeuronLease, Terms
from templar.exchange.network_view import NetworkView
from templar.hparams import SETTINGS_FILE, Data, HParams, TrainerSettings, with_agreed
from templar.neuron.lock import holder_of, this_machine, write_file

log = logging.getLogger(__name__)

CHAIN_ROLES = {"miner": Role.MINER, "aggregator": Role.VALIDATOR, "validator": Role.VALIDATOR}
"""The role that a neuron of each kind announces on chain."""
GENESIS_FILE = "network"  # in a neuron's folder: the genesis hash of the network that it joined


@dataclass(frozen=True)
class NeuronConfig:
    """The configuration and the connections of a neuron, for its node and its housekeeping."""

    name: str  # of the neuron, on this host
    home: Path  # its folder: journal, snapshots, spool, payloads
    hparams: HParams
    chain: Chain  # the subnet, seen by the neuron's hotkey
    buckets: Buckets
    signer: Signer | None  # the hotkey; None for an observer
    open_dataset: Callable[[Data], TrainingData]  # opens the training split; called when the network is reachable
    pinned_genesis: str | None = None  # genesis hash that the operator insists on; None takes the network's
    gather_concurrency: int = 8  # peers fetched at once
    durable: bool = True  # wait for the disk before anything is published; only a simulation does without
    secret_order: bool = True  # train in an order that nobody else knows; a simulation keeps the assigned one
    trainer: TrainerSettings = field(default_factory=TrainerSettings)  # what the operator chose for this host
    agreed: bytes | None = None  # what `hparams` has of a network's settings; None if it is a preset

    @property
    def own_signer(self) -> Signer:
        """The own hotkey.

        Raises:
            PermanentError: `not_registered`; an observer has none.
        """
        if self.signer is None:
            raise PermanentError(Reason.NOT_REGISTERED, "this node has no hotkey: it can only read")
        return self.signer

    def own_neuron(self) -> NeuronInfo:
        """The own hotkey's neuron, as the chain has it now.

        Raises:
            PermanentError: `not_registered`.
            TransientError: The chain could not be reached.
        """
        neuron = self.chain.metagraph().by_hotkey(self.own_signer.address)
        if neuron is None:
            raise PermanentError(
                Reason.NOT_REGISTERED,
                f"hotkey {self.own_signer.address} is not registered on subnet {self.chain.netuid}: register it first",
            )
        return neuron

    def birth(self) -> Birth:
        """Find where the network started: the one that the operator insists on, or that this folder joined first.

        A validator with more stake may publish another genesis later: it captures nobody that is in a network.

        Raises:
            TransientError: `genesis_missing`, or a store failed.
            PermanentError: `bad_hparams`, ...; this node has other numbers than the network. `wrong_network`; the
                folder belongs to another network than the one that the operator insists on.
        """
        birth = find_birth(self.chain, self.buckets, self.hparams, pinned=self._pinned())
        check_settings(birth.start, sha256_hex(self.agreed or self.hparams.agreed))
        return birth

    def _pinned(self) -> str | None:
        path = self.home / GENESIS_FILE
        joined = path.read_text().strip() if path.exists() else None
        if self.pinned_genesis is not None and joined not in (None, self.pinned_genesis):
            raise PermanentError(
                Reason.WRONG_NETWORK,
                f"{path}: this folder belongs to the network {joined}, and the genesis that is set is "
                f"{self.pinned_genesis}: set that of the folder, or give the other network a folder of its own",
            )
        return self.pinned_genesis or joined

    def of_network(self) -> Self:
        """This configuration with the settings that the network started with, in place of the preset's.

        They are those of the folder, if it joined a network, or else what the network's publisher shows. So another
        preset, or another release's of the same name, changes only what is the operator's own. Where no network is
        found, or its publisher shows none, nothing is changed.

        Raises:
            PermanentError: `bad_hparams`; this release does not know a setting, or they are not those of the start
                window. `wrong_network`, `access_denied`, ...
            TransientError: Chain or store could not be reached.
        """
        path = self.home / SETTINGS_FILE
        agreed = path.read_bytes() if path.exists() else None
        if agreed is None or not (self.home / GENESIS_FILE).exists():
            self.chain.head()  # a failure of the chain is none of the network's
            known = {self.hparams.digest: None} | ({} if agreed is None else {sha256_hex(agreed): agreed})
            try:
                birth = find_birth(self.chain, self.buckets, self.hparams, pinned=self._pinned())
            except TransientError as error:
                log.info("no network is found: %s", error)
            else:
                start = birth.start.hparams
                agreed = known[start] if start in known else read_settings(self.buckets, birth)
        if agreed is None:
            return self
        return replace(self, hparams=with_agreed(self.hparams, agreed), agreed=agreed)

    def keep_settings(self) -> None:
        """Keep the settings in the folder: every command of the neuron takes them from there."""
        path, agreed = self.home / SETTINGS_FILE, self.agreed or self.hparams.agreed
        if not path.exists() or path.read_bytes() != agreed:
            self.home.mkdir(parents=True, exist_ok=True)
            write_file(path, lambda part: part.write_bytes(agreed), durable=self.durable)

    def reading(self, birth: Birth) -> NetworkView:
        """The network that started so, for whoever only reads it."""
        return NetworkView(self.chain, self.buckets, birth.network, self.hparams)

    def join(self) -> Birth:
        """As `birth`, and the folder belongs to that network from now on. Its lock must be held."""
        birth, path = self.birth(), self.home / GENESIS_FILE
        if not path.exists():
            validators = validators_now(self.chain, self.hparams)
            stake, total = birth.publisher.stake, sum(each.stake for each in validators)
            log.info(
                "this folder joins the network %s, published by uid %d with %.0f %% of the validators' stake",
                birth.network.genesis,
                birth.publisher.uid,
                100 * stake / total if total else 0.0,
            )
            write_file(path, lambda part: part.write_text(birth.network.genesis), durable=self.durable)
        self.keep_settings()
        return birth


def take_lease(config: NeuronConfig, role: str | None) -> NeuronLease | None:
    """Take the neuron's lease; from then on its own bucket is only written to while it holds.

    It is of the role on chain: an aggregator and a validator of one hotkey would sign words against each other. The
    lock of the neuron's folder must be held. None for a node without a hotkey or a role.

    Raises:
        PermanentError: `not_registered`, `already_running`; nothing was changed.
        TransientError: Chain or store could not be reached.
    """
    chain, buckets, signer = config.chain, config.buckets, config.signer
    if signer is None:
        return None
    neuron = config.own_neuron()
    if role is None:
        return None
    buckets.write_while(None)  # the lease of an earlier start says nothing of this one
    holder = holder_of(config.home, durable=config.durable)
    claimant = Claimant(chain.netuid, neuron.uid, signer.address, CHAIN_ROLES[role].value, holder, this_machine())
    lease = NeuronLease(buckets.own, chain.clock, signer, claimant, Terms.of(config.hparams.windows))
    lease.enter()
    buckets.write_while(lease.hold)
    return lease


def announce_role(chain: Chain, address: str, role: str) -> bool:
    """Announce a neuron's role under its hotkey, unless the chain has it; whether it had to.

    It counts from the next window on.

    Raises:
        TransientError: `chain_unreachable`, `chain_rate_limited`, ...; a later call goes on.
        PermanentError: The chain refused, for example because the hotkey is not registered.
    """
    neuron, wanted = chain.metagraph().by_hotkey(address), CHAIN_ROLES[role]
    if neuron is not None and neuron.role is wanted:
        return False
    log.info("hotkey %s announces that it is a %s", address, wanted)
    chain.set_role(wanted)
    return True
