"""Wallets of a local network, whose keys are not encrypted."""

import errno
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

    The files are complete and durable before they get their names, and only their owner can read the keys.

    Args:
        path: Folder of all wallets.
        name: Name of the wallet.
        hotkey: Name of the hotkey.
        seed: 32 bytes from which the hotkey and a new coldkey are made; random by default.

    Raises:
        PermanentError: `bad_wallet`: the hotkey exists already (nothing is ever overwritten), or the folder cannot
            be written.
        ValueError: The seed has another length.
    """
    # 1. The two keys; the coldkey's seed is derived from the hotkey's.
    wallet = wallet_folder(path, name, hotkey)
    secret = secrets.token_bytes(SEED_BYTES) if seed is None else seed
    keypair = _keypair(secret)
    coldkey = _keypair(hashlib.sha256(b"templar.wallet.coldkey" + secret).digest())
    # 2. Their files, each linked to its name once it is complete.
    hotkeys = wallet / "hotkeys"
    try:
        hotkeys.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (wallet / "coldkey").exists() and not (wallet / "coldkeypub.txt").exists():
            _write_keyfile(wallet / "coldkey", coldkey)
            _write_keyfile(wallet / "coldkeypub.txt", _public_half(coldkey))
        _write_keyfile(hotkeys / hotkey, keypair)
        _write_keyfile(hotkeys / f"{hotkey}pub.txt", _public_half(keypair))
    except FileExistsError as error:
        raise PermanentError(
            Reason.BAD_WALLET,
            f"{error.filename}: exists already and is never overwritten; load it or choose a new name",
        ) from None
    except OSError as error:
        raise PermanentError(Reason.BAD_WALLET, f"{wallet}: cannot be written: {error.strerror}") from None
    return Hotkey(keypair)


def _keypair(seed: bytes) -> Any:
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    return bittensor_core.Keypair.create_from_seed(seed)


def _public_half(keypair: Any) -> Any:
    return bittensor_core.Keypair(ss58_address=keypair.ss58_address)


def _write_keyfile(file: Path, keypair: Any) -> None:
    """Write under a temporary name, then link: a name appears once, whole, and never replaces another."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(bittensor_core.serialized_keypair_to_keyfile_data(keypair))
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(temporary, file)
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "exists", str(file)) from None
    finally:
        temporary.unlink(missing_ok=True)
