"""Sync proofs, and the debug values beside them (docs/protocol.md 10).

A sync proof shows that a node holds the state after a window, and cannot be copied. The block that settles the window
chooses slices of the parameters; the proof is their hash, keyed with that block's hash and the node's own hotkey. A
validator, which holds the same parameters, recomputes it.

Debug values are two elements of every parameter. They show people how far apart two states are, where roots only show
that they differ. No decision depends on them: anybody can copy or invent values. Miners publish other elements than
all other nodes, as documented.
"""

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress

from torch import Tensor, float32

from templar.agreement.ballot_box import READ_SECONDS
from templar.canonical import keyed_seed
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, TemplarError, TransientError
from templar.exchange.gather import ask_in_turn
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import DEBUG_ELEMENTS, DEBUG_NAME, MAX_DEBUG_PARAMETERS, Debug, Proof
from templar.exchange.publish import PublishReceipt, publish_body
from templar.exchange.signed import read_signed

log = logging.getLogger(__name__)

NUM_SLICES = 32
SLICE_ELEMENTS = 64
ATTEMPTS = 2  # reads of a proof whose store fails
PAUSE_SECONDS = 1.0  # between two of them
MINER_START = 10  # index in the flattened parameter of the first debug element of miners
START = 0  # the same of all other nodes


def state_proof(params: Mapping[str, Tensor], *, window: int, block_hash: str, hotkey: str) -> str:
    """The proof of a node for the parameters after a window; `block_hash` is that of the block that settled it.

    It is SHA-256, in hex, over the key and `NUM_SLICES` slices of up to `SLICE_ELEMENTS` elements.
    """
    names, flat = sorted(params), {name: param.detach().reshape(-1) for name, param in params.items()}
    digest = hashlib.sha256(f"templar.proof:{window}:{block_hash}:{hotkey}".encode())
    for index in range(NUM_SLICES):
        draw = keyed_seed("templar.proof.slice", window, block_hash, hotkey, index)
        name = names[draw % len(names)]
        start = (draw >> 64) % max(1, len(flat[name]) - SLICE_ELEMENTS + 1)
        digest.update(f"{name}:{start}:".encode())
        digest.update(flat[name][start : start + SLICE_ELEMENTS].cpu().numpy().astype("<f4", copy=False).tobytes())
    return digest.hexdigest()


def publish_proof(
    exchange: NetworkView, params: Mapping[str, Tensor], *, window: int, block_hash: str, root: str, outer_steps: int
) -> PublishReceipt:
    """Publish the own proof. On failure a later call with the same state continues."""
    author = exchange.author(window)
    proof = state_proof(params, window=window, block_hash=block_hash, hotkey=author["hotkey"])
    body = Proof(**author, window=window, root=root, outer_steps=outer_steps, proof=proof)
    key = window_key(Kind.PROOF, window, body.uid)
    return publish_body(exchange.buckets.own, key, body, exchange.own_signer, clock=exchange.chain.clock)


def read_proof(exchange: NetworkView, neuron: NeuronInfo, window: int) -> Proof | None:
    """A node's proof for a window, None if there is none; errors as in `read_signed`."""
    store = exchange.buckets.reader(neuron)
    key = window_key(Kind.PROOF, window, neuron.uid)
    found = read_signed(store, key, Proof, network=exchange.network, author=neuron, window=window)
    return None if found is None else found.body


def read_proofs(
    exchange: NetworkView, neurons: Mapping[int, NeuronInfo], window: int, *, concurrency: int
) -> dict[int, Proof | TemplarError | None]:
    """The proofs of neurons for a window, or what keeps them from being read, by uid and in the order of uids.

    A store that fails is asked again, and one that hangs delays no other.
    """
    clock = exchange.chain.clock

    def read(uid: int) -> Proof | TemplarError | None:
        try:
            for _ in range(ATTEMPTS - 1):
                with suppress(TransientError):
                    return read_proof(exchange, neurons[uid], window)
                clock.sleep_until(clock.now() + PAUSE_SECONDS)
            return read_proof(exchange, neurons[uid], window)
        except TemplarError as error:
            return error

    return dict(sorted(ask_in_turn(read, neurons, seconds=READ_SECONDS, concurrency=concurrency, together=True)))


def debug_values(params: Mapping[str, Tensor], start: int) -> dict[str, tuple[float, float]]:
    """Name -> elements `start` and `start + 1` of a parameter, exactly, for at most `MAX_DEBUG_PARAMETERS` by name.

    Parameters without these elements, with a non-finite one or with an illegal name are left out.
    """
    found: dict[str, tuple[float, float]] = {}
    for name in sorted(params):
        piece = params[name].detach().reshape(-1)[start : start + DEBUG_ELEMENTS].to("cpu", float32).tolist()
        if len(piece) == DEBUG_ELEMENTS and all(map(math.isfinite, piece)) and re.fullmatch(DEBUG_NAME, name):
            found[name] = (piece[0], piece[1])
        if len(found) == MAX_DEBUG_PARAMETERS:
            break
    return found


def publish_debug(
    exchange: NetworkView, params: Mapping[str, Tensor], *, window: int, role: str | None
) -> PublishReceipt | None:
    """Publish the own debug values of the state after a window; None if other values are stored already, which stay.

    On failure a later call with the same state continues.
    """
    start = MINER_START if role == "miner" else START
    body = Debug(**exchange.author(window), window=window, start=start, values=debug_values(params, start))
    key = window_key(Kind.DEBUG, window, body.uid)
    try:
        return publish_body(exchange.buckets.own, key, body, exchange.own_signer, clock=exchange.chain.clock)
    except PermanentError as error:
        if error.reason is not Reason.OBJECT_DIFFERS:
            raise
        log.warning("the debug values of an abandoned state stay: %s", error)
        return None
