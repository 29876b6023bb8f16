"""The rules of the house: sizes, import circles, names and words.

python -m tests.house

Every limit only falls: one above the smallest that was ever committed is refused. A feature whose issue states a budget
stands in `BUDGETS`, and nothing else raises a limit.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path

from docs.file_tables import PAGE, PAGES, PATH_ROW, THREATS, by_hand, length, written

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("templar", "blocks", "tasks", "flows", "deployments", "lab", "benchmarks", "docs")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CELL_WORDS = 60
LIMITS = {
    "files of templar/": 146,
    "lines of templar/": 32_979,
    "lines of blocks/, tasks/, flows/ and deployments/": 10_982,
    "lines of lab/, benchmarks/ and docs/": 9_971,
    "lines of tests/": 43_863,
    "files on the reading path": 10,
    "lines on the reading path": 3_162,
    "words of pages": 61_700,
    "lines with vague pronouns": 3,
}
BUDGETS: tuple[tuple[str, str, int], ...] = (
    (
        "lines of templar/",
        "the design of a network, optimizers, batches by speed, a mean over payloads, packing, what was mended later",
        733,
    ),
    ("lines of blocks/, tasks/, flows/ and deployments/", "its command, the operator's choice, the same", 137),
    ("lines of lab/, benchmarks/ and docs/", "the table of codes and optimizers, and that of speeds", 630),
    ("lines of tests/", "the tests of these", 546),
    ("files of templar/", "training that begins ahead, the inner optimizers, the plan and how it is read", 4),
    ("lines of templar/", "the same, margins that are learned, settings of the start, early rosters", 984),
    ("lines on the reading path", "the same", 151),
    (
        "lines of blocks/, tasks/, flows/ and deployments/",
        "the operator's switch, the owners' command, an upgrade",
        439,
    ),
    (
        "lines of lab/, benchmarks/ and docs/",
        "how long a device waits, windows of many steps, other settings, releases",
        377,
    ),
    (
        "lines of tests/",
        "the tests of training ahead, of margins, of the plan, of settings, upgrades and early rosters",
        1460,
    ),
    ("files of templar/", "the network's page, the reader for other programs and its order", 3),
    (
        "lines of blocks/, tasks/, flows/ and deployments/",
        "./.env, refusals, commands for buckets and releases, the page, clouds, an upgrade, lighter scheduled runs",
        962,
    ),
    (
        "lines of lab/, benchmarks/ and docs/",
        "the files that `prefect deploy` reads, pages for newcomers, the reader beside others",
        555,
    ),
    (
        "lines of templar/",
        "storage of other vendors, the page, what other programs read and write, mixtures, compressed shards, models",
        1272,
    ),
    ("lines on the reading path", "the total of a miner's tokens", 11),
    ("lines of tests/", "the tests of these", 1781),
)
"""What may be added to a limit: (limit, feature, number). The learner's features may have 1,500 lines of product and as
many of tests, those of a network that changes 1,800, those of the surface (the last six) 2,800 of each."""
RESULT_LINK = re.compile(r"\[([-\d.]+)\]\((benchmarks/results/[\w.-]+\.json)#([\w.]+)\)( %)?")
VAGUE = re.compile(r"\b(?:whoever|whatever|whichever)\b", re.IGNORECASE)
SHARED_MODULE_NAMES = {
    "__init__": "every package has one",
    "__main__": "every command has one",
    "base": "the contract of stores, and that of chains",
}

Graph = Mapping[str, set[str]]


def module_of(path: Path) -> str:
    """The module name of a file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def too_long(path: Path, tree: ast.Module) -> Iterator[str]:
    """Files and functions that are too long."""
    name, lines = path.relative_to(ROOT), len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules out of `modules` that a file imports, anywhere in it; names of a package count as the package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {
                name if (name := f"{node.module}.{alias.name}") in modules else node.module for alias in node.names
            }
    return found & modules


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components with more than one module, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


def repeated(names: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line for each name that stands in several places; pairs of name and place."""
    places = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return (f"{name} stands in {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1)


def problems_of_templar(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Import circles and repeated names inside templar/."""
    domain = {module_of(path): tree for path, tree in trees.items() if path.is_relative_to(ROOT / "templar")}
    for circle in circles({module: imports(tree, set(domain)) - {module} for module, tree in domain.items()}):
        yield f"import circle: {', '.join(circle)}"
    paths = [path for path in trees if path.is_relative_to(ROOT / "templar")]
    modules = ((path.stem, str(path.relative_to(ROOT))) for path in paths if path.stem not in SHARED_MODULE_NAMES)
    yield from (f"module {problem}" for problem in repeated(modules))
    classes = (
        (node.name, module)
        for module, tree in domain.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    yield from (f"class {problem}" for problem in repeated(classes))


def lines_of(paths: Iterable[Path]) -> Iterator[str]:
    """The lines of files."""
    for path in paths:
        yield from path.read_text(encoding="utf-8").splitlines()


def figures(files: Iterable[Path]) -> dict[str, int]:
    """What is limited, as it is."""
    lines = Counter[str]()
    for path in files:
        lines[path.relative_to(ROOT).parts[0]] += length(path) if path.name != "__init__.py" else 0
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve()]
    on_path = [ROOT / row[1] for row in PATH_ROW.findall(PAGE.read_text(encoding="utf-8"))]
    found = (
        sum(path.relative_to(ROOT).parts[0] == "templar" and path.name != "__init__.py" for path in files),
        lines["templar"],
        sum(lines[folder] for folder in ("blocks", "tasks", "flows", "deployments")),
        lines["lab"] + lines["benchmarks"] + lines["docs"],
        sum(length(path) for path in tests),
        len(on_path),
        sum(length(path) for path in on_path),
        sum(len(by_hand(page.read_text(encoding="utf-8")).split()) for page in pages),
        sum(VAGUE.search(line) is not None for line in lines_of([*files, *tests, *pages])),
    )
    return dict(zip(LIMITS, found, strict=True))


def long_cells(page: Path) -> Iterator[str]:
    """Cells of a page's tables with more words than one takes in at a glance; names of tests are no words."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        for cell in line.split("|")[1:-1] if line.startswith("|") else ():
            words = [word for word in cell.split() if not word.startswith("`test_")]
            if len(words) > MAX_CELL_WORDS:
                yield f"{page.relative_to(ROOT)}:{number}: a cell has {len(words)} words, at most {MAX_CELL_WORDS}"


def unlike_results(readme: str) -> Iterator[str]:
    """Figures of the README that are not those of the result to which they link, and rows of its table without a link.

    A link has the form `[8.56](benchmarks/results/NAME.json#KEY)`; a percent sign behind it multiplies by 100.
    """
    results = {
        file: json.loads((ROOT / file).read_text(encoding="utf-8")) for _, file, _, _ in RESULT_LINK.findall(readme)
    }
    for shown, file, key, percent in RESULT_LINK.findall(readme):
        value = reduce(getitem, key.split("."), results[file]["figures"]) * (100 if percent else 1)
        if f"{value:.{len(shown.partition('.')[2])}f}" != shown:
            yield f"README.md: {shown}, but {key} of {file} is {value}"
    table = readme.partition("\n## Measured\n")[2].partition("\n## ")[0]
    for what, figure, command in (row.split(" | ") for row in re.findall(r"^\| (.+) \|$", table, re.MULTILINE)[2:]):
        commands = {f"`{results[file]['command']}`" for _, file, _, _ in RESULT_LINK.findall(what + figure)}
        if commands != {command}:
            yield f"README.md: {what}: link its figure to the file that `benchmarks.keep` wrote of {command}"


def committed_limits() -> Iterator[tuple[str, int]]:
    """Every limit that was ever committed; nothing where there is no whole history."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commits = git("log", "--format=%H", "--", "tests/house.py").split()
        if git("rev-parse", "--is-shallow-repository") == "true":
            commits = []
    except (OSError, subprocess.CalledProcessError):
        commits = []
    if not commits:
        print("no whole history is here: limits that were raised are not seen")
    for commit in commits:
        for node in ast.parse(git("show", f"{commit}:tests/house.py")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LIMITS":
                yield from ast.literal_eval(node.value).items()


def raised_limits() -> Iterator[str]:
    """Limits above the smallest ones that were ever committed."""
    smallest = dict(LIMITS)
    for name, limit in committed_limits():
        smallest[name] = min(limit, smallest.get(name, limit))
    for name, limit in LIMITS.items():
        if limit > smallest[name]:
            yield f"{name}: the limit was {smallest[name]} and is {limit}; it only falls, but for a budget"


def main() -> int:
    """Check every rule and print the figures; 1 if a rule is broken."""
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    problems = [problem for path, tree in trees.items() for problem in too_long(path, tree)]
    problems += [*problems_of_templar(trees), *long_cells(THREATS)]

    problems += [*unlike_results((ROOT / "README.md").read_text(encoding="utf-8")), *raised_limits()]
    for name, number in figures(files).items():
        limit = LIMITS[name] + sum(more for limited, _, more in BUDGETS if limited == name)
        print(f"{number} {name}, at most {limit}")
        problems += [f"{number} {name}, at most {limit}"] if number > limit else []
    for page in PAGES:
        if written(page) != page.read_text(encoding="utf-8"):
            problems.append(f"docs/{page.name}: run `python -m docs.file_tables`, what it lists has changed")

    print("\n".join(problems) if problems else f"{len(files)} files keep the rules of the house")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
