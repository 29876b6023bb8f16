"""The table of docs/hparams.md: every setting with its meaning, limits, and value in each preset."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from templar.hparams import HParams, load_hparams

PRESETS = ("150M", "1B", "8B", "70B", "templar-2.1.3", "local")
SIGNS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def tables() -> str:
    """One table for each section."""
    values = {name: load_hparams(name).model_dump(mode="json") for name in PRESETS}
    parts = []
    for section, field in HParams.model_fields.items():
        group = group_of(field)
        if group is None:
            raise TypeError(f"{section} is no group of settings")
        parts += [f"## {section}\n", f"{linked(group.__doc__)}\n"]
        parts += ["| setting | meaning | limits | value |", "|---|---|---|---|"]
        parts += rows(group, section, values)
        parts.append("")
    return "\n".join(parts)


def rows(group: type[BaseModel], path: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A row for each setting of a group, and of the groups in it."""
    for name, field in group.model_fields.items():
        key = f"{path}.{name}"
        if (inner := group_of(field)) is not None:
            yield from rows(inner, key, values)
            continue
        cells = f"`{key.partition('.')[2]}`", linked(field.description), limits(field), in_presets(key, values)
        yield f"| {' | '.join(cells)} |"


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """The group that a setting is, if it is one; null stands beside it where there may be none."""
    return next((kind for kind in kinds_of(field) if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def linked(text: str | None) -> str:
    """A docstring as it stands in a page."""
    plain = " ".join((text or "").split()).replace("|", "\\|")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", plain)


def limits(field: FieldInfo) -> str:
    """The values that a setting may have."""
    words = next((get_args(each) for each in kinds_of(field) if get_origin(each) is Literal), ())
    signs = [
        f"{sign} {getattr(each, name):g}" for each in field.metadata for name, sign in SIGNS if hasattr(each, name)
    ]
    return ", ".join([*(f"`{word}`" for word in words), *signs])


def kinds_of(field: FieldInfo) -> tuple[Any, ...]:
    """The type of a setting, and those that it is a union of."""
    return field.annotation, *get_args(field.annotation)


def in_presets(key: str, values: Mapping[str, Any]) -> str:
    """The value, with the presets that have it if it is not that of all."""
    found: dict[str, list[str]] = {}
    for preset, settings in values.items():
        value = settings
        for name in key.split("."):
            value = None if value is None else value[name]
        found.setdefault(f"`{value if isinstance(value, str) else json.dumps(value)}`", []).append(preset)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{text} {', '.join(presets)}" for text, presets in found.items())
