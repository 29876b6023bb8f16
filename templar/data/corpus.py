"""Real text that lies on the machine, and the choice of the documents that are held out of training.

The text is the sources of the running interpreter's standard library, their docstrings, and the Python documentation
that Debian packages (`python3.11-doc`; left out where it is absent): all under the PSF licence. No text stands in two
sources: the library's code is taken without its docstrings. The same machine gives the same documents in the same
order. If not all fit, a hash of their names decides which are taken, so a small corpus is as varied as a large one.

Held-out documents are chosen whole, by a hash of their names, and in every source at once: source by source, in the
order of their names. The choice depends on names and lengths alone, so it needs no text in memory.
"""

import ast
import io
import os
import sys
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from templar.canonical import keyed_seed
from templar.data.pages.metadata import HELD_OUT_SPLIT, TRAIN_SPLIT
from templar.errors import PermanentError, Reason

SPLITS = (TRAIN_SPLIT, HELD_OUT_SPLIT)

# Tests, other people's packages, tables of numbers, and copies of the documentation as Python strings.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests"}
)

SKIPPED_FILES = ("_sysconfigdata",)

MIN_DOCUMENT_CHARS = 200  # shorter documents are left out: a row of one line would make a page short

MAX_DOCUMENT_FRACTION = 1 / 8
"""A document that takes a larger part of its source's share is left out, so that no single file stands out."""

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # the fields of a statement that have statements


@dataclass(frozen=True)
class Document:
    """One text.

    Documents of one name, in different sources, are on one subject: they are held out together.
    """

    source: str  # a dataset of pages has one config per source
    name: str  # its path within the source
    text: str


@dataclass(frozen=True)
class Source:
    """A folder of files, and the text to take from each."""

    name: str
    root: Path
    suffix: str
    extract: Callable[[str], str]  # from a file's text to the document's


def default_sources() -> tuple[Source, ...]:
    """The sources that this machine has, the smallest first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    own = Path(f"/usr/share/doc/python{sys.version_info.major}.{sys.version_info.minor}/html/_sources")
    others = sorted(Path("/usr/share/doc").glob("python3*/html/_sources"))
    documentation = [root for root in (own, *others) if root.is_dir()][:1]
    return (
        Source("docstrings", library, ".py", docstrings),
        Source("stdlib-source", library, ".py", without_docstrings),
        *(Source("python-doc", root, ".rst.txt", str) for root in documentation),
    )


def collect_documents(*, max_bytes: int, sources: Sequence[Source] | None = None) -> list[Document]:
    """Documents of every source in equal parts, source by source, by name within each.

    They have `max_bytes` of UTF-8 text in all at most; a part that one source cannot fill goes to those after it.
    """
    sources = default_sources() if sources is None else sources
    documents: list[Document] = []
    left = max_bytes
    for number, source in enumerate(sources):
        taken = _collect(source, left // (len(sources) - number))
        left -= sum(len(document.text.encode()) for document in taken)
        documents += taken
    return documents


def _collect(source: Source, max_bytes: int) -> list[Document]:
    documents: list[Document] = []
    left = max_bytes
    for name in sorted(_names(source), key=lambda name: keyed_seed("templar.corpus", name)):
        document = _read(source, name)
        if document is None:
            continue
        size = len(document.text.encode())
        if size > max_bytes * MAX_DOCUMENT_FRACTION:
            continue
        if size > left:
            break
        documents.append(document)
        left -= size
    return sorted(documents, key=lambda document: document.name)


def _names(source: Source) -> Iterator[str]:
    for folder, folders, files in os.walk(source.root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        for file in files:
            if file.endswith(source.suffix) and not file.startswith(SKIPPED_FILES):
                yield (Path(folder) / file).relative_to(source.root).as_posix()


def _read(source: Source, name: str) -> Document | None:
    try:
        text = source.extract((source.root / name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return Document(source.name, name, text) if len(text) >= MIN_DOCUMENT_CHARS else None


def docstrings(code: str) -> str:
    """The docstrings of a module in the order of the code, separated by blank lines; empty if it does not parse."""
    texts = [ast.get_docstring(node) for node in _documented_nodes(code)]
    return "".join(f"{text.strip()}\n\n" for text in texts if text and text.strip())


def without_docstrings(code: str) -> str:
    """The code of a module without the lines of its docstrings; empty if it does not parse."""
    nodes = list(_documented_nodes(code))
    dropped: set[int] = set()
    for node in nodes:
        if ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            dropped.update(range(statement.lineno - 1, statement.end_lineno or statement.lineno))
    if not nodes:
        return ""
    # The parser counts lines by newlines alone, as StringIO does; str.splitlines would count form feeds too.
    return "".join(line for number, line in enumerate(io.StringIO(code)) if number not in dropped)


def _documented_nodes(code: str) -> Iterator[_Documented]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old code has invalid escapes
            tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return
    # 1. The statements: a walk through all expressions takes a third of the whole time.
    statements: list[ast.AST] = [tree]
    for node in statements:
        statements += [each for block in _BLOCKS for each in getattr(node, block, ())]
    nodes = [node for node in statements if isinstance(node, _Documented)]
    # 2. The module comes first and has no line of its own.
    yield from sorted(nodes, key=lambda node: getattr(node, "lineno", 0))


def split_rows(text: str, max_chars: int) -> list[str]:
    """Cut a text at line borders into rows of at most `max_chars` characters, all about equally long.

    The rows put together are the text; a line longer than `max_chars`, which is at least 1, is cut.
    """
    rows: list[str] = []
    row: list[str] = []
    length, left = 0, len(text)
    lines = text.splitlines(keepends=True)
    for piece in (line[start : start + max_chars] for line in lines for start in range(0, len(line), max_chars)):
        target = left / -(-left // max_chars)
        # Close the row where that comes nearer to the target than one more piece would.
        if row and (length + len(piece) > max_chars or target - length <= length + len(piece) - target):
            rows.append("".join(row))
            left -= length
            row, length = [], 0
        row.append(piece)
        length += len(piece)
    return [*rows, "".join(row)] if row else rows


@dataclass(frozen=True)
class DocumentLengths:
    """Name hashes and lengths of one source's documents: the input of the choice."""

    source: str
    keys: NDArray[np.uint64]  # `held_out_key` of every name, shape (n,)
    num_chars: NDArray[np.int64]  # shape (n,)


def split_documents(documents: Iterable[Document], fraction: float) -> dict[tuple[str, str], list[Document]]:
    """Documents by source and split, in the order of sources, splits and names; errors as in `held_out_masks`."""
    by_source: dict[str, list[Document]] = defaultdict(list)
    for document in sorted(documents, key=lambda document: (document.source, document.name)):
        by_source[document.source].append(document)
    lengths = [
        DocumentLengths(
            source,
            np.array([held_out_key(document.name) for document in members], dtype=np.uint64),
            np.array([len(document.text) for document in members], dtype=np.int64),
        )
        for source, members in by_source.items()
    ]
    masks = held_out_masks(lengths, fraction)
    splits: dict[tuple[str, str], list[Document]] = {}
    for (source, members), mask in zip(by_source.items(), masks, strict=True):
        for split, held_out in zip(SPLITS, (False, True), strict=True):
            splits[source, split] = [each for each, out in zip(members, mask, strict=True) if out == held_out]
    return splits


def held_out_key(name: str) -> int:
    """The 64-bit number by which documents are ordered for the choice."""
    return keyed_seed("templar.held_out", name) >> 64


def held_out_masks(sources: Sequence[DocumentLengths], fraction: float) -> list[NDArray[np.bool_]]:
    """For each source, booleans of shape (n,): which of its documents are held out.

    Of each source, documents are taken in the order of their keys as long as they fit into `fraction`, in (0, 1), of
    its characters, and at least the shortest one. A name that is held out in one source is held out in all.

    PermanentError: `dataset_too_small`; there are no documents, or one split of a source would have none.
    """
    if not sources:
        raise PermanentError(Reason.DATASET_TOO_SMALL, "there are no documents to build a dataset of")
    chosen: set[int] = set()
    for source in sources:
        chosen |= _keys_to_hold_out(source, chosen, fraction)
    masks = [_is_among(source.keys, chosen) for source in sources]
    for source, mask in zip(sources, masks, strict=True):
        if mask.all() or not mask.any():
            raise PermanentError(
                Reason.DATASET_TOO_SMALL,
                f"source {source.source!r} has {len(mask)} documents, too few to train on some and hold out others: "
                "collect more",
            )
    return masks


def _keys_to_hold_out(source: DocumentLengths, chosen: set[int], fraction: float) -> set[int]:
    """Keys of one source to hold out beside those that are chosen already."""
    # 1. Characters that are still to be held out, after the documents that other sources hold out.
    known = _is_among(source.keys, chosen)
    left = fraction * int(source.num_chars.sum()) - int(source.num_chars[known].sum())
    # 2. Documents in the order of their keys, as long as they fit.
    more: set[int] = set()
    rest = np.flatnonzero(~known)
    rest = rest[np.argsort(source.keys[rest], kind="stable")]
    smallest = source.num_chars.min(initial=np.iinfo(np.int64).max)
    for index in rest:
        if left < smallest:
            break
        key, length = int(source.keys[index]), int(source.num_chars[index])
        if length <= left and key not in more:
            more.add(key)
            left -= length
    # 3. At least one document: the shortest.
    if not more and not known.any():
        more.add(int(source.keys[np.argmin(source.num_chars)]))
    return more


def _is_among(keys: NDArray[np.uint64], chosen: set[int]) -> NDArray[np.bool_]:
    return np.isin(keys, np.fromiter(chosen, dtype=np.uint64, count=len(chosen)))
