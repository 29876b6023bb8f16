"""Artifacts: tables of gather outcomes and scores, pictures, and progress bars; history is under the key in the UI."""

import base64
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

log = logging.getLogger("templar.artifacts")


def table(key: str, rows: list[dict[str, Any]], description: str) -> None:
    """Show rows as a table in the UI; an empty table says so."""
    with _optional(key):
        create_table_artifact(key=key, table=rows or [{"": "nothing"}], description=description)


def picture(key: str, svg: bytes, description: str) -> None:
    """Show a drawing in the UI.

    It is Markdown with the drawing in it: an artifact of the kind that is for images takes an address, and prints it.
    """
    drawing = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    with _optional(key):
        create_markdown_artifact(key=key, markdown=f"![{key}]({drawing})", description=description)


def progress(key: str, description: str) -> Callable[[float], None]:
    """A bar in the UI, and what moves it to a percentage; the server hears of whole percents only."""
    artifact: Any = None
    shown = 0
    with _optional(key):
        artifact = create_progress_artifact(progress=0.0, key=key, description=description)

    def show(percentage: float) -> None:
        nonlocal shown
        if artifact is not None and int(percentage) != shown:
            shown = int(percentage)
            with _optional(key):
                update_progress_artifact(artifact, percentage)

    return show


@contextmanager
def _optional(key: str) -> Iterator[None]:
    """A server that does not answer costs the artifact, never the step: its work is done or goes on."""
    try:
        yield
    except (httpx.HTTPError, PrefectException) as error:
        log.warning("the artifact %s is not shown: %r", key, error)
