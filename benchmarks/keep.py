"""Run a command, and keep the line of JSON that it ends with as figures of the README.

    python -m benchmarks.keep python -m benchmarks.quality --rows short

writes `benchmarks/results/quality-rows-short.json`, with the command, the commit and the machine. A figure of the
README links to the file and names a key in it; `make lint` compares the two. Without a command, all that were kept
run again.
"""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def name_of(command: str) -> str:
    """The name of a command's result: its words but for paths, without what all benchmarks have in common."""
    words = (word for word in command.removeprefix("python -m benchmarks.").split() if "/" not in word)
    return "-".join(re.findall(r"[\w.]+", " ".join(words)))


def machine() -> str:
    """Cores, processor and Python."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return f"{os.cpu_count()} cores, {models[0] if models else platform.machine()}, Python {platform.python_version()}"


def commit() -> str:
    """The commit of this checkout, and whether files of it were changed since."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()  # noqa: S603, S607 - git

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def keep(words: list[str]) -> int:
    """Run the command and show what it prints; return its exit status, and keep its last line if that is 0."""
    command = [sys.executable if word == "python" else word for word in words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - given
        last = ""
        for last in process.stdout or ():
            print(last, end="", flush=True)
    if not process.returncode:
        shown = " ".join(words)
        result = {"command": shown, "commit": commit(), "machine": machine(), "figures": json.loads(last)}
        (RESULTS / f"{name_of(shown)}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return process.returncode


def kept() -> list[str]:
    """The commands whose figures were kept."""
    return [json.loads(path.read_text(encoding="utf-8"))["command"] for path in sorted(RESULTS.glob("*.json"))]


if __name__ == "__main__":
    sys.exit(max(map(keep, [sys.argv[1:]] if sys.argv[1:] else [command.split() for command in kept()])))
