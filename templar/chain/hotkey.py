"""Hotkeys: a neuron's identity, its signatures, and the wallet folder that holds its key.

Signatures are sr25519 over exactly the bytes given, as on chain, and addresses are ss58 in the chain's own format.
A signature over the bytes wrapped in `<Bytes>...</Bytes>` verifies too, as everywhere on this chain. The secret appears
in no `repr` and in no message. Wallets have the standard layout: `{path}/{name}/coldkey`, `coldkeypub.txt` and
`hotkeys/{hotkey}`. A hotkey may be encrypted with a password, as Bittensor's tools do it.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import bittensor_core
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from templar.errors import PermanentError, Reason

SEED_BYTES = 32
KEY_BYTES = 32  # length of a derived key
_IDENTITY = bytes(32)
"""The public key without a secret: the group's neutral element. Anybody can make a signature that fits it. The group of
sr25519 has prime order, so it is the only such key, and no other encoding of it is valid."""


_unlocking = threading.Lock()
_unlocked: dict[bytes, bytes | None] = {}
"""Digest of an encrypted file and its password -> what the file holds, or None if the password is wrong. To unlock a
file takes 3 s of a processor and 512 MiB by design, so a process does it once, and one file at a time."""


@dataclass(frozen=True)
class Password:
    """The password of an encrypted hotkey."""

    source: str  # where it came from, for messages: the name of a variable, or the terminal
    value: str = field(repr=False)


class Signer(Protocol):
    """A holder of a hotkey, who signs with it."""

    @property
    def address(self) -> str:
        """The ss58 address of the hotkey."""

    def sign(self, message: bytes) -> bytes:
        """The hotkey's signature of `message`, 64 bytes; every call returns another valid signature."""

    def derive_key(self, salt: bytes, info: bytes) -> bytes:
        """A secret of 32 bytes that only a holder of this hotkey can derive; the same for the same salt and info."""


class Hotkey:
    """An unlocked sr25519 key pair."""

    __slots__ = ("_keypair",)

    def __init__(self, keypair: Any) -> None:
        self._keypair = keypair

    @property
    def address(self) -> str:
        """The ss58 address."""
        return str(self._keypair.ss58_address)

    @property
    def keypair(self) -> Any:
        """The key pair, for Bittensor's SDK, which signs by itself."""
        return self._keypair

    def sign(self, message: bytes) -> bytes:
        """Sign `message`; 64 bytes."""
        return bytes(self._keypair.sign(message))

    def derive_key(self, salt: bytes, info: bytes) -> bytes:
        """HKDF-SHA256 of the private key; 32 bytes. A signature would not do: sr25519 draws another one each time."""
        keyfile = json.loads(bittensor_core.serialized_keypair_to_keyfile_data(self._keypair))
        secret = bytes.fromhex(keyfile["privateKey"].removeprefix("0x"))  # the same for seeds, phrases and raw keys
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(secret)

    def __repr__(self) -> str:
        return f"Hotkey({self.address})"


def verify(address: str, message: bytes, signature: bytes) -> bool:
    """Whether the hotkey with this address signed `message`; False for any malformed address or signature.

    What is no address (see `is_address`) has signed nothing.
    """
    try:
        return (keypair := _keypair(address)) is not None and bool(keypair.verify(message, signature))
    except (ValueError, TypeError):
        return False


def is_address(text: str) -> bool:
    """Whether a text is an address in the chain's own spelling, and not that of the key that has no secret."""
    return _keypair(text) is not None


def _keypair(address: str) -> bittensor_core.Keypair | None:
    try:
        keypair = bittensor_core.Keypair(ss58_address=address)
    except (ValueError, TypeError):
        return None
    return keypair if keypair.ss58_address == address and bytes(keypair.public_key) != _IDENTITY else None


def load_hotkey(
    wallet_path: Path, wallet_name: str, hotkey_name: str, password: Callable[[], Password | None] = lambda: None
) -> Hotkey:
    """Read a hotkey from the folder of all wallets, such as `~/.bittensor/wallets`.

    `password` is called for an encrypted hotkey alone, and gives None if there is none.

    Raises:
        PermanentError: `bad_wallet`; the message names the path, the problem and the remedy. What `password` raises.
    """
    wallet = wallet_folder(wallet_path, wallet_name, hotkey_name)
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
        data = _unlock(file, data, password())
    return Hotkey(_parse_keyfile(file, data))


def wallet_folder(path: Path, name: str, hotkey: str) -> Path:
    """The folder of a wallet; `bad_wallet` if a name is not that of a single file or folder."""
    for what, value in (("wallet name", name), ("hotkey name", hotkey)):
        if not value or value in {".", ".."} or Path(value).name != value:
            raise PermanentError(Reason.BAD_WALLET, f"{what} {value!r} is not the name of a single file or folder")
    return path.expanduser() / name


def _missing_message(wallet: Path, hotkey_name: str) -> str:
    if not wallet.is_dir():
        return f"{wallet}: no such wallet; create it, or correct the wallet's path or name"
    folder = wallet / "hotkeys"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    known = sorted(name for name in names if not name.startswith(".") and not name.endswith("pub.txt"))
    held = ", ".join(known) or "no hotkey at all"
    return f"{folder / hotkey_name}: no such hotkey; the wallet holds {held}; create it, or correct its name"


def _unlock(file: Path, data: bytes, password: Password | None) -> bytes:
    """The content of an encrypted file."""
    if password is None:
        raise PermanentError(
            Reason.BAD_WALLET,
            f"{file}: the hotkey is encrypted: set WALLET_HOTKEY_PASSWORD_FILE to a file with its password, "
            "or WALLET_HOTKEY_PASSWORD to the password itself",
        )
    digest = hashlib.sha256(data + b"\0" + password.value.encode()).digest()
    with _unlocking:
        if digest not in _unlocked:
            try:
                _unlocked[digest] = bytes(bittensor_core.decrypt_keyfile_data(data, password.value))
            except bittensor_core.WrongPasswordError:
                _unlocked[digest] = None
            except (bittensor_core.KeyfileError, ValueError) as error:
                raise PermanentError(
                    Reason.BAD_WALLET, f"{file}: cannot be decrypted: {error}; restore it or create a new hotkey"
                ) from None
        opened = _unlocked[digest]
    if opened is None:
        raise PermanentError(
            Reason.BAD_WALLET, f"{file}: the password of {password.source} does not open it: correct the password"
        )
    return opened


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
