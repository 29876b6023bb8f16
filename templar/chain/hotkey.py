"""Hotkeys: a neuron's identity, its signatures, and the wallet folder that holds its key.

Signatures are sr25519 over exactly the bytes given, as on chain, and addresses are ss58 in the chain's own format.
A signature over the bytes wrapped in `<Bytes>...</Bytes>` verifies too, as everywhere on this chain. The secret appears
in no `repr` and in no message. Wallets have the standard layout: `{path}/{name}/coldkey`, `coldkeypub.txt` and
`hotkeys/{hotkey}`.
"""

import errno
import hashlib
import os
import secrets
from pathlib import Path
from typing import Any, Protocol

import bittensor_core

from templar.errors import PermanentError, Reason

SEED_BYTES = 32


class Signer(Protocol):
    """A holder of a hotkey, who signs with it."""

    @property
    def address(self) -> str:
        """The ss58 address of the hotkey."""

    def sign(self, message: bytes) -> bytes:
        """The hotkey's signature of `message`, 64 bytes; every call returns another valid signature."""


class Hotkey:
    """An unlocked sr25519 key pair.

    Args:
        keypair: A key pair of `bittensor_core` that holds its secret.
    """

    __slots__ = ("_keypair",)

    def __init__(self, keypair: Any) -> None:
        self._keypair = keypair

    @property
    def address(self) -> str:
        """The ss58 address."""
        return str(self._keypair.ss58_address)

    def sign(self, message: bytes) -> bytes:
        """Sign `message`; 64 bytes."""
        return bytes(self._keypair.sign(message))

    def __repr__(self) -> str:
        return f"Hotkey({self.address})"


def verify(address: str, message: bytes, signature: bytes) -> bool:
    """Whether the hotkey with this address signed `message`.

    A malformed address or signature, or an address in another spelling than the chain's own, gives False and raises
    nothing.
    """
    try:
        keypair = bittensor_core.Keypair(ss58_address=address)
        return keypair.ss58_address == address and bool(keypair.verify(message, signature))
    except (ValueError, TypeError):
        return False


def hotkey_from_seed(seed: bytes) -> Hotkey:
    """The hotkey of a 32-byte seed, for tests and simulation.

    Raises:
        ValueError: The seed has another length.
    """
    return Hotkey(_keypair_from_seed(seed))


def load_hotkey(wallet_path: Path, wallet_name: str, hotkey_name: str) -> Hotkey:
    """Read an unencrypted hotkey from the folder of all wallets, such as `~/.bittensor/wallets`.

    Raises:
        PermanentError: `bad_wallet`; the message names the path, the problem and the remedy.
    """
    wallet = _wallet_folder(wallet_path, wallet_name, hotkey_name)
    file = wallet / "hotkeys" / hotkey_name
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise PermanentError(Reason.BAD_WALLET, _missing_message(wallet, hotkey_name)) from None
    except OSError as error:
        raise PermanentError(
            Reason.BAD_WALLET, f"{file}: cannot be read: {error.strerror}; check its owner and its mode"
        ) from None
    if bittensor_core.keyfile_data_is_encrypted(data):
        raise PermanentError(
            Reason.BAD_WALLET,
            f"{file}: the hotkey is encrypted, but a node has to sign unattended: "
            "create or regenerate it without a password",
        )
    return Hotkey(_parse_keyfile(file, data))


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
    wallet = _wallet_folder(path, name, hotkey)
    secret = secrets.token_bytes(SEED_BYTES) if seed is None else seed
    keypair = _keypair_from_seed(secret)
    coldkey = _keypair_from_seed(hashlib.sha256(b"templar.wallet.coldkey" + secret).digest())
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


def _keypair_from_seed(seed: bytes) -> Any:
    if len(seed) != SEED_BYTES:
        raise ValueError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}")
    return bittensor_core.Keypair.create_from_seed(seed)


def _public_half(keypair: Any) -> Any:
    return bittensor_core.Keypair(ss58_address=keypair.ss58_address)


def _wallet_folder(path: Path, name: str, hotkey: str) -> Path:
    for field, value in (("wallet name", name), ("hotkey name", hotkey)):
        if not value or value in {".", ".."} or Path(value).name != value:
            raise PermanentError(Reason.BAD_WALLET, f"{field} {value!r} is not the name of a single file or folder")
    return path.expanduser() / name


def _missing_message(wallet: Path, hotkey_name: str) -> str:
    if not wallet.is_dir():
        return f"{wallet}: no such wallet; create it, or correct the wallet's path or name"
    folder = wallet / "hotkeys"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    known = sorted(name for name in names if not name.startswith(".") and not name.endswith("pub.txt"))
    held = ", ".join(known) or "no hotkey at all"
    return f"{folder / hotkey_name}: no such hotkey; the wallet holds {held}; create it, or correct its name"


def _parse_keyfile(file: Path, data: bytes) -> Any:
    try:
        keypair = bittensor_core.deserialize_keypair_from_keyfile_data(data)
        keypair.sign(b"")  # a file with the public half alone parses, but cannot sign
    except (bittensor_core.KeyfileError, ValueError) as error:
        raise PermanentError(
            Reason.BAD_WALLET, f"{file}: not the file of a hotkey: {error}; restore it or create a new hotkey"
        ) from None
    if keypair.crypto_type != bittensor_core.CRYPTO_SR25519:
        raise PermanentError(
            Reason.BAD_WALLET,
            f"{file}: the key is not sr25519, the only kind that others verify; create another hotkey",
        )
    return keypair


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
