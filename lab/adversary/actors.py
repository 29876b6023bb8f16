"""Every actor that a simulation, a gauntlet or a local network can run, by name.

Actors are miners, honest and bad, and publishers of rosters that differ from the honest aggregator in one step.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.adversary import cheats, copiers, hostile
from lab.adversary.hostile import FORGED_MANIFESTS, SKEW_SECONDS, SPOILT_MANIFESTS, variant
from lab.adversary.mutations import MUTATIONS
from templar.agreement.settings_plan import proposal
from templar.agreement.voter import Settlement
from templar.canonical import sha256_hex
from templar.exchange.gather import GatherReport
from templar.exchange.object_keys import Kind, aggregate_key, window_key
from templar.exchange.objects import AdoptedEntry, Approval, PlanEntry, Roster
from templar.exchange.publish import TimedReport
from templar.exchange.reveal import Submission
from templar.exchange.signed import seal
from templar.gradient.codec.wire import Payload, encode
from templar.neuron.aggregator import Aggregator
from templar.neuron.miner import Miner
from templar.neuron.node import Node
from templar.timeline import Interval, WindowTimes


class SilentPublisher(Aggregator):
    """Gathers, applies and decides, and never publishes a roster."""

    def publish(self, window: int, report: GatherReport, rank: int, slot: Interval) -> None:
        """Nothing is published."""


class LatePublisher(Aggregator):
    """Publishes an honest roster in the second after its slot."""

    def publish(self, window: int, report: GatherReport, rank: int, slot: Interval) -> None:
        """Wait for the end of the slot, then write."""
        draft = self.draft(window, report)
        self.chain.clock.sleep_until(slot.last + 1)
        self.buckets.own.put_file(aggregate_key(window), draft.aggregate)
        put_roster(self, draft.roster)


class OmittingPublisher(Aggregator):
    """Leaves the payloads of the two lowest uids out."""

    def chosen(self, report: GatherReport) -> list[Submission]:
        """All but two."""
        return super().chosen(report)[2:]


class ForgingPublisher(Aggregator):
    """Puts a payload of its own making under the first miner's name: what the last one learnt."""

    def chosen(self, report: GatherReport) -> list[Submission]:
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

    def check_own(self, times: WindowTimes, roster: Roster) -> None:
        """It knows that its roster is not legal."""


class HastyPublisher(Aggregator):
    """Owns the network, and adds an entry to the plan that nobody had notice of."""

    def proposed(self, window: int) -> AdoptedEntry | None:
        """The learning rate of the next window."""
        start, own, plan = self.birth.start, self.exchange.identity(window), self.state.plan
        number, changes = len(plan.entries) + 1, dict[str, Any]({"training.adamw.learning_rate": 1.0})
        entry = PlanEntry(number=number, previous=plan.head(start), first_window=window + 1, changes=changes)
        signature = seal(proposal(start, own, entry), self.exchange.own_signer).signature
        return AdoptedEntry(entry=entry, approvals=(Approval(uid=own.uid, hotkey=own.hotkey, signature=signature),))

    def check_own(self, times: WindowTimes, roster: Roster) -> None:
        """It knows that its roster is not legal."""


class TwoFacedPublisher(Aggregator):
    """Shows an honest roster in its slot and, once that is decided, puts another one in its place."""

    def publish_decision(self, settlement: Settlement) -> TimedReport:
        """Decide on the first roster and, after its slot, show one without its first entry."""
        report = super().publish_decision(settlement)
        roster = settlement.roster
        if roster is not None and roster.entries and roster.hotkey == self.exchange.own_signer.address:
            self.chain.clock.sleep_until(self.exchange.times(settlement.window).null_after + 1)
            entries = roster.entries[1:]
            num_bytes = sum(entry.payload_bytes for entry in entries)
            put_roster(self, roster.model_copy(update={"entries": entries, "aggregate_bytes": num_bytes}))
        return report


class DoubleVotingPublisher(Aggregator):
    """Honest, but for a second vote in the ballot that decided: it is shown once the window is decided."""

    def publish_decision(self, settlement: Settlement) -> TimedReport:
        """Decide, then sign a vote for none in the place of the first one."""
        report = super().publish_decision(settlement)
        voter = self.voter(self.judge(self.exchange.times(settlement.window)))
        if voter is not None:
            vote = next(word for word in voter.ballots.own if word.step == "vote")
            voter.say(vote._replace(value=None))
            voter.show(at_once=True)
        return report


def put_roster(node: Aggregator, roster: Roster) -> None:
    """Sign a roster and publish it, overwriting what is there."""
    key = window_key(Kind.ROSTER, roster.window, roster.uid)
    node.buckets.own.put(key, seal(roster, node.exchange.own_signer).encode())


PUBLISHERS: dict[str, type[Aggregator]] = {
    "silent_publisher": SilentPublisher,
    "late_publisher": LatePublisher,
    "omitting_publisher": OmittingPublisher,
    "forging_publisher": ForgingPublisher,
    "hasty_publisher": HastyPublisher,
    "two_faced_publisher": TwoFacedPublisher,
    "double_voting_publisher": DoubleVotingPublisher,
}
"""Every kind of aggregator that a gauntlet can put in the honest one's place."""


ACTORS: Mapping[str, type[Miner]] = {
    "honest": Miner,
    "lazy": cheats.LazyMiner,
    "silent": hostile.SilentMiner,
    "late": hostile.LateMiner,
    "garbage": cheats.GarbageMiner,
    "huge": cheats.HugeMiner,
    "zero": cheats.ZeroMiner,
    "colluding": cheats.ColludingMiner,
    "hasty": hostile.HastyMiner,
    "late_commit": hostile.LateCommittingMiner,
    "early_commit": hostile.EarlyCommittingMiner,
    "swapping": hostile.SwappingMiner,
    "late_swapping": hostile.LateSwappingMiner,
    "withdrawing": hostile.WithdrawingMiner,
    "copying": copiers.CopyingMiner,
    "copying_late_commit": copiers.LateCommittingCopyingMiner,
    "copying_commit": copiers.CommitCopyingMiner,
    "backdating": copiers.BackdatingMiner,
    "copying_bucket": copiers.BucketCopyingMiner,
    "moving": copiers.MovingMiner,
    "staking": copiers.StakingMiner,
    "impersonating": copiers.ImpersonatingMiner,
    "replaying": copiers.ReplayingMiner,
    "repeating": copiers.RepeatingMiner,
    "half": cheats.HalfMiner,
    "wrong_data": cheats.WrongDataMiner,
    "one_batch": cheats.OneBatchMiner,
    "overfitting": cheats.OverfittingMiner,
    "sign_flip": cheats.SignFlipMiner,
    "shuffled": cheats.ShuffledMiner,
    "stale": cheats.StaleMiner,
    "near_zero": cheats.NearZeroMiner,
    "gaming": cheats.GamingMiner,
    "recycling": copiers.RecyclingMiner,
    "plagiarising": copiers.PlagiarisingMiner,
    "blending": copiers.BlendingMiner,
    "within_norm": copiers.WithinNormMiner,
    "sybil": copiers.SybilMiner,
    "fifth": cheats.FifthMiner,
    "slow": cheats.SlowMiner,
    "pool": cheats.PoolMiner,
    "pooled": cheats.PooledMiner,
    "split": cheats.SplitMiner,
    "scaled": cheats.NearCapMiner,
    "shadow": cheats.ShadowMiner,
    "noisy_shadow": cheats.NoisyShadowMiner,
    "smuggled_pickle": hostile.SmuggledPickleMiner,
    "junk_keys": hostile.JunkKeysMiner,
    "pickle": variant(hostile.OtherBytesMiner, "pickle", content=hostile.pickle_bytes),
    "zip_bomb": variant(hostile.OtherBytesMiner, "zip_bomb", content=lambda home: hostile.zip_bomb(hostile.BOMB_BYTES)),
    "fast_clock": variant(hostile.SkewedMiner, "fast", skew_seconds=SKEW_SECONDS),
    "slow_clock": variant(hostile.SkewedMiner, "slow", skew_seconds=-SKEW_SECONDS),
    **{name: variant(hostile.ForgingMiner, name, forge=forge) for name, forge in FORGED_MANIFESTS.items()},
    **{name: variant(hostile.MutatingMiner, name, mutation=mutation) for name, (mutation, _) in MUTATIONS.items()},
    **{name: variant(hostile.RawManifestMiner, name, spoil=spoil) for name, spoil in SPOILT_MANIFESTS.items()},
}
"""Every kind of miner that a simulation or a local network can run."""


def idle(kind: type[Miner]) -> type[Miner]:
    """The same miner without training: what it does besides is unchanged, and its update is noise."""
    if issubclass(cheats.IdleMiner, kind):
        return cheats.IdleMiner
    return type(
        f"Idle{kind.__name__}", (kind, cheats.IdleMiner), {"__doc__": kind.__doc__, "__module__": kind.__module__}
    )


IDLE: Mapping[str, type[Node]] = {
    "validator": cheats.IdleValidator,
    **{name: idle(kind) for name, kind in ACTORS.items()},
}
"""Stand-ins for the roles that train and measure when only the protocol is to run."""
