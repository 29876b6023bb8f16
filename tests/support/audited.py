"""A prepared network in which one node that decides alone did a few windows: all of them are null."""

from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal, unseal
from templar.scoring.evidence import Evidence
from templar.store.directory import DirectoryStore
from templar.window import Action, drive_window

VALIDATOR = 2
"""Its uid."""


def run_alone(network, num_windows, *, name="validator"):
    """Let a node that has a quorum of the stake do its windows by itself, on simulated time."""
    first = network.first_window
    node = network.at(name, first).build(name)
    for window in range(first, first + num_windows):
        assert drive_window(node, window).action is Action.RUN
    node.stop()


def evidence_of(network, window):
    data = DirectoryStore(network.bucket("validator")).get(
        window_key(Kind.EVIDENCE, window, VALIDATOR), max_bytes=Evidence.max_bytes
    )
    return unseal(data, Evidence).body


def publish(network, evidence):
    key, signer = window_key(Kind.EVIDENCE, evidence.window, VALIDATOR), network.block("validator").wallet.open()
    DirectoryStore(network.bucket("validator")).put(key, seal(evidence, signer).encode())
