"""The subnet and the hotkey: which chain, which wallet."""

import getpass
import os
import re
import sys
from pathlib import Path

from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, HttpUrl, PrivateAttr, field_validator

from blocks.schema import SchemaOnce
from templar.chain.base import Chain
from templar.chain.clock import SimulatedClock
from templar.chain.hotkey import Hotkey, Password, load_hotkey
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason

DOCUMENTATION_URL = HttpUrl("https://docs.learnbittensor.org/keys/wallets")

PASSWORD, PASSWORD_FILE = "WALLET_HOTKEY_PASSWORD", "WALLET_HOTKEY_PASSWORD_FILE"
"""Variables with the password of an encrypted hotkey, and with the path of a file that has it."""

_CREDENTIALS = re.compile(r"//[^/?#\s,]*@")
_LEDGER_SCHEME = "ledger:"
_LEDGER = re.compile(_LEDGER_SCHEME + r"(?P<path>/[^?]+)(?:\?clock=(?P<clock>\d+(?:\.\d+)?))?")


class Wallet(SchemaOnce, Block):
    """A wallet on this machine's disk, by name. The keys themselves are never stored in Prefect."""

    _documentation_url = DOCUMENTATION_URL

    path: str = Field(default="~/.bittensor/wallets", description="Folder of all wallets.")
    name: str = Field(description="Name of the wallet.")
    hotkey: str = Field(description="Name of the hotkey.")
    password_file: str = Field(default="", description="File with the password of an encrypted hotkey.")
    """Without one, WALLET_HOTKEY_PASSWORD of the process has it, and a process in a terminal asks for it."""
    _password: Password | None = PrivateAttr(default=None)

    def open(self) -> Hotkey:
        """The hotkey; `bad_wallet`, also for a password that is missing or wrong."""
        return load_hotkey(Path(self.path), self.name, self.hotkey, self.password)

    @property
    def given_password(self) -> str | None:
        """The password that the environment or the terminal gave to this process, for the processes that it starts."""
        return None if self._password is None else self._password.value

    def know_password(self, password: str) -> None:
        """Take the password that WALLET_HOTKEY_PASSWORD has where it is not in this process's own environment."""
        self._password = Password(PASSWORD, password)

    def password(self) -> Password | None:
        """The password of an encrypted hotkey: of the file, the environment or the terminal; None without any of them.

        `bad_wallet` if the file cannot be read, or is empty.
        """
        if self.password_file:
            return Password(PASSWORD_FILE, _read_password(Path(self.password_file)))
        if self._password is None and (value := os.environ.get(PASSWORD)):
            self.know_password(value)
        if self._password is None and sys.stdin is not None and sys.stdin.isatty():
            asked = getpass.getpass(f"Password of the hotkey {self.name}/{self.hotkey}: ")
            self._password = Password("the terminal", asked)
        return self._password


def _read_password(file: Path) -> str:
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise PermanentError(
            Reason.BAD_WALLET, f"{PASSWORD_FILE}: {file} cannot be read: {why}; check its path, owner and mode"
        ) from None
    password = text.removesuffix("\n").removesuffix("\r")
    if not password:
        raise PermanentError(Reason.BAD_WALLET, f"{PASSWORD_FILE}: {file} is empty: write the password into it")
    return password


class Subnet(SchemaOnce, Block):
    """A subnet: the real one, or the ledger of a local network."""

    _documentation_url = DOCUMENTATION_URL

    model_config = ConfigDict(hide_input_in_errors=True)  # a refused address may hold a secret

    network: str = Field(default="finney", description="Bittensor networks or endpoints in order, or ledger:/path.")
    """For example `finney`, `test` or `wss://...`, separated by commas. A ledger with `?clock=SECONDS` runs on
    simulated time from there: waits do not wait. For measurements."""
    archives: str = Field(default="", description="Archive endpoints in order.")
    """They are asked for state that the others have pruned; separated by commas."""
    netuid: int = Field(ge=0, description="Number of the subnet.")

    @field_validator("network")
    @classmethod
    def _is_a_network(cls, network: str) -> str:
        if network.startswith(_LEDGER_SCHEME) and _LEDGER.fullmatch(network) is None:
            raise ValueError("a ledger is ledger:/path, or ledger:/path?clock=SECONDS for simulated time")
        return network

    @field_validator("network", "archives")
    @classmethod
    def _has_no_password(cls, addresses: str) -> str:
        if any(_CREDENTIALS.search(address) for address in addresses.split(",")):
            raise ValueError(
                "this address holds a user name or a password, and the address is shown in the UI and in logs; "
                "name the endpoint without them (wss://host:port), and let a firewall or a local proxy guard it"
            )
        return addresses

    def open(self, wallet: Wallet | None) -> Chain:
        """The chain as the wallet's hotkey sees it; read-only without a wallet.

        Raises:
            PermanentError: `bad_wallet`, `bad_environment`.
            TransientError: The chain cannot be reached.
        """
        if (local := _LEDGER.fullmatch(self.network)) is not None:
            clock = SimulatedClock(float(local["clock"])) if local["clock"] else None
            ledger = Ledger(Path(local["path"]), hotkey=None if wallet is None else wallet.open(), clock=clock)
            if ledger.netuid != self.netuid:
                raise PermanentError(
                    Reason.BAD_ENVIRONMENT,
                    f"NETUID is {self.netuid}, but the ledger {local['path']} is subnet {ledger.netuid}",
                )
            return ledger
        # Only a node on the real chain pays for this import.
        from templar.chain.bittensor import BittensorChain, open_wallet

        opened = None
        if wallet is not None:
            opened = open_wallet(Path(wallet.path), wallet.name, wallet.hotkey, wallet.password)
        return BittensorChain(self.network, self.netuid, archives=self.archives, wallet=opened)
