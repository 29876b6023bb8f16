"""Evidence of made-up windows: concluded one after the other, and in the bucket of a prepared network's validator.

And the evaluation of its genesis.
"""

from functools import partial
from pathlib import Path

from templar.exchange.object_keys import Kind, window_key
from templar.exchange.signed import seal
from templar.reports.checkpoint_evaluation import evaluate_checkpoints
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence
from templar.scoring.standing import Standing
from tests.support.facts import AUTHOR, absent, revealed, window_of
from tests.support.prepared import PreparedNetwork

MINERS = (3, 4, 5)
"""Two miners whose payload counts, and one that is not there."""


def evidences(windows, hparams, author=AUTHOR, *, after=None):
    """What is concluded from one window after the other, the first of them after nothing or after this."""
    standing, found = after or Standing(), list[Evidence]()
    for window, miners in windows.items():
        found.append(conclude(window_of(*miners, window=window), standing, hparams, author))
        standing = found[-1].standing
    return found


def announce(network):
    """Let the chain name the validator's bucket, before anybody looks at a later window."""
    network.at("validator", network.first_window).config("validator").buckets.announce()


def with_reader(folder, server, name, *, after, evidence=()):
    """A network with evidence of these windows, counted from its first, and a miner's block that reads it later."""
    network = PreparedNetwork(folder)
    announce(network)
    publish_evidence(network, [network.first_window + window for window in evidence])
    with server.configured():
        network.at("lazy", network.first_window + after).save(name)
    return network


def publish_evidence(network, windows):
    config = network.at("validator", network.first_window).config("validator")
    validator = config.chain.metagraph().by_hotkey(config.signer.address)
    author = {"uid": validator.uid, "hotkey": validator.hotkey}
    author |= {"netuid": config.chain.netuid, "genesis": config.birth().network.genesis}
    miners = (revealed(3, 0.2), revealed(4, 0.1), absent(5))
    found = evidences(dict.fromkeys(windows, miners), network.hparams, author)
    for evidence in found:
        key = window_key(Kind.EVIDENCE, evidence.window, validator.uid)
        config.buckets.own.put(key, seal(evidence, config.signer).encode())
    return validator.uid, found


def evaluate_genesis(network):
    """Let the aggregator measure the genesis checkpoint, which is the only one in its bucket."""
    block = network.at("aggregator", network.first_window)
    config = block.config("aggregator")
    read_texts = partial(block.dataset.held_out_texts, config.hparams, Path(block.home))
    (found,) = evaluate_checkpoints(config, read_texts)
    return found
