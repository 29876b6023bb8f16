"""Copying an honest miner's payload does not get that miner penalised.

Payloads are real: made with error feedback from one window to the next.
"""

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from templar.canonical import sha256_hex
from templar.gradient.codec.wire import Header, Payload, encode
from templar.gradient.compress import FeedbackRule, FeedbackState, compress
from templar.gradient.layout import Layout
from templar.gradient.similarity import similarity
from templar.hparams import Gradient, load_hparams
from templar.scoring.conclude import conclude
from templar.scoring.evidence import Evidence
from templar.scoring.measure import find_likenesses
from tests.support.facts import AUTHOR, WINDOW, bucket, events_of, hotkey, revealed, standing_of, veteran, window_of
from tests.support.payloads import HOTKEY, mixed, random_payload, random_update

HPARAMS = load_hparams("templar-2.1.3")
LEVEL = HPARAMS.scoring.overlap_levels[0]
GRADIENT = Gradient(momentum_decay=0.95, topk_compression=4, target_chunk=8, magnitude_bits=0, use_dct=False)
LAYOUT = Layout.of(dict.fromkeys("abcd", (64, 64)), GRADIENT, "sparseloco")
RULE = FeedbackRule("sparseloco", decay=0.95, learning_rate=1.0)
HONEST, COPIER, STRANGER = 2, 3, 4


def sent_again(count: int) -> list[Payload]:
    """Return the payloads of an honest miner in windows in which it is not applied.

    Its error feedback stays as it was; only the window's own update is another one.
    """
    kept, found = FeedbackState(random_update(LAYOUT, 1000), 10), []
    for window in range(count):
        update = {name: 0.3 * tensor for name, tensor in random_update(LAYOUT, 2000 + window).items()}
        coded = compress(kept, update, layout=LAYOUT, rule=RULE).tensors
        found.append(Payload.of(Header(LAYOUT.recipe, 1, HONEST, HOTKEY, LAYOUT.digest), coded, LAYOUT))
    return found


def share(one: Payload, other: Payload) -> float:
    return float(similarity([one, other], LAYOUT).taken[0, 1])


def judged(windows: Iterable[Mapping[int, Payload]], *, applied: frozenset[int]) -> list[Evidence]:
    """The evidence of windows in a row, of which every validator keeps the payloads."""
    kept: dict[str, Payload] = {}
    standing, found = standing_of(veteran(uid) for uid in (HONEST, COPIER, STRANGER)), []
    for window, payloads in enumerate(windows, WINDOW):
        earlier = {uid: kept[digest] for uid, digest in standing.payloads.items()}
        overlaps, repeats = find_likenesses(payloads, earlier, standing.applied, LAYOUT, threshold=LEVEL)
        digests = {uid: sha256_hex(encode(payload, LAYOUT)) for uid, payload in payloads.items()}
        miners = [
            revealed(
                uid,
                payload_sha256=digests[uid],
                applied=uid in applied,
                overlap=overlaps.get(uid),
                repeat=repeats.get(uid),
            )
            for uid in payloads
        ]
        found.append(conclude(window_of(*miners, window=window), standing, HPARAMS, AUTHOR))
        standing = found[-1].standing
        kept |= {digests[uid]: payload for uid, payload in payloads.items()}
    return found


def noise(seed: int) -> Payload:
    return random_payload(LAYOUT, seed)


@pytest.mark.parametrize("copied", ["a", "ab", "abc", "abcd"])
def test_a_copy_of_a_payload_that_was_not_applied_blames_the_copier_only(copied: str) -> None:
    """The copier hits what the miner sends again, and pays for it alone, however much it takes over."""
    first, second = sent_again(2)
    assert share(first, second) >= LEVEL, "so the copy is like what comes next"
    forged = mixed(first, noise(77), lambda name: name in copied)
    now = {HONEST: second, COPIER: forged, STRANGER: noise(6)}
    past = {HONEST: first, COPIER: noise(7), STRANGER: noise(8)}
    *_, last = judged([past, now], applied=frozenset({COPIER, STRANGER}))
    assert (events_of(last, HONEST), events_of(last, STRANGER)) == ([], [])
    assert {hotkey(HONEST), bucket(HONEST)}.isdisjoint(ban.subject for ban in last.bans)
    assert ("repeated_payload" in {reason for _, reason in events_of(last, COPIER)}) is (copied != "a")


def test_a_copied_miner_goes_on_and_only_the_copier_pays() -> None:
    """In the window after the copy, the miner sends again what is in the copy as well, which is public now."""
    first, second, third = sent_again(3)
    assert share(third, first) >= LEVEL
    past, copied, last = judged(
        [
            {HONEST: first, COPIER: noise(5), STRANGER: noise(6)},
            {HONEST: second, COPIER: first, STRANGER: noise(7)},
            {HONEST: third, STRANGER: noise(8)},
        ],
        applied=frozenset({COPIER, STRANGER}),
    )
    assert ("overlap_mega", "repeated_payload") in events_of(copied, COPIER)
    assert events_of(copied, HONEST) == events_of(last, HONEST) == []
    assert COPIER in past.standing.payloads
    assert COPIER not in copied.standing.payloads, "a copy is not remembered"
    framing = {COPIER: first, HONEST: second}
    _, repeats = find_likenesses({HONEST: third}, framing, frozenset(), LAYOUT, threshold=LEVEL)
    assert repeats[HONEST].share >= LEVEL, "what the copy would have done, were it remembered"


def test_two_uids_of_one_trainer_both_pay_in_every_window() -> None:
    """They are alike in every window, and both pay in every window; what they sent before helps neither."""
    rows = judged([{COPIER: noise(5), STRANGER: noise(5)}, {COPIER: noise(5), STRANGER: noise(5)}], applied=frozenset())
    for evidence in rows:
        for uid in (COPIER, STRANGER):
            assert ("overlap_mega", "index_overlap") in events_of(evidence, uid)


parts = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=4)
SOURCES = {seed: random_payload(LAYOUT, seed) for seed in range(1, 5)}


def patched(sources: list[int]) -> Payload:
    """A payload with each tensor from some source."""
    found = SOURCES[sources[0]]
    for name, seed in zip("abcd", sources, strict=True):
        found = mixed(SOURCES[seed], found, lambda each, name=name: each == name)
    return found


@settings(max_examples=60)
@given(now=st.tuples(parts, parts), past=st.tuples(parts, parts))
def test_of_two_similar_payloads_at_least_one_pays(
    now: tuple[list[int], list[int]], past: tuple[list[int], list[int]]
) -> None:
    """A payload that excuses another by repeating its earlier one pays for the repetition."""
    payloads = dict(zip((HONEST, COPIER), map(patched, now), strict=True))
    earlier = dict(zip((HONEST, COPIER), map(patched, past), strict=True))
    overlaps, repeats = find_likenesses(payloads, earlier, frozenset(), LAYOUT, threshold=LEVEL)
    alike = share(payloads[HONEST], payloads[COPIER]) >= LEVEL
    paying = {uid for uid in payloads for found in (overlaps, repeats) if uid in found and found[uid].share >= LEVEL}
    assert paying or not alike
    for uid, other in ((HONEST, COPIER), (COPIER, HONEST)):
        if alike and uid not in overlaps:
            assert repeats[other].share >= LEVEL
