"""Joining a network: find its birth, check that this node has the same numbers, text and tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from templar.chain.base import Chain
from templar.chain.keys import Signer
from templar.data.training import TrainingData
from templar.errors import PermanentError, Reason
from templar.exchange.buckets import Buckets
from templar.exchange.context import Exchange
from templar.exchange.genesis import Birth, find_birth, require_digest
from templar.exchange.holders import Claimant
from templar.exchange.lease import NeuronLease, Terms
from templar.hparams import HParams
from templar.model.tokenizer import EMBEDDED, check_fits, load_tokenizer
from templar.neuron.lock import holder_of, this_machine
from templar.neuron.workload import Workload


@dataclass(frozen=True)
class NodeSettings:
    """What is particular to one node and nobody else's business.

    Attributes:
        name: The neuron's name on this host.
        home: Its folder: journal, snapshots, spool, payloads.
        pinned_genesis: Genesis hash that the operator insists on; None takes the network's.
        gather_concurrency: Peers fetched at once.
        durable: Wait for the disk before anything is published; only a simulation does without.
    """

    name: str
    home: Path
    pinned_genesis: str | None = None
    gather_concurrency: int = 8
    durable: bool = True


@dataclass(frozen=True)
class Surroundings:
    """What a node is connected to.

    Attributes:
        chain: The subnet, seen by the node's hotkey.
        buckets: Everybody's buckets.
        signer: The hotkey; None for an observer.
        open_dataset: Opens the training split; called when the network is reachable.
    """

    chain: Chain
    buckets: Buckets
    signer: Signer | None
    open_dataset: Callable[[], TrainingData]


@dataclass(frozen=True)
class Membership:
    """A network that was joined.

    Attributes:
        birth: Where it started.
        exchange: This node's view of it.
        workload: Its data.
    """

    birth: Birth
    exchange: Exchange
    workload: Workload


def take_lease(
    settings: NodeSettings, hparams: HParams, surroundings: Surroundings, role: str | None
) -> NeuronLease | None:
    """Take the neuron's lease; from then on its own bucket is only written to while it holds.

    Args:
        settings: The node; its folder's lock is held.
        hparams: The network's numbers.
        surroundings: What it is connected to.
        role: The node's role.

    Returns:
        None for a node that runs for no hotkey, or in no role.

    Raises:
        PermanentError: `not_registered`, `already_running`; nothing was changed.
        TransientError: Chain or store could not be reached.
    """
    chain, buckets, signer = surroundings.chain, surroundings.buckets, surroundings.signer
    if signer is None:
        return None
    neuron = chain.metagraph().by_hotkey(signer.address)
    if neuron is None:
        raise PermanentError(
            Reason.NOT_REGISTERED,
            f"hotkey {signer.address} is not registered on subnet {chain.netuid}: register it first",
        )
    if role is None:
        return None
    buckets.write_while(None)  # the lease of an earlier start says nothing of this one
    holder = holder_of(settings.home, durable=settings.durable)
    claimant = Claimant(chain.netuid, neuron.uid, signer.address, role, holder, this_machine())
    lease = NeuronLease(buckets.own, chain.clock, signer, claimant, Terms.of(hparams.windows))
    lease.enter()
    buckets.write_while(lease.hold)
    return lease


def join(settings: NodeSettings, hparams: HParams, surroundings: Surroundings) -> Membership:
    """Announce the own bucket, find the network's birth and open its dataset.

    Raises:
        PermanentError: `bad_hparams`, `dataset_malformed`, `tokenizer_missing`, ...
        TransientError: Chain or stores could not be reached, or the network has not started.
    """
    chain, buckets, signer = surroundings.chain, surroundings.buckets, surroundings.signer
    buckets.announce()
    birth = find_birth(chain, buckets, hparams, pinned=settings.pinned_genesis)
    exchange = Exchange(chain, buckets, birth.network, hparams, signer)
    return Membership(birth, exchange, _open_workload(exchange, birth, surroundings.open_dataset()))


def _open_workload(exchange: Exchange, birth: Birth, dataset: TrainingData) -> Workload:
    start, data = birth.start, exchange.hparams.data
    require_digest(dataset.digest, start)
    beside = dataset.tokenizer_json() if data.tokenizer_name == EMBEDDED else None
    tokenizer = load_tokenizer(data.tokenizer_name, embedded=beside)
    check_fits(tokenizer, exchange.hparams.model.vocab_size)
    if tokenizer.digest != start.tokenizer:
        raise PermanentError(
            Reason.TOKENIZER_MISSING,
            f"tokenizer {data.tokenizer_name!r}: digest {tokenizer.digest[:12]} is not the network's "
            f"{start.tokenizer[:12]}; another version of it was loaded",
        )
    dataset.check(tokenizer)
    return Workload(exchange, dataset, tokenizer, start.start_window)
