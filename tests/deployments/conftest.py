"""An operator for each test, on the one Prefect server; and calls of commands in this process."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.command import exit_status
from tests.support.commands import Call
from tests.support.operator import Operator
from tests.support.prefect_server import RunningPrefectServer


@pytest.fixture
def operator(prefect_server: RunningPrefectServer, tmp_path: Path) -> Iterator[Operator]:
    with prefect_server.client() as client:
        operator = Operator(prefect_server, client, tmp_path)
        yield operator
        operator.stop_workers()


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command's `main` with arguments; its exit status, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(main: Callable[[], int], *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        try:
            status = exit_status(main)
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run
