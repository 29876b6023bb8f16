"""Decisions: the words on a window as they are read from the validators' buckets (docs/protocol.md 11).

Every validator's decision object carries the words that its author has read, so a bucket that fails hides nothing.
Words prove themselves by their signatures: it does not matter who carries them, or when they were stored.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from templar.agreement.ballot_rules import Said, Stakes, convicting, core_words, decided, needed_words
from templar.agreement.retention import survey
from templar.agreement.roster import fetch_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError, as_reader_failure
from templar.exchange.gather import Workers, ask_in_turn
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, window_key
from templar.exchange.objects import MAX_WORDS, NULL_WINDOW, Decision, Roster, SignedWord, Word
from templar.exchange.signed import Network, Sealed, check_author, check_signature, check_window, unseal
from templar.shared_results import shared
from templar.store.base import ObjectInfo, ObjectStore
from templar.timeline import closing_block, window_of

log = logging.getLogger(__name__)

READ_SECONDS = 5.0  # time that one bucket has to answer; the others are read meanwhile
WAIT_SECONDS = 1.0  # longest wait for answers in one look; later ones are taken in the next
MOST_PAUSES = 4  # a bucket that fails is asked again after a pause, twice as long each time, up to so many pauses
STAMP_SECONDS = 2.0  # an object that shows the same size and stamp is read again until both have been there for so long
WORDS_PER_AUTHOR = 28
"""Most words of one validator that are taken from one object; an honest reader keeps no more of any."""


@dataclass(frozen=True)
class _Seen:
    """The content of a bucket when it was last read."""

    info: ObjectInfo
    since: float  # when this size and this stamp were seen for the first time
    is_settled: bool  # whether an object with this size and stamp is the one that was read


class BallotBox:
    """The words on one window that this node has read or signed. Only one thread may use it.

    TransientError if the chain cannot be reached.
    """

    def __init__(self, exchange: NetworkView, window: int, *, concurrency: int = 1) -> None:
        self.exchange, self.window = exchange, window
        self.validators = {neuron.uid: neuron for neuron in exchange.announced(window)}
        stakes = {uid: neuron.stake for uid, neuron in self.validators.items()}
        self.stakes = Stakes(stakes, exchange.hparams.windows.quorum)
        self.answered: set[int] = set()  # uids whose bucket could be read at least once
        self.words: frozenset[Said] = frozenset()
        self.proofs: tuple[tuple[Said, Said], ...] = ()  # pairs of words that convict their author
        self.decided: tuple[int, str] | None = None  # the deciding ballot, and what is decided
        address = exchange.signer.address if exchange.signer else None
        self._uid = next((uid for uid, neuron in self.validators.items() if neuron.hotkey == address), None)
        self.stored: tuple[SignedWord, ...] = ()  # what this node's own bucket has
        self._signatures: dict[Said, str] = {}
        self._core: frozenset[Said] = frozenset()  # words that no others may push out of an object
        self._seen: dict[int, _Seen] = {}
        self._due = dict.fromkeys(self.validators, 0.0)
        self._failures: dict[int, int] = defaultdict(int)
        self._is_concurrent = concurrency > 1
        self._workers: Workers[Decision | TemplarError | None] = Workers(self._fetch, concurrency)

    @property
    def value(self) -> str | None:
        """The decision: the digest of a roster, or `NULL_WINDOW`; None while there is none."""
        return None if self.decided is None else self.decided[1]

    def look(self, *, until_decided: bool = False) -> None:
        """Read every bucket that is due once; with `until_decided`, only until what was read decides the window.

        A bucket that fails costs nothing but its own words: others carry them.
        """
        clock, started = self.exchange.chain.clock, time.monotonic()
        waiting = [uid for uid, due in self._due.items() if due <= clock.now() and not self._workers.is_running(uid)]
        waiting.sort(key=lambda uid: (uid != self._uid, self._due[uid]))  # the own one, then the higher rank first
        while waiting or self._workers.is_busy:
            if until_decided and self.value is not None:
                break
            if self._is_concurrent and time.monotonic() - started > WAIT_SECONDS:
                break
            while waiting and self._workers.has_room() and (self._is_concurrent or not self._workers.is_busy):
                self._workers.start(waiting.pop(0), READ_SECONDS)
            for uid, answer in self._workers.results(WAIT_SECONDS / 4):
                self._take(uid, answer)

    def add(self, words: Iterable[SignedWord]) -> None:
        """Add words, of which only those count that an announced validator signed; the rest is dropped."""
        taken: dict[int, int] = defaultdict(int)
        found = dict(self._signatures)
        for word in sorted(words, key=lambda each: -each.ballot):
            said, author = Said.of(word), self.validators.get(word.uid)
            taken[word.uid] += 1
            if author is None or said in found or taken[word.uid] > WORDS_PER_AUTHOR:
                continue
            try:
                _check(self.exchange.network, self.window, author.hotkey, said, word.signature)
            except RejectedError as error:
                log.warning("window %d: a word of uid %d is left out: %s", self.window, word.uid, error)
                continue
            found[said] = word.signature
        if found.keys() != self._signatures.keys():
            self._count(found)

    def sealed(self, said: Said) -> Sealed[Word]:
        """A word that was read or signed, as it was signed."""
        return Sealed(
            _word(self.exchange.network, self.window, self.validators[said.uid].hotkey, said), self._signatures[said]
        )

    @property
    def own(self) -> frozenset[Said]:
        """The newest words of this node."""
        return _newest(self._signatures, self._uid)

    @property
    def signed(self) -> tuple[SignedWord, ...]:
        """All these words, in a fixed order.

        If there are more than an object may have, the own ones and those of the core go before the rest: of what
        floods the object, proofs and further words of one place are left out.
        """
        own, core = self.own, self._core
        ranked = sorted(self._signatures.items(), key=lambda each: (each[0] not in own, each[0] not in core, each[1]))
        found = (SignedWord(**said._asdict(), signature=text) for said, text in ranked[:MAX_WORDS])
        return tuple(sorted(found, key=lambda each: (each.ballot, each.step, each.uid, each.signature)))

    def close(self) -> None:
        """End what is still being read."""
        self._workers.close()

    def _count(self, found: dict[Said, str]) -> None:
        own = _newest(found, self._uid)
        kept = needed_words(found, self.stakes, own=own)
        self._signatures = {said: found[said] for said in found if said in kept}
        self._core = core_words(kept, self.stakes, own=own)
        self.words, self.proofs = kept, convicting(kept)
        self.decided = decided(kept, self.stakes)

    def _fetch(self, uid: int) -> Decision | TemplarError | None:
        """Read one bucket, perhaps in a worker thread; None if there is no decision object, or the same as before."""
        validator, network = self.validators[uid], self.exchange.network
        try:
            with as_reader_failure(f"decision of uid {uid}"):
                buckets, key = self.exchange.buckets, window_key(Kind.DECISION, self.window, uid)
                store = buckets.own if uid == self._uid else buckets.newest_reader(validator)
                info, now = store.head(key), self.exchange.chain.clock.now()
                seen = self._seen.get(uid)
                if info is None or (seen is not None and seen.is_settled and seen.info == info):
                    return None
                since = seen.since if seen is not None and seen.info == info else now
                data = store.get(key, max_bytes=Decision.max_bytes)
                answer: Decision | RejectedError
                try:
                    answer = body = unseal(data, Decision).body
                    check_author(body, network=network, uid=uid, hotkey=validator.hotkey)
                    check_window(body, self.window)
                except RejectedError as error:
                    answer = error  # nor will the same bytes be legal at the next look
                # The store may give its stamp to another object within the second, or again if its clock goes back.
                is_settled = now - since > STAMP_SECONDS and now - info.last_modified > STAMP_SECONDS
                self._seen[uid] = _Seen(info, since, is_settled)
                return answer
        except TemplarError as error:
            return error

    def _take(self, uid: int, answer: Decision | TemplarError | None) -> None:
        clock, rules = self.exchange.chain.clock, self.exchange.hparams.windows
        if isinstance(answer, TemplarError) and not isinstance(answer, RejectedError):
            log.info("window %d: words of uid %d cannot be read now: %s", self.window, uid, answer)
            self._failures[uid] = min(2 * self._failures[uid] or 1, MOST_PAUSES)
            self._due[uid] = clock.now() + self._failures[uid] * rules.poll_seconds
            return
        if isinstance(answer, RejectedError):
            log.warning("window %d: the words of uid %d are left out: %s", self.window, uid, answer)
        self.answered.add(uid)
        self._failures.pop(uid, None)
        self._due[uid] = clock.now()
        if isinstance(answer, Decision):
            if uid == self._uid:
                self.stored = answer.words
            self.add(answer.words)


def read_ballots(exchange: NetworkView, window: int, *, until_decided: bool = True, concurrency: int = 1) -> BallotBox:
    """The words on a window as the buckets show them now, by default as many as decide it; errors as of `BallotBox`."""
    ballots = BallotBox(exchange, window, concurrency=concurrency)
    try:
        ballots.look(until_decided=until_decided)
    finally:
        ballots.close()
    return ballots


def decided_value(ballots: BallotBox) -> str:
    """Return the decision: the digest of a roster, or `NULL_WINDOW`.

    TransientError: `decision_missing`; it is not decided, or the buckets do not show it now.
    """
    if ballots.value is None:
        stakes, silent = ballots.stakes, ballots.validators.keys() - {word.uid for word in ballots.words}
        raise TransientError(
            Reason.DECISION_MISSING,
            f"window {ballots.window}: no value has the locks of more than {stakes.needed:g} of the announced stake; "
            f"nothing is known of uids {sorted(silent)}; ask again later",
        )
    return ballots.value


def decided_roster(exchange: NetworkView, window: int) -> tuple[Roster, NeuronInfo] | None:
    """The roster that was decided, and its publisher; None for a null window.

    TransientError: `decision_missing`, or `roster_missing` (no bucket shows the decided roster now).
    """
    ballots = read_ballots(exchange, window)
    value = decided_value(ballots)
    if value == NULL_WINDOW:
        return None
    sealed, publisher = find_roster(ballots, value)
    return sealed.body, publisher


def find_roster(ballots: BallotBox, digest: str, *, concurrency: int = 1) -> tuple[Sealed[Roster], NeuronInfo]:
    """The decided roster, and its publisher.

    It is read from its publisher's bucket, or else from a validator that locked it: each keeps a copy, so a publisher
    that deletes or replaces its roster stops no late node. Each bucket has its own deadline.

    TransientError: `roster_missing`; no bucket shows it now.
    """
    exchange, window = ballots.exchange, ballots.window
    publishers = exchange.publishers(window)
    buckets = {each.uid: each for each in (*publishers, *ballots.validators.values())}

    def look(uid: int) -> tuple[Sealed[Roster], NeuronInfo] | None:
        """Look for the publisher's own roster in one bucket, then for copies of others'."""
        for publisher in sorted(publishers, key=lambda each: each.uid != uid):
            keeper = None if publisher.uid == uid else buckets[uid]
            try:
                found = fetch_roster(exchange, publisher, window, keeper=keeper)
            except (PermanentError, TransientError) as error:
                what = f"window {window}: roster of uid {publisher.uid} in the bucket of uid {uid}"
                log.warning("%s is left out: %s", what, error)
                continue
            if found is not None and found.body.digest == digest:
                return Sealed(found.body, found.signature), publisher
        return None

    with closing(ask_in_turn(look, buckets, seconds=READ_SECONDS, concurrency=concurrency)) as answers:
        if (found := next((found for _, found in answers if found is not None), None)) is not None:
            return found
    raise TransientError(Reason.ROSTER_MISSING, f"window {window}: no bucket shows the decided roster {digest[:12]}")


def is_recent(exchange: NetworkView, window: int) -> bool:
    """Whether the window after this one has not closed yet."""
    return exchange.chain.block() < closing_block(window + 1, exchange.hparams.windows)


def may_have_expired(exchange: NetworkView, store: ObjectStore, window: int) -> bool:
    """Whether a clean-up may have deleted the objects of a window in a bucket: their absence proves nothing then.

    A clean-up counts ages from the newest window in the bucket. Errors are those of chain and store.
    """
    return _may_have_expired(exchange, store, window, window_of(exchange.chain.block(), exchange.hparams.windows))


def _may_have_expired(exchange: NetworkView, store: ObjectStore, window: int, current: int) -> bool:
    retention = exchange.hparams.storage.retention_windows
    if window >= current - retention:
        return False
    newest = survey(store.list(), current).newest_window
    return newest is not None and window < newest - retention


def own_may_have_expired(exchange: NetworkView, window: int) -> bool:
    """As `may_have_expired`, of the own bucket: True while that cannot be listed. Errors are those of the chain alone.

    PermanentError: `lease_lost`.
    """
    own, current = exchange.buckets.own, window_of(exchange.chain.block(), exchange.hparams.windows)
    try:
        return _may_have_expired(exchange, own, window, current)
    except TemplarError as error:
        log.info("window %d: the own bucket cannot be listed now: %s", window, error)
        return True


def _newest(words: Iterable[Said], uid: int | None) -> frozenset[Said]:
    """The words of one validator in the last two ballots in which it signed any, and its newest lock before these.

    The newest lock says what its author is bound to, however many ballots it only voted in since.
    """
    own = [word for word in words if word.uid == uid]
    ballots = sorted({word.ballot for word in own})[-2:]
    locked = max((word.ballot for word in own if word.step == "lock"), default=None)
    return frozenset(word for word in own if word.ballot in ballots or (word.step == "lock" and word.ballot == locked))


def _word(network: Network, window: int, hotkey: str, said: Said) -> Word:
    return Word(
        netuid=network.netuid, genesis=network.genesis, hotkey=hotkey, window=window, uid=said.uid, **said.spoken
    )


@shared(lambda *words: words, most=4096)
def _check(network: Network, window: int, hotkey: str, said: Said, signature: str) -> None:
    """Check that a validator signed a word: RejectedError `bad_signature`, or `malformed` if no word can say this."""
    try:
        word = _word(network, window, hotkey, said)
    except ValueError:
        raise RejectedError(Reason.MALFORMED, "a lock names a ballot that it cannot") from None
    check_signature(Sealed(word, signature))
