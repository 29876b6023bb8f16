"""Two families of errors, and the list of the reason codes that they carry (docs/protocol.md 16).

The reason code ends up in flow state messages, artifacts and evidence; the message is for a person and names the
field, the object and the remedy.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

log = logging.getLogger(__name__)


class Reason(StrEnum):
    """The reason for which something was skipped, retried, rejected, slashed or refused.

    One vocabulary for the whole project: an operator greps for these words, an audit compares them.
    """

    # Windows and runs.
    WINDOW_FINISHED = "window_finished"
    WINDOW_PASSED = "window_passed"
    WINDOW_NOT_OPEN = "window_not_open"
    NO_TIME_LEFT = "no_time_left"
    NO_ASSIGNMENT = "no_assignment"
    SELF_CHECK_FAILED = "self_check_failed"
    STOPPED = "stopped"
    SUPERSEDED = "superseded"
    SCHEDULE_STALLED = "schedule_stalled"
    SERVER_ERRORS = "server_errors"

    # Configuration and environment.
    BAD_ENVIRONMENT = "bad_environment"
    BAD_PARAMETERS = "bad_parameters"
    NOT_CONFIRMED = "not_confirmed"
    BAD_HPARAMS = "bad_hparams"
    PLAN_INVALID = "plan_invalid"
    PLAN_UNKNOWN = "plan_unknown"
    BAD_WALLET = "bad_wallet"
    NOT_REGISTERED = "not_registered"
    PORT_TAKEN = "port_taken"
    ALREADY_RUNNING = "already_running"
    LEASE_LOST = "lease_lost"
    BAD_STATE_FILE = "bad_state_file"
    PROCESS_DIED = "process_died"
    REPORT_LOST = "report_lost"
    PROCESS_NOT_READY = "process_not_ready"
    COMPILER_MISSING = "compiler_missing"
    OUT_OF_MEMORY = "out_of_memory"
    TRAINER_FAILED = "trainer_failed"

    # Stores.
    STORE_UNREACHABLE = "store_unreachable"
    STORE_BUSY = "store_busy"
    TOO_SLOW = "too_slow"
    ACCESS_DENIED = "access_denied"
    BUCKET_MISSING = "bucket_missing"
    OBJECT_MISSING = "object_missing"
    OBJECT_EXISTS = "object_exists"
    OBJECT_TOO_LARGE = "object_too_large"
    OBJECT_DIFFERS = "object_differs"
    OBJECT_TRUNCATED = "object_truncated"
    BAD_KEY = "bad_key"
    STORE_REFUSED = "store_refused"
    LOCAL_FILE = "local_file"
    OBJECTS_LEFT = "objects_left"
    READ_KEY_WRITES = "read_key_writes"
    WRITE_KEY_REFUSED = "write_key_refused"

    # Chains.
    CHAIN_UNREACHABLE = "chain_unreachable"
    CHAIN_REFUSED = "chain_refused"
    CHAIN_RATE_LIMITED = "chain_rate_limited"
    CHAIN_FATE_UNKNOWN = "chain_fate_unknown"
    CHAIN_NOT_NOW = "chain_not_now"
    NO_VALIDATOR_PERMIT = "no_validator_permit"
    NOT_ENOUGH_STAKE = "not_enough_stake"
    CANNOT_PAY_FEES = "cannot_pay_fees"
    WEIGHTS_VERSION = "weights_version"
    WEIGHTS_MALFORMED = "weights_malformed"
    BLOCK_UNKNOWN = "block_unknown"
    ROLE_MISSING = "role_missing"
    COMMITMENT_MISSING = "commitment_missing"
    COMMITMENT_MALFORMED = "commitment_malformed"

    # What a peer published.
    COMMIT_MISSING = "commit_missing"
    COMMIT_EARLY = "commit_early"
    COMMIT_LATE = "commit_late"
    COMMIT_UNSEEN = "commit_unseen"
    TIME_UNPROVEN = "time_unproven"
    COMMIT_MISMATCH = "commit_mismatch"
    MANIFEST_MISSING = "manifest_missing"
    PAYLOAD_MISSING = "payload_missing"
    REVEAL_EARLY = "reveal_early"
    REVEAL_LATE = "reveal_late"
    MALFORMED = "malformed"
    BAD_SIGNATURE = "bad_signature"
    WRONG_IDENTITY = "wrong_identity"
    WRONG_NETWORK = "wrong_network"
    WRONG_WINDOW = "wrong_window"
    WRONG_ASSIGNMENT = "wrong_assignment"
    WRONG_SIZE = "wrong_size"
    WRONG_HASH = "wrong_hash"
    WRONG_VERSION = "wrong_version"
    WRONG_SHAPES = "wrong_shapes"
    NOT_CANONICAL = "not_canonical"
    BAD_PAYLOAD = "bad_payload"
    BUCKET_UNREADABLE = "bucket_unreadable"
    READER_FAILED = "reader_failed"

    # Agreement and state.
    ROSTER_MISSING = "roster_missing"
    ROSTER_EARLY = "roster_early"
    ROSTER_LATE = "roster_late"
    ROSTER_OMITS = "roster_omits"
    ROSTER_INCLUDES = "roster_includes"
    ROSTER_HARMFUL = "roster_harmful"
    ROSTER_EQUIVOCATION = "roster_equivocation"
    MANIFEST_EQUIVOCATION = "manifest_equivocation"
    WORD_EQUIVOCATION = "word_equivocation"
    PEER_LIST_LATE = "peer_list_late"
    AGGREGATE_MISSING = "aggregate_missing"
    DECISION_MISSING = "decision_missing"
    WORDS_HAVE_EXPIRED = "words_have_expired"
    MINORITY = "minority"
    NOT_APPLIED = "not_applied"
    ROOT_DIFFERS = "root_differs"
    CHECKPOINT_BROKEN = "checkpoint_broken"
    BACKUP_BROKEN = "backup_broken"
    GENESIS_MISSING = "genesis_missing"

    # Data.
    DATASET_MISSING = "dataset_missing"
    DATASET_MALFORMED = "dataset_malformed"
    DISK_FULL = "disk_full"
    NO_SHARDS = "no_shards"
    DATASET_TOO_SMALL = "dataset_too_small"
    TOKENIZER_MISSING = "tokenizer_missing"

    # Own work and scores.
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_UPDATE = "non_finite_update"
    DESYNC = "desync"
    INACTIVE = "inactive"
    BANNED = "banned"
    REGISTERED_AGAIN = "registered_again"
    INDEX_OVERLAP = "index_overlap"
    REPEATED_PAYLOAD = "repeated_payload"
    OVERSIZED = "oversized"
    OWN_DATA_UNLEARNT = "own_data_unlearnt"
    EVIDENCE_DIFFERS = "evidence_differs"
    EVIDENCE_MISSING = "evidence_missing"
    NOBODY_EARNED = "nobody_earned"
    WEIGHTS_DIFFER = "weights_differ"


class TemplarError(Exception):
    """An expected failure: a reason code for machines, and a message that names field, object and remedy."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)  # both, so that the error can be copied and pickled
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"[{self.reason}] {self.message}"


class TransientError(TemplarError):
    """A failure that a retry may survive."""


class PermanentError(TemplarError):
    """A failure that a retry cannot survive."""


class RejectedError(PermanentError):
    """A peer's object was not accepted. It never affects the handling of other peers."""


@contextmanager
def as_own_failure() -> Iterator[None]:
    """Turn permanent failures of this node's own chain or data, but no rejection, into transient ones."""
    try:
        yield
    except RejectedError:
        raise
    except PermanentError as error:
        raise TransientError(error.reason, error.message) from error


@contextmanager
def as_reader_failure(what: str) -> Iterator[None]:
    """Turn an unexpected exception of code that reads a peer into a transient failure: it is no verdict on the peer.

    `reader_failed` takes the place of every exception outside the two families; the log has where it arose.
    """
    try:
        yield
    except BaseException as error:
        if not _is_foreign_failure(error):
            raise
        problem = one_line(f"{what}: unexpected {type(error).__name__}: {error}")
        log.error("%s\n%s", problem, "".join(traceback.format_tb(error.__traceback__)))  # noqa: TRY400 - no raw text
        raise TransientError(Reason.READER_FAILED, f"{problem}; a fault of this node, please report it") from error


@contextmanager
def parsing(what: str, reason: Reason, *, size: int = 0, most: int = 0, remedy: str = "") -> Iterator[None]:
    """Run a parser that is not this project's over bytes that somebody else chose.

    Such a parser may end with any exception, whose text may have all of the bytes: it becomes one short PermanentError
    with this reason, that names `what` and the remedy. So do more than `most` bytes, which bounds memory and time. A
    machine without memory, or whose operating system failed, is a TransientError, `reader_failed`.
    """
    remedy = f"; {remedy}" if remedy else ""
    if size > most:
        raise PermanentError(reason, f"{what}: {size} bytes, at most {most} are legal{remedy}")
    try:
        yield
    except BaseException as error:
        if not _is_foreign_failure(error):
            raise
        problem = one_line(f"{what}: cannot be read: {type(error).__name__}: {error}", 300 + len(what))
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno):
            raise TransientError(Reason.READER_FAILED, f"{problem}; a fault of this machine") from None
        raise PermanentError(reason, f"{problem}{remedy}") from None


def _is_foreign_failure(error: BaseException) -> bool:
    """Whether an exception is neither ours nor a request to stop; a panic of a library in Rust is no `Exception`."""
    is_ours = isinstance(error, TemplarError)
    return not is_ours and (isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime")


def one_line(text: str, most: int = 300) -> str:
    """The first characters of a text that somebody else chose, with what a terminal or a log would not show escaped."""
    plain = (each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text[:most])
    return "".join(plain)
