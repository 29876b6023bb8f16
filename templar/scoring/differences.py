"""Two accounts of one window, field by field: where they part, by name.

What was measured with floating point may be compared within a tolerance, for other hardware; everything else is
compared exactly.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from statistics import median
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from templar.scoring.evidence import Evidence, Likeness, SlashRecord, WindowFacts

KEYS = ("uid", "hotkey", "subject")
"""What the parts of an evidence are known by, where they are lists."""


MOST_CHARACTERS = 80
"""Of a value that is shown."""


_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Difference:
    """One thing that was published and is not so.

    Attributes:
        where: The field, such as `miners[uid 7].after.mu`.
        published: What was published, for people.
        recomputed: What follows from the public objects, for people; empty if `published` says what is wrong.
        suspects: Uids of whom one at least is at fault; a single one is.
    """

    where: str
    published: str
    recomputed: str
    suspects: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"{self.where}: {self.published}"
        if self.recomputed:
            text = f"{self.where}: published {self.published}, recomputed {self.recomputed}"
        return text if len(self.suspects) < 2 else f"{text} (uid {' or uid '.join(map(str, self.suspects))})"


@dataclass(frozen=True)
class Closeness:
    """When two measured numbers are the same.

    Attributes:
        relative: How far apart they may be, relative to the larger one of what was recomputed and what is usual.
        usual: Field -> the median size of its numbers in the window: a gain may be next to nothing.
    """

    relative: float = 0.0
    usual: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, relative: float, recomputed: WindowFacts) -> "Closeness":
        """For the facts of one window.

        Args:
            relative: 0 for exactly.
            recomputed: The own account; that of others must not widen what is close.
        """
        sizes: dict[str, list[float]] = {}
        for miner in recomputed.miners:
            for part in (miner.estimate, miner.measurement, miner.overlap, miner.repeat):
                for name, value in _parts(part) if part is not None else ():
                    if isinstance(value, float):
                        sizes.setdefault(name, []).append(abs(value))
        return cls(relative, {name: median(values) for name, values in sizes.items()})

    def holds(self, name: str, published: float, recomputed: float) -> bool:
        """Whether the two numbers of a field are the same."""
        size = max(abs(recomputed), self.usual.get(name, 0.0))
        return published == recomputed or abs(published - recomputed) <= self.relative * size


EXACTLY = Closeness()


def compare_facts(
    published: WindowFacts, recomputed: WindowFacts, *, tolerance: float = 0.0, measured: bool = True
) -> tuple[Difference, ...]:
    """Where the facts of a window part, as the evidence names its fields.

    Args:
        published: The facts of an evidence.
        recomputed: The same window, seen and measured again.
        tolerance: How far apart measured numbers may be, relatively; 0 for exactly.
        measured: Whether the measured numbers are compared at all; without them, only what was seen.
    """
    closeness = Closeness.of(tolerance, recomputed)
    if not measured:
        published, recomputed = _unmeasured(published), _unmeasured(recomputed)
    mine, theirs = ({miner.uid: miner for miner in facts.miners} for facts in (recomputed, published))
    found = [
        *_compare_keys("miners", "uid", published.miners, recomputed.miners),
        *_compare_parts("", published, recomputed, closeness, but="miners"),
    ]
    for uid, miner in theirs.items():
        if uid in mine:
            found.extend(_compare(f"miners[uid {uid}].facts", miner, mine[uid], closeness))
    return tuple(found)


def compare_evidence(published: Evidence, recomputed: Evidence) -> tuple[Difference, ...]:
    """Where an evidence parts from what follows from its own facts, exactly."""
    return tuple(_compare_parts("", published, recomputed, EXACTLY))


def _unmeasured(facts: WindowFacts) -> WindowFacts:
    """The same without numbers."""
    nothing = dict.fromkeys(("estimate", "measurement", "norm_ratio", "overlap", "repeat"))
    miners = tuple(miner.model_copy(update=nothing) for miner in facts.miners)
    return WindowFacts(
        facts.window, facts.roster, facts.root_before, facts.outer_steps, facts.seed_block, loss=None, miners=miners
    )


def _compare(where: str, published: Any, recomputed: Any, closeness: Closeness) -> Iterator[Difference]:
    name = where.rpartition(".")[2]
    if isinstance(published, float) and isinstance(recomputed, float):
        if not closeness.holds(name, published, recomputed):
            yield _difference(where, published, recomputed)
    elif isinstance(published, BaseModel) and type(published) is type(recomputed):
        yield from _compare_parts(where, published, recomputed, closeness)
    elif _key(published, recomputed) is not None:
        yield from _compare_lists(where, published, recomputed, closeness)
    elif published != recomputed:
        yield _difference(where, published, recomputed)


def _compare_parts(
    where: str, published: Any, recomputed: Any, closeness: Closeness, *, but: str | None = None
) -> Iterator[Difference]:
    theirs = dict(_parts(recomputed))
    for name, value in _parts(published):
        if name != but:
            yield from _compare(f"{where}.{name}" if where else name, value, theirs[name], closeness)


def _compare_lists(
    where: str, published: Sequence[Any], recomputed: Sequence[Any], closeness: Closeness
) -> Iterator[Difference]:
    """Lists whose parts have names: a part that is missing is one difference, and moves no other."""
    key = _key(published, recomputed) or ""
    yield from _compare_keys(where, key, published, recomputed)
    mine = {getattr(each, key): each for each in recomputed}
    for each in published:
        name = getattr(each, key)
        if name in mine:
            yield from _compare(f"{where}[{key} {name}]", each, mine[name], closeness)


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
    """What the parts of two lists are known by; None if they are no such lists."""
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
    """A value for people, in one short line."""
    if value is None or value == ():
        return "nothing"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, str):
        return value[:12] if _DIGEST.fullmatch(value) else value[:MOST_CHARACTERS]
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
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
