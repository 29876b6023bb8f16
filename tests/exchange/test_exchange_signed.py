import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from templar import PROTOCOL_VERSION
from templar.canonical import canonical_json
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import Commit, Decision, Roster
from templar.exchange.signed import (
    Found,
    Network,
    Sealed,
    WindowBody,
    check_author,
    read_signed,
    seal,
    unseal,
)
from templar.store.base import ObjectInfo
from tests.support.scripted_store import failing, once
from tests.support.subnet import GENESIS, NETUID, NETWORK, Bucket, fields_of, member, signed_anyhow

ALICE, BOB = member(5), member(6)
BODY = Commit(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=3, commitment="0a" * 32)
DATA = seal(BODY, ALICE.hotkey).encode()
VERSION_FIELD = f'"protocol":"{PROTOCOL_VERSION}"'.encode()
SIGNATURE = json.loads(DATA)["signature"]

MALFORMED, NOT_CANONICAL, BAD_SIGNATURE = Reason.MALFORMED, Reason.NOT_CANONICAL, Reason.BAD_SIGNATURE


def reason_of(data: bytes, body_type: type[WindowBody] = Commit) -> Reason:
    with pytest.raises(RejectedError) as caught:
        unseal(data, body_type)
    assert len(str(caught.value)) < 400
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    return caught.value.reason


# What is accepted.


def test_a_sealed_object_is_read_back() -> None:
    sealed = unseal(DATA, Commit)
    assert sealed.body == BODY
    assert sealed.encode() == DATA
    assert canonical_json({"body": fields_of(BODY), "signature": SIGNATURE}) == DATA


def test_two_signings_differ_and_name_one_object() -> None:
    again = seal(BODY, ALICE.hotkey)
    assert again.encode() != DATA
    assert unseal(again.encode(), Commit).body.digest == BODY.digest


def test_every_field_changes_the_digest() -> None:
    changes: list[dict[str, Any]] = [
        {"protocol": "other"},
        {"netuid": 8},
        {"genesis": "ac" * 32},
        {"uid": 6},
        {"hotkey": BOB.hotkey.address},
        {"window": 4},
        {"commitment": "0b" * 32},
    ]
    assert len(changes) == len(BODY.model_dump())
    digests = {BODY.model_copy(update=change).digest for change in changes}
    assert len(digests | {BODY.digest}) == len(changes) + 1


def test_a_body_is_signed_by_its_own_hotkey_only() -> None:
    with pytest.raises(ValueError, match="names"):
        seal(BODY, BOB.hotkey)


# One canonical form. The signature covers the meaning, so in all of these it is good.


def reordered(data: bytes) -> bytes:
    value = json.loads(data)
    body = dict(reversed(value["body"].items()))
    return json.dumps({"body": body, "signature": value["signature"]}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "data",
    [
        DATA + b"\n",
        b"\n" + DATA,
        DATA.replace(b'":', b'": '),
        json.dumps(json.loads(DATA), indent=1).encode(),
        reordered(DATA),
        b'{"signature":"%s","body":%s}' % (SIGNATURE.encode(), BODY.canonical()),
        DATA.replace(b'"uid":5', b'"uid":5,"uid":5'),
        DATA.replace(b'{"body":', b'{"body":{},"body":'),
        DATA.replace(b'"commitment":"0', b'"commitment":"\\u0030'),
        DATA.replace(b'"window"', b'"\\u0077indow"'),
    ],
)
def test_another_encoding_of_the_same_value_is_not_canonical(data: bytes) -> None:
    assert data != DATA
    assert reason_of(data) is NOT_CANONICAL


@pytest.mark.parametrize(
    "data",
    [
        DATA.replace(b'"uid":5', b'"uid":5.0'),
        DATA.replace(b'"uid":5', b'"uid":05'),
        DATA.replace(b'"uid":5', b'"uid":NaN'),
        DATA.replace(b'"uid":5', b'"uid":1e999'),
        DATA.replace(b"0a0a", b"0A0A"),
        DATA.replace(SIGNATURE.encode(), SIGNATURE.upper().encode()),
        DATA.replace(SIGNATURE.encode(), SIGNATURE[:-2].encode()),
        DATA.replace(b"}", b',"extra":1}', 1),
        DATA[:-1] + b',"extra":1}',
        DATA[:-1],
        DATA + DATA,
        b"\xef\xbb\xbf" + DATA,
        DATA.replace(VERSION_FIELD, b'"protocol":"\xff"'),
        DATA.replace(VERSION_FIELD, b'"protocol":"\\ud800"'),
        b"",
        b"null",
        b"{}",
        b"[" * 600,
        b"\x80\x04\x95.",  # the beginning of a pickle
        BODY.canonical(),
        b'{"body":{},"signature":"%s"}' % SIGNATURE.encode(),
    ],
)
def test_bytes_that_do_not_match_the_schema_are_malformed(data: bytes) -> None:
    assert data != DATA
    assert reason_of(data) is MALFORMED


@given(st.data())
@settings(max_examples=150)
def test_every_mutation_is_rejected(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(DATA)))
    end = data.draw(st.integers(start, min(len(DATA), start + 4)))
    mutated = DATA[:start] + data.draw(st.binary(max_size=4)) + DATA[end:]
    if mutated != DATA:
        assert reason_of(mutated) in {MALFORMED, NOT_CANONICAL, BAD_SIGNATURE}


@given(st.binary(max_size=800))
def test_any_bytes_are_rejected(data: bytes) -> None:
    assert reason_of(data) is MALFORMED


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*BODY.model_dump(), "other"]), json_values, max_size=8))
@settings(max_examples=200)
@example({**BODY.model_dump(mode="json"), "window": True})
@example({**BODY.model_dump(mode="json"), "uid": None})
def test_any_values_are_rejected(body: dict[str, Any]) -> None:
    data = json.dumps({"body": body, "signature": SIGNATURE}).encode()
    assert reason_of(data) in {MALFORMED, NOT_CANONICAL}


@pytest.mark.parametrize("depth", [195, 100_000])
def test_deep_nesting_is_rejected(depth: int) -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        inner = opening * depth + b"1" + closing * depth
        assert reason_of(b'{"body":{"entries":%s},"signature":"%s"}' % (inner, SIGNATURE.encode()), Roster) is MALFORMED


def test_a_long_number_is_rejected() -> None:
    data = b'{"body":{"window":%s},"signature":"%s"}' % (b"9" * 300_000, SIGNATURE.encode())
    assert reason_of(data, Roster) is MALFORMED


def test_bytes_that_are_too_long_are_not_parsed() -> None:
    longest = Commit.max_bytes
    assert reason_of(b"{" * longest) is MALFORMED
    with pytest.raises(RejectedError, match=f"{longest + 1} bytes, at most {longest}"):
        unseal(b" " * (longest + 1), Commit)


def test_a_message_quotes_plain_text_only() -> None:
    for name in ("\x1b[31m\nuid 7 was accepted\r", "é\u202e", "x" * 10_000):
        data = json.dumps({"body": {**fields_of(BODY), name: 1}, "signature": SIGNATURE}).encode()
        assert reason_of(data, Commit if len(data) <= Commit.max_bytes else Roster) is MALFORMED  # and see there
    assert reason_of(signed_anyhow(Kind.COMMIT, fields_of(BODY, protocol="\x1b[31m"), ALICE.hotkey)) is MALFORMED


# One author.


class OtherCommit(WindowBody):
    """A kind with the very fields of another one."""

    kind: ClassVar[Kind] = Kind.DEBUG
    max_bytes: ClassVar[int] = Commit.max_bytes
    commitment: Annotated[str, Field(max_length=64)]


def test_a_signature_is_good_for_one_kind_only() -> None:
    body = OtherCommit(**BODY.model_dump())
    assert body.digest == BODY.digest
    other = seal(body, ALICE.hotkey).encode()
    assert unseal(other, OtherCommit).body == body
    assert reason_of(other, Commit) is BAD_SIGNATURE
    assert reason_of(DATA, OtherCommit) is BAD_SIGNATURE


def test_a_signature_is_good_for_one_protocol_version_only() -> None:
    assert reason_of(signed_anyhow(Kind.COMMIT, fields_of(BODY), ALICE.hotkey, version="other")) is BAD_SIGNATURE
    assert unseal(signed_anyhow(Kind.COMMIT, fields_of(BODY), ALICE.hotkey), Commit).body == BODY


def test_a_signature_is_good_for_one_body_only() -> None:
    for change in ({"window": 4}, {"uid": 6}, {"commitment": "0b" * 32}, {"genesis": "ac" * 32}):
        other = canonical_json({"body": fields_of(BODY, **change), "signature": SIGNATURE})
        assert reason_of(other) is BAD_SIGNATURE


def test_a_signature_is_good_for_one_hotkey_only() -> None:
    theirs = fields_of(BODY, uid=6, hotkey=BOB.hotkey.address)
    assert reason_of(signed_anyhow(Kind.COMMIT, theirs, ALICE.hotkey)) is BAD_SIGNATURE
    assert reason_of(signed_anyhow(Kind.COMMIT, fields_of(BODY), BOB.hotkey)) is BAD_SIGNATURE


@pytest.mark.parametrize("signature", ["00" * 64, "ff" * 64, SIGNATURE[:126] + "00"])
def test_a_wrong_signature_is_rejected(signature: str) -> None:
    assert reason_of(canonical_json({"body": fields_of(BODY), "signature": signature})) is BAD_SIGNATURE


def test_an_impossible_address_signs_nothing() -> None:
    nobody = "1" * 48
    assert reason_of(signed_anyhow(Kind.COMMIT, fields_of(BODY, hotkey=nobody), ALICE.hotkey)) is BAD_SIGNATURE


# Network and author.


def test_an_object_of_another_network_is_rejected() -> None:
    check_author(BODY, network=NETWORK, uid=5, hotkey=ALICE.hotkey.address)
    others = [
        (BODY, Network(NETUID + 1, GENESIS)),
        (BODY, Network(NETUID, "ac" * 32)),
        (BODY.model_copy(update={"protocol": "other"}), NETWORK),
    ]
    for body, network in others:
        with pytest.raises(RejectedError) as caught:
            check_author(body, network=network, uid=5, hotkey=ALICE.hotkey.address)
        assert caught.value.reason is Reason.WRONG_NETWORK
        assert PROTOCOL_VERSION in str(caught.value)


def test_an_object_of_another_neuron_is_rejected() -> None:
    for uid, hotkey in ((6, ALICE.hotkey.address), (5, BOB.hotkey.address)):
        with pytest.raises(RejectedError) as caught:
            check_author(BODY, network=NETWORK, uid=uid, hotkey=hotkey)
        assert caught.value.reason is Reason.WRONG_IDENTITY


def test_a_decision_is_no_commitment() -> None:
    decision = Decision(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=3, roster=None)
    assert reason_of(seal(decision, ALICE.hotkey).encode()) is MALFORMED


# Reading from a bucket.

KEY = window_key(Kind.DECISION, 3, 5)


def decision(roster: str | None = None, window: int = 3) -> Decision:
    return Decision(netuid=NETUID, genesis=GENESIS, uid=5, hotkey=ALICE.hotkey.address, window=window, roster=roster)


@pytest.fixture
def bucket() -> Bucket:
    bucket = Bucket(ALICE)
    bucket.put_signed(KEY, decision(), at=1000.9)
    return bucket


def read(
    bucket: Bucket, check: Callable[[ObjectInfo], None] | None = None, network: Network = NETWORK, window: int = 3
) -> Found[Decision] | None:
    return read_signed(bucket.store, KEY, Decision, network=network, author=ALICE.neuron, window=window, check=check)


def rejection(call: Callable[[], object]) -> Reason:
    with pytest.raises(RejectedError) as caught:
        call()
    return caught.value.reason


def test_an_object_is_read_with_its_time_and_its_signature(bucket: Bucket) -> None:
    found = read(bucket)
    assert found is not None
    assert found == Found(decision(), 1000, found.signature)
    assert Sealed(found.body, found.signature).encode() == bucket.memory.get(KEY, max_bytes=1000)


def test_nothing_is_a_definite_404() -> None:
    empty = Bucket(ALICE)
    assert read(empty) is None
    assert empty.store.calls == [("head", KEY)]


def test_the_check_comes_before_the_body(bucket: Bucket) -> None:
    def check(info: ObjectInfo) -> None:
        assert info.last_modified == 1000
        raise RejectedError(Reason.COMMIT_LATE, "for a test")

    assert rejection(lambda: read(bucket, check)) is Reason.COMMIT_LATE
    assert bucket.store.count("get") == 0


def test_an_object_that_is_too_long_is_not_read(bucket: Bucket) -> None:
    bucket.put(KEY, b"x" * (Decision.max_bytes + 1), at=1000)
    assert rejection(lambda: read(bucket)) is Reason.WRONG_SIZE
    assert bucket.store.count("get") == 0
    bucket.put(KEY, b"x" * Decision.max_bytes, at=1000)
    assert rejection(lambda: read(bucket)) is Reason.MALFORMED


def test_network_author_and_window_are_checked(bucket: Bucket) -> None:
    assert rejection(lambda: read(bucket, network=Network(NETUID, "00" * 32))) is Reason.WRONG_NETWORK
    assert rejection(lambda: read(bucket, window=4)) is Reason.WRONG_WINDOW
    foreign = decision().model_copy(update={"uid": 6, "hotkey": BOB.hotkey.address})
    bucket.put(KEY, seal(foreign, BOB.hotkey).encode(), at=1000)
    assert rejection(lambda: read(bucket)) is Reason.WRONG_IDENTITY


@pytest.mark.parametrize(
    "replacement",
    [
        seal(decision("aa" * 32), ALICE.hotkey).encode(),  # legal, and longer
        seal(decision(), ALICE.hotkey).encode(),  # legal, as long, and even the same body
        b"x",
        b"x" * 10_000,
        None,
    ],
)
@pytest.mark.parametrize("moment", ["before the body", "after the body"])
def test_an_object_that_is_replaced_while_it_is_read_does_not_count(
    bucket: Bucket, replacement: bytes | None, moment: str
) -> None:
    def replace() -> None:
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
def test_a_store_failure_is_raised_as_it_is(bucket: Bucket, operation: str) -> None:
    for error in (
        TransientError(Reason.STORE_BUSY, "for a test"),
        PermanentError(Reason.ACCESS_DENIED, "for a test"),
        PermanentError(Reason.BUCKET_MISSING, "for a test"),
    ):
        bucket.store.before = failing(error, operation)
        with pytest.raises(type(error)) as caught:
            read(bucket)
        assert caught.value is error
