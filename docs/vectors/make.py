"""Write the test vectors that docs/protocol.md speaks of.

    python -m docs.vectors.make

Everything is recomputed by the library, so a run on an unchanged protocol changes no file. A file that changes means
that nodes of the two versions do not understand each other: raise `templar.PROTOCOL_VERSION`.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.vectors import assigning, evaluating, exchange, learning, payloads, places

FOLDER = Path(__file__).resolve().parent
LINE_CHARACTERS = 120

VECTORS: Mapping[str, Callable[[], Any]] = {
    "canonical": assigning.canonical_vectors,
    "keys": exchange.key_vectors,
    "objects": lambda: exchange.object_vectors(known_signatures()),
    "times": places.time_vectors,
    "commitments": places.commitment_vectors,
    "payload": payloads.payload_vectors,
    "aggregate": learning.aggregate_vectors,
    "state": learning.state_vectors,
    "schedules": learning.schedule_vectors,
    "assignment": assigning.assignment_vectors,
    "evaluation": evaluating.evaluation_vectors,
    "peers": assigning.peer_vectors,
}
"""Name of the file, without `.json` -> what makes its content."""


def vector_file(name: str) -> Path:
    """Return where a set of vectors lies."""
    return FOLDER / f"{name}.json"


def known_signatures() -> frozenset[str]:
    """Every signature that is in the file of objects; none before the first run."""
    path = vector_file("objects")
    return frozenset(re.findall(r"\b[0-9a-f]{128}\b", path.read_text(encoding="utf-8")) if path.exists() else ())


def render(value: Any, indent: int = 0) -> str:
    """Format JSON for people: a value that fits a line stands on one line."""
    line = json.dumps(value, ensure_ascii=True)
    if len(line) + indent <= LINE_CHARACTERS or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(key)}: {render(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + render(item, indent + 1) for item in value) + "\n" + " " * indent + "]"


def main() -> int:
    """Write every file."""
    for name, make in VECTORS.items():
        path, text = vector_file(name), render(make()) + "\n"
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path.name}: {'written' if changed else 'unchanged'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
