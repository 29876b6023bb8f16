import json
from typing import Annotated, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Decision, Roster
from templar.exchange.signed import Found, Network, Sealed, WindowBody, read_signed, seal, unseal
from tests.support.errors import error_of, raising
from tests.support.scripted_store import failing, once
from tests.support.subnet import GENESIS, NETUID, NETWORK, Bucket, fields_of, member, signed_anyhow

ALICE, BOB = member(5), member(6)
BODY = Commit(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=3, commitment="0a" * 32)
DATA = seal(BODY, ALICE.hotkey).encode()
DECISION = Decision(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=3, words=())
VERSION_FIELD = f'"protocol":"{PROTOCOL_VERSION}"'.encode()
SIGNATURE = json.loads(DATA)["signature"]

MALFORMED, NOT_CANONICAL, BAD_SIGNATURE = Reason.MALFORMED, Reason.NOT_CANONICAL, Reason.BAD_SIGNATURE


def reason_of(data, body_type=Commit):
    error = error_of(lambda: unseal(data, body_type))
    assert isinstance(error, RejectedError)
    assert len(str(error)) < 400
    assert str(error).isascii()
    assert str(error).isprintable()
    return error.reason


def test_a_sealed_object_is_read_back():
    sealed = unseal(DATA, Commit)
    assert sealed.body == BODY
    assert sealed.encode() == DATA
    assert canonical_json({"body": fields_of(BODY), "signature": SIGNATURE}) == DATA
    assert unseal(signed_anyhow(Kind.COMMIT, fields_of(BODY), ALICE.hotkey), Commit).body == BODY


def test_two_signings_differ_and_name_one_object():
    again = seal(BODY, ALICE.hotkey)
    assert again.encode() != DATA
    assert unseal(again.encode(), Commit).body.digest == BODY.digest


def test_a_body_is_signed_by_its_own_hotkey_only():
    with pytest.raises(ValueError, match="names"):
        seal(BODY, BOB.hotkey)


# What is not: another encoding of the same value, whose signature is good; another schema; another author.


def reordered(data):
    value = json.loads(data)
    body = dict(reversed(value["body"].items()))
    return json.dumps({"body": body, "signature": value["signature"]}, separators=(",", ":")).encode()


OTHER_FIELDS = ({"netuid": 8}, {"genesis": "ac" * 32}, {"uid": 6}, {"window": 4}, {"commitment": "0b" * 32})
"""Each changes the digest, and so what is signed."""
REFUSED: dict[Reason, list[bytes]] = {
    NOT_CANONICAL: [
        DATA + b"\n",
        DATA.replace(b'":', b'": '),
        reordered(DATA),
        b'{"signature":"%s","body":%s}' % (SIGNATURE.encode(), BODY.canonical()),
        DATA.replace(b'"uid":5', b'"uid":5,"uid":5'),
        DATA.replace(b'{"body":', b'{"body":{},"body":'),
        DATA.replace(b'"window"', b'"\\u0077indow"'),
    ],
    MALFORMED: [
        DATA.replace(b'"uid":5', b'"uid":NaN'),
        DATA.replace(b'"uid":5', b'"uid":1e999'),
        DATA.replace(b'"uid":5', b'"uid":%s' % (b"9" * 300)),
        DATA.replace(SIGNATURE.encode(), SIGNATURE.upper().encode()),
        DATA.replace(SIGNATURE.encode(), SIGNATURE[:-2].encode()),
        DATA.replace(b"}", b',"extra":1}', 1),
        DATA[:-1] + b',"extra":1}',
        b"\xef\xbb\xbf" + DATA,
        DATA.replace(VERSION_FIELD, b'"protocol":"\xff"'),
        DATA.replace(VERSION_FIELD, b'"protocol":"\\ud800"'),
        signed_anyhow(Kind.COMMIT, fields_of(BODY, protocol="\x1b[31m"), ALICE.hotkey),
        b"",
        b"[" * 600,
        b"{" * Commit.max_bytes,
        BODY.canonical(),
        seal(DECISION, ALICE.hotkey).encode(),
    ],
    BAD_SIGNATURE: [
        signed_anyhow(Kind.COMMIT, fields_of(BODY), ALICE.hotkey, version="other"),
        signed_anyhow(Kind.COMMIT, fields_of(BODY), BOB.hotkey),
        signed_anyhow(Kind.COMMIT, fields_of(BODY, uid=6, hotkey=BOB.hotkey.address), ALICE.hotkey),
        signed_anyhow(Kind.COMMIT, fields_of(BODY, hotkey="1" * 48), ALICE.hotkey),  # an impossible address
        *(canonical_json({"body": fields_of(BODY, **change), "signature": SIGNATURE}) for change in OTHER_FIELDS),
        *(canonical_json({"body": fields_of(BODY), "signature": signature}) for signature in ("00" * 64, "ff" * 64)),
    ],
}


@pytest.mark.parametrize(("reason", "data"), [(reason, data) for reason, each in REFUSED.items() for data in each])
def test_bytes_of_another_form_schema_or_author_are_refused(reason, data):
    assert data != DATA
    assert reason_of(data) is reason


@given(st.data())
@settings(max_examples=100)
def test_every_mutation_is_rejected(data):
    start = data.draw(st.integers(0, len(DATA)))
    end = data.draw(st.integers(start, min(len(DATA), start + 4)))
    mutated = DATA[:start] + data.draw(st.binary(max_size=4)) + DATA[end:]
    if mutated != DATA:
        assert reason_of(mutated) in {MALFORMED, NOT_CANONICAL, BAD_SIGNATURE}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*BODY.model_dump(), "other"]), json_values, max_size=8))
@settings(max_examples=60)
@example({**BODY.model_dump(mode="json"), "window": True})
@example({**BODY.model_dump(mode="json"), "uid": None})
def test_any_values_are_rejected(body):
    data = json.dumps({"body": body, "signature": SIGNATURE}).encode()
    assert reason_of(data) in {MALFORMED, NOT_CANONICAL}


@pytest.mark.parametrize("depth", [195, 100_000])
def test_deep_nesting_and_long_numbers_are_rejected(depth):
    for opening, number, closing in ((b"[", b"1", b"]"), (b'{"a":', b"1", b"}"), (b"", b"9" * 3 * depth, b"")):
        inner = opening * depth + number + closing * depth
        assert reason_of(b'{"body":{"entries":%s},"signature":"%s"}' % (inner, SIGNATURE.encode()), Roster) is MALFORMED


def test_bytes_that_are_too_long_are_not_parsed():
    longest = Commit.max_bytes
    with raising(RejectedError, MALFORMED, f"{longest + 1} bytes, at most {longest}"):
        unseal(b" " * (longest + 1), Commit)


def test_a_message_quotes_plain_text_only():
    for name in ("\x1b[31m\nuid 7 was accepted\r", "é\u202e", "x" * 10_000):
        data = json.dumps({"body": {**fields_of(BODY), name: 1}, "signature": SIGNATURE}).encode()
        assert reason_of(data, Commit if len(data) <= Commit.max_bytes else Roster) is MALFORMED  # and see there


class OtherCommit(WindowBody):
    """A kind with the very fields of another one."""

    kind: ClassVar[Kind] = Kind.DEBUG
    max_bytes: ClassVar[int] = Commit.max_bytes
    commitment: Annotated[str, Field(max_length=64)]


def test_a_signature_is_good_for_one_kind_only():
    body = OtherCommit(**BODY.model_dump())
    assert body.digest == BODY.digest
    other = seal(body, ALICE.hotkey).encode()
    assert unseal(other, OtherCommit).body == body
    assert reason_of(other, Commit) is BAD_SIGNATURE
    assert reason_of(DATA, OtherCommit) is BAD_SIGNATURE


KEY = window_key(Kind.DECISION, 3, 5)


@pytest.fixture
def bucket():
    bucket = Bucket(ALICE)
    bucket.put_signed(KEY, DECISION, at=1000.9)
    return bucket


def read(bucket, check=None, network=NETWORK, window=3):
    return read_signed(bucket.store, KEY, Decision, network=network, author=ALICE.neuron, window=window, check=check)


def rejection(call):
    error = error_of(call)
    assert isinstance(error, RejectedError)
    return error.reason


def test_an_object_is_read_with_its_time_and_its_signature(bucket):
    found = read(bucket)
    assert found == Found(DECISION, 1000, found.signature)
    assert Sealed(found.body, found.signature).encode() == bucket.memory.get(KEY, max_bytes=1000)


def test_the_check_comes_before_the_body(bucket):
    def check(info):
        assert info.last_modified == 1000
        raise RejectedError(Reason.COMMIT_LATE, "for a test")

    assert rejection(lambda: read(bucket, check)) is Reason.COMMIT_LATE
    assert bucket.store.count("get") == 0


def test_an_object_that_is_too_long_is_not_read(bucket):
    bucket.put(KEY, b"x" * (Decision.max_bytes + 1), at=1000)
    assert rejection(lambda: read(bucket)) is Reason.WRONG_SIZE
    assert bucket.store.count("get") == 0
    bucket.put(KEY, b"x" * Decision.max_bytes, at=1000)
    assert rejection(lambda: read(bucket)) is Reason.MALFORMED


def test_network_author_and_window_are_checked_if_there_is_an_object(bucket):
    empty = Bucket(ALICE)
    assert read(empty) is None
    assert empty.store.calls == [("head", KEY)]
    assert rejection(lambda: read(bucket, window=4)) is Reason.WRONG_WINDOW
    for network in (Network(NETUID + 1, GENESIS), Network(NETUID, "00" * 32)):
        assert rejection(lambda network=network: read(bucket, network=network)) is Reason.WRONG_NETWORK
    for changes, signer, reason in (
        ({"protocol": "other"}, ALICE, Reason.WRONG_NETWORK),
        ({"uid": 6}, ALICE, Reason.WRONG_IDENTITY),
        ({"hotkey": BOB.hotkey.address}, BOB, Reason.WRONG_IDENTITY),
    ):
        bucket.put(KEY, seal(DECISION.model_copy(update=changes), signer.hotkey).encode(), at=1000)
        assert rejection(lambda: read(bucket)) is reason


@pytest.mark.parametrize(
    "replacement",
    [
        seal(DECISION.model_copy(update={"roster": "aa" * 32}), ALICE.hotkey).encode(),  # legal, and longer
        seal(DECISION, ALICE.hotkey).encode(),  # legal, as long, and even the same body
        b"x",
        b"x" * 10_000,
        None,
    ],
)
@pytest.mark.parametrize("moment", ["before the body", "after the body"])
def test_an_object_that_is_replaced_while_it_is_read_does_not_count(bucket, replacement, moment):
    def replace():
        if replacement is None:
            bucket.memory.delete([KEY])
        else:
            bucket.put(KEY, replacement, at=1001)

    if moment == "before the body":
        bucket.store.before = once("get", KEY, replace)
    else:
        bucket.store.after = once("get", KEY, replace)
    found = rejection(lambda: read(bucket))
    torn = replacement == b"x" and moment == "before the body"
    assert found is (Reason.MALFORMED if torn else Reason.OBJECT_DIFFERS)


@pytest.mark.parametrize("operation", ["head", "get"])
def test_a_store_failure_is_raised_as_it_is(bucket, operation):
    for error in (TransientError(Reason.STORE_BUSY, "for a test"), PermanentError(Reason.BUCKET_MISSING, "for a test")):
        bucket.store.before = failing(error, operation)
        assert error_of(lambda: read(bucket)) is error
