import json
from collections.abc import Callable
from typing import Any

import pytest

Figures = tuple[int, list[str], dict[str, Any]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Figures]:
    """Runs a benchmark's `main`; its exit status, the lines of its table, and the figures of its last line."""

    def run(main: Callable[[], int], *arguments: str) -> Figures:
        monkeypatch.setattr("sys.argv", ["benchmark", *(arguments or ["--quick"])])
        code = main()
        *table, last = capsys.readouterr().out.splitlines()
        return code, table, json.loads(last)

    return run
