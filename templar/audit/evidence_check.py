"""Check one evidence: observe and measure its window again, and compute again what follows (docs/architecture.md D8).

Some observations only the moment could show: a store that failed then, an object that came later. Where the public
objects agree with such a claim it is a note; where they contradict it, it is a difference. Both accounts are then
measured on the same payloads, so that one lie is one difference and does not change every other number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from templar.agreement.ballot_box import may_have_expired
from templar.audit.hindsight import Hindsight, cache_payloads
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import bucket_digest
from templar.exchange.gather import GatherReport, PeerOutcome, Tier
from templar.exchange.object_keys import Kind, window_key
from templar.hparams import HParams
from templar.neuron.evaluate import evaluate
from templar.neuron.node import Node
from templar.scoring.conclude import conclude
from templar.scoring.differences import Difference, DifferenceKind, compare_evidence, compare_facts, shown
from templar.scoring.evidence import Evidence, MinerFacts, WindowFacts
from templar.scoring.evidence_chain import compare_weights, find_standing
from templar.scoring.meter import Meter
from templar.scoring.slashing import is_absent
from templar.scoring.standing import Standing

MOMENTARY = frozenset(
    {
        Reason.STORE_UNREACHABLE,
        Reason.STORE_BUSY,
        Reason.TOO_SLOW,
        Reason.COMMIT_UNSEEN,
        Reason.CHAIN_UNREACHABLE,
        Reason.CHAIN_RATE_LIMITED,
    }
)
"""Failures that nobody can see later, and that may be the validator's own."""
_CAME_LATER = {
    Reason.COMMIT_MISSING: Reason.COMMIT_LATE,
    Reason.MANIFEST_MISSING: Reason.REVEAL_LATE,
    Reason.PAYLOAD_MISSING: Reason.REVEAL_LATE,
}
"""Reason when the validator looked -> reason after the object came too late."""


@dataclass
class Findings:
    """The differences found so far; they stand if a later step fails."""

    past: list[Difference] = field(default_factory=list)  # in the evidence that this one follows
    facts: list[Difference] = field(default_factory=list)  # in observations and measurements
    derived: list[Difference] = field(default_factory=list)  # in the conclusion from both
    chain: list[Difference] = field(default_factory=list)  # in the weights on chain
    notes: list[str] = field(default_factory=list)  # claims that cannot be checked
    within: str = ""  # the device and precision there and here, if losses and gains were compared within the tolerance

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, each once, causes before consequences."""
        facts = [replace(each, kind=each.kind or DifferenceKind.OBSERVATION) for each in self.facts]
        derived = [replace(each, kind=DifferenceKind.DERIVATION) for each in self.derived]
        return tuple(dict.fromkeys((*self.past, *facts, *derived, *self.chain)))


def check_evidence(
    node: Node,
    model: nn.Module,
    seen: Hindsight,
    evidence: Evidence,
    findings: Findings,
    *,
    meter: Meter,
    tolerance: float | None = None,
) -> None:
    """Rebuild a validator's window, compare, and enter each difference into `findings` as it is found.

    The node's agreed state must be that of the window before. `meter` measures. `tolerance` is the allowed relative
    distance of measured numbers; 0 for equality. Without one they must be equal if they were measured repeatably there
    and are here, else as near as `LOSS_TOLERANCE` and `GAIN_TOLERANCE` say.

    TransientError: Chain, dataset or stores failed; a later call starts over. PermanentError: `evidence_missing`:
    something of it has expired.
    """
    # 1. The standing before, from the evidence that this one follows.
    standing, problems = find_standing(node.exchange, evidence)
    findings.past.extend(problems)
    if standing is None:
        findings.notes.append("nothing else can be recomputed without the evidence before")
        return
    # 2. The conclusion from the published facts, and the weights on chain.
    findings.derived.extend(_derive(evidence, standing, node.hparams))
    chain, notes = compare_weights(node.exchange, evidence)
    findings.chain.extend(chain)
    findings.notes.extend(notes)
    # 3. The facts themselves.
    there = evidence.measured_on
    if tolerance is None and meter.repeatable and (there is None or there.repeatable):
        tolerance = 0.0
    elif tolerance is None:
        findings.within = f"{there or 'unknown'} there, {meter.measured_on} here"
    _check_facts(node, model, seen, evidence, standing, findings=findings, meter=meter, tolerance=tolerance)


def _derive(evidence: Evidence, standing: Standing, hparams: HParams) -> tuple[Difference, ...]:
    """Return where the evidence differs from the conclusion from its own facts, exactly."""
    author = {name: getattr(evidence, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    try:
        again = conclude(evidence.facts, standing, hparams, author)
    except (ValueError, ArithmeticError) as error:  # numbers that no honest validator can have measured
        return (Difference("facts", f"no conclusion follows from them: {str(error)[:200]}", ""),)
    return compare_evidence(evidence, again)


def _check_facts(
    node: Node,
    model: nn.Module,
    seen: Hindsight,
    evidence: Evidence,
    standing: Standing,
    *,
    findings: Findings,
    meter: Meter,
    tolerance: float | None,
) -> None:
    """Observe and measure the window again, and enter the differences."""
    # 1. Which payload of each miner counted: by the claims, as far as the public objects allow.
    published = evidence.facts
    again = _Reconciliation(node, seen, standing, evidence.uid, published, findings)
    report = again.run()
    # 2. Measure on these payloads.
    earlier = standing.payloads if standing.window == seen.window - 1 else {}
    missing = cache_payloads(node, seen.window - 1, earlier)
    measuring = model if again.measurable else None
    measured = evaluate(node, measuring, standing, report, seen.settlement, meter=meter)
    recomputed = _changed(measured, again.settled)
    # 3. Proofs may change after a validator read them: they have rules of their own.
    again.compare_proofs(recomputed)
    lags = {miner.uid: {"windows_behind": miner.windows_behind} for miner in published.miners if miner.payload_sha256}
    recomputed = _changed(recomputed, lags)
    # 4. Compare the rest.
    if missing and again.measurable:
        recomputed = _without_repeats(published, recomputed, missing, findings)
    if not again.measurable:
        findings.notes.append("nothing is measured again, for the payloads are not the same")
    findings.facts.extend(compare_facts(published, recomputed, tolerance=tolerance, measured=again.measurable))


def _changed(facts: WindowFacts, changes: Mapping[int, Mapping[str, Any]]) -> WindowFacts:
    return replace(facts, miners=tuple(miner.model_copy(update=changes.get(miner.uid, {})) for miner in facts.miners))


def _without_repeats(
    published: WindowFacts, recomputed: WindowFacts, missing: frozenset[int], findings: Findings
) -> WindowFacts:
    """Take the published likeness to an earlier payload that is not shown any more."""
    claims = {miner.uid: miner.repeat for miner in published.miners}

    def known(miner: MinerFacts) -> MinerFacts:
        claim = claims.get(miner.uid)
        if claim is None or claim.uid not in missing or claim == miner.repeat:
            return miner
        findings.notes.append(f"uid {miner.uid}: the payload of uid {claim.uid} before is not shown any more")
        return miner.model_copy(update={"repeat": claim})

    return replace(recomputed, miners=tuple(known(miner) for miner in recomputed.miners))


@dataclass
class _Reconciliation:
    """The claims of one validator about the reveals of one window, compared with the public objects."""

    node: Node
    seen: Hindsight
    standing: Standing
    validator: int
    published: WindowFacts
    findings: Findings
    measurable: bool = True  # whether exactly the validator's payloads are at hand
    settled: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Uid -> fields of its facts that need no further comparison."""

    def __post_init__(self) -> None:
        self.claims = {miner.uid: miner for miner in self.published.miners}

    def run(self) -> GatherReport:
        """Return the gather by the validator's claims, as far as the public objects allow."""
        miners = self.node.exchange.miners(self.seen.window)
        outcomes = [self.outcome(neuron, self.claims.get(neuron.uid)) for neuron in miners]
        return replace(self.seen.report, outcomes=tuple(each for each in outcomes if each is not None))

    def outcome(self, neuron: NeuronInfo, claim: MinerFacts | None) -> PeerOutcome | None:
        """Return the outcome to measure; None for a miner that was not asked."""
        uid, now = neuron.uid, self.seen.outcome(neuron.uid)
        truth, banned = self._truth(neuron, now)
        if claim is None:  # `compare_facts` reports that it was skipped; the others are measured without it
            self.measurable &= not self._is_listed(uid)
            return None if now is None else replace(now, submission=None)
        bucket = bucket_digest(neuron)
        if claim.bucket != bucket:
            self._other_bucket(neuron, claim, bucket)
        if claim.payload_sha256 == truth:
            if truth is None:
                self._no_payload(neuron, claim, now, banned=banned)
        elif claim.payload_sha256 is None:
            self._left_out(neuron, claim, truth)
        else:
            self._put_in(neuron, claim, truth, None if banned else now)
        return self._as_claimed(claim, now, truth)

    def _truth(self, neuron: NeuronInfo, now: PeerOutcome | None) -> tuple[str | None, bool]:
        """Return the payload that counts by the public objects, and whether its author is banned."""
        bucket = bucket_digest(neuron)
        if self.standing.is_banned(self.seen.window, neuron.hotkey, bucket):
            return None, True
        roster = self.seen.settlement.roster
        for entry in () if roster is None else roster.entries:
            if entry.uid == neuron.uid:
                return entry.payload_sha256, False
        counted = None if now is None else now.submission
        return (None if counted is None else counted.manifest.payload_sha256), False

    def _as_claimed(self, claim: MinerFacts, now: PeerOutcome | None, truth: str | None) -> PeerOutcome | None:
        """Return the outcome now, with the parts of the claim that were accepted."""
        uid, claimed = claim.uid, claim.payload_sha256
        asked = self.seen.report.outcome(uid) is not None
        tier = Tier.OTHER if now is None or not asked else now.tier
        was_needless = _is_unasked(claim) and asked and not self._is_disturbed()
        if uid in self.seen.reserve and claim.tier in (Tier.RESERVE, Tier.OTHER) and not was_needless:
            tier = Tier(claim.tier)
            if tier is Tier.RESERVE and not asked:
                self.findings.notes.append(f"uid {uid}: asked in another's place, which is not necessary now")
        if now is None or (_is_unasked(claim) and uid in self.seen.reserve and not was_needless):
            return None
        counted = now.submission if claimed is not None and claimed == truth else None
        return replace(now, tier=tier, submission=counted, reason=claim.reason)

    def _other_bucket(self, neuron: NeuronInfo, claim: MinerFacts, bucket: str | None) -> None:
        """Handle another bucket than the chain named when the window opened, and what follows if one is banned."""
        self._differs(claim, "bucket", shown(bucket))
        self._settle(claim, "bucket")
        is_banned = partial(self.standing.is_banned, self.seen.window, neuron.hotkey)
        if is_banned(claim.bucket) != is_banned(bucket):
            self._settle(claim, "payload_sha256", "reason", "windows_behind")
            self.measurable = False

    def _left_out(self, neuron: NeuronInfo, claim: MinerFacts, truth: str | None) -> None:
        """Handle a claim that nothing counted, where a payload counts by the public objects."""
        uid = neuron.uid
        if self._is_settled(claim, "payload_sha256"):
            return
        if self._is_listed(uid):  # the decided roster holds against any observation
            self.measurable = False
        elif claim.reason in MOMENTARY:
            cost = ", and it was punished" if is_absent(claim, self.published) else ""
            self.findings.notes.append(
                f"uid {uid}: it could not be read then, says the evidence [{claim.reason}]{cost}"
            )
        elif _is_unasked(claim) and uid in self.seen.reserve:
            pass  # its tier says whether it had to be asked
        else:
            self._differs(claim, "payload_sha256", shown(truth), because=claim.reason)
        if not self._is_listed(uid):
            self._settle(claim, "payload_sha256", "reason")

    def _put_in(self, neuron: NeuronInfo, claim: MinerFacts, truth: str | None, now: PeerOutcome | None) -> None:
        """Handle a claim that a payload counted, where the public objects do not show that."""
        if self._is_settled(claim, "payload_sha256"):
            return
        self.measurable = False
        if self._is_listed(neuron.uid) or now is None or claim.payload_sha256 is None:
            self._differs(claim, "payload_sha256", shown(truth))
        else:
            self._require_readable(neuron, now)
            recomputed = shown(truth) if now.reason is None else f"nothing ({now.reason})"
            suspects = () if now.reason is None else (self.validator, neuron.uid)
            self._differs(claim, "payload_sha256", recomputed, suspects=suspects)
        self._settle(claim, "payload_sha256", "reason", "windows_behind")

    def _no_payload(self, neuron: NeuronInfo, claim: MinerFacts, now: PeerOutcome | None, *, banned: bool) -> None:
        """Handle a miner without a payload in both accounts: the reasons must agree."""
        reason = Reason.BANNED if banned else None if now is None else now.reason
        if self._is_settled(claim, "reason") or claim.reason == reason:
            return
        self._settle(claim, "reason")
        if _is_unasked(claim) and neuron.uid in self.seen.reserve:
            return  # its tier says whether it had to be asked
        if claim.reason in MOMENTARY and not banned:
            self.findings.notes.append(f"uid {neuron.uid}: [{claim.reason}] then, [{reason}] now")
            return
        if Reason.BANNED in (claim.reason, reason) or now is None:
            self._differs(claim, "reason", shown(reason))
            return
        self._require_readable(neuron, now)
        if claim.reason is not None and _CAME_LATER.get(claim.reason) is reason:
            self.findings.notes.append(f"uid {neuron.uid}: [{claim.reason}] then, [{reason}] now: it came later")
        else:
            self._differs(claim, "reason", shown(reason), suspects=(self.validator, neuron.uid))

    def compare_proofs(self, recomputed: WindowFacts) -> None:
        """Compare the published lags with the miners' proofs; enter differences, and notes on undecidable ones."""
        again = {miner.uid: miner for miner in recomputed.miners}
        for miner in self.published.miners:
            now = again.get(miner.uid)
            if now is None or None in (miner.payload_sha256, now.payload_sha256):
                continue
            if miner.windows_behind == now.windows_behind:
                continue
            suspects = self._suspects_of_lag(miner, now)
            if isinstance(suspects, str):
                self.findings.notes.append(f"uid {miner.uid}: {suspects}")
            else:
                self._differs(miner, "windows_behind", shown(now.windows_behind), suspects=suspects)

    def _suspects_of_lag(self, miner: MinerFacts, now: MinerFacts) -> tuple[int, ...] | str:
        """Return who may be at fault if one miner's lag differs, or why that is undecidable."""
        if miner.windows_behind is None:
            return "its proof could not be read then, says the evidence"
        if now.windows_behind is None:
            raise TransientError(Reason.STORE_UNREACHABLE, f"the proof of uid {miner.uid} cannot be read now")
        node, window = self.node, self.seen.window - 1
        author = node.exchange.metagraph(self.seen.window).by_uid(miner.uid)
        if author is None or window == node.birth.mark.window:
            return (self.validator,)
        store = node.buckets.reader(author)
        info = store.head(window_key(Kind.PROOF, window, miner.uid))
        if info is not None and info.last_modified >= self.seen.rules.times.settles:
            return f"{miner.windows_behind} windows behind then; its proof was stored after that"
        if info is None and may_have_expired(node.exchange, store, window):
            return f"{miner.windows_behind} windows behind then; its proof may have expired"
        return (self.validator,) if info is not None else (self.validator, miner.uid)

    def _require_readable(self, neuron: NeuronInfo, now: PeerOutcome) -> None:
        """Raise if nothing can be said of a miner: its store fails now, or its objects may have expired."""
        if now.reason is not None and now.reason in MOMENTARY:
            raise TransientError(now.reason, f"uid {neuron.uid} cannot be read now: {now.detail}")
        window, exchange = self.seen.window, self.node.exchange
        if now.reason in _CAME_LATER and may_have_expired(exchange, exchange.buckets.reader(neuron), window):
            raise PermanentError(
                Reason.EVIDENCE_MISSING, f"the objects of uid {neuron.uid} in window {window} may have expired"
            )

    def _is_disturbed(self) -> bool:
        """Whether a peer that counted then fails now, so that more of the reserve are asked than then."""
        counted = {uid for uid, claim in self.claims.items() if claim.payload_sha256 is not None}
        return any(
            each.submission is None and (each.reason in MOMENTARY or each.uid in counted)
            for each in self.seen.report.outcomes
            if each.tier is Tier.GATHER
        )

    def _is_listed(self, uid: int) -> bool:
        return uid in self.seen.settlement.uids

    def _is_settled(self, claim: MinerFacts, name: str) -> bool:
        return name in self.settled.get(claim.uid, {})

    def _settle(self, claim: MinerFacts, *names: str) -> None:
        """Exclude these fields from further comparison."""
        self.settled.setdefault(claim.uid, {}).update({name: getattr(claim, name) for name in names})

    def _differs(
        self,
        claim: MinerFacts,
        name: str,
        recomputed: str,
        *,
        because: Reason | None = None,
        suspects: tuple[int, ...] = (),
    ) -> None:
        published = shown(getattr(claim, name)) + (f" ({because})" if because is not None else "")
        where = f"miners[uid {claim.uid}].facts.{name}"
        self.findings.facts.append(Difference(where, published, recomputed, suspects or (self.validator,)))


def _is_unasked(claim: MinerFacts) -> bool:
    """Return whether the evidence says nothing of a miner's payload."""
    return claim.payload_sha256 is None and claim.reason is None
