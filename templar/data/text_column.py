"""A column of text in a Parquet or Arrow file, in any of the types that Arrow has for text."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


class TextColumnError(Exception):
    """A column is not one of texts. The message names column, row and remedy; the caller knows the file."""


def require_texts(schema: Any, name: str) -> None:
    """Check that a schema has one column of a name, and that it holds strings: plain, large, views, encoded or tagged.

    Raises:
        TextColumnError: It does not.
    """
    fields = [field for field in schema if field.name == name]
    if not fields:
        there = ", ".join(schema.names) or "none"
        raise TextColumnError(f"no column {name!r}; there are {there}: name one of them")
    if len(fields) > 1:
        raise TextColumnError(f"{len(fields)} columns have the name {name!r}: rename all but one")
    if not _is_text(fields[0].type):
        raise TextColumnError(f"column {name!r} holds {fields[0].type}, not strings: name another column")


def texts_of(rows: Any, name: str, first_row: int = 0) -> Any:
    """A column of a batch or a table as plain strings in UTF-8, none of them null.

    `first_row` is the number that the first row has in messages.

    Raises:
        TextColumnError: As in `require_texts`; a row is null or not UTF-8, or the column is damaged.
    """
    require_texts(rows.schema, name)
    column = rows.column(rows.schema.get_field_index(name))
    while not _is_plain(kind := column.type):
        if pa.types.is_run_end_encoded(kind):
            column = pc.run_end_decode(column)
        else:
            column = column.cast(kind.value_type if pa.types.is_dictionary(kind) else kind.storage_type)
    if column.null_count:
        row = first_row + column.is_null().index(True).as_py()
        raise TextColumnError(f"row {row} of column {name!r} is null: drop such rows")
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        for row, text in enumerate(column if "UTF8" in str(error) else (), first_row):
            try:
                text.as_py()
            except UnicodeDecodeError:
                raise TextColumnError(f"row {row} of column {name!r} is not UTF-8: repair it") from None
        raise TextColumnError(f"column {name!r} is damaged ({error}): restore the file") from None
    return column


def _is_plain(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    return _is_text(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else _is_plain(kind)
