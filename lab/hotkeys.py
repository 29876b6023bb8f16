"""Hotkeys whose secrets everybody knows."""

import bittensor_core

from templar.chain.hotkey import SEED_BYTES, Hotkey


def hotkey_from_seed(seed: bytes) -> Hotkey:
    """The hotkey of a 32-byte seed.

    Raises:
        ValueError: The seed has another length.
    """
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    return Hotkey(bittensor_core.Keypair.create_from_seed(seed))
