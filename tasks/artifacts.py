"""Table artifacts: one per window for gather outcomes, one for scores; history is under the key in the UI."""

from typing import Any

from prefect.artifacts import create_table_artifact


def table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    """Show rows as a table in the UI; an empty table says so."""
    create_table_artifact(key=key, table=rows or [{"": "nothing"}], description=description)
