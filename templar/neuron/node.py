"""One node of the network: the live state, and the steps that every role shares.

A node is the only mutable training state in its process. Every step is keyed by its window and idempotent: run twice,
the second time finds what the first one left and changes nothing. Roles add theirs.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from templar.agreement.ballot_box import BallotBox
from templar.agreement.conflicts import AuditReport, audit_window
from templar.agreement.genesis import load_genesis
from templar.agreement.roster import check_entries
from templar.agreement.roster_judge import Judge
from templar.agreement.state import AgreedState, StateMark, check_mark
from templar.agreement.sync_proof import publish_debug, publish_proof
from templar.agreement.voter import Settlement, Voter, await_decision, settled
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError, as_own_failure
from templar.exchange.gather import Gatherer, GatherReport
from templar.exchange.lease import NeuronLease
from templar.exchange.objects import Roster
from templar.exchange.payload_cache import PayloadCache
from templar.exchange.peers import PeerBook, Selection
from templar.exchange.publish import PublishReceipt
from templar.exchange.reveal import RevealRules
from templar.gradient.aggregate import compile_kernels
from templar.gradient.layout import Layout
from templar.neuron.configuration import CHAIN_ROLES, NeuronConfig, announce_role, take_lease
from templar.neuron.journal import Applied, Journal, Status, check_history
from templar.neuron.lock import NeuronLock, prune_spool, write_file
from templar.neuron.snapshot import Snapshots
from templar.neuron.window_time import WindowTime, spends
from templar.neuron.workload import open_workload
from templar.timeline import WindowTimes
from templar.training.model import parameter_shapes

log = logging.getLogger(__name__)

CHAIN_IS_AWAY = frozenset({Reason.CHAIN_UNREACHABLE, Reason.CHAIN_RATE_LIMITED})
"""The reasons after which a read of the chain may succeed later."""
T = TypeVar("T")


class Node:
    """A node that has joined its network and is ready for its next window.

    Constructing one takes the neuron's lock and lease, joins the network and restores the newest state on this disk; if
    any of this fails, everything is released again.

    Raises:
        PermanentError: `already_running`, `not_registered`, `bad_hparams`, `dataset_malformed`, ...; nothing was
            changed.
        TransientError: Chain or stores could not be reached, or the network has not started.
    """

    role: str | None = None
    """The role in its lease; None for a node that only reads."""
    windows_late = 0
    """Windows after its close in which an unclaimed window may still be opened."""

    foresee: Callable[[GatherReport], None] = staticmethod(lambda report: None)
    """Takes note of what is gathered so far: a miner trains ahead on it, and others may vote on it early."""
    check_settings: Callable[..., None] = staticmethod(lambda settings: None)  # of a later window
    left_window: int | None = None
    """The newest window that was found decided otherwise, until somebody has been told."""
    _pending_journal_window: int | None = None
    """The window that was applied to the state and is not entered in the journal yet."""

    def __init__(self, config: NeuronConfig) -> None:
        self.config, self.name, self.home = config, config.name, config.home
        self.time = WindowTime()
        self.hparams, self.chain, self.buckets = config.hparams, config.chain, config.buckets
        shapes = parameter_shapes(self.hparams.model)
        self.layout = Layout.of(shapes, self.hparams.gradient, self.hparams.training.recipe)
        self.cache = PayloadCache(self.home / "payloads", self.layout)
        self.spool = self.home / "spool"
        self._ballots: BallotBox | None = None
        self._lease: NeuronLease | None = None
        self._resources = ExitStack()
        self._resources.callback(self.buckets.close)
        self._resources.callback(self._close_ballots)
        with self._released_on_failure():
            # 1. One process per folder; then compile what a window needs, for a lease must not wait for it.
            self._lock = NeuronLock(self.home)
            self._resources.callback(self._lock.release)
            compile_kernels(self.layout)

            # 2. One machine per neuron.
            self._lease = take_lease(config, self.role)
            self._resources.callback(self.release_lease)

            # 3. Join the network, unless its numbers, text or tokenizer are not this node's.
            self.buckets.announce()
            if self.role is not None:
                announce_role(self.chain, config.own_signer.address, self.role)
            self.birth = config.join()
            self.workload = open_workload(config, self.birth)
            self.exchange = self.workload.exchange
            self.peers = PeerBook(self.exchange, config.gather_concurrency)
            self.gatherer = Gatherer(self.buckets, self.cache, self.chain.clock, config.gather_concurrency)

            # 4. Open what is on this disk, and restore the newest state.
            self.journal = Journal(self.home / "journal.sqlite", durable=config.durable)
            self._resources.callback(self.journal.close)
            self.snapshots = Snapshots(
                self.home / "snapshots",
                self.birth.network,
                kept=self.hparams.storage.snapshots_kept,
                durable=config.durable,
            )
            self._resources.callback(self._end_snapshot)
            self.snapshots.sweep()
            for name, content in self.workload.tokenizer.files().items():
                write_file(self.home / name, partial(Path.write_bytes, data=content), durable=config.durable)
            self.restore()

    @contextmanager
    def _released_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Give files, lease, lock and connections back. Nothing needs saving: every step was durable when it ended."""
        self._resources.close()

    def release_lease(self) -> None:
        """Release the lease: another machine may run this neuron, and this node publishes nothing more."""
        if self._lease is not None:
            self._lease.release()

    @property
    def lease_seconds_left(self) -> float | None:
        """Seconds until another machine may take this neuron over; 0 if one did, None for a node without a lease."""
        return None if self._lease is None else self._lease.seconds_left

    def takes_part(self, window: int) -> bool:
        """Whether this node's hotkey was registered, with role and bucket, when a window opened; waits for the opening.

        Raises:
            PermanentError: `lease_lost`; another process runs this neuron.
        """
        if self._lease is not None:
            self._lease.check()
        neuron = self.exchange.metagraph(window).by_hotkey(self.exchange.own_signer.address)
        if neuron is None or neuron.commitment is None:
            return False
        return self.role is None or neuron.role is CHAIN_ROLES[self.role]

    def stay_announced(self) -> None:
        """Commit the own bucket again if the chain names another; if that fails, a later window tries again."""
        try:
            self.buckets.keep_announced()
        except TemplarError as error:
            log.warning("%s: the own bucket's commitment could not be checked: %s", self.name, error)

    def selection(self, window: int) -> Selection:
        """The peers to gather for a window."""
        return self.peers.selection(window)

    @spends("exchanging")
    def update_peers(self, window: int) -> Selection:
        """The peers to gather for a window, once the chain names the own bucket.

        Raises:
            TransientError: Chain or store failed; a later call goes on.
        """
        self.stay_announced()
        return self.selection(window)

    def reveal_rules(self, times: WindowTimes) -> RevealRules:
        """The rules that the reveals of a closed window must follow."""
        return RevealRules(self.exchange.network, times, partial(self.workload.digest, times.window))

    @spends("exchanging")
    def gather(self, window: int, *, others: Sequence[NeuronInfo] = ()) -> GatherReport:
        """Fetch the peers' reveals of a window once it has closed; waits until all are known or final.

        A failing peer does not affect the others; the report has its reason.
        """
        # 1. Look up every assignment first: a failure of this node's chain or dataset must not count against a peer.
        times = self._patiently(lambda: self.exchange.times(window))
        selection, rules = self._patiently(lambda: self.selection(window)), self.reveal_rules(times)
        for neuron in (*selection.peers, *others):
            rules.assignment(neuron.uid)

        # 2. Fetch until the middle of the first roster slot at the latest.
        listed = {neuron.uid for neuron in selection.peers}
        report = self.gatherer.gather(
            selection.peers,
            rules,
            reserve=selection.reserve,
            others=[neuron for neuron in others if neuron.uid not in listed],
            retry_until=times.settles + self.hparams.windows.roster_slot_seconds / 2,
            found=lambda report: self.foresee(replace(report, peer_list=selection.digest)),
        )
        return replace(report, peer_list=selection.digest)

    @spends("exchanging")
    def settle(self, window: int, *, deadline: float | None = None) -> Settlement:
        """Wait until a window is decided, by default twice as long as its slots take; the payloads are here then.

        Raises:
            TransientError: `decision_missing`, `roster_missing`, `aggregate_missing`, `minority`: it cannot be settled
                yet; catch up later.
        """
        # 1. A settlement in the journal stands, if its payloads are still here.
        if (known := self.journal.result(window, "settle")) is not None:
            settlement = Settlement.from_json(known)
            if settlement is not None and settlement.has_payloads(self.cache):
                return settlement

        # 2. Wait for the decision, which a validator takes part in; enter it.
        times = self._patiently(lambda: self.exchange.times(window))
        ballots, judge = self._patiently(lambda: self.ballots(window)), self.judge(times)
        voter = self._patiently(lambda: self.voter(judge))
        if deadline is None:
            slots = self.hparams.windows.roster_ranks * self.hparams.windows.roster_slot_seconds
            deadline = max(times.settle_until, self.chain.clock.now() + slots)
        await_decision(ballots, times, voter, deadline=deadline)
        settlement = settled(judge, ballots)
        if settlement.roster is not None:
            with suppress(RejectedError):  # a quorum knows the history better
                self._check_history(settlement.roster)
        self.journal.enter(window, "settle", settlement.to_json())
        return settlement

    def settle_late(self, window: int, *, deadline: float) -> Settlement:
        """Settle a past window that is not decided yet; `decision_missing` for a node that signs no words."""
        return settled(self.judge(self.exchange.times(window)), self.ballots(window), judged=False)

    def ballots(self, window: int) -> BallotBox:
        """The words on a window that this node knows; of one window at a time."""
        if self._ballots is None or self._ballots.window != window:
            self._close_ballots()
            self._ballots = BallotBox(self.exchange, window, concurrency=self.config.gather_concurrency)
        return self._ballots

    def judge(self, times: WindowTimes) -> Judge:
        """Judges the rosters of a window."""
        check, concurrency = partial(self.check_roster, times), self.config.gather_concurrency
        return Judge(self.exchange, times, self.cache, check, concurrency, partial(self.approve_roster, times))

    def _check_history(self, roster: Roster) -> None:
        check_history(self.exchange, self.journal, roster, concurrency=self.config.gather_concurrency)

    def _patiently(self, read: Callable[[], T]) -> T:
        """Read from the chain, and wait a while if it is away: a validator that leaves the window makes others wait.

        The while begins with the first failure, because a read may wait long for a block before it fails.
        """
        clock, rules, until = self.chain.clock, self.hparams.windows, math.inf
        while True:
            try:
                return read()
            except TransientError as error:
                until = min(until, clock.now() + rules.settle_delay_seconds + rules.roster_slot_seconds)
                if error.reason not in CHAIN_IS_AWAY or clock.now() + rules.poll_seconds > until:
                    raise
            clock.sleep_until(clock.now() + rules.poll_seconds)

    def _close_ballots(self) -> None:
        if self._ballots is not None:
            self._ballots.close()
        self._ballots = None

    def voter(self, judge: Judge) -> Voter | None:
        """This node's part in a window's ballots; only validators have any."""

    def check_roster(self, times: WindowTimes, roster: Roster) -> None:
        """Check a roster as every reader does, the own one before it is published.

        Raises:
            RejectedError: It does not count.
            TransientError: `minority`, or this node could not find out.
        """
        with as_own_failure():
            self._check_history(roster)  # first, for another history has other assignments
            rules = self.reveal_rules(times)
            miners, places = self.exchange.miners(rules.window), self.hparams.peers.gather_peer_count
            check_entries(roster, rules, miners, places=places)
            self.state.plan.check(roster.plan, rules.window, self.birth.start)

    def approve_roster(self, times: WindowTimes, roster: Roster) -> None:
        """Judge a roster that is legal; only validators have a judgement, by which they vote."""

    @spends("applying")
    def apply(self, settlement: Settlement) -> StateMark:
        """Apply a settled window to the state, once; the journal and, where due, a snapshot follow.

        Raises:
            PermanentError: `self_check_failed`; the state lacks the window before, and nothing was changed.
        """
        # 1. The parameters.
        window = settlement.window
        if self.state.window < window - 1:
            raise PermanentError(
                Reason.SELF_CHECK_FAILED, f"window {window} cannot be applied to the state of {self.state.window}"
            )
        if self.state.window < window:
            self._change_parameters(settlement)
            self._pending_journal_window = window

        # 2. What follows from them; a later call goes on here if this one fails.
        if self._pending_journal_window == window:
            self.journal.enter_applied(Applied(window, settlement.digest, self.state.root), settlement.to_json())
            self._after_step(settlement)
            self._pending_journal_window = None
        return self.state.mark

    @spends("exchanging")
    def publish_sync_proof(self, window: int) -> PublishReceipt | None:
        """Publish the proof of the state after a window, and then its debug values, which decide nothing.

        Returns:
            None if the state is that of a later window, if this node was not registered when the window opened, or if
            it published the proof of another state before.

        Raises:
            TransientError: Chain or store failed; a later call goes on.
        """
        if self.state.window != window or window == self.birth.mark.window or not self.takes_part(window):
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
            log.warning("%s: the proof of an earlier state stands: %s", self.name, error)
            return None
        publish_debug(self.exchange, self.state.params, window=window, role=self.role)
        return receipt

    def close_window(self, report: GatherReport, settlement: Settlement) -> AuditReport:
        """Compare the decided roster with what this node gathered, then close the window in the journal.

        Raises:
            TransientError: Chain or own store failed; a later call goes on.
        """
        window = settlement.window
        known = self.journal.result(window - 1, "settle")
        before = None if known is None else Settlement.from_json(known)
        audit = audit_window(self.exchange, self.ballots, report, settlement, before)
        self.finish(window)
        return audit

    def finish(self, window: int, reason: Reason | None = None) -> None:
        """Close a claimed window and delete what neither a later window nor a restart needs."""
        self.journal.close_window(window, Status.FINISHED if reason is None else Status.ABANDONED, reason)
        self.journal.forget(window - self.hparams.storage.retention_windows)
        self.forget_files(self._oldest_needed(window))

    def forget_files(self, before_window: int) -> None:
        """Delete the files of windows before this one that no snapshot has."""
        self.cache.prune(before_window)
        prune_spool(self.spool, before_window)

    def _oldest_needed(self, window: int) -> int:
        """The oldest window whose files are needed after this one: a restart replays from the newest snapshot on."""
        self._end_snapshot()
        newest = next((mark.window for mark in self.snapshots.marks()), self.birth.mark.window)
        return min(window - 2, newest + 1)

    def restore(self, *, before: int | None = None) -> None:
        """Return to the newest snapshot, or to genesis, and replay what this disk has of the windows after it.

        With `before`, return to a snapshot of an earlier window, and replay no further than to that window.

        Raises:
            TransientError: Genesis is needed and its store failed.
        """
        # 1. The newest snapshot whose parameters have their root.
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
            break
        else:
            params = load_genesis(
                *(self.birth, self.buckets, self.hparams.model, self.home / "genesis"),
                concurrency=self.config.gather_concurrency,
            )
            self.adopt(params, self.birth.mark, None)

        # 2. The windows after it.
        self._replay_from_disk(before)

    def adopt(self, params: Mapping[str, Tensor], mark: StateMark, private: Path | None) -> None:
        """Make this the live state; `private` is the file of the private state that a snapshot has, if it has one."""
        self.state = AgreedState(params, mark, self.layout, self.config.hparams)
        self.workload.follow(self.state.epochs, self.state.window)
        self._pending_journal_window = None
        self._close_ballots()
        log.info("%s: state of window %d, root %s", self.name, mark.window, mark.root[:12])

    def use_settings(self, window: int) -> None:
        """Take the settings of a window, which is run or replayed next, from the plan; errors as in `at` and `use`."""
        self.hparams = self.workload.use(self.state.plan.at(window))

    def adopt_checkpoint(self, params: Mapping[str, Tensor], mark: StateMark) -> None:
        """Make a published checkpoint the live state, which this node did not come to by itself."""
        self.adopt(params, mark, None)

    def _replay_from_disk(self, before: int | None) -> None:
        """Apply once more what the journal has after the snapshot, asking nobody; the rest is left to catch-up."""
        while (applied := self.journal.applied(self.state.window + 1)) is not None:
            if before is not None and applied.window >= before:
                return
            # 1. The roster from the journal, its payloads from the cache.
            window = applied.window
            try:
                settlement = self._settlement_of(applied)
                self._change_parameters(settlement)
            except PermanentError as error:
                log.warning(
                    "%s: window %d cannot be replayed from this disk, catch-up will: %s", self.name, window, error
                )
                return

            # 2. The state must be the one that was entered; otherwise nothing here says which of the two was decided.
            if self.state.root != applied.root:
                log.error(
                    "%s: [%s] window %d gave the root %s when it was applied, and %s now; catch-up will replay it",
                    *(self.name, Reason.ROOT_DIFFERS, window, applied.root[:12], self.state.root[:12]),
                )
                self.journal.forget_settlement(window)
                self.restore(before=before)
                return
            self._after_step(settlement)
            log.info("%s: replayed window %d from this disk, root %s", self.name, window, applied.root[:12])

    def _settlement_of(self, applied: Applied) -> Settlement:
        """The settlement of a window that was applied.

        Raises:
            PermanentError: `object_missing`; the journal does not have it.
        """
        if applied.roster is None:
            return Settlement(applied.window, None)
        known = self.journal.result(applied.window, "settle")
        settlement = None if known is None else Settlement.from_json(known)
        if settlement is None or settlement.digest != applied.roster:
            raise PermanentError(Reason.OBJECT_MISSING, f"the journal lacks the roster of window {applied.window}")
        return settlement

    def _change_parameters(self, settlement: Settlement) -> None:
        """Take the outer step of the next window; without a payload in the cache nothing is changed.

        A snapshot that is being written is waited for; if it failed, that is in the log.
        """
        self._end_snapshot()
        window, roster = settlement.window, settlement.roster
        entries = () if roster is None else roster.entries
        payloads = [self.cache.payload(window, entry.payload_sha256) for entry in entries]
        added = None if roster is None else roster.plan
        self.state.apply(window, payloads, self.state.plan.adopted(added, window, self.birth.start))
        self.workload.follow(self.state.epochs, window)

    def _after_step(self, settlement: Settlement) -> None:
        """Do what follows from the outer step of a window; a repeated call changes nothing."""
        if settlement.window % self.hparams.storage.snapshot_frequency == 0:
            self.begin_snapshot()

    def begin_snapshot(self) -> None:
        """Begin a snapshot of the state, which is written beside the next steps."""
        self.snapshots.begin(self.state.params, self.state.mark, None)

    def _end_snapshot(self) -> None:
        """Wait for the snapshot that is being written; without it a restart replays from the one before."""
        try:
            self.snapshots.wait()
        except OSError as error:
            log.warning("%s: a snapshot could not be written, the one before stays: %s", self.name, error)
