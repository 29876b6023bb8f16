"""How far behind a miner's state is: by its proof of the window before, which nobody can copy."""

import logging

from templar.chain.base import NeuronInfo
from templar.errors import TemplarError, TransientError
from templar.exchange.gather import GatherReport
from templar.exchange.objects import Proof
from templar.exchange.proof import read_proof, state_proof
from templar.interrupt import StoppedError
from templar.neuron.node import Node
from templar.scoring.sync import MAX_BEHIND, windows_behind

log = logging.getLogger(__name__)

PROOF_ATTEMPTS = 2
PROOF_PAUSE_SECONDS = 1.0


def find_behind(node: Node, neuron: NeuronInfo, report: GatherReport, window: int) -> int | None:
    """Windows that a miner's state was behind, by the proof of the window before; None if its store fails twice.

    Args:
        node: Somebody whose state is that of the window before.
        neuron: The miner.
        report: The own gather; of the first window, whose state has no proof, the manifest says what was claimed.
        window: The window that is scored.
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
