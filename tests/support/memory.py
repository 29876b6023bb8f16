"""Folders in memory for tests that write many small files; on the disk where there is no such memory."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from templar.simulate.run import memory_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that is removed after the test."""
    with tempfile.TemporaryDirectory(prefix="templar-test-", dir=memory_folder()) as name:
        yield Path(name)
