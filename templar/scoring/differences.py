"""Compare two accounts of one window field by field, and name the fields that differ.

Measured numbers may be compared within a tolerance, for another device or precision; everything else is compared
exactly.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum, StrEnum
from statistics import median
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from templar.scoring.evidence import Estimate, Evidence, Likeness, Measurement, SlashRecord, WindowFacts

KEYS = ("uid", "hotkey", "subject")  # fields that identify the items of an evidence's lists
MAX_CHARACTERS = 80  # length of a value that is shown
LOSS_TOLERANCE = 1e-3
"""Allowed distance of two losses that were measured on different devices or in different precisions, relative to the
recomputed one (docs/validator.md says how it was found)."""
GAIN_TOLERANCE = 2e-2
"""The same of two first-order gains, relative to the larger of the recomputed one and their median in the window."""
_GAINS = ("own_gain", "random_gain", "expected")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MEASURED = re.compile(r"loss|miners\[uid \d+\]\.facts\.(estimate|measurement)(\..*)?")


class DifferenceKind(StrEnum):
    """The names of the fields that differ."""

    OBSERVATION = "observation"
    MEASUREMENT = "measurement outside the tolerance"
    DERIVATION = "derivation"


@dataclass(frozen=True)
class Difference:
    """A published value that the public objects contradict; values are texts for people."""

    where: str  # the field, such as `miners[uid 7].after.mu`
    published: str
    recomputed: str  # empty if `published` says what is wrong
    suspects: tuple[int, ...] = ()  # uids, at least one of which is at fault
    kind: DifferenceKind | None = field(default=None, compare=False)
    """None outside of facts and of what follows from them."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.published}"
        if self.recomputed:
            text = f"{self.where}: published {self.published}, recomputed {self.recomputed}"
        more = [] if self.kind is None else [self.kind.value]
        more += [] if len(self.suspects) < 2 else [f"uid {' or uid '.join(map(str, self.suspects))}"]
        return f"{text} ({'; '.join(more)})" if more else text


@dataclass(frozen=True)
class Tolerance:
    """When two measured numbers are equal."""

    relative: float = 0.0
    """Allowed distance, relative to the larger of the recomputed number and the typical size of its field."""
    limits: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Field -> another allowed distance."""
    typical: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Field -> median size of its recomputed numbers in the window, for a gain may be almost zero. Published numbers
    have no part in it: they must not widen the tolerance."""

    @classmethod
    def of(cls, relative: float | None, recomputed: WindowFacts) -> "Tolerance":
        """Return the tolerance for the facts of one window; None for what different devices and precisions make."""
        sizes: dict[str, list[float]] = {}
        for miner in recomputed.miners:
            for part in (miner.estimate, miner.measurement, miner.overlap, miner.repeat):
                for name, value in _parts(part) if part is not None else ():
                    if isinstance(value, float):
                        sizes.setdefault(name, []).append(abs(value))
        typical = {name: median(values) for name, values in sizes.items()}
        if relative is not None:
            return cls(relative, typical=typical)
        losses = dict.fromkeys(("loss", *Estimate.model_fields, *Measurement.model_fields), LOSS_TOLERANCE)
        # What to expect is a difference of relative gains, each as uncertain as a gain, and may be much smaller.
        gain, before = typical.get("random_gain", 0.0), typical.get("random_before", 0.0)
        typical["expected"] = max(typical.get("expected", 0.0), gain / before if before else 0.0)
        return cls(limits=losses | dict.fromkeys(_GAINS, GAIN_TOLERANCE), typical=typical)

    def allows(self, name: str, published: float, recomputed: float) -> bool:
        """Return whether the two numbers of a field are equal."""
        size = max(abs(recomputed), self.typical.get(name, 0.0))
        return published == recomputed or abs(published - recomputed) <= self.limits.get(name, self.relative) * size


EXACT = Tolerance()


def compare_facts(
    published: WindowFacts, recomputed: WindowFacts, *, tolerance: float | None = 0.0, measured: bool = True
) -> tuple[Difference, ...]:
    """Return where the facts of a window differ, by the evidence's names of the fields.

    `tolerance` is the allowed relative distance of measured numbers: 0 for equality, None for `LOSS_TOLERANCE` and
    `GAIN_TOLERANCE`. Only observations are compared if not `measured`.
    """
    allowed = Tolerance.of(tolerance, recomputed)
    if not measured:
        published, recomputed = _unmeasured(published), _unmeasured(recomputed)
    mine, theirs = ({miner.uid: miner for miner in facts.miners} for facts in (recomputed, published))
    found = [
        *_compare_keys("miners", "uid", published.miners, recomputed.miners),
        *_compare_parts("", published, recomputed, allowed, but=("miners", "measured_on")),
    ]
    for uid, miner in theirs.items():
        if uid in mine:
            found.extend(_compare(f"miners[uid {uid}].facts", miner, mine[uid], allowed))
    kinds = DifferenceKind.OBSERVATION, DifferenceKind.MEASUREMENT
    return tuple(replace(each, kind=kinds[_MEASURED.fullmatch(each.where) is not None]) for each in found)


def compare_evidence(published: Evidence, recomputed: Evidence) -> tuple[Difference, ...]:
    """Return where an evidence differs from the conclusion from its own facts, exactly."""
    return tuple(_compare_parts("", published, recomputed, EXACT))


def _unmeasured(facts: WindowFacts) -> WindowFacts:
    """Return the facts without measured numbers."""
    nothing = dict.fromkeys(("estimate", "measurement", "sequences", "norm_ratio", "overlap", "repeat"))
    return replace(facts, loss=None, miners=tuple(miner.model_copy(update=nothing) for miner in facts.miners))


def _compare(where: str, published: Any, recomputed: Any, tolerance: Tolerance) -> Iterator[Difference]:
    name = where.rpartition(".")[2]
    if isinstance(published, float) and isinstance(recomputed, float):
        if not tolerance.allows(name, published, recomputed):
            yield _difference(where, published, recomputed)
    elif isinstance(published, BaseModel) and type(published) is type(recomputed):
        yield from _compare_parts(where, published, recomputed, tolerance)
    elif _key(published, recomputed) is not None:
        yield from _compare_lists(where, published, recomputed, tolerance)
    elif published != recomputed:
        yield _difference(where, published, recomputed)


def _compare_parts(
    where: str, published: Any, recomputed: Any, tolerance: Tolerance, *, but: Collection[str] = ()
) -> Iterator[Difference]:
    theirs = dict(_parts(recomputed))
    for name, value in _parts(published):
        if name not in but:
            yield from _compare(f"{where}.{name}" if where else name, value, theirs[name], tolerance)


def _compare_lists(
    where: str, published: Sequence[Any], recomputed: Sequence[Any], tolerance: Tolerance
) -> Iterator[Difference]:
    """Compare lists by their items' keys: a missing item is one difference, and shifts no other."""
    key = _key(published, recomputed) or ""
    yield from _compare_keys(where, key, published, recomputed)
    mine = {getattr(each, key): each for each in recomputed}
    for each in published:
        name = getattr(each, key)
        if name in mine:
            yield from _compare(f"{where}[{key} {name}]", each, mine[name], tolerance)


def _compare_keys(where: str, key: str, published: Sequence[Any], recomputed: Sequence[Any]) -> Iterator[Difference]:
    theirs, mine = [getattr(each, key) for each in published], [getattr(each, key) for each in recomputed]
    for name in sorted({*theirs} ^ {*mine}):
        here = f"{where}[{key} {name}]"
        if name in theirs:
            yield _difference(here, published[theirs.index(name)], None)
        else:
            yield _difference(here, None, recomputed[mine.index(name)])
    if theirs != mine and {*theirs} == {*mine}:
        yield _difference(f"{where} in order", theirs, mine)


def _key(published: Any, recomputed: Any) -> str | None:
    """Return the field that identifies the items of two lists; None for anything else."""
    if not isinstance(published, tuple) or not isinstance(recomputed, tuple) or not (published or recomputed):
        return None
    first = (published or recomputed)[0]
    if not isinstance(first, BaseModel):
        return None
    return next((key for key in KEYS if hasattr(first, key)), None)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        yield from ((each.name, getattr(value, each.name)) for each in fields(value))
    else:
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)


def _difference(where: str, published: Any, recomputed: Any) -> Difference:
    return Difference(where, shown(published), shown(recomputed))


def shown(value: Any) -> str:
    """Return a value as one short line for people."""
    if value is None or value == ():
        return "nothing"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return value[:12] if _DIGEST.fullmatch(value) else value[:MAX_CHARACTERS]
    if isinstance(value, tuple | list):
        text = ", ".join(map(shown, value))
    elif isinstance(value, SlashRecord):
        text = f"{value.event.value} ({value.reason.value})"
    elif isinstance(value, Likeness):
        text = f"{value.share!r} like uid {value.uid}"
    elif isinstance(value, BaseModel):
        text = value.model_dump_json(exclude_none=True)
    else:
        text = repr(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
