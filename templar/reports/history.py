"""The past of a network out of chain and buckets alone: validators' evidence of many windows, and decided rosters.

A window without evidence, or whose evidence has expired, is a gap. An object that is not valid evidence of that
validator for that window is left out, with the reason.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from templar import interrupt
from templar.agreement.ballot_box import decided_roster
from templar.chain.base import NeuronInfo
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import RosterEntry
from templar.neuron.configuration import NeuronConfig
from templar.scoring.evidence import Evidence
from templar.scoring.evidence_chain import read_evidence
from templar.store.deadline import in_parallel
from templar.timeline import window_of

log = logging.getLogger(__name__)

CONCURRENCY = 8  # objects that are read at once


@dataclass(frozen=True)
class Published:
    """A validator's published evidence of a range of windows."""

    validator: NeuronInfo
    windows: range
    evidences: tuple[Evidence, ...]  # by rising window
    left_out: tuple[tuple[int, RejectedError], ...] = ()  # windows whose object is no valid evidence, and why

    @property
    def gaps(self) -> tuple[int, ...]:
        """The windows without any object, up to the newest with evidence; later ones may still be published."""
        newest = self.evidences[-1].window if self.evidences else self.windows.start - 1
        known = {evidence.window for evidence in self.evidences} | {window for window, _ in self.left_out}
        return tuple(window for window in self.windows if window <= newest and window not in known)

    @property
    def summary(self) -> str:
        """One line: the windows that were read, the gaps, and the objects that were left out."""
        found = f"{len(self.evidences)} of {len(self.windows)} windows, {_spans(self.windows)}"
        text = f"evidence of uid {self.validator.uid}: {found}"
        if self.gaps:
            text += f"; nothing of {_spans(self.gaps)}"
        for window, error in self.left_out:
            text += f"; window {window} is left out [{error.reason}]"
        return text


def read_recent(config: NeuronConfig, num_windows: int, *, uid: int | None = None) -> Published:
    """Read a validator's evidence of the windows that closed last.

    By default the validator is the own hotkey if it has evidence, else the one with the most stake that has. Nothing is
    written.

    PermanentError: `evidence_missing`: no evidence of these windows; `not_registered`: no such validator; or its bucket
    cannot be read. TransientError: `genesis_missing`, or chain or store failed; a later call continues.
    """
    birth = config.birth()
    exchange = config.reading(birth)
    end = window_of(config.chain.block(), config.hparams.windows)
    windows = range(max(birth.start.start_window, end - num_windows), end)
    if uid is None:
        own = None if config.signer is None else config.signer.address
        found = first_published(exchange, windows, first=own)
    else:
        validators = {neuron.uid: neuron for neuron in exchange.newest_metagraph().validators()}
        if uid not in validators:
            subnet, uids = exchange.chain.netuid, ", ".join(map(str, sorted(validators)))
            problem = f"validator: uid {uid} is no validator of subnet {subnet} by role, permit and stake"
            raise PermanentError(Reason.NOT_REGISTERED, f"{problem}; uids that are: {uids}")
        found = read_published(exchange, validators[uid], windows)
    if found is None or not (found.evidences or found.left_out):
        who = "no validator" if uid is None else f"uid {uid}"
        asked = f"windows {_spans(windows)}" if windows else f"any window, for the first, {windows.start}, is open"
        seconds = max(1, birth.start.start_window + 1 - end) * config.hparams.windows.seconds
        problem = f"{who} shows evidence of {asked}: wait until a window was measured, about {seconds:.0f} s"
        raise PermanentError(Reason.EVIDENCE_MISSING, problem)
    return found


def read_published(exchange: NetworkView, validator: NeuronInfo, windows: range) -> Published:
    """Read a validator's signed evidence of a range of windows, and check each object.

    RejectedError: `commitment_missing`, `commitment_malformed`; the chain names no bucket of the validator.
    TransientError: chain or store failed; a later call starts over. PermanentError: `access_denied`, `bucket_missing`.
    """

    def read(window: int) -> Evidence | RejectedError | None:
        interrupt.check_stop()
        try:
            return read_evidence(exchange, validator, window)
        except RejectedError as error:
            log.warning("window %d: evidence of uid %d is left out: %s", window, validator.uid, error)
            return RejectedError(error.reason, error.message)  # without its traceback, which holds a peer's bytes

    exchange.buckets.reader(validator)  # without it no window can be read
    found = in_parallel(read, windows, CONCURRENCY)
    evidences = tuple(each for each in found if isinstance(each, Evidence))
    pairs = zip(windows, found, strict=True)
    left_out = tuple((window, each) for window, each in pairs if isinstance(each, RejectedError))
    return Published(validator, windows, evidences, left_out)


def decided_entries(exchange: NetworkView, window: int) -> tuple[RosterEntry, ...] | None:
    """The entries of a window's decided roster, none in a null window; None if it cannot be read now."""
    try:
        decided = decided_roster(exchange, window)
    except TemplarError as error:
        log.info("window %d: its roster is not known: %s", window, error)
        return None
    return () if decided is None else decided[0].entries


def first_published(exchange: NetworkView, windows: range, *, first: str | None = None) -> Published | None:
    """The evidence of one hotkey, or else of the validator with the most stake that has any; None if none has.

    TransientError if the chain failed, or if at least one validator's bucket did and no evidence was found.
    """
    failed: TransientError | None = None
    for validator in sorted(exchange.newest_metagraph().validators(), key=lambda neuron: neuron.hotkey != first):
        try:
            found = read_published(exchange, validator, windows)
        except TemplarError as error:
            log.warning("uid %d is passed over: %s", validator.uid, error)
            failed = error if isinstance(error, TransientError) else failed
            continue
        if found.evidences:
            return found
    if failed is not None:
        raise failed
    return None


def _spans(windows: Iterable[int]) -> str:
    """For example `3 to 7, 9`."""
    spans: list[list[int]] = []
    for window in windows:
        if spans and spans[-1][1] == window - 1:
            spans[-1][1] = window
        else:
            spans.append([window, window])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
