"""State roots: one hash that two nodes share if and only if their models and their histories are the same.

To recompute one with nothing but SHA-256 and JSON (`json` below is canonical JSON: keys sorted, no spaces, ASCII):

    leaf(tensor)  = SHA-256( json {"domain": "templar/tensor/1", "dtype": "float32", "name": ..., "shape": [...]}
                             + newline + the elements in row-major order, little-endian )
    parameters    = SHA-256( json {"domain": "templar/parameters/1", "leaves": [hex leaf, ... in order of the names]} )
    genesis root  = SHA-256( json {"domain": "templar/root/genesis/1", "netuid": n, "parameters": hex} )
    next root     = SHA-256( json {"domain": "templar/root/next/1", "outer_steps": s, "parameters": hex,
                                   "previous": hex root before, "window": w} )
    null root     = SHA-256( json {"domain": "templar/root/null/1", "parameters": hex,
                                   "previous": hex root before, "window": w} )

`outer_steps` counts the steps with that of `w`; a null window has none. Hashes are 64 lower-case hex digits. In a
network that trains on shards, next and null roots have one more field, "epochs": the list of [first window, position]
of `templar.data.epochs` after `w`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from templar.canonical import canonical_json, sha256_hex


def parameters_digest(params: Mapping[str, Tensor]) -> str:
    """The hash of all parameters.

    Tensors that are not on the CPU are copied to it one at a time.

    Args:
        params: By name, in any order, of any type and device.
    """
    leaves = [_leaf(name, params[name]) for name in sorted(params)]
    return _hash("templar/parameters/1", leaves=leaves)


def genesis_root(netuid: int, digest: str) -> str:
    """The root before the first window, of the parameters with this digest."""
    return _hash("templar/root/genesis/1", netuid=netuid, parameters=digest)


def next_root(previous: str, window: int, outer_steps: int, digest: str, epochs: Sequence[tuple[int, int]] = ()) -> str:
    """The root after the outer step of a window.

    Args:
        previous: The root before.
        window: The window whose update was applied.
        outer_steps: Outer steps since genesis, this one included.
        digest: `parameters_digest` after the step.
        epochs: First window and position of the epochs after the window; none in a network that trains on pages.
    """
    return _hash(
        "templar/root/next/1",
        outer_steps=outer_steps,
        parameters=digest,
        previous=previous,
        window=window,
        **_listed(epochs),
    )


def null_root(previous: str, window: int, digest: str, epochs: Sequence[tuple[int, int]] = ()) -> str:
    """The root after a null window: the parameters did not change, the history did (PROTOCOL 19).

    Args:
        previous: The root before.
        window: The null window.
        digest: `parameters_digest`, unchanged; so that every root is bound to parameters.
        epochs: As in `next_root`.
    """
    return _hash("templar/root/null/1", parameters=digest, previous=previous, window=window, **_listed(epochs))


def _listed(epochs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {"epochs": [list(epoch) for epoch in epochs]} if epochs else {}


def _leaf(name: str, tensor: Tensor) -> str:
    header = {
        "domain": "templar/tensor/1",
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "name": name,
        "shape": list(tensor.shape),
    }
    digest = hashlib.sha256(canonical_json(header) + b"\n")
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # little-endian, as all our machines
    digest.update(elements.numpy().data)
    return digest.hexdigest()


def _hash(domain: str, **fields: Any) -> str:
    return sha256_hex(canonical_json({"domain": domain, **fields}))
