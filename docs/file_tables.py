"""The generated parts of pages: `python -m docs.file_tables`.

docs/architecture.md has a table of files, from the first line of each, and the lengths of files on the reading path.
docs/threat-model.md has a table that says where each test which the page names is, docs/hparams.md one of all settings,
docs/from-templar.md the words of the reference, docs/troubles.md symptoms and their causes, docs/commands.md options.
Generated tables stand between two marks, and `make lint` fails while a page differs.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from deployments.command import PAGE as COMMANDS
from docs import command_help, from_templar, settings_table, troubles

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGE, THREATS = DOCS / "architecture.md", DOCS / "threat-model.md"
PARTS = {
    DOCS / "hparams.md": settings_table.tables,
    DOCS / "from-templar.md": from_templar.tables,
    DOCS / "troubles.md": troubles.table,
    COMMANDS: command_help.sections,
}
PAGES = PAGE, THREATS, *PARTS
FOLDERS = ("templar", "flows", "tasks", "blocks", "deployments", "lab", "benchmarks", "docs")
BEGIN, END = "<!-- python -m docs.file_tables writes from here -->\n", "<!-- to here -->\n"
PATH_ROW = re.compile(r"^(\| \d+ \| )`([^`]+\.py)`( \| )[\d,]+( \| .*)$", re.MULTILINE)


def first_line(file: Path) -> str:
    """Return what a file says that it is, without a full stop, fit for a cell of a table."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".").replace("|", "\\|")


def length(file: Path) -> int:
    """The lines of a file."""
    return len(file.read_text(encoding="utf-8").splitlines())


def rooms() -> Iterator[tuple[Path, list[Path]]]:
    """Each folder that has a table, and its files; a folder within a room is in the room's table."""
    for folder in (ROOT / name for name in FOLDERS):
        inner = [*folder.glob("*/__init__.py")] if folder.name in ("templar", "lab") else []
        own = folder.glob("*.py") if inner else folder.rglob("*.py")
        for room, found in ((folder, own), *((each.parent, each.parent.rglob("*.py")) for each in sorted(inner))):
            files = [file for file in sorted(found) if file.name != "__init__.py"]
            yield room, files


def tables() -> str:
    """All tables."""
    parts = []
    for room, files in rooms():
        parts.append(f"### {room.relative_to(ROOT)}/\n")
        if (package := room / "__init__.py").exists():
            parts.append(f"{first_line(package)}.\n")
        rows = [f"| `{file.relative_to(room)}` | {length(file)} | {first_line(file)} |" for file in files]
        parts.append("\n".join(["| file | lines | what it is |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def path_lengths(page: str) -> str:
    """The page with the length of each file on the reading path."""
    return PATH_ROW.sub(lambda row: f"{row[1]}`{row[2]}`{row[3]}{length(ROOT / row[2])}{row[4]}", page)


def test_table(page: str) -> str:
    """The file of each test that a page names; ValueError if there is no such test."""
    files: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^ *def (test_\w+)\(", file.read_text(encoding="utf-8"), re.MULTILINE):
            files.setdefault(name, []).append(f"`{file.relative_to(ROOT)}`")
    rows = ["| test | file |", "|---|---|"]
    for name in sorted(set(re.findall(r"`(test_\w+)`", page))):
        if name not in files:
            raise ValueError(f"{THREATS.name} names {name}: there is no such test")
        rows.append(f"| {name} | {', '.join(dict.fromkeys(files[name]))} |")
    return "\n".join([*rows, ""])


def between_marks(page: str, text: str) -> str:
    """The page with another text between its marks; ValueError if a mark is missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a page has lost its marks: {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def written(file: Path) -> str:
    """The text of a page with generated parts, as it should be."""
    page = file.read_text(encoding="utf-8")
    if file == THREATS:
        return between_marks(page, test_table(by_hand(page)))
    if file in PARTS:
        return between_marks(page, PARTS[file]())
    return between_marks(path_lengths(page), tables())


def by_hand(page: str) -> str:
    """Return what people have written of a page."""
    before, _, rest = page.partition(BEGIN)
    return before + rest.partition(END)[2]


def main() -> int:
    """Write the pages."""
    for file in PAGES:
        file.write_text(written(file), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
