"""What a validator measures in one window: losses of every payload alone, and how far behind its author's state is."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from templar.chain.base import NeuronInfo
from templar.errors import TemplarError, TransientError
from templar.exchange.gather import GatherReport
from templar.exchange.objects import Proof
from templar.exchange.proof import read_proof, state_proof
from templar.gradient.aggregate import median_norms, single_update
from templar.gradient.payload import Payload
from templar.interrupt import StoppedError
from templar.model.schedule import outer_learning_rate
from templar.neuron.node import Node
from templar.neuron.settlement import Settlement
from templar.scoring.evidence import Measurement
from templar.scoring.measure import Evaluator
from templar.scoring.plan import SPARE, draw_plan
from templar.scoring.sync import MAX_BEHIND, windows_behind

log = logging.getLogger(__name__)

PROOF_ATTEMPTS = 2
PROOF_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Evaluation:
    """What was measured in a window.

    Attributes:
        window: The window.
        seed_block: The block whose hash drew the evaluation plan.
        loss: Mean loss of the evaluation batch before the step; None if there was nothing to measure.
        payloads: Uid -> hash of the payload that was measured.
        measurements: Uid -> losses.
        behind: Uid -> windows that its state was behind; missing where its store failed, for an error is no absence.
    """

    window: int
    seed_block: int
    loss: float | None
    payloads: Mapping[int, str]
    measurements: Mapping[int, Measurement]
    behind: Mapping[int, int]


def evaluate(node: Node, model: nn.Module, report: GatherReport, settlement: Settlement) -> Evaluation:
    """Measure every payload of the roster, and every other one that counts, on the state before the window.

    Args:
        node: The validator; its agreed state is that of the window before.
        model: A working model; its parameters are overwritten.
        report: The own gather, of all miners.
        settlement: What was decided; where it differs from the own gather, it holds.

    Raises:
        TransientError: Chain or dataset could not be reached; a later call starts over and gives the same.
    """
    window = settlement.window
    block = node.exchange.settling_block(node.exchange.times(window))
    payloads = {each.uid: each.manifest.payload_sha256 for each in report.contributions}
    if settlement.roster is not None:
        payloads |= {entry.uid: entry.payload_sha256 for entry in settlement.roster.entries}
    evaluator = _evaluator(node, model, window, sorted(payloads), node.chain.block_hash(block))
    decoded = {uid: node.cache.payload(window, digest) for uid, digest in sorted(payloads.items())}
    measurements = node.chain.clock.compute(lambda: _measure(node, evaluator, decoded, settlement))
    neurons = {neuron.uid: neuron for neuron in node.exchange.miners(window)}
    behind = {uid: _behind(node, neurons[uid], report, window) for uid in payloads if uid in neurons}
    return Evaluation(
        window=window,
        seed_block=block,
        loss=evaluator.loss,
        payloads=payloads,
        measurements=measurements,
        behind={uid: windows for uid, windows in behind.items() if windows is not None},
    )


def _evaluator(node: Node, model: nn.Module, window: int, uids: list[int], block_hash: str) -> Evaluator:
    sequences = {uid: node.workload.sequences(node.workload.assignment(window, uid)) for uid in uids}
    sequences[SPARE] = node.workload.spare_sequences(window)
    training = node.hparams.training
    plan = draw_plan(
        {uid: len(sequences[uid]) for uid in uids},
        num_spare=len(sequences[SPARE]),
        num_sequences=node.hparams.scoring.eval_sequences,
        trained_first=training.inner_steps * training.batch_size,
        block_hash=block_hash,
    )
    return Evaluator(
        model, node.state.params, sequences, plan, micro_batch_size=node.hparams.scoring.eval_micro_batch_size
    )


def _measure(
    node: Node, evaluator: Evaluator, decoded: Mapping[int, Payload], settlement: Settlement
) -> dict[int, Measurement]:
    """Each payload alone, clipped to the roster's median norm; without a roster, to that of all payloads."""
    if not decoded:
        return {}
    rostered = [decoded[uid] for uid in settlement.uids]
    medians = median_norms(rostered or list(decoded.values()), node.layout)
    factor = outer_learning_rate(node.hparams.training, node.state.outer_steps) * node.hparams.scoring.eval_lr_factor
    measurements: dict[int, Measurement] = {}
    update: dict[str, Tensor] | None = None
    for uid, payload in decoded.items():
        update = single_update(payload, node.layout, medians, out=update)
        measurements[uid] = evaluator.measure(uid, update, factor)
    return measurements


def _behind(node: Node, neuron: NeuronInfo, report: GatherReport, window: int) -> int | None:
    """Windows that a miner's state was behind: by the proof of the window before, which nobody can copy.

    None if its store fails again and again.
    """
    roots = node.journal.roots(window - 1 - MAX_BEHIND, window - 1)
    start = node.birth.mark
    if window - 1 == start.window:
        outcome = report.outcome(neuron.uid)
        claimed = outcome.contribution.manifest.root_before if outcome and outcome.contribution else start.root
        return windows_behind(claimed, {start.window: start.root}, start.window)
    try:
        proof = _read_proof(node, neuron, window - 1)
    except StoppedError:
        raise
    except TransientError as error:
        log.warning("window %d: proof of uid %d cannot be read now: %s", window - 1, neuron.uid, error)
        return None
    except TemplarError as error:
        log.warning("window %d: proof of uid %d is left out: %s", window - 1, neuron.uid, error)
        return MAX_BEHIND
    if proof is None:
        return MAX_BEHIND
    behind = windows_behind(proof.root, roots, window - 1)
    if behind == 0 and proof.proof != _expected_proof(node, neuron, window - 1):
        return MAX_BEHIND
    return behind


def _read_proof(node: Node, neuron: NeuronInfo, window: int) -> Proof | None:
    """As `read_proof`; a store that fails is asked again."""
    for _ in range(PROOF_ATTEMPTS - 1):
        try:
            return read_proof(node.exchange, neuron, window)
        except TransientError:
            node.chain.clock.sleep_until(node.chain.clock.now() + PROOF_PAUSE_SECONDS)
    return read_proof(node.exchange, neuron, window)


def _expected_proof(node: Node, neuron: NeuronInfo, window: int) -> str:
    block = node.exchange.settling_block(node.exchange.times(window))
    return state_proof(node.state.params, window=window, block_hash=node.chain.block_hash(block), hotkey=neuron.hotkey)
