"""The preview command says where text is from, and shows it without obeying it."""

import io
import sys

import pytest
from rich.console import Console

from deployments import preview as command
from templar.data.dataset import PageOrigin
from templar.errors import PermanentError, Reason
from templar.neuron.workload import Preview

PAGES = (PageOrigin(7, "books", 96, 32, 4567), PageOrigin(3, "[red]code", 0, 32, 89))
FOUND = Preview(12, 4, 216, "ab" * 32, PAGES, 20, ("first [bold]text", "second\x1b[2J\n\tline\u00a0and"))


def shown(found: Preview) -> str:
    console = Console(file=io.StringIO(), width=100)
    command.show(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_pages_and_texts() -> None:
    text = shown(FOUND)
    assert "window 12 (from block 216), uid 4, assignment abababababab" in text
    assert "96 to 127" in text
    assert "[red]code" in text
    assert "20 sequences; the first 2 in training order:" in text
    assert "first [bold]text" in text
    assert "second�[2J" in text
    assert "line\u00a0and" in text
    assert "\x1b" not in text


def test_nothing_assigned() -> None:
    assert "all slots were taken" in shown(Preview(12, 4, 216, "ab" * 32, (), 0, ()))


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise PermanentError(Reason.BAD_ENVIRONMENT, "there is none")

    monkeypatch.setattr(command, "run", refuse)
    monkeypatch.setattr(sys, "argv", ["preview", "--uid", "3"])
    assert command.main() == 1
    assert capsys.readouterr().err == "[bad_environment] there is none\n"
