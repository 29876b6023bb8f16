"""The house's sizes: files up to 500 lines and functions up to 60, in everything but tests.

python -m tests.sizes
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("templar", "blocks", "tasks", "flows", "deployments", "benchmarks", "docs")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def too_long(path: Path) -> Iterator[str]:
    """What is too long in one file, as lines for a person."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{name}: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def main() -> int:
    """Check every file; 1 if something is too long."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    problems = [problem for path in files for problem in too_long(path)]
    print("\n".join(problems) if problems else f"{len(files)} files keep the house's sizes")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
