"""Object keys: one grammar, written and parsed here (docs/protocol.md 4).

The documented stems are kept (`gradient-{window}-{uid}-v{version}`, ...); `version` is the protocol version. Publishing
and clean-up both use `ObjectKey`, so they cannot understand a key differently.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from templar import PROTOCOL_VERSION


class Kind(StrEnum):
    """Kind of object; the value is the first word of its key."""

    COMMIT = "commit"
    MANIFEST = "manifest"
    GRADIENT = "gradient"
    AGGREGATE = "aggregator"
    ROSTER = "roster"
    DECISION = "decision"
    WORD = "word"  # in a decision, never under a key of its own
    PROOF = "proof"
    REPORT = "report"
    EVIDENCE = "evidence"
    DEBUG = "debug"
    CHECKPOINT = "checkpoint"
    PRIVATE = "private"
    PEERS = "peers"
    START_WINDOW = "start_window"
    SETTINGS = "settings"  # not signed: the start window has its digest
    PLAN = "plan"
    LEASE = "lease"
    HEARTBEAT = "lease_heartbeat"


_SUFFIX = {Kind.GRADIENT: ".bin", Kind.AGGREGATE: ".bin", Kind.PRIVATE: ".bin", Kind.CHECKPOINT: ""}
_LEASES = (Kind.LEASE, Kind.HEARTBEAT)
_SINGLE = (Kind.START_WINDOW, Kind.SETTINGS, Kind.PLAN)
_SPECIAL = (Kind.AGGREGATE, Kind.CHECKPOINT, Kind.PEERS, Kind.WORD, *_SINGLE, *_LEASES)
_PER_WINDOW = "|".join(kind for kind in Kind if kind not in _SPECIAL)

_NUMBER = r"(?:0|[1-9][0-9]{0,11})"
_VERSION = r"v(?P<version>[0-9A-Za-z.+]{1,32}?)"
_FILE = r"(?P<file>[0-9A-Za-z][0-9A-Za-z._-]{0,127})"

_PATTERNS = (
    re.compile(rf"(?P<kind>{_PER_WINDOW})-(?P<window>{_NUMBER})-(?P<uid>{_NUMBER})-{_VERSION}(?:\.json|\.bin)"),
    re.compile(rf"(?P<kind>checkpoint)-(?P<window>{_NUMBER})-(?P<uid>{_NUMBER})-{_VERSION}/{_FILE}"),
    re.compile(rf"(?P<kind>aggregator)-(?P<window>{_NUMBER})-{_VERSION}\.bin"),
    re.compile(rf"(?P<kind>peers)_(?P<window>{_NUMBER})_{_VERSION}\.json"),
    re.compile(rf"(?P<kind>{'|'.join(_SINGLE)})_{_VERSION}\.json"),
    re.compile(rf"(?P<kind>{'|'.join(_LEASES)})-(?P<role>[a-z]{{1,16}})-(?P<holder>[0-9a-f]{{32}})-{_VERSION}\.json"),
)

_LEGACY_PATTERNS = (
    re.compile(rf"(?P<kind>gradient|debug|checkpoint)-{_NUMBER}-{_NUMBER}-{_VERSION}\.pt"),
    re.compile(rf"(?P<kind>aggregator)-{_NUMBER}-{_VERSION}\.pt"),
    re.compile(r"(?P<kind>gathers|checkpoints)/(?P<version>[0-9A-Za-z.+]{1,32})/.+", re.DOTALL),
)


@dataclass(frozen=True)
class ObjectKey:
    """The parts of a key."""

    kind: Kind
    window: int | None = None  # None for the start window, the settings, the plan and leases
    uid: int | None = None  # the publisher; None for these, aggregates and peer lists
    version: str = PROTOCOL_VERSION
    file: str | None = None  # name inside a checkpoint's folder
    role: str | None = None  # of a leased neuron
    holder: str | None = None  # of the lease

    def __str__(self) -> str:
        suffix = _SUFFIX.get(self.kind, ".json")
        if self.kind in _SINGLE:
            return f"{self.kind}_v{self.version}{suffix}"
        if self.kind is Kind.PEERS:
            return f"peers_{self.window}_v{self.version}{suffix}"
        if self.kind is Kind.AGGREGATE:
            return f"aggregator-{self.window}-v{self.version}{suffix}"
        if self.kind in _LEASES:
            return f"{self.kind}-{self.role}-{self.holder}-v{self.version}{suffix}"
        file = "" if self.file is None else f"/{self.file}"
        return f"{self.kind}-{self.window}-{self.uid}-v{self.version}{suffix}{file}"


def parse_key(text: str) -> ObjectKey | None:
    """Parse a key; None if it does not follow the grammar. `str(parse_key(text)) == text` for all others."""
    for pattern in _PATTERNS:
        if match := pattern.fullmatch(text):
            parts: dict[str, Any] = match.groupdict()
            parts |= {name: int(parts[name]) for name in ("window", "uid") if name in parts}
            key = ObjectKey(**parts | {"kind": Kind(parts["kind"])})
            return key if str(key) == text else None
    return None


def parse_current_key(text: str) -> ObjectKey | None:
    """As `parse_key`, and None for other protocol versions, whose objects are neither read nor deleted."""
    key = parse_key(text)
    return key if key is not None and key.version == PROTOCOL_VERSION else None


def parse_legacy_key(text: str) -> tuple[str, str] | None:
    """Kind and version of an object of the reference system, for clean-up; None if the key is not of that form."""
    for pattern in _LEGACY_PATTERNS:
        if match := pattern.fullmatch(text):
            return match["kind"], match["version"]
    return None


def window_key(kind: Kind, window: int, uid: int) -> str:
    """The key of a per-window object of one neuron."""
    return str(ObjectKey(kind, window, uid))


def aggregate_key(window: int) -> str:
    """The key of a window's aggregate in its publisher's bucket."""
    return str(ObjectKey(Kind.AGGREGATE, window))


def peers_key(first_effective_window: int) -> str:
    """The key of the peer list that takes effect in a window."""
    return str(ObjectKey(Kind.PEERS, first_effective_window))


def checkpoint_key(window: int, uid: int, file: str) -> str:
    """The key of one file of a checkpoint."""
    return str(ObjectKey(Kind.CHECKPOINT, window, uid, file=file))


START_WINDOW_KEY = str(ObjectKey(Kind.START_WINDOW))  # the key of the start window object
SETTINGS_KEY = str(ObjectKey(Kind.SETTINGS))  # the key of the settings that a network started with
PLAN_KEY = str(ObjectKey(Kind.PLAN))  # the key of what an owner wants next
