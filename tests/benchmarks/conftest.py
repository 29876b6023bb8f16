import json

import pytest


@pytest.fixture
def measure(monkeypatch, capsys):
    """Runs a benchmark's `main`; its exit status, the lines of its table, and the figures of its last line."""

    def run(main, *arguments):
        monkeypatch.setattr("sys.argv", ["benchmark", *(arguments or ["--quick"])])
        code = main()
        *table, last = capsys.readouterr().out.splitlines()
        return code, table, json.loads(last)

    return run
