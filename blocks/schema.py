"""The schema of a block class, generated once."""

from functools import cache
from typing import Any


class SchemaOnce:
    """A base of our block classes, before `Block`, with which saving a block takes little time.

    To save a block, Prefect asks for the schema of its class once per field, and the schema of each block in it.
    Generating these took half of the CPU time of a local network's start.
    """

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the class's JSON schema, as pydantic's method of this name; callers do not change it."""
        kind: Any = cls  # mypy takes no class for hashable
        return _schema(kind, *arguments, **options)


@cache
def _schema(kind: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    schema: dict[str, Any] = super(SchemaOnce, kind).model_json_schema(*arguments, **options)
    return schema
