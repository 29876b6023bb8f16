"""The chain of a validator's evidence: kept in its score book, read from its bucket, held against weights on chain.

Each evidence names the one before. A validator's memory stands in the newest, so a window is in the book with all that
it changed or not at all: a crash in mid-window scores nobody twice.
"""

import math
from pathlib import Path

from templar.agreement.ballot_box import may_have_expired
from templar.chain.base import NeuronInfo
from templar.chain.extrinsics import differing_uids
from templar.errors import PermanentError, Reason, RejectedError, TemplarError
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, ObjectKey, parse_current_key, window_key
from templar.exchange.signed import read_signed
from templar.scoring.differences import Difference, shown
from templar.scoring.evidence import Evidence
from templar.scoring.standing import Standing
from templar.statefile import StateFile
from templar.store.base import ObjectStore
from templar.timeline import window_of

SCHEMA_VERSION = 2
RECENT_WINDOWS = 3  # evidence older than this many windows is not held against the weights on chain, which change
DUE_WINDOWS = 3  # number of windows with due weights in which the weights on chain may have been set
_SCHEMA = "CREATE TABLE windows (window INTEGER PRIMARY KEY, evidence BLOB NOT NULL) STRICT;"


class ScoreBook:
    """The evidence of a validator's windows in SQLite, one transaction per window.

    The file is made when needed. Unless `durable`, nobody waits for the disk at every window, as in a simulation.

    PermanentError: `bad_state_file`; the file is not a score book, or of another release.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._file = StateFile(
            path,
            schema=_SCHEMA,
            version=SCHEMA_VERSION,
            remedy="move the file away to start with fresh scores",
            durable=durable,
        )

    @property
    def standing(self) -> Standing:
        """The memory after the newest window; an empty one if there is none."""
        newest = self._file.execute("SELECT evidence FROM windows ORDER BY window DESC LIMIT 1")
        return Evidence.model_validate_json(newest[0][0]).standing if newest else Standing()

    def record(self, evidence: Evidence, *, first: bool = False) -> None:
        """Enter a window; with `first`, as the beginning of an empty book, without the evidence that it follows.

        ValueError: The window is in the book already, or its evidence does not follow the newest of the book. Nothing
        changed.
        """
        window, standing = evidence.window, self.standing
        with self._file.transaction() as transaction:
            if transaction.execute("SELECT 1 FROM windows WHERE window = ?", (window,)).fetchone():
                raise ValueError(f"window {window} is in the score book already")
            follows = evidence.previous == standing.evidence and (standing.window is None or window > standing.window)
            if not follows and not (first and standing.evidence is None):
                raise ValueError(f"window {window} does not follow window {standing.window}, the newest in the book")
            transaction.execute("INSERT INTO windows VALUES (?, ?)", (window, evidence.canonical()))

    def evidence(self, window: int) -> Evidence | None:
        """Return the evidence of a window; None if it is not in the book."""
        rows = self._file.execute("SELECT evidence FROM windows WHERE window = ?", (window,))
        return Evidence.model_validate_json(rows[0][0]) if rows else None

    def forget(self, before_window: int) -> None:
        """Drop the evidence of windows before this one, but for the newest."""
        self._file.execute(
            "DELETE FROM windows WHERE window < ? AND window < (SELECT MAX(window) FROM windows)", (before_window,)
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_evidence(exchange: NetworkView, validator: NeuronInfo, window: int) -> Evidence | None:
    """Return a validator's published evidence of a window, None if there is none; errors as in `read_signed`."""
    store = exchange.buckets.reader(validator)
    key = window_key(Kind.EVIDENCE, window, validator.uid)
    found = read_signed(store, key, Evidence, network=exchange.network, author=validator, window=window)
    return None if found is None else found.body


def evidence_windows(exchange: NetworkView, validator: NeuronInfo) -> tuple[int, ...]:
    """Return the windows that a validator shows evidence of, legal or not, in rising order."""
    keys = evidence_keys(exchange.buckets.reader(validator))
    return tuple(dict.fromkeys(key.window for key in keys if key.window is not None))


def evidence_keys(store: ObjectStore) -> list[ObjectKey]:
    """Return the keys of all evidence in a bucket, by rising window; errors as in `ObjectStore.list`."""
    keys = (parse_current_key(info.key) for info in store.list(f"{Kind.EVIDENCE}-"))
    found = (key for key in keys if key is not None and key.kind is Kind.EVIDENCE)
    return sorted(found, key=lambda key: (key.window or 0, str(key)))


def find_standing(exchange: NetworkView, evidence: Evidence) -> tuple[Standing | None, tuple[Difference, ...]]:
    """Return a validator's memory before a window, from the evidence that this one names, and the differences.

    The standing is None if it cannot be known. A validator has one past: the newest evidence before this one. To name
    another, or none, would wash away what it remembered.

    TransientError: Chain or store failed. PermanentError: `evidence_missing`: the earlier evidence has expired.
    """
    window, earlier = evidence.window, evidence.previous_window
    validator = exchange.metagraph(window).by_hotkey(evidence.hotkey)
    assert validator is not None  # noqa: S101 - it was found there
    # 1. The evidence that is named must be the newest before this one.
    newest = max((each for each in evidence_windows(exchange, validator) if each < window), default=None)
    problems = []
    if earlier != newest and (newest is not None or evidence.previous is None):
        problems.append(Difference("previous_window", shown(earlier), shown(newest)))
    if evidence.previous is None or earlier is None or earlier >= window:
        if evidence.previous is not None:
            problems.append(Difference("previous", shown(evidence.previous), "nothing"))
        return Standing(), tuple(problems)
    # 2. Read it.
    then = exchange.metagraph(earlier)
    author = then.by_hotkey(evidence.hotkey) or then.before_swap(validator)
    if author is None:
        return None, (*problems, Difference("previous", shown(evidence.previous), "nothing: it was not registered"))
    try:
        found = read_evidence(exchange, author, earlier)
    except RejectedError as error:
        return None, (*problems, Difference("previous", shown(evidence.previous), str(error)))
    if found is not None:
        seats = ((each.uid, each.registered_at, each.hotkey) for each in exchange.miners(window))
        return found.standing.following(seats), tuple(problems)
    if may_have_expired(exchange, exchange.buckets.reader(author), earlier):
        raise PermanentError(
            Reason.EVIDENCE_MISSING,
            f"window {window} follows the evidence of window {earlier}, which has expired: audit a later window",
        )
    return None, (*problems, Difference("previous", shown(evidence.previous), f"no evidence of window {earlier}"))


def compare_weights(exchange: NetworkView, evidence: Evidence) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """Compare the weights on chain with a validator's evidence; return the differences, and notes on gaps.

    Evidence older than `RECENT_WINDOWS` is not compared: the chain shows no older weights. Where it shows weights only
    later, they are compared from then on.
    """
    chain, every, rules = exchange.chain, exchange.hparams.weights.windows_per_weights, exchange.hparams.windows
    validator, schedule = chain.metagraph().by_hotkey(evidence.hotkey), chain.weights_schedule()
    current, last_due = window_of(chain.block(), rules), evidence.window - evidence.window % every
    # Weights are set once per epoch, and hidden for some: those that are shown may be so many windows older.
    lag = math.ceil((1 + schedule.reveal_epochs) * schedule.epoch_blocks / rules.blocks_per_window)
    if validator is None or evidence.window < current - lag - RECENT_WINDOWS:
        return (), ()
    hidden = schedule.hidden.get(evidence.hotkey, ())
    last = window_of(hidden[0], rules) - 1 if hidden else current
    if hidden and evidence.window >= last:
        return (), (f"the chain hides the weights that were set since block {hidden[0]}",)
    # The validator sends again what the chain refused, so weights of earlier windows may stand there, and no other
    # ones. How long an epoch was is not known afterwards, so with epochs all windows are looked at.
    first = 0 if lag else last_due - every * DUE_WINDOWS + 1
    windows = [each for each in evidence_windows(exchange, validator) if first <= each <= last]
    on_chain, known = chain.weights().get(validator.uid, {}), list[int]()
    for found in (_legal(exchange, window, evidence) for window in reversed(windows)):
        if found is not None and _matches(found, on_chain):
            return (), () if found.window >= last_due else (f"the weights on chain are those of window {found.window}",)
        known += [] if found is None else [found.window]
    was_due = any(each % every == 0 and each < known[0] - lag for each in known)
    if not on_chain or not was_due:
        return (), ("the chain shows no weights of these windows",)
    wanted = {record.uid: record.weight for record in evidence.weights}
    rounded = {uid: round(on_chain[uid], 6) for uid in on_chain}
    return (Difference("weights on chain", shown(wanted), shown(rounded)),), ()


def _legal(exchange: NetworkView, window: int, evidence: Evidence) -> Evidence | None:
    if window == evidence.window:
        return evidence
    author = exchange.metagraph(window).by_hotkey(evidence.hotkey)
    try:
        return None if author is None else read_evidence(exchange, author, window)
    except RejectedError:
        return None


def _matches(evidence: Evidence, on_chain: dict[int, float]) -> bool:
    wanted = {record.uid: record.weight for record in evidence.weights}
    try:
        return bool(wanted) and not differing_uids(wanted, on_chain)
    except TemplarError:
        return False  # weights that no chain takes
