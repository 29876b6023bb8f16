"""Wallets of a local network, whose keys are not encrypted."""

import hashlib
import os
import secrets
from pathlib import Path
from typing import Any

import bittensor_core

from templar.chain.hotkey import SEED_BYTES, Hotkey, wallet_folder
from templar.errors import PermanentError, Reason


def create_wallet(path: Path, name: str, hotkey: str, *, seed: bytes | None = None) -> Hotkey:
    """Create an unencrypted wallet for a local network; an existing wallet gets another hotkey.

    Only the files' owner can read them. `path` is the folder of all wallets. Hotkey and coldkey are made from `seed`,
    32 bytes that are random by default.

    Raises:
        PermanentError: `bad_wallet`: the hotkey exists already (nothing is ever overwritten), or the folder cannot
            be written.
    """
    # 1. The two keys; the coldkey's seed is derived from the hotkey's.
    wallet = wallet_folder(path, name, hotkey)
    secret = secrets.token_bytes(SEED_BYTES) if seed is None else seed
    keypair = bittensor_core.Keypair.create_from_seed(secret)
    coldkey = bittensor_core.Keypair.create_from_seed(hashlib.sha256(b"templar.wallet.coldkey" + secret).digest())
    # 2. Their files.
    hotkeys = wallet / "hotkeys"
    try:
        hotkeys.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (wallet / "coldkey").exists() and not (wallet / "coldkeypub.txt").exists():
            _write_keyfile(wallet / "coldkey", coldkey)
            _write_keyfile(wallet / "coldkeypub.txt", _public_half(coldkey))
        _write_keyfile(hotkeys / hotkey, keypair)
        _write_keyfile(hotkeys / f"{hotkey}pub.txt", _public_half(keypair))
    except FileExistsError as error:
        problem = f"{error.filename}: exists already and is never overwritten; load it or choose a new name"
        raise PermanentError(Reason.BAD_WALLET, problem) from None
    except OSError as error:
        raise PermanentError(Reason.BAD_WALLET, f"{wallet}: cannot be written: {error.strerror}") from None
    return Hotkey(keypair)


def _public_half(keypair: Any) -> Any:
    return bittensor_core.Keypair(ss58_address=keypair.ss58_address)


def _write_keyfile(file: Path, keypair: Any) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(bittensor_core.serialized_keypair_to_keyfile_data(keypair))
