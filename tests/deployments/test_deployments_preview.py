"""The preview command says where text is from, and shows it without obeying it."""

import io

from rich.console import Console

from deployments import preview as command
from templar.data.dataset import PageOrigin
from templar.neuron.workload import Preview

PAGES = (PageOrigin(7, "books", 96, 32, 4567), PageOrigin(3, "[red]code", 0, 32, 89))
FOUND = Preview(12, 4, 216, "ab" * 32, PAGES, 20, ("first [bold]text", "second\x1b[2J\n\tline\u00a0and"))


def shown(found):
    console = Console(file=io.StringIO(), width=100)
    command.show(found, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_pages_and_texts():
    text = shown(FOUND)
    assert "window 12 (from block 216), uid 4, assignment abababababab" in text
    assert "96 to 127" in text
    assert "[red]code" in text
    assert "20 sequences; the first 2 in training order:" in text
    assert "first [bold]text" in text
    assert "second�[2J" in text
    assert "line\u00a0and" in text
    assert "\x1b" not in text
