"""A validator's window: settle, decide, measure on the state before the window, rate, apply, publish, set weights.

A window enters the score book in one transaction, so a crash in mid-window scores nobody twice.
"""

import logging
from dataclasses import dataclass

from pydantic import TypeAdapter
from torch import nn

from templar.errors import Reason, TransientError
from templar.exchange.gather import GatherReport
from templar.exchange.keys import Kind, window_key
from templar.exchange.peers import publish_peers, select_peers
from templar.exchange.publish import PublishReceipt, publish_body
from templar.model.llama import build_model
from templar.neuron.aggregator import RosterNode
from templar.neuron.conclude import conclude
from templar.neuron.evaluate import Evaluation, evaluate
from templar.neuron.settlement import Settlement
from templar.scoring.book import ScoreBook
from templar.scoring.evidence import Evidence
from templar.windows import first_block

log = logging.getLogger(__name__)

READ_BACK_TOLERANCE = 1e-3
"""Chains store weights in 16 bits; anything further off was not what this node set."""


@dataclass(frozen=True)
class WeightsReport:
    """What became of the weights in a window.

    Attributes:
        window: The window.
        weights: Uid -> weight as read back from the chain, or as sent where it hides them; empty if none were set.
        reason: Why none were set; None if they were.
    """

    window: int
    weights: dict[int, float]
    reason: Reason | None


class Validator(RosterNode):
    """A node that measures, rates and sets weights."""

    role = "validator"

    def _join(self) -> None:
        super()._join()
        self.book = ScoreBook(self.settings.home / "scores.sqlite", durable=self.settings.durable)
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
        settings = self.hparams.peers
        miners = {neuron.hotkey: neuron.uid for neuron in self.exchange.miners(window)}
        cards = self.book.cards(miners)
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

    def evaluate(self, report: GatherReport, settlement: Settlement) -> Evaluation | None:
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
        return evaluate(self, self.model, report, settlement)

    def rate(self, report: GatherReport, evaluation: Evaluation | None, settlement: Settlement) -> Evidence | None:
        """Enter the window into the score book, once; the evidence of it, or None if it was never measured."""
        known = self.book.evidence(settlement.window)
        if known is not None:
            return Evidence.model_validate_json(known)
        if evaluation is None:
            return None
        miners = [neuron.hotkey for neuron in self.exchange.miners(settlement.window)]
        cards, evidence = conclude(self, self.book.cards(miners), report, evaluation, settlement)
        self.book.record(settlement.window, cards, evidence.canonical())
        return evidence

    def set_weights(self, evidence: Evidence | None) -> WeightsReport | None:
        """Set the weights on chain if they are due, once; wait for inclusion, read them back and compare.

        A subnet with commit-reveal shows them only later, so there is nothing to compare with.

        Returns:
            None if they are not due.

        Raises:
            TransientError: The chain could not be reached, limits the rate, or shows other weights than were set; try
                again.
            PermanentError: `chain_refused`.
        """
        if evidence is None or evidence.window % self.hparams.weights.windows_per_weights:
            return None
        if (known := self.journal.result(evidence.window, "weights")) is not None:
            return _WEIGHTS_REPORT.validate_json(known)
        wanted = {record.uid: record.weight for record in evidence.weights}
        if not wanted:
            return WeightsReport(evidence.window, {}, Reason.NOBODY_EARNED)
        if self.chain.hides_weights():
            self.chain.set_weights(wanted)
            log.info("window %d: the chain reveals the weights later; they are not read back", evidence.window)
            report = WeightsReport(evidence.window, wanted, None)
        else:
            report = WeightsReport(evidence.window, self._set_and_read_back(evidence, wanted), None)
        self.journal.enter(evidence.window, "weights", _WEIGHTS_REPORT.dump_json(report).decode())
        return report

    def _set_and_read_back(self, evidence: Evidence, wanted: dict[int, float]) -> dict[int, float]:
        limited = None
        try:
            self.chain.set_weights(wanted)
        except TransientError as error:
            if error.reason is not Reason.CHAIN_RATE_LIMITED:
                raise
            limited = error  # it may have been this very call that set them, before the process died
        stored = self.chain.weights().get(evidence.uid, {})
        off = [uid for uid in {*wanted, *stored} if abs(wanted.get(uid, 0) - stored.get(uid, 0)) > READ_BACK_TOLERANCE]
        if off:
            raise limited or TransientError(
                Reason.WEIGHTS_DIFFER, f"window {evidence.window}: the chain shows other weights for uids {sorted(off)}"
            )
        return stored

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
_WEIGHTS_REPORT = TypeAdapter(WeightsReport)
