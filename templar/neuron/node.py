"""One node of the network: the live state, and the steps that every role shares.

A node is the only mutable training state in its process. Every step is keyed by its window and idempotent: run twice,
the second time finds what the first one left and changes nothing. Roles add theirs.

Joining a network: find its birth, check that this node has the same numbers, text and tokenizer.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from templar.agreement.decisions import is_undecided_for_good
from templar.agreement.genesis import Birth, find_birth, load_genesis, require_digest
from templar.agreement.roster import check_entries
from templar.agreement.slots import PassedOver, Settlement, await_roster
from templar.agreement.state import AgreedState, StateMark, check_mark
from templar.agreement.sync_proof import publish_debug, publish_proof
from templar.chain.base import Chain, NeuronInfo
from templar.chain.hotkey import Signer
from templar.data.dataset import TrainingData
from templar.data.tokenizer import EMBEDDED, check_fits, load_tokenizer
from templar.errors import PermanentError, Reason, TemplarError, as_own_failure
from templar.exchange.buckets import Buckets
from templar.exchange.context import Exchange
from templar.exchange.gather import Gatherer, GatherReport
from templar.exchange.lease import Claimant, NeuronLease, Terms
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.peers import PeerBook, Selection
from templar.exchange.publish import PublishReceipt
from templar.exchange.reveal import RevealRules
from templar.gradient.layout import Layout
from templar.gradient.precompile import prepare
from templar.hparams import HParams
from templar.neuron.journal import Applied, Journal, Status, check_history
from templar.neuron.lock import NeuronLock, holder_of, prune_spool, this_machine, write_file
from templar.neuron.snapshot import PrivateState, Snapshots
from templar.neuron.workload import Workload
from templar.timeline import WindowTimes
from templar.training.model import parameter_shapes


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


log = logging.getLogger(__name__)


class Node:
    """A node before and after `start`; see the module.

    Args:
        settings: What is particular to this node.
        hparams: The network's numbers.
        surroundings: What it is connected to.
    """

    role: str | None = None
    """What its lease is for; None for a node that only reads."""
    keeps_private_state = False
    """Whether a window also changes state that is this node's alone."""
    windows_late = 0
    """How many windows after its close an unclaimed window may still be opened: a miner has nothing left to do then."""

    _lease: NeuronLease | None = None
    _unentered: int | None = None
    """The window that went into the state and is not entered in the journal yet."""

    def __init__(self, settings: NodeSettings, hparams: HParams, surroundings: Surroundings) -> None:
        self.settings = settings
        self.hparams = hparams
        self.chain = surroundings.chain
        self.buckets = surroundings.buckets
        self._surroundings = surroundings
        self.layout = Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)
        self.cache = PayloadCache(settings.home / "payloads", self.layout)
        self.spool = settings.home / "spool"

    def start(self) -> None:
        """Take the neuron's lock and lease, join the network and restore the newest state on this disk.

        Raises:
            PermanentError: `already_running`, `not_registered`, `bad_hparams`, `dataset_malformed`, ...; nothing was
                changed.
            TransientError: Chain or stores could not be reached, or the network has not started.
        """
        self._lock = NeuronLock(self.settings.home)
        try:
            prepare(self.layout)
            self._lease = take_lease(self.settings, self.hparams, self._surroundings, self.role)
            self._join()
        except BaseException:
            self._release()
            raise

    def stop(self) -> None:
        """Give lease, lock, files and connections back. Nothing needs saving: every step was durable when it ended."""
        self.journal.close()
        self._release()
        self.buckets.close()

    def release_lease(self) -> None:
        """Let another machine run this neuron; from here on this one publishes nothing."""
        if self._lease is not None:
            self._lease.release()

    def takes_part(self, window: int) -> bool:
        """Whether this node's hotkey was registered when a window opened; waits until it is open.

        Raises:
            PermanentError: `lease_lost`; another process runs this neuron now.
        """
        if self._lease is not None:
            self._lease.check()
        address = self.exchange.own_signer.address
        return self.exchange.metagraph(window).by_hotkey(address) is not None

    def stay_announced(self) -> None:
        """See that the chain still names the own bucket; if it takes no commitment now, the next window tries again."""
        try:
            self.buckets.keep_announced()
        except TemplarError as error:
            log.warning("%s: the own bucket's commitment was not looked after: %s", self.settings.name, error)

    def selection(self, window: int) -> Selection:
        """Whom to gather for a window."""
        return self.peers.selection(window)

    def update_peers(self, window: int) -> Selection:
        """The peers to gather for a window, once the chain names the own bucket.

        Raises:
            TransientError: Chain or store failed; a later call goes on.
        """
        self.stay_announced()
        return self.selection(window)

    def reveal_rules(self, times: WindowTimes) -> RevealRules:
        """What the reveals of a closed window are held against."""
        return RevealRules(self.exchange.network, times, partial(self.workload.digest, times.window))

    def gather(self, window: int, *, others: Sequence[NeuronInfo] = ()) -> GatherReport:
        """Fetch the peers' reveals of a window once it has closed; waits until they are final.

        On failure of a peer the others are not touched; see the report.
        """
        times = self.exchange.times(window)
        selection, rules = self.selection(window), self.reveal_rules(times)
        for neuron in (*selection.peers, *others):
            rules.assignment(neuron.uid)  # what this node cannot find out fails here, and is nobody else's fault
        listed = {neuron.uid for neuron in selection.peers}
        report = self.gatherer.gather(
            selection.peers,
            rules,
            reserve=selection.reserve,
            others=[neuron for neuron in others if neuron.uid not in listed],
            retry_until=times.settles + self.hparams.windows.roster_slot_seconds / 2,
        )
        return replace(report, peer_list=selection.digest)

    def settle(self, window: int, *, publish_own: Callable[[int], None] | None = None) -> Settlement:
        """Wait for the roster that decides a window, or for the end of the last slot.

        Raises:
            TransientError: `roster_missing`, `minority`: nothing can be said now; catch up later.
        """
        if (known := self.journal.result(window, "settle")) is not None:
            settlement = Settlement.from_json(known)
            if settlement is not None and settlement.has_payloads(self.cache):  # else it is settled again
                return settlement
        passed_over: list[PassedOver] = []
        times = self.exchange.times(window)
        decided = await_roster(
            self.exchange,
            times,
            cache=self.cache,
            check=partial(self._check_roster, self.reveal_rules(times)),
            publish_own=publish_own,
            on_passed_over=passed_over.append,
        )
        settlement = Settlement.of(window, None if decided is None else decided.sealed, tuple(passed_over))
        self.journal.enter(window, "settle", settlement.to_json())
        return settlement

    def _check_roster(self, rules: RevealRules, roster: Roster) -> None:
        with as_own_failure():
            check_history(self.exchange, self.journal, roster)  # first: another history has other assignments
            miners, places = self.exchange.miners(rules.window), self.hparams.peers.gather_peer_count
            check_entries(roster, rules, miners, places=places)

    def settle_undecided(self, window: int) -> Settlement | None:
        """Settle a past window on which nobody decided; None if somebody did, or still may.

        Raises:
            TransientError: As `settle`.
        """
        return self.settle(window) if is_undecided_for_good(self.exchange, window) else None

    def apply(self, settlement: Settlement) -> StateMark:
        """Apply a decided window to the state, once; a window that is applied already is left alone.

        The parameters, the journal and, where due, a snapshot change; staged private state goes live or is dropped.
        """
        window = settlement.window
        if self.state.window < window:
            entries = () if settlement.roster is None else settlement.roster.entries
            payloads = [self.cache.payload(window, entry.payload_sha256) for entry in entries]
            self.state.apply(window, payloads)
            self.workload.follow(self.state.epochs, window)
            self._unentered = window
        if self._unentered == window:  # also if a call before failed from here on
            self.private_state_decided(settlement)
            self.journal.enter_applied(Applied(window, settlement.digest, self.state.root))
            if window % self.hparams.storage.snapshot_frequency == 0:
                self.snapshots.save(self.state.params, self.state.mark, self.private)
            self._unentered = None
        return self.state.mark

    def private_state_decided(self, settlement: Settlement) -> None:
        """Let staged private state go live, or drop it; only miners have any."""

    def publish_sync_proof(self, window: int) -> PublishReceipt | None:
        """Publish the proof of the state after a window, and then its debug values, which decide nothing.

        Returns:
            None if the state has moved on, if this node was not on the subnet yet when the window opened, or if the
            proof of a state that it has left since stands there already.

        Raises:
            TransientError: Chain or store failed; a later call goes on.
        """
        if self.state.window != window or not self.takes_part(window):
            return None
        try:
            receipt = publish_proof(
                self.exchange,
                self.state.params,
                window=window,
                block_hash=self.chain.block_hash(self.exchange.settling_block(self.exchange.times(window))),
                root=self.state.root,
                outer_steps=self.state.outer_steps,
            )
        except PermanentError as error:
            if error.reason is not Reason.OBJECT_DIFFERS:
                raise
            log.warning("%s: the proof of a state that was left stands: %s", self.settings.name, error)
            return None
        publish_debug(self.exchange, self.state.params, window=window, role=self.role)
        return receipt

    def finish(self, window: int, reason: Reason | None = None) -> None:
        """Close a claimed window and drop what no later window needs."""
        self.journal.close_window(window, Status.FINISHED if reason is None else Status.ABANDONED, reason)
        self.journal.forget(window - self.hparams.storage.retention_windows)
        self.cache.prune(window - 2)
        prune_spool(self.spool, window - 2 - self.hparams.storage.snapshot_frequency)

    def restore(self, *, before: int | None = None) -> None:
        """Return to the newest snapshot, or to genesis; with `before`, to one of an earlier window.

        Raises:
            TransientError: Genesis is needed and its store failed.
        """
        for mark in self.snapshots.marks():
            if before is not None and mark.window >= before:
                continue
            try:
                params, private = self.snapshots.load(mark, self.hparams.model)
                if mark != self.birth.mark:
                    check_mark(params, mark, f"snapshot of window {mark.window}")
            except PermanentError as error:
                log.warning("snapshot of window %d is left out: %s", mark.window, error)
                continue
            self.adopt(params, mark, private)
            return
        params = load_genesis(self.birth, self.buckets, self.hparams.model, self.settings.home / "genesis")
        self.adopt(params, self.birth.mark, None)

    def adopt(self, params: Mapping[str, Tensor], mark: StateMark, private: PrivateState | None) -> None:
        """Make this the live state. Without private state a miner starts with a fresh one."""
        self.state = AgreedState(params, mark, self.layout, self.hparams.training, self.hparams.data.shard_steps)
        self.workload.follow(self.state.epochs, self.state.window)
        if self.keeps_private_state and private is None:
            private = PrivateState.fresh(self.layout, params)
        self.private = private if self.keeps_private_state else None
        self._unentered = None
        log.info("%s: state of window %d, root %s", self.settings.name, mark.window, mark.root[:12])

    def _release(self) -> None:
        self.release_lease()
        self._lock.release()

    def _join(self) -> None:
        membership = join(self.settings, self.hparams, self._surroundings)
        self.birth, self.exchange, self.workload = membership.birth, membership.exchange, membership.workload
        self.peers = PeerBook(self.exchange)
        self.gatherer = Gatherer(self.buckets, self.cache, self.chain.clock, self.settings.gather_concurrency)
        home, durable = self.settings.home, self.settings.durable
        self.journal = Journal(home / "journal.sqlite", durable=durable)
        kept = self.hparams.storage.snapshots_kept
        self.snapshots = Snapshots(home / "snapshots", self.birth.network, kept=kept, durable=durable)
        self.snapshots.sweep()
        write_file(
            home / "tokenizer.json", lambda path: path.write_bytes(self.workload.tokenizer.to_bytes()), durable=durable
        )
        self.restore()
