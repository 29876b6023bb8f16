"""Similarity and size of payloads: whole, scaled and partial copies, and honest ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.gradient.codec.wire import Payload
from templar.gradient.layout import Layout
from templar.hparams import Gradient, load_hparams
from templar.scoring.evidence import Likeness
from templar.scoring.measure import find_likenesses, norm_ratios
from templar.scoring.slashing import overlap_event
from tests.support.payloads import mixed, payload_of, random_payload, random_update, zero_payload

GRADIENT = Gradient(momentum_decay=0.95, topk_compression=4, target_chunk=8, magnitude_bits=0, use_dct=False)
LAYOUT = Layout.of({"a": (64, 64), "b": (64, 64), "c": (64, 64), "d": (64, 64)}, GRADIENT, "sparseloco")
SCORING = load_hparams("templar-2.1.3").scoring
NOBODY: frozenset[int] = frozenset()
HONEST = {uid: random_payload(LAYOUT, uid) for uid in (3, 5, 8)}


Found = dict[int, Likeness]


def likenesses(
    payloads: dict[int, Payload],
    earlier: dict[int, Payload] | None = None,
    applied: frozenset[int] = NOBODY,
    layout: Layout = LAYOUT,
) -> tuple[Found, Found]:
    return find_likenesses(payloads, earlier or {}, applied, layout, threshold=SCORING.overlap_levels[0])


def overlaps(payloads: dict[int, Payload]) -> Found:
    found, repeats = likenesses(payloads)
    assert repeats == {}
    return found


def repeats(payloads: dict[int, Payload], earlier: dict[int, Payload], applied: frozenset[int] = NOBODY) -> Found:
    return likenesses(payloads, earlier, applied)[1]


def test_strangers_have_nothing_in_common_beyond_chance() -> None:
    found = overlaps(HONEST)
    assert set(found) == set(HONEST)
    assert all(each.uid in HONEST and each.uid != uid and each.share < 0.02 for uid, each in found.items())


@pytest.mark.parametrize("size", [1.0, 0.01, 50.0])
def test_a_copy_of_any_scale_is_found(size: float) -> None:
    copy = random_payload(LAYOUT, 5, size=size)
    found = overlaps({**HONEST, 1: copy})
    assert found[1] == Likeness(uid=5, share=1.0)
    assert found[5] == Likeness(uid=1, share=1.0), "the order is unknown"
    assert found[3].share < 0.02


@pytest.mark.parametrize(("copied", "share"), [("a", 0.25), ("ab", 0.5), ("abc", 0.75)])
def test_a_part_of_a_copy_counts_as_much_as_it_is(copied: str, share: float) -> None:
    partial = mixed(HONEST[5], random_payload(LAYOUT, 99), lambda name: name in copied)
    found = overlaps({**HONEST, 1: partial})[1]
    assert found.uid == 5
    assert found.share == pytest.approx(share, abs=0.02)


def test_of_two_copies_the_lower_uid_is_named() -> None:
    one = random_payload(LAYOUT, 1)
    assert {uid: each.uid for uid, each in overlaps({7: one, 4: one, 9: one}).items()} == {7: 4, 4: 7, 9: 4}


def test_a_single_payload_has_no_likeness() -> None:
    assert likenesses({3: HONEST[3]}, {}, frozenset({3})) == ({}, {})
    assert likenesses({}, HONEST) == ({}, {})


def test_a_payload_of_another_in_the_window_before_is_a_repeat() -> None:
    earlier = {3: random_payload(LAYOUT, 30), 5: random_payload(LAYOUT, 50)}
    found = repeats({**HONEST, 1: random_payload(LAYOUT, 50, size=3.0)}, earlier)
    assert found[1] == Likeness(uid=5, share=1.0)
    assert all(found[uid].share < 0.02 for uid in HONEST)


def test_the_own_payload_of_the_window_before_is_a_repeat_only_if_it_was_applied() -> None:
    """A payload that was not applied stays in the error feedback, and an honest miner sends much of it again."""
    again = {3: HONEST[3], 5: HONEST[5]}
    found = repeats(again, again, frozenset({5}))
    assert found[5] == Likeness(uid=5, share=1.0)
    assert found[3].uid == 5
    assert found[3].share < 0.02
    assert repeats({3: HONEST[3]}, {3: HONEST[3]}) == {}, "nothing to compare with"


def test_a_copy_of_a_miners_earlier_payload_is_no_evidence_against_it() -> None:
    """It was not applied, so its author sends it again; by then anybody could have copied it."""
    author, copier = {3: HONEST[3]}, {8: HONEST[3]}
    found, past = likenesses({**author, **copier, 5: HONEST[5]}, author)
    assert (found[3].uid, found[8].uid) == (5, 3)
    assert found[3].share < 0.02
    assert (found[8].share, past[8]) == (1.0, Likeness(uid=3, share=1.0))
    alone, _ = likenesses({**author, **copier}, author)
    assert 3 not in alone, "there is nobody else to compare it with"
    strangers, _ = likenesses({**author, **copier}, {5: HONEST[5]})
    assert strangers[3].share == strangers[8].share == 1.0


def test_zero_payloads_are_like_none() -> None:
    found = overlaps({3: zero_payload(LAYOUT), 5: zero_payload(LAYOUT), 8: HONEST[8]})
    assert [each.share for each in found.values()] == [0.0] * 3


def test_a_payload_of_one_chunk_makes_nobody_a_copier() -> None:
    """A single chunk whose places can be guessed is a copy of everybody's, but nobody's payload is a copy of it."""
    alike = random_update(LAYOUT, 0)["a"][:8, :8]
    crowd = {}
    for uid in HONEST:
        update = random_update(LAYOUT, uid)
        update["a"][:8, :8] = alike
        crowd[uid] = payload_of(LAYOUT, update)
    forged = {tensor.name: torch.zeros(tensor.shape) for tensor in LAYOUT.tensors}
    forged["a"][:8, :8] = alike
    found = overlaps({**crowd, 1: payload_of(LAYOUT, forged)})
    assert found[1].share == 1.0
    assert [uid for uid in crowd if overlap_event(found[uid].share, SCORING) is not None] == []


@settings(max_examples=20)
@given(names=st.permutations([1, 2, 3, 4]), copied=st.sampled_from(["", "a", "abc", "abcd"]))
def test_shares_belong_to_payloads_and_not_to_uids(names: list[int], copied: str) -> None:
    payloads = [*HONEST.values(), mixed(HONEST[5], random_payload(LAYOUT, 9), lambda name: name in copied)]
    earlier = {1: HONEST[3], 4: payloads[3]}
    plain = likenesses(dict(enumerate(payloads, 1)), earlier, frozenset({4}))
    other = likenesses(
        dict(zip(names, payloads, strict=True)),
        {names[uid - 1]: payload for uid, payload in earlier.items()},
        frozenset({names[3]}),
    )
    for found, renamed in zip(plain, other, strict=True):
        assert {names[uid - 1]: each.share for uid, each in found.items()} == {
            uid: each.share for uid, each in renamed.items()
        }


# Norms.


def test_norms_are_taken_over_the_lower_median() -> None:
    payloads = {uid: random_payload(LAYOUT, 7, size=size) for uid, size in {2: 1.0, 3: 2.0, 4: 4.0, 5: 64.0}.items()}
    assert norm_ratios(payloads, LAYOUT) == {2: 0.5, 3: 1.0, 4: 2.0, 5: 32.0}
    assert norm_ratios({5: payloads[5]}, LAYOUT) == {5: 1.0}
    assert norm_ratios({4: payloads[4], 5: payloads[5]}, LAYOUT) == {4: 1.0, 5: 16.0}


def test_payloads_of_nothing_do_not_pull_the_median_down() -> None:
    payloads = {uid: zero_payload(LAYOUT) for uid in (1, 2, 3, 4)} | {5: HONEST[5]}
    assert norm_ratios(payloads, LAYOUT) == {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 1.0}
    assert norm_ratios({1: zero_payload(LAYOUT)}, LAYOUT) == {1: 0.0}
    assert norm_ratios({}, LAYOUT) == {}


def test_the_largest_that_is_legal_has_a_norm() -> None:
    """No payload overflows."""
    huge = payload_of(LAYOUT, {tensor.name: torch.full(tensor.shape, 1000.0) for tensor in LAYOUT.tensors})
    small = random_payload(LAYOUT, 1, size=2.0**-30)
    ratios = norm_ratios({1: small, 2: HONEST[3], 3: huge}, LAYOUT)
    assert ratios[1] < 1e-6 < ratios[2] == 1.0 < SCORING.oversized_ratio < ratios[3]
