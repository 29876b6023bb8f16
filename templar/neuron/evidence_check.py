"""One evidence against its window: what was seen and measured is done again, what follows is computed again."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from templar.hparams import HParams
from templar.neuron.evaluate import evaluate
from templar.neuron.evidence_chain import compare_weights, find_standing
from templar.neuron.hindsight import Hindsight, bring_earlier
from templar.neuron.node import Node
from templar.neuron.proof_audit import compare_proofs
from templar.neuron.reconciling import reconcile
from templar.scoring.cards import Standing
from templar.scoring.conclude import conclude
from templar.scoring.differences import Difference, compare_evidence, compare_facts
from templar.scoring.evidence import Evidence, MinerFacts, WindowFacts


@dataclass
class Findings:
    """What is known so far; it stands, whatever fails later.

    Attributes:
        past: About the evidence that this one follows.
        facts: About what was seen and measured.
        derived: About what follows from both.
        chain: About what became of it.
        notes: What cannot be redone.
    """

    past: list[Difference] = field(default_factory=list)
    facts: list[Difference] = field(default_factory=list)
    derived: list[Difference] = field(default_factory=list)
    chain: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All of them, each once, the causes before what follows from them."""
        return tuple(dict.fromkeys((*self.past, *self.facts, *self.derived, *self.chain)))


def check_evidence(
    node: Node, model: nn.Module, seen: Hindsight, evidence: Evidence, findings: Findings, *, tolerance: float
) -> None:
    """Rebuild a validator's window and compare; what is found goes into `findings` as it is found.

    Args:
        node: A node whose agreed state is that of the window before.
        model: A model of the network's shape.
        seen: The window as it looks now.
        evidence: What the validator published, signed by it.
        findings: Where it goes.
        tolerance: How far apart measured numbers may be, relatively; 0 for exactly.

    Raises:
        TransientError: Chain, dataset or stores failed; a later call starts over.
        PermanentError: `evidence_missing`: something of it has expired.
    """
    standing, problems = find_standing(node.exchange, evidence)
    findings.past.extend(problems)
    if standing is None:
        findings.notes.append("nothing else can be recomputed without the evidence before")
        return
    findings.derived.extend(_derive(evidence, standing, node.hparams))
    chain, notes = compare_weights(node.exchange, evidence)
    findings.chain.extend(chain)
    findings.notes.extend(notes)
    _check_facts(node, model, seen, evidence, standing, findings=findings, tolerance=tolerance)


def _derive(evidence: Evidence, standing: Standing, hparams: HParams) -> tuple[Difference, ...]:
    """What follows from the published facts, exactly."""
    author = {name: getattr(evidence, name) for name in ("netuid", "genesis", "uid", "hotkey")}
    try:
        again = conclude(evidence.facts, standing, hparams, author)
    except (ValueError, ArithmeticError) as error:  # numbers that no honest validator can have measured
        return (Difference("facts", f"what nothing can be concluded from: {str(error)[:200]}", ""),)
    return compare_evidence(evidence, again)


def _check_facts(
    node: Node,
    model: nn.Module,
    seen: Hindsight,
    evidence: Evidence,
    standing: Standing,
    *,
    findings: Findings,
    tolerance: float,
) -> None:
    """What was seen and measured, once more."""
    published = evidence.facts
    again = reconcile(node, seen, published, standing, evidence.uid)
    findings.facts.extend(again.differences)
    findings.notes.extend(again.notes)
    earlier = standing.payloads if standing.window == seen.window - 1 else {}
    missing = bring_earlier(node, seen.window - 1, earlier)
    measuring = model if again.measurable else None
    recomputed = _changed(evaluate(node, measuring, standing, again.report, seen.settlement), again.settled)
    differences, untold = compare_proofs(node, seen, published, recomputed, evidence.uid)
    findings.facts.extend(differences)
    findings.notes.extend(f"uid {uid}: {why}" for uid, why in untold.items())
    told = {miner.uid: {"windows_behind": miner.windows_behind} for miner in published.miners if miner.payload_sha256}
    recomputed = _changed(recomputed, told)
    if missing and again.measurable:
        recomputed = _without_repeats(published, recomputed, missing, findings)
    if not again.measurable:
        findings.notes.append("nothing is measured again, for the payloads are not the same")
    found = compare_facts(published, recomputed, tolerance=tolerance, measured=again.measurable)
    findings.facts.extend(found)


def _changed(facts: WindowFacts, changes: Mapping[int, Mapping[str, Any]]) -> WindowFacts:
    miners = tuple(miner.model_copy(update=changes.get(miner.uid, {})) for miner in facts.miners)
    return replace(facts, miners=miners)


def _without_repeats(
    published: WindowFacts, recomputed: WindowFacts, missing: frozenset[int], findings: Findings
) -> WindowFacts:
    """Take the likeness to an earlier payload that nobody shows any more as it is published."""
    claims = {miner.uid: miner.repeat for miner in published.miners}

    def known(miner: MinerFacts) -> MinerFacts:
        claim = claims.get(miner.uid)
        if claim is None or claim.uid not in missing or claim == miner.repeat:
            return miner
        findings.notes.append(f"uid {miner.uid}: the payload of uid {claim.uid} before is not shown any more")
        return miner.model_copy(update={"repeat": claim})

    return replace(recomputed, miners=tuple(known(miner) for miner in recomputed.miners))
