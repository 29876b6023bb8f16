"""Bad publishers of rosters: aggregators that differ from the honest one in one step."""

from dataclasses import replace

from templar.canonical import sha256_hex
from templar.exchange.gather import GatherReport
from templar.exchange.keys import Kind, aggregate_key, window_key
from templar.exchange.objects import Roster
from templar.exchange.publish import TimedReport
from templar.exchange.reveal import Contribution
from templar.exchange.sealing import seal
from templar.gradient.payload import Payload
from templar.gradient.wire import encode
from templar.neuron.aggregator import Aggregator
from templar.neuron.settlement import Settlement


class SilentPublisher(Aggregator):
    """Gathers, applies and decides, and never publishes a roster."""

    def publish(self, window: int, report: GatherReport, rank: int) -> None:
        """Nothing is published."""


class LatePublisher(Aggregator):
    """Publishes an honest roster in the second after its slot."""

    def publish(self, window: int, report: GatherReport, rank: int) -> None:
        """Wait for the end of the slot, then write."""
        draft, slot = self.draft(window, report), self.exchange.times(window).roster_slot(rank)
        self.chain.clock.sleep_until(slot.last + 1)
        self.buckets.own.put_file(aggregate_key(window), draft.aggregate)
        self._put(draft.roster)

    def _put(self, roster: Roster) -> None:
        key = window_key(Kind.ROSTER, roster.window, roster.uid)
        self.buckets.own.put(key, seal(roster, self.exchange.own_signer).encode())


class OmittingPublisher(Aggregator):
    """Leaves the payloads of the two lowest uids out."""

    def chosen(self, report: GatherReport) -> list[Contribution]:
        """All but two."""
        return super().chosen(report)[2:]


class ForgingPublisher(Aggregator):
    """Puts a payload of its own making under the first miner's name: what the last one learnt."""

    def chosen(self, report: GatherReport) -> list[Contribution]:
        """The first payload is exchanged; its manifest's signature stays what it was."""
        honest = super().chosen(report)
        if len(honest) < 2:
            return honest
        victim, source = honest[0], honest[-1]
        payload = self.cache.payload(report.window, source.manifest.payload_sha256)
        header = replace(payload.header, uid=victim.uid, hotkey=victim.hotkey)
        data = encode(Payload(header, payload.sections), self.layout)
        digest = sha256_hex(data)
        self.cache.admit(data, digest, window=report.window, uid=victim.uid, hotkey=victim.hotkey)
        manifest = victim.manifest.model_copy(update={"payload_sha256": digest, "payload_bytes": len(data)})
        return [replace(victim, manifest=manifest), *honest[1:]]


class TwoFacedPublisher(LatePublisher):
    """Shows an honest roster in its slot and, once that is decided, puts another one in its place."""

    def publish(self, window: int, report: GatherReport, rank: int) -> None:
        """As an honest one."""
        Aggregator.publish(self, window, report, rank)

    def decide(self, settlement: Settlement) -> TimedReport:
        """Decide on the first roster and, after its slot, show one without its first entry."""
        report = super().decide(settlement)
        roster = settlement.roster
        if roster is not None and roster.entries and roster.hotkey == self.exchange.own_signer.address:
            self.chain.clock.sleep_until(self.exchange.times(settlement.window).null_after + 1)
            entries = roster.entries[1:]
            num_bytes = sum(entry.payload_bytes for entry in entries)
            self._put(roster.model_copy(update={"entries": entries, "aggregate_bytes": num_bytes}))
        return report


PUBLISHERS: dict[str, type[Aggregator]] = {
    "silent_publisher": SilentPublisher,
    "late_publisher": LatePublisher,
    "omitting_publisher": OmittingPublisher,
    "forging_publisher": ForgingPublisher,
    "two_faced_publisher": TwoFacedPublisher,
}
"""Every kind of aggregator that a gauntlet can put in the honest one's place."""
