"""The schema of a block class, generated once."""

from functools import cache
from typing import Any


class SchemaOnce:
    """A base of our block classes, before `Block`, whose saving needs no second of the CPU.

    To save a block, Prefect asks for the schema of its class once per field, and the schema of each block in it.
    Generating these took half of the CPU time of a local network's start.
    """

    @classmethod
    @cache
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the class's JSON schema, as pydantic's method of this name; callers do not change it."""
        base: Any = super()
        schema: dict[str, Any] = base.model_json_schema(*arguments, **options)
        return schema
