"""A validator's steps: measure on the state before the window, rate, publish evidence, set weights.

A window enters the score book in one transaction, so a crash in mid-window scores nobody twice. A refusal of the chain
costs the weights, never the window: it is tried again while the window lasts, then reported, and the next window sets
the weights. All that a restart needs is in the journal.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter
from torch import nn

from templar.agreement.voter import Settlement
from templar.chain.base import NeuronInfo, WeightsSchedule
from templar.chain.extrinsics import ExtrinsicLimitedError, cause_of, differing_uids
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.buckets import bucket_digest
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Roster
from templar.exchange.peers import Selection, publish_peers, select_peers
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import unseal
from templar.hparams import HParams
from templar.neuron.aggregator import RosterNode
from templar.neuron.configuration import NeuronConfig
from templar.neuron.evaluate import check_effect, evaluate
from templar.neuron.journal import Journal
from templar.neuron.node import Node
from templar.neuron.window_time import spends
from templar.scoring.conclude import check_weights, conclude
from templar.scoring.evidence import Evidence, WindowFacts
from templar.scoring.evidence_chain import ScoreBook, evidence_keys
from templar.scoring.meter import Meter
from templar.scoring.standing import Standing
from templar.timeline import WindowTimes, closing_block, first_block
from templar.training.model import build_model

log = logging.getLogger(__name__)

PAUSES = (1, 2, 4)  # blocks from one try to set weights to the next; after the last of them the window gives up
ROOM = 4  # one part in this many of the running window is left to the steps that follow
STEP = "weights"  # the journal's step for the weights' report
BEGUN = "weights_begun"  # the journal's step for the newest block before the weights were sent for the first time
HIDDEN = "weights_hidden"
"""The journal's step for the same block if the chain took the weights and hides them; empty once it does not."""


@dataclass(frozen=True)
class WeightsReport:
    """Result of setting a window's weights; the reason, with its detail, says why none were set.

    Without a reason, a detail says that the chain has dropped what an earlier window sent, and why.
    """

    window: int
    weights: dict[int, float]
    """Uid -> weight as read back from the chain, or as sent where it hides them; empty if none were set."""
    reason: Reason | None
    detail: str = ""
    tries: int = 1

    @property
    def refused(self) -> bool:
        """Whether there were weights that could not be set: the next window tries again."""
        return self.reason not in (None, Reason.NOBODY_EARNED)

    @property
    def summary(self) -> str:
        """The result in a few words, for the middle of a message."""
        if self.reason is None:
            return "weights set, earlier ones were dropped" if self.detail else "weights set"
        return f"{'weights refused' if self.refused else 'no weights'} [{self.reason}]"


_REPORT = TypeAdapter(WeightsReport)
_TIERS = TypeAdapter(tuple[tuple[int, ...], tuple[int, ...]] | None)


class Validator(RosterNode):
    """A node that measures, rates and sets weights."""

    role = "validator"

    def __init__(self, config: NeuronConfig) -> None:
        super().__init__(config)
        with self._released_on_failure():
            self.book = ScoreBook(self.home / "scores.sqlite", durable=config.durable)
            self._resources.callback(self.book.close)
            if self.book.standing.evidence is None and (evidence := published_evidence(self)) is not None:
                log.warning("%s: no scores on this disk: they go on from window %d", self.name, evidence.window)
                self.book.record(evidence, first=True)
            self.meter = Meter(config.trainer)
            self.check_settings(self.state.plan.at(self.state.window + 1))
            self.model: nn.Module = build_model(self.hparams.model)
            self._guard = threading.Lock()  # several rosters may be looked at at once
            self._approved = dict[tuple[str, bool], RejectedError | None]()  # by the roster's digest, and whether early

    def check_settings(self, settings: HParams) -> None:
        """Check that this host can measure with these settings; PermanentError as in `Meter.check`."""
        self.meter.check(settings)

    def publish_peers(self, window: int) -> PublishReceipt | None:
        """Publish a new peer list if one is due; None if not, or if too few miners are active.

        On failure a later call in the same window goes on.
        """
        if window % self.hparams.peers.peer_replacement_frequency:
            return None
        if (known := self.journal.result(window, "peers")) is None:
            # The journal keeps the list: the book changes within the window, the published list does not.
            known = _TIERS.dump_json(self._select_peers(window)).decode()
            self.journal.enter(window, "peers", known)
        tiers = _TIERS.validate_json(known)
        return None if tiers is None else publish_peers(self.exchange, window, *tiers)

    def _select_peers(self, window: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        settings, standing = self.hparams.peers, self._standing(window)
        miners = {
            neuron.hotkey: neuron.uid
            for neuron in self.exchange.miners(window)
            if not standing.is_banned(window, neuron.hotkey, bucket_digest(neuron))
        }
        cards = {hotkey: standing.card(hotkey) for hotkey in miners}
        active = [
            miners[hotkey]
            for hotkey, card in cards.items()
            if card.last_reveal is not None and window - card.last_reveal <= settings.recent_windows
        ]
        weights = {miners[hotkey]: max(0.0, card.final) for hotkey, card in cards.items()}
        excluded = {miners[hotkey] for hotkey, card in cards.items() if card.excluded_until is not None}
        seed = self.chain.block_hash(first_block(window, self.hparams.windows))
        return select_peers(active, weights, settings, seed=seed, excluded=excluded)

    def _standing(self, window: int) -> Standing:
        """The memory, under the hotkeys that the miners have in a window."""
        seats = ((each.uid, each.registered_at, each.hotkey) for each in self.exchange.miners(window))
        return self.book.standing.following(seats)

    @spends("exchanging")
    def update_peers(self, window: int) -> Selection:
        """As every node; also publish a new peer list if one is due."""
        self.stay_announced()
        self.publish_peers(window)
        return self.selection(window)

    @spends("exchanging")
    def gather(self, window: int, *, others: Sequence[NeuronInfo] = ()) -> GatherReport:
        """Gather the peers as every node does, and all other miners besides: each of them is scored."""
        return super().gather(window, others=others or self.exchange.miners(window))

    def approve_roster(self, times: WindowTimes, roster: Roster) -> None:
        """As every publisher of rosters; and measure what its step does, once.

        Raises:
            RejectedError: `roster_omits`, `roster_harmful`.
        """
        super().approve_roster(times, roster)
        with self._guard:
            if self.state.window != times.window - 1 or not roster.entries:
                return
            judged = roster.digest, times.is_early(self.chain.clock.now())
            if judged not in self._approved:
                self._approved[judged] = self._effect(roster, is_early=judged[1])
            if (refused := self._approved[judged]) is not None:
                raise refused

    def _effect(self, roster: Roster, *, is_early: bool) -> RejectedError | None:
        """Say why a roster's step does harm; None if it does none, or if this node cannot say."""
        try:
            check_effect(self, self.model, roster, is_early=is_early, meter=self.meter)
        except RejectedError as error:
            return error
        except TemplarError as error:
            log.warning("window %d: what the roster does was not measured: %s", roster.window, error)
        return None

    @spends("evaluating")
    def evaluate(self, report: GatherReport, settlement: Settlement) -> WindowFacts | None:
        """Measure the window's payloads, `validator_offset` blocks after the settling block.

        Returns:
            None if the window is in the score book already.

        Raises:
            TransientError: Chain or dataset could not be reached, or the device failed (`trainer_failed`); a later call
                starts over and gives the same.
            PermanentError: `out_of_memory`; the device has no room for the evaluation.
        """
        window = settlement.window
        if self.book.evidence(window) is not None or self.state.window != window - 1:
            return None
        settling = self.exchange.settling_block(self.exchange.times(window))
        self.chain.wait_for_block(settling + self.hparams.scoring.validator_offset)
        with self._guard:  # a look at a roster that nobody waits for any more may still use the model
            return evaluate(self, self.model, self._standing(window), report, settlement, meter=self.meter)

    @spends("evaluating")
    def rate(self, window: int, facts: WindowFacts | None) -> Evidence | None:
        """Enter a window into the score book, once; its evidence, or None if it was never measured.

        Raises:
            PermanentError: `self_check_failed`; the weights are not what the scores say, and nothing was entered.
        """
        known = self.book.evidence(window)
        if known is not None or facts is None:
            return known
        evidence = conclude(facts, self.book.standing, self.hparams, self.exchange.author(window))
        check_weights(evidence, self.hparams.weights)
        self.book.record(evidence)
        return evidence

    @spends("exchanging")
    def set_weights(self, evidence: Evidence | None) -> WeightsReport | None:
        """Set the weights if they are due and the window was measured; see `weigh`."""
        return None if evidence is None else weigh(self, evidence)

    @spends("exchanging")
    def publish_evidence(self, evidence: Evidence | None) -> PublishReceipt | None:
        """Publish the evidence of a window, and what is missing before it. On failure a later call goes on.

        Raises:
            PermanentError: `object_differs`: other evidence was published before.
            TransientError: The store failed.
        """
        if evidence is None:
            return None
        # 1. Its chain must have no gap: a store that failed for long, or a kill, may have left one.
        store, missing = self.buckets.own, [evidence]
        while (before := missing[-1].previous_window) is not None:
            earlier = self.book.evidence(before)
            if earlier is None or earlier.hotkey != evidence.hotkey:  # of before the hotkey was swapped: it cannot sign
                break
            if store.head(window_key(Kind.EVIDENCE, before, earlier.uid)) is not None:
                break
            missing.append(earlier)
        # 2. The oldest first.
        for each in reversed(missing):
            key = window_key(Kind.EVIDENCE, each.window, each.uid)
            receipt = publish_body(store, key, each, self.exchange.own_signer, clock=self.chain.clock)
        return receipt

    def finish(self, window: int, reason: Reason | None = None) -> None:
        """As every node; then drop old evidence."""
        super().finish(window, reason)
        self._approved.clear()
        self.book.forget(window - self.hparams.storage.retention_windows)


def published_evidence(node: Node) -> Evidence | None:
    """The newest evidence of this network in a validator's own bucket: its scores if its disk is lost; None without.

    Raises:
        TransientError: The store failed, which does not mean that there is none.
        PermanentError: The store refuses.
    """
    store, address = node.buckets.own, node.exchange.own_signer.address
    for key in sorted(evidence_keys(store), key=lambda each: -(each.window or 0)):
        try:
            evidence = unseal(store.get(str(key), max_bytes=Evidence.max_bytes), Evidence).body
        except RejectedError as error:
            log.warning("%s is left out: %s", key, error)
            continue
        if (evidence.genesis, evidence.hotkey) == (node.exchange.network.genesis, address):
            return evidence
    return None


def weigh(node: Node, evidence: Evidence) -> WeightsReport | None:
    """Set a window's weights on chain if they are due, once; wait for inclusion, read them back and compare.

    Tries again while the chain refuses, up to shortly before the next window closes. A subnet with commit-reveal hides
    the weights at first: later windows look whether it has revealed them, and set weights at once if it has not.

    Returns:
        The report, also if the chain refused; None if no weights are due, or later ones are due before the epoch ends.

    Raises:
        StoppedError: A stop was asked for; a later call goes on.
    """
    window, every = evidence.window, node.hparams.weights.windows_per_weights
    if (known := node.journal.result(window, STEP)) is not None:
        return _REPORT.validate_json(known)
    due = are_due(node.journal, window, every=every)
    if not due and not _hidden(node.journal):
        return None
    dropped, begun = "", node.journal.result(window, BEGUN) is not None
    try:
        schedule = node.chain.weights_schedule()
        dropped = _find_dropped(node, evidence, schedule)
    except TemplarError as error:
        log.warning("window %d: whether the chain has revealed the weights cannot be seen: %s", window, error)
        schedule = WeightsSchedule()
    if not dropped and not begun and (not due or _may_wait(node.journal, node.hparams, window, schedule)):
        return None
    wanted = {record.uid: record.weight for record in evidence.weights}
    if not wanted:
        return WeightsReport(window, {}, Reason.NOBODY_EARNED, "no positive score, and no uid to burn with", 0)
    report = _Tries(node, evidence, wanted, dropped).run()
    node.journal.enter(window, STEP, _REPORT.dump_json(report).decode())
    return report


def _may_wait(journal: Journal, hparams: HParams, window: int, schedule: WeightsSchedule) -> bool:
    """Whether due weights need not be sent: only the last ones before the end of an epoch take effect.

    Either the next due ones can be sent with a window to spare before it ends, or those of a window just before were.
    """
    every, blocks = hparams.weights.windows_per_weights, hparams.windows.blocks_per_window
    if schedule.next_epoch is None or window % every:  # in other windows a refusal made them due
        return False
    if closing_block(window + every + 2, hparams.windows) <= schedule.next_epoch:
        return True
    last_stretch = schedule.next_epoch - min(schedule.epoch_blocks, (every + 2) * blocks)
    for before in range(max(0, window - every - 2), window):
        known, begun = journal.result(before, STEP), journal.result(before, BEGUN)
        if known and int(begun or 0) >= last_stretch and _REPORT.validate_json(known).reason is None:
            return True
    return False


def _hidden(journal: Journal) -> dict[int, int]:
    """The windows whose weights the chain hid when they were last looked at, and the block before they were sent."""
    return {window: int(block) for window, block in journal.results(HIDDEN).items() if block}


def _find_dropped(node: Node, evidence: Evidence, schedule: WeightsSchedule) -> str:
    """Name the hidden weights that the chain has dropped, and why; empty if it shows or still hides them.

    The newest weights that it does not hide any more must be those that it shows.
    """
    # 1. Each block with hidden weights belongs to the last window that was sent before it.
    sent, journal = _hidden(node.journal), node.journal
    blocks = schedule.hidden.get(evidence.hotkey, ())
    pending = {max((each for each in sent if sent[each] < block), default=None) for block in blocks}
    if not (gone := sorted(sent.keys() - pending)):
        return ""
    # 2. The newest of the others is shown, or was dropped by one of the rules that hold now.
    newest, dropped = gone[-1], ""
    known = journal.result(newest, STEP)  # None if the process died, and never took the window up again
    weights = None if known is None else _REPORT.validate_json(known).weights
    if weights and differing_uids(weights, node.chain.weights().get(evidence.uid, {})):
        try:
            node.chain.check_weights(weights, sent=sent[newest])
            cause, why = Reason.WEIGHTS_DIFFER, "they break no rule now: the epoch may have ended before their round"
        except PermanentError as error:
            cause, why = cause_of(error), error.message
        dropped = f"the chain has dropped the weights of window {newest} [{cause}]: {why}"
        log.error("%s: window %d: %s", node.name, evidence.window, dropped)
    for window in gone:
        journal.enter(window, HIDDEN, "")
    return dropped


def are_due(journal: Journal, window: int, *, every: int) -> bool:
    """Whether weights are due: in windows divisible by `every`, and after a refusal until a window sets them."""
    last_due = window - window % every
    if window == last_due:
        return True
    for before in range(window - 1, last_due - 1, -1):
        if (known := journal.result(before, STEP)) is not None:
            return _REPORT.validate_json(known).refused
        if journal.result(before, BEGUN) is not None:  # the process died meanwhile and never took the window up again
            return True
    return False


class _Tries:
    """The tries to set one window's weights."""

    def __init__(self, node: Node, evidence: Evidence, wanted: dict[int, float], detail: str) -> None:
        rules, window = node.hparams.windows, evidence.window
        self._node, self._chain, self._block_seconds = node, node.chain, rules.block_seconds
        self._window, self._uid, self._hotkey, self._wanted = window, evidence.uid, evidence.hotkey, wanted
        self._last_block = closing_block(window + 1, rules) - rules.blocks_per_window // ROOM
        begun = node.journal.result(window, BEGUN)
        self._begun = None if begun is None else int(begun)
        self._head, self._head_seen = 0, 0.0
        self._not_before = 0
        self._detail = detail
        self._taken = False
        self._sent = 0

    def run(self) -> WeightsReport:
        """Try until the weights are set, an error is permanent, or the time is up."""
        pauses = iter(PAUSES)
        while True:
            try:
                return WeightsReport(self._window, self._set(), None, self._detail, self._sent)
            except TemplarError as error:
                if not self._wait(error, next(pauses, None)):
                    return self._refused(error)

    def _set(self) -> dict[int, float]:
        """Set the weights unless an earlier try did; the weights that the chain has then."""
        # 1. Wait until the chain takes weights again, and note the block before the first try.
        if self._not_before:
            self._chain.wait_for_block(self._not_before, finalized=False)
        self._head, self._head_seen = self._chain.head(), self._chain.clock.now()
        if self._begun is None:
            self._begun = self._head
            self._node.journal.enter(self._window, BEGUN, str(self._head))
        elif self._are_hidden(schedule := self._chain.weights_schedule()):
            return self._wanted  # an earlier try succeeded without an answer, or the process died before it was entered
        elif not schedule.reveal_epochs and not differing_uids(self._wanted, shown := self._shown()):
            return shown

        # 2. Send them. A transient refusal is kept, since they may be on chain all the same.
        self._sent += 1
        refusal: TransientError | None = None
        try:
            self._chain.set_weights(self._wanted)
        except TransientError as error:
            refusal = error
        schedule = self._chain.weights_schedule()  # the owner may have switched commit-reveal meanwhile
        if self._are_hidden(schedule):
            log.info("window %d: the chain hides the weights; a later window looks for them", self._window)
            return self._wanted
        if refusal is not None and schedule.reveal_epochs:
            raise refusal

        # 3. Read them back. Once the chain took a try, its limit on weights only follows from that.
        shown = self._shown()
        if not (unlike := differing_uids(self._wanted, shown)):
            return shown
        if refusal is not None and not self._taken:
            raise refusal
        self._taken = True
        raise TransientError(
            Reason.WEIGHTS_DIFFER, f"window {self._window}: the chain shows other weights for uids {unlike}"
        )

    def _shown(self) -> dict[int, float]:
        return self._chain.weights().get(self._uid, {})

    def _are_hidden(self, schedule: WeightsSchedule) -> bool:
        """Whether the chain hides weights of this window; the journal has it then."""
        begun = self._begun or 0
        if not any(block > begun for block in schedule.hidden.get(self._hotkey, ())):
            return False
        self._node.journal.enter(self._window, HIDDEN, str(begun))
        return True

    def _wait(self, error: TemplarError, pause: int | None) -> bool:
        """Wait as long as the error asks for, else `pause` blocks; False if no further try can help or is in time."""
        if pause is None or isinstance(error, PermanentError):
            return False
        clock = self._chain.clock
        head = self._head + int((clock.now() - self._head_seen) / self._block_seconds) if self._head else 0
        known = error.next_block if isinstance(error, ExtrinsicLimitedError) else None
        self._not_before = known if known is not None and known > head else 0
        following = self._not_before or head + pause
        if following > self._last_block:
            return False
        log.warning("window %d: the weights are tried again in %d blocks: %s", self._window, following - head, error)
        if not self._not_before:
            clock.sleep_until(clock.now() + pause * self._block_seconds)
        return True

    def _refused(self, error: TemplarError) -> WeightsReport:
        reason = cause_of(error)
        log.error(
            "%s: window %d: the weights are NOT set [%s], the next window tries again: %s",
            self._node.name,
            self._window,
            reason,
            error.message,
        )
        detail = f"{error.message}; {self._detail}" if self._detail else error.message
        return WeightsReport(self._window, {}, reason, detail, self._sent)
