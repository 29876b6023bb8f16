"""The rules of the house: sizes, import circles, names and words, in everything but tests.

python -m tests.house
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("templar", "blocks", "tasks", "flows", "deployments", "benchmarks", "docs")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_TEMPLAR_FILES = 169
MAX_TEMPLAR_LINES = 42_736
MAX_VAGUE_LINES = 30
"""Lines of code and documentation with `whoever`, `whatever` or `whichever`."""
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


def vague_lines() -> Counter[str]:
    """File -> lines with a vague pronoun, in code, tests and documentation."""
    count: Counter[str] = Counter()
    for folder in (*PRODUCT, "tests"):
        for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")):
            if path != Path(__file__).resolve():
                lines = path.read_text(encoding="utf-8").splitlines()
                count[str(path.relative_to(ROOT))] = sum(VAGUE.search(line) is not None for line in lines)
    for path in ROOT.glob("*.md"):
        count[path.name] = sum(VAGUE.search(line) is not None for line in path.read_text(encoding="utf-8").splitlines())
    return +count


def main() -> int:
    """Check every rule and print the figures; 1 if a rule is broken."""
    files = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    problems = [problem for path, tree in trees.items() for problem in too_long(path, tree)]
    problems += problems_of_templar(trees)

    domain = [path for path in files if path.is_relative_to(ROOT / "templar") and path.name != "__init__.py"]
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in domain)
    vague = vague_lines()
    if len(domain) > MAX_TEMPLAR_FILES:
        problems.append(f"templar/ has {len(domain)} files, at most {MAX_TEMPLAR_FILES}")
    if num_lines > MAX_TEMPLAR_LINES:
        problems.append(f"templar/ has {num_lines} lines, at most {MAX_TEMPLAR_LINES}")
    if vague.total() > MAX_VAGUE_LINES:
        problems.append(
            f"{vague.total()} lines with whoever, whatever or whichever, at most {MAX_VAGUE_LINES}; most are in "
            + ", ".join(f"{name} ({number})" for name, number in vague.most_common(5))
        )

    print(f"templar/: {len(domain)} files of {MAX_TEMPLAR_FILES}, {num_lines} lines of {MAX_TEMPLAR_LINES}")
    print(f"vague pronouns: {vague.total()} lines of {MAX_VAGUE_LINES}")
    print("\n".join(problems) if problems else f"{len(files)} files keep the rules of the house")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
