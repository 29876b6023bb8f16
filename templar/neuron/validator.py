"""A validator's window: settle, decide, measure on the state before the window, rate, apply, publish, set weights.

A window enters the score book in one transaction, so a crash in mid-window scores nobody twice.
"""

import logging

from pydantic import TypeAdapter
from torch import nn

from templar.errors import Reason
from templar.exchange.gather import GatherReport
from templar.exchange.keys import Kind, window_key
from templar.exchange.peers import publish_peers, select_peers
from templar.exchange.publish import PublishReceipt, publish_body
from templar.model.llama import build_model
from templar.neuron.aggregator import RosterNode
from templar.neuron.evaluate import bucket_of, evaluate
from templar.neuron.recovery import published_evidence
from templar.neuron.settlement import Settlement
from templar.neuron.weighing import WeightsReport, weigh
from templar.scoring.book import ScoreBook
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence, WindowFacts
from templar.windows import first_block

log = logging.getLogger(__name__)


class Validator(RosterNode):
    """A node that measures, rates and sets weights."""

    role = "validator"

    def _join(self) -> None:
        super()._join()
        self.book = ScoreBook(self.settings.home / "scores.sqlite", durable=self.settings.durable)
        if self.book.is_empty and (evidence := published_evidence(self)) is not None:
            log.warning("%s: no scores on this disk: they go on from window %d", self.settings.name, evidence.window)
            self.book.record(evidence, first=True)
        self.model: nn.Module = build_model(self.hparams.model)

    def stop(self) -> None:
        """As every node; then close the score book."""
        super().stop()
        self.book.close()

    def publish_peers(self, window: int) -> PublishReceipt | None:
        """Publish a new peer list if one is due; None if not, or if too few miners are active.

        On failure a later call in the same window goes on.
        """
        if window % self.hparams.peers.peer_replacement_frequency:
            return None
        if (known := self.journal.result(window, "peers")) is None:
            # The book changes within the window, what was published for it does not.
            known = _TIERS.dump_json(self._select_peers(window)).decode()
            self.journal.enter(window, "peers", known)
        tiers = _TIERS.validate_json(known)
        return None if tiers is None else publish_peers(self.exchange, window, *tiers)

    def _select_peers(self, window: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        settings, standing = self.hparams.peers, self.book.standing
        miners = {
            neuron.hotkey: neuron.uid
            for neuron in self.exchange.miners(window)
            if not standing.is_banned(window, neuron.hotkey, bucket_of(self, neuron))
        }
        cards = {hotkey: standing.card(hotkey) for hotkey in miners}
        active = [
            miners[hotkey]
            for hotkey, card in cards.items()
            if card.last_reveal is not None and window - card.last_reveal <= settings.recent_windows
        ]
        weights = {miners[hotkey]: max(0.0, card.final) for hotkey, card in cards.items()}
        seed = self.chain.block_hash(first_block(window, self.hparams.windows))
        return select_peers(active, weights, settings, seed=seed)

    def gather_everybody(self, window: int) -> GatherReport:
        """Gather the peer list as everybody does, and all other miners besides: each of them is scored."""
        return self.gather(window, others=self.exchange.miners(window))

    def evaluate(self, report: GatherReport, settlement: Settlement) -> WindowFacts | None:
        """Measure the window's payloads; None if the window is in the score book already.

        Waits until `validator_offset` blocks after the settling block.

        Raises:
            TransientError: Chain or dataset could not be reached; a later call starts over and gives the same.
        """
        window = settlement.window
        if self.book.evidence(window) is not None or self.state.window != window - 1:
            return None
        settling = self.exchange.settling_block(self.exchange.times(window))
        self.chain.wait_for_block(settling + self.hparams.scoring.validator_offset)
        return evaluate(self, self.model, self.book.standing, report, settlement)

    def rate(self, window: int, facts: WindowFacts | None) -> Evidence | None:
        """Enter a window into the score book, once; the evidence of it, or None if it was never measured."""
        known = self.book.evidence(window)
        if known is not None or facts is None:
            return known
        evidence = conclude(facts, self.book.standing, self.hparams, self.exchange.author(window))
        self.book.record(evidence)
        return evidence

    def set_weights(self, evidence: Evidence | None) -> WeightsReport | None:
        """Set the weights if they are due and the window was measured; what the chain refuses ends no window.

        See `templar.neuron.weighing.weigh`.
        """
        return None if evidence is None else weigh(self, evidence)

    def publish_evidence(self, evidence: Evidence | None) -> PublishReceipt | None:
        """Publish the evidence of a window. On failure a later call goes on.

        Raises:
            PermanentError: `object_differs`: other evidence was published before.
            TransientError: The store failed.
        """
        if evidence is None:
            return None
        key = window_key(Kind.EVIDENCE, evidence.window, evidence.uid)
        return publish_body(self.buckets.own, key, evidence, self.exchange.own_signer, clock=self.chain.clock)

    def finish(self, window: int, reason: Reason | None = None) -> None:
        """As every node; then drop old evidence."""
        super().finish(window, reason)
        self.book.forget(window - self.hparams.storage.retention_windows)


_TIERS = TypeAdapter(tuple[tuple[int, ...], tuple[int, ...]] | None)
