"""An operator for each test, on the one Prefect server; and calls of commands in this process."""

import sys

import pytest

from deployments.command import exit_status
from tests.support.operator import Operator


@pytest.fixture
def operator(prefect_server, tmp_path):
    with prefect_server.client() as client:
        operator = Operator(prefect_server, client, tmp_path)
        yield operator
        operator.stop_workers()


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Calls a command's `main` with arguments; its exit status, output and errors."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        try:
            status = exit_status(main)
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run
