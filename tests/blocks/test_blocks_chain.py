"""Blocks of chain and wallet, and the neuron that is built from them."""

import io
from pathlib import Path

import pytest
from pydantic import ValidationError

from blocks import Subnet, Wallet
from blocks.chain import PASSWORD, PASSWORD_FILE
from deployments.local.wallets import create_wallet
from templar.chain.hotkey import Password
from templar.chain.ledger import create_ledger
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.neuron_block import neuron_block

NETUID = 7
BIRTHDAY = 1_700_000_000.0


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "ledger.sqlite"
    create_ledger(path, netuid=NETUID, block_seconds=1.0, genesis_time=BIRTHDAY, seed=1)
    return path


@pytest.fixture
def hotkey(tmp_path):
    return create_wallet(tmp_path / "wallets", "cold", "hot")


@pytest.fixture
def wallet(tmp_path, hotkey):
    del hotkey
    return Wallet(path=str(tmp_path / "wallets"), name="cold", hotkey="hot")


class TestPassword:
    """Where the password of an encrypted hotkey comes from; tests/chain/test_chain_keys.py opens one."""

    @pytest.fixture(autouse=True)
    def no_terminal(self, monkeypatch):
        monkeypatch.delenv(PASSWORD, raising=False)
        monkeypatch.setattr("sys.stdin", io.StringIO())

    def test_there_is_none_by_default(self, wallet):
        assert wallet.password() is None

    def test_a_file_comes_first_without_the_end_of_its_line(self, wallet, tmp_path, monkeypatch):
        monkeypatch.setenv(PASSWORD, "another")
        for content in (b" a word ", b" a word \n", b" a word \r\n"):
            (tmp_path / "password").write_bytes(content)
            found = wallet.model_copy(update={"password_file": str(tmp_path / "password")}).password()
            assert found == Password(PASSWORD_FILE, " a word ")

    @pytest.mark.parametrize(
        ("content", "words"),
        [(None, "cannot be read: No such"), (b"\n", "is empty"), (b"\xff", "cannot be read: is not UTF-8")],
    )
    def test_a_file_without_a_password_is_named(self, wallet, tmp_path, content, words):
        if content is not None:
            (tmp_path / "password").write_bytes(content)
        with raising(PermanentError, Reason.BAD_WALLET, f"{PASSWORD_FILE}: {tmp_path / 'password'} {words}"):
            wallet.model_copy(update={"password_file": str(tmp_path / "password")}).password()

    def test_the_environment_is_next(self, wallet, monkeypatch):
        monkeypatch.setenv(PASSWORD, "a word")
        assert wallet.password() == Password(PASSWORD, "a word")

    def test_a_terminal_is_asked_once_and_its_answer_is_for_processes_that_are_started(self, wallet, monkeypatch):
        asked: list[str] = []
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or "typed")
        assert wallet.given_password is None
        assert wallet.password() == wallet.password() == Password("the terminal", "typed")
        assert asked == ["Password of the hotkey cold/hot: "]
        assert wallet.given_password == "typed"


class TestSubnet:
    @pytest.mark.parametrize(
        ("field", "addresses"),
        [
            ("network", "wss://user:s3cret@host:443"),
            ("network", "test,ws://s3cret@host/path?x=@"),
            ("network", "http://:s3cret@h"),
            ("network", "ws://a:1, ws://me:s3cret@b:2"),
            ("archives", "ws://s3cret@c:3"),
        ],
    )
    def test_an_address_with_credentials_is_refused_and_not_shown(self, field, addresses):
        with pytest.raises(ValueError, match=rf"(?s){field}.*name the endpoint without them") as caught:
            Subnet(**{"netuid": NETUID, field: addresses})
        assert "s3cret" not in str(caught.value)
        assert Subnet(network="wss://host:443/path@x", netuid=NETUID).network  # it is no user's name there

    def test_a_ledger_is_a_chain(self, ledger, wallet, hotkey):
        chain = Subnet(network=f"ledger:{ledger}", netuid=NETUID).open(wallet)
        assert (chain.netuid, chain.block_seconds) == (NETUID, 1.0)
        with pytest.raises(PermanentError, match=hotkey.address):  # it writes under the wallet's key
            chain.set_commitment("x" * 128)

    def test_on_simulated_time_waits_do_not_wait(self, tmp_path):
        path = tmp_path / "odd #name %20" / "ledger.sqlite"
        path.parent.mkdir()
        create_ledger(path, netuid=NETUID, block_seconds=1.0, genesis_time=BIRTHDAY, seed=1)
        chain = Subnet(network=f"ledger:{path}?clock={BIRTHDAY + 10.5}", netuid=NETUID).open(None)
        assert chain.block() == 10
        chain.wait_for_block(1_000_000)
        assert chain.clock.now() == BIRTHDAY + 1_000_000
        with pytest.raises(ValidationError, match="a ledger is ledger:/path"):
            Subnet(network="ledger:/a?clock=x", netuid=NETUID)

    def test_endpoints_are_a_list(self):
        chain = Subnet(network="ws://a:1, ws://b:2", archives="ws://c:3", netuid=NETUID).open(None)
        assert "ws://a:1" in repr(vars(chain)["_endpoints"])
        with raising(PermanentError, Reason.BAD_ENVIRONMENT):
            Subnet(network="ws://a:1, nowhere", netuid=NETUID).open(None)

    def test_another_netuid_is_refused(self, ledger):
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, "NETUID is 8", "is subnet 7"):
            Subnet(network=f"ledger:{ledger}", netuid=8).open(None)

    def test_a_wrong_wallet_is_refused(self, ledger, wallet):
        missing = wallet.model_copy(update={"hotkey": "other"})
        for network in (f"ledger:{ledger}", "ws://127.0.0.1:1"):  # before anything is asked of a chain
            with raising(PermanentError, Reason.BAD_WALLET):
                Subnet(network=network, netuid=NETUID).open(missing)


class TestNeuron:
    @pytest.fixture
    def neuron(self, ledger, wallet, tmp_path):
        subnet, home = Subnet(network=f"ledger:{ledger}", netuid=NETUID), str(tmp_path / "home")
        return neuron_block(tmp_path.as_uri(), preset="local", subnet=subnet, wallet=wallet, home=home)

    def test_its_context_is_its_own(self, neuron, hotkey, tmp_path):
        (tmp_path / "own-account").mkdir()
        config = neuron.config("default")
        assert (config.name, config.home, config.hparams) == ("default", Path(neuron.home), neuron.hparams())
        assert config.signer.address == hotkey.address
        config.buckets.own.put("key", b"1")
        assert (tmp_path / "own-account" / "key").exists()
        assert config.pinned_genesis is None
        assert neuron.model_copy(update={"genesis": "ab"}).config("one").pinned_genesis == "ab"

    @pytest.mark.parametrize(
        ("change", "reason", "message"),
        [
            ({"preset": "150M"}, Reason.BAD_HPARAMS, "windows.block_seconds is 12 in preset '150M'"),
            ({"preset": "none"}, Reason.BAD_HPARAMS, "no preset 'none'; there are"),
            ({"hparams_path": "/none"}, Reason.BAD_HPARAMS, "/none: no such file"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, neuron, change, reason, message):
        with raising(PermanentError, reason, message):
            neuron.model_copy(update=change).build("one")
        assert not Path(neuron.home, "journal.sqlite").exists()
