import json
import stat

import bittensor as bt
import bittensor_core
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.local.wallets import create_wallet
from lab.hotkeys import hotkey_from_seed
from templar.chain.bittensor import open_wallet
from templar.chain.hotkey import Password, load_hotkey, verify
from templar.errors import PermanentError, Reason
from tests.support.errors import raising, refusal

SEED = bytes(range(32))
HOTKEY = hotkey_from_seed(SEED)
PASSWORD = Password("WALLET_HOTKEY_PASSWORD", " two words ")


def bad_wallet(call, *words):
    refusal(call, PermanentError, Reason.BAD_WALLET, *words)


@given(message=st.binary(max_size=200), other=st.binary(max_size=200), seed=st.binary(min_size=32, max_size=32))
@settings(max_examples=50)
def test_a_signature_counts_for_its_message_and_its_key_only(message, other, seed):
    key = hotkey_from_seed(seed)
    signature = key.sign(message)
    assert len(signature) == 64
    assert verify(key.address, message, signature)
    assert verify(key.address, other, signature) == (other == message)
    assert verify(HOTKEY.address, message, signature) == (seed == SEED)
    flipped = signature[:40] + bytes([signature[40] ^ 1]) + signature[41:]
    assert not verify(key.address, message, flipped)


@given(
    address=st.one_of(st.text(max_size=60), st.just(HOTKEY.address), st.binary(max_size=50), st.none()),
    message=st.one_of(st.binary(max_size=40), st.text(max_size=40), st.none()),
    signature=st.one_of(st.binary(max_size=70), st.binary(min_size=64, max_size=64), st.text(max_size=70), st.none()),
)
@settings(max_examples=40)
def test_garbage_is_no_signature_and_no_error(address, message, signature):
    assert verify(address, message, signature) is False


def test_a_seed_gives_one_known_address_and_no_other_spelling_of_it_counts():
    assert HOTKEY.address == hotkey_from_seed(SEED).address == "5HB7kpn92RS7uF9uWn8bXSvPVKFPg8kPUFDd5sbveGjX6Dbi"
    assert repr(HOTKEY) == str(HOTKEY) == f"Hotkey({HOTKEY.address})"  # and never the seed
    for length in (0, 31, 33):
        with pytest.raises(ValueError, match="32 bytes"):
            hotkey_from_seed(bytes(length))
    public_key, signature = bittensor_core.ss58_decode(HOTKEY.address), HOTKEY.sign(b"message")
    for spelling in (bittensor_core.ss58_encode(public_key, 0), "0x" + bytes(public_key).hex()):
        assert not verify(spelling, b"message", signature)


def test_no_signature_counts_for_a_key_without_a_secret_nor_of_another_scheme():
    """The neutral element of a curve is the public key of no secret, and a signature of zeros fits it."""
    nobody, forged = bittensor_core.ss58_encode(bytes(32), 42), bytes(63) + b"\x80"
    assert bittensor_core.Keypair(ss58_address=nobody).verify(b"message", forged), "the library does not refuse it"
    other = bittensor_core.Keypair.create_from_seed(SEED, bittensor_core.CRYPTO_ED25519)
    neutral = bittensor_core.ss58_encode(bytes([1]) + bytes(31), 42)
    for address, signature in (
        (nobody, forged),
        (other.ss58_address, other.sign(b"message")),
        (neutral, bytes([1]) + bytes(63)),
    ):
        assert not verify(address, b"message", signature)


def test_a_wallet_of_ours_opens_in_the_sdk(tmp_path):
    made = create_wallet(tmp_path, "miner", "one", seed=SEED)
    wallet = bt.Wallet("miner", "one", str(tmp_path))
    assert made.address == wallet.hotkey.ss58_address == wallet.hotkeypub.ss58_address == HOTKEY.address
    assert wallet.coldkey.ss58_address == wallet.coldkeypub.ss58_address != HOTKEY.address
    assert verify(HOTKEY.address, b"message", wallet.hotkey.sign(b"message"))
    assert wallet.coldkeypub.verify(b"message", wallet.coldkey.sign(b"message"))
    assert not wallet.coldkey_file.is_encrypted()
    assert open_wallet(tmp_path, "miner", "one").hotkey.ss58_address == HOTKEY.address


def test_a_wallet_of_the_sdk_opens_here(tmp_path):
    wallet = bt.Wallet("validator", "hot", str(tmp_path))
    wallet.create_new_coldkey(use_password=False, suppress=True).create_new_hotkey(use_password=False, suppress=True)
    loaded = load_hotkey(tmp_path, "validator", "hot")
    assert loaded.address == wallet.hotkey.ss58_address
    assert wallet.hotkeypub.verify(b"message", loaded.sign(b"message"))


def test_keys_are_for_their_owner_alone(tmp_path):
    create_wallet(tmp_path / "deep" / "er", "miner", "one")
    files = [path for path in (tmp_path / "deep" / "er" / "miner").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == ["coldkey", "coldkeypub.txt", "one", "onepub.txt"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    for name in ("coldkeypub.txt", "hotkeys/onepub.txt"):
        public = json.loads((tmp_path / "deep" / "er" / "miner" / name).read_text())
        assert not {"secretSeed", "privateKey", "secretPhrase"} & public.keys()


def test_nothing_is_overwritten(tmp_path):
    create_wallet(tmp_path, "miner", "one", seed=SEED)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    bad_wallet(lambda: create_wallet(tmp_path, "miner", "one"), tmp_path / "miner" / "hotkeys" / "one", "never")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    second = create_wallet(tmp_path, "miner", "two")  # the coldkey that is there stays
    assert all(path.read_bytes() == data for path, data in before.items())
    assert load_hotkey(tmp_path, "miner", "two").address == second.address != HOTKEY.address


def test_a_missing_file_or_folder_is_named(tmp_path):
    bad_wallet(lambda: load_hotkey(tmp_path, "miner", "one"), tmp_path / "miner", "no such wallet", "create")
    create_wallet(tmp_path, "miner", "one")
    create_wallet(tmp_path, "miner", "two")
    bad_wallet(lambda: load_hotkey(tmp_path, "miner", "x"), tmp_path / "miner" / "hotkeys" / "x", "holds one, two;")
    bad_wallet(lambda: open_wallet(tmp_path, "miner", "x"), "no such hotkey")
    (tmp_path / "empty").mkdir()
    bad_wallet(lambda: load_hotkey(tmp_path, "empty", "one"), "no hotkey at all")
    (tmp_path / "file").write_text("not a folder")
    bad_wallet(lambda: create_wallet(tmp_path / "file", "miner", "one"), tmp_path / "file", "cannot be written")
    bad_wallet(lambda: load_hotkey(tmp_path, "file", "one"), "no such wallet")


def _keyfile(crypto_type=bittensor_core.CRYPTO_SR25519):
    return bytes(
        bittensor_core.serialized_keypair_to_keyfile_data(bittensor_core.Keypair.create_from_seed(SEED, crypto_type))
    )


def test_a_bad_keyfile_is_named(tmp_path):
    create_wallet(tmp_path, "miner", "one", seed=SEED)
    file = tmp_path / "miner" / "hotkeys" / "one"
    for content, word in (
        (b"{}", "not the file of a hotkey"),
        (_keyfile()[:-20], "not the file of a hotkey"),
        (_keyfile().replace(b"5HB7kpn", b"5GrwvaE"), "not the file of a hotkey"),
        (json.dumps({"ss58Address": HOTKEY.address}).encode(), "not the file of a hotkey"),  # the public half
        (_keyfile(bittensor_core.CRYPTO_ED25519), "sr25519"),
        (b"$NACL" + bytes(72), "encrypted: set WALLET_HOTKEY_PASSWORD_FILE"),
    ):
        file.write_bytes(content)
        bad_wallet(lambda: load_hotkey(tmp_path, "miner", "one"), file, word)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory):
    """A wallet folder whose hotkey the SDK has encrypted, which takes seconds and 512 MiB, as does opening it."""
    folder = tmp_path_factory.mktemp("encrypted")
    wallet = bt.Wallet("cold", "hot", str(folder))
    wallet.regenerate_hotkey(seed=SEED, suppress=True, hotkey_password=PASSWORD.value)
    assert wallet.hotkey_file.is_encrypted()
    return folder


@pytest.mark.slow
def test_a_password_opens_an_encrypted_hotkey_and_the_sdk_signs_with_it(encrypted):
    opened = load_hotkey(encrypted, "cold", "hot", lambda: PASSWORD)
    assert opened.address == HOTKEY.address
    assert verify(HOTKEY.address, b"message", opened.sign(b"message"))
    wallet = open_wallet(encrypted, "cold", "hot", lambda: PASSWORD)  # at once: this process has opened it already
    assert verify(HOTKEY.address, b"message", wallet.hotkey.sign(b"message"))
    assert PASSWORD.value not in repr(PASSWORD)


@pytest.mark.slow
def test_a_wrong_password_is_one_line_without_the_password(encrypted):
    wrong = Password("WALLET_HOTKEY_PASSWORD_FILE", "s3cret")
    problem = f"{encrypted / 'cold' / 'hotkeys' / 'hot'}: the password of WALLET_HOTKEY_PASSWORD_FILE does not open"
    with raising(PermanentError, Reason.BAD_WALLET, problem) as caught:
        load_hotkey(encrypted, "cold", "hot", lambda: wrong)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_cut_off_encrypted_file_is_named(tmp_path):
    file = tmp_path / "cold" / "hotkeys" / "hot"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"$NACL" + bytes(10))
    bad_wallet(lambda: load_hotkey(tmp_path, "cold", "hot", lambda: PASSWORD), file, "cannot be decrypted", "restore")


@given(content=st.binary(max_size=300))
@settings(max_examples=50)
def test_no_keyfile_raises_anything_else(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("wallets")
    file = folder / "miner" / "hotkeys" / "one"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    bad_wallet(lambda: load_hotkey(folder, "miner", "one"))


def test_a_derived_key_follows_from_the_private_key_alone(tmp_path):
    """Whether the keyfile has it as a seed, as a phrase or by itself."""
    phrase = bittensor_core.Keypair.generate_mnemonic(12)
    whole = bittensor_core.Keypair.create_from_mnemonic(phrase)
    content = json.loads(bittensor_core.serialized_keypair_to_keyfile_data(whole))
    public = {name: content[name] for name in ("publicKey", "ss58Address")}
    keys = []
    for secret in ("secretSeed", "secretPhrase", "privateKey"):
        create_wallet(tmp_path, secret, "one", seed=SEED)
        (tmp_path / secret / "hotkeys" / "one").write_text(json.dumps(public | {secret: content[secret]}))
        keys.append(load_hotkey(tmp_path, secret, "one").derive_key(b"salt", b"info"))
    assert len({*keys}) == 1
    own = HOTKEY.derive_key(b"salt", b"info")
    others = [HOTKEY.derive_key(b"other", b"info"), HOTKEY.derive_key(b"salt", b"other"), *keys]
    assert (len(own), HOTKEY.derive_key(b"salt", b"info") == own, own in others) == (32, True, False)


def test_names_stay_in_their_folder(tmp_path):
    for name in ("", ".", "..", "a/b", "/etc", "a/"):
        bad_wallet(lambda name=name: load_hotkey(tmp_path, name, "one"), "wallet name")
        bad_wallet(lambda name=name: load_hotkey(tmp_path, "miner", name), "hotkey name")
        bad_wallet(lambda name=name: create_wallet(tmp_path, "miner", name), "hotkey name")
