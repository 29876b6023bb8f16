"""A validator that lost its disk: what it remembered of the miners stands in the evidence that it published."""

import logging

from templar.errors import RejectedError
from templar.exchange.sealing import unseal
from templar.neuron.evidence_chain import evidence_keys
from templar.neuron.node import Node
from templar.scoring.evidence import Evidence

log = logging.getLogger(__name__)


def published_evidence(node: Node) -> Evidence | None:
    """The newest evidence in a validator's own bucket that it signed in this network; None if there is none.

    Raises:
        TransientError: The store failed; ask again, for an error is no absence.
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
