"""Sync proofs: evidence that a node holds the state after a window, which nobody can copy (DESIGN 4).

The block that settles a window chooses slices of the parameters; the proof is their hash, keyed with that block's hash
and the node's own hotkey. A node that does not hold the parameters cannot compute it, and another node's proof is of no
use to it. A validator, which holds the same parameters, recomputes it.
"""

import hashlib
from collections.abc import Mapping

from torch import Tensor

from templar.canonical import keyed_seed
from templar.chain.base import NeuronInfo
from templar.exchange.context import Exchange
from templar.exchange.keys import Kind, window_key
from templar.exchange.objects import Proof
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.read import read_signed

NUM_SLICES = 32
SLICE_ELEMENTS = 64


def state_proof(params: Mapping[str, Tensor], *, window: int, block_hash: str, hotkey: str) -> str:
    """The proof for these parameters.

    Args:
        params: The agreed parameters after the window, by name.
        window: The window.
        block_hash: Hash of the block that settled it.
        hotkey: Address of the node that proves.

    Returns:
        SHA-256, in hex, over the key and `NUM_SLICES` slices of up to `SLICE_ELEMENTS` elements.
    """
    names = sorted(params)
    digest = hashlib.sha256(f"templar.proof:{window}:{block_hash}:{hotkey}".encode())
    for index in range(NUM_SLICES):
        draw = keyed_seed("templar.proof.slice", window, block_hash, hotkey, index)
        name = names[draw % len(names)]
        flat = params[name].detach().reshape(-1)
        start = (draw >> 64) % max(1, flat.numel() - SLICE_ELEMENTS + 1)
        piece = flat[start : start + SLICE_ELEMENTS].contiguous().cpu()
        digest.update(f"{name}:{start}:".encode())
        digest.update(piece.numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def publish_proof(
    exchange: Exchange, params: Mapping[str, Tensor], *, window: int, block_hash: str, root: str, outer_steps: int
) -> PublishReceipt:
    """Publish the own proof. On failure a later call with the same state goes on."""
    author = exchange.author(window)
    proof = state_proof(params, window=window, block_hash=block_hash, hotkey=author["hotkey"])
    body = Proof(**author, window=window, root=root, outer_steps=outer_steps, proof=proof)
    key = window_key(Kind.PROOF, window, body.uid)
    return publish_body(exchange.buckets.own, key, body, exchange.own_signer, clock=exchange.chain.clock)


def read_proof(exchange: Exchange, neuron: NeuronInfo, window: int) -> Proof | None:
    """A node's proof for a window; None if there is none.

    Raises:
        RejectedError: It is not legal.
        TransientError: The store failed.
    """
    store = exchange.buckets.reader(neuron)
    key = window_key(Kind.PROOF, window, neuron.uid)
    found = read_signed(store, key, Proof, network=exchange.network, author=neuron, window=window)
    return None if found is None else found.body
