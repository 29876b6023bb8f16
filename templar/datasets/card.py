"""The card of a dataset: its input and its settings, for machines as `card.json`, for people as `README.md`.

The same input and settings give the same card: it contains no time, no machine and no path outside of its sources.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from templar.canonical import canonical_json
from templar.data.corpus import SPLITS
from templar.data.dataset import CARD_FILE
from templar.data.pages.metadata import malformed
from templar.data.tokenizer import EMBEDDED, Tokenizer
from templar.datasets.plan import DatasetLayout, Plan
from templar.datasets.units import Unit
from templar.store.files import local_file, replacing

log = logging.getLogger(__name__)

README_FILE = "README.md"
CARD_VERSION = 1
_LISTED_FILES = 100


@dataclass(frozen=True)
class Counts:
    """The size of a split of a source."""

    documents: int
    characters: int
    tokens: int | None = None  # with one end token per document; None where the dataset is not tokenised
    dropped: int = 0  # characters that the tokenizer does not know, white space aside

    def __add__(self, other: "Counts") -> "Counts":
        tokens = None if self.tokens is None or other.tokens is None else self.tokens + other.tokens
        dropped = self.dropped + other.dropped
        return Counts(self.documents + other.documents, self.characters + other.characters, tokens, dropped)


@dataclass(frozen=True)
class FileCard:
    """One file that was read."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceCard:
    """One source."""

    name: str
    column: str | None  # that held the text; None for files that are one text each
    files: tuple[FileCard, ...]
    splits: Mapping[str, Counts]


@dataclass(frozen=True)
class TokenizerCard:
    """The tokenizer."""

    digest: str
    embedded: bool  # whether it was trained on the documents
    eos_id: int
    eos_token: str
    vocab_size: int


@dataclass(frozen=True)
class Card:
    """The description of a dataset."""

    layout: DatasetLayout
    digest: str  # of `_shards.json`, or of the files, rows and hashes of `_shard_sizes.json`
    tokenizer: TokenizerCard
    settings: Mapping[str, Any]  # those that its bytes follow from
    sources: tuple[SourceCard, ...]
    sample_tokens: Mapping[str, int] | None  # by split; None for pages

    def total(self, split: str) -> Counts:
        """The size of a split over all sources."""
        first, *rest = (source.splits[split] for source in self.sources)
        return sum(rest, start=first)

    def rows(self) -> list[dict[str, Any]]:
        """A row per source and split, and one per split for all, for a table."""
        each = [(source.name, split, source.splits[split]) for source in self.sources for split in SPLITS]
        all_of_them = [("all", split, self.total(split)) for split in SPLITS]
        return [{"source": name, "split": split, **asdict(counts)} for name, split, counts in (*each, *all_of_them)]

    def to_json(self) -> dict[str, Any]:
        """The content of `card.json`."""
        totals = {split: asdict(self.total(split)) for split in SPLITS}
        return {"version": CARD_VERSION, **asdict(self), "splits": totals}


_CARD = TypeAdapter(Card)


def make_card(
    plan: Plan,
    tokenizer: Tokenizer,
    counts: Mapping[tuple[str, str], Counts],
    digest: str,
    sample_tokens: Mapping[str, int] | None,
) -> Card:
    """The card of a plan's dataset; `counts` are by source and split, `sample_tokens` by split."""
    settings = plan.request.settings
    embedded = settings.tokenizer == EMBEDDED
    described = TokenizerCard(tokenizer.digest, embedded, tokenizer.eos_id, tokenizer.eos_token, tokenizer.vocab_size)
    sources: list[SourceCard] = []
    for name in sorted({unit.source for unit in plan.units}):
        units = [unit for unit in plan.units if unit.source == name]
        splits = {split: counts[name, split] for split in SPLITS}
        sources.append(SourceCard(name, units[0].files[0].column, files_of(units), splits))
    warn_of_dropped(tokenizer, sum(each.dropped for each in counts.values()))
    return Card(settings.layout, digest, described, settings.described(), tuple(sources), sample_tokens)


def warn_of_dropped(tokenizer: Tokenizer, num_chars: int) -> None:
    """Log that a tokenizer does not know some characters of a dataset."""
    if num_chars:
        log.warning(
            "tokenizer %s does not know %d characters of the text: it drops them, or gives them its token for unknown "
            "words; choose a tokenizer with bytes to keep them",
            *(tokenizer.digest[:12], num_chars),
        )


def files_of(units: Iterable[Unit]) -> tuple[FileCard, ...]:
    """The files of some units."""
    return tuple(
        FileCard(file.name, file.size, sha256)
        for unit in units
        for file, sha256 in zip(unit.files, unit.sha256, strict=True)
    )


def write_card(card: Card, root: Path) -> None:
    """Write `card.json` and `README.md`; errors as in `local_file`."""
    with local_file(root):
        for name, data in ((CARD_FILE, canonical_json(card.to_json())), (README_FILE, readable(card).encode())):
            with replacing(root / name, durable=True) as file:
                file.write(data)


def read_card(root: Path) -> Card:
    """The card of a dataset in a folder.

    PermanentError: `dataset_malformed`, if `card.json` is not a card; `local_file`.
    """
    path = root / CARD_FILE
    with local_file(path):
        data = path.read_bytes()
    try:
        return _CARD.validate_json(data)
    except ValidationError as error:
        raise malformed(f"{path}, which is not the card of a dataset", error) from None


def readable(card: Card) -> str:
    """The card as Markdown."""
    kind = "pretokenised shards" if card.layout is DatasetLayout.SHARDS else "pages of text"
    lines = [
        "# Training dataset",
        "",
        f"A templar dataset in {kind}, digest `{card.digest}`. `{CARD_FILE}` has all of this for machines, and every "
        "input file with its SHA-256.",
        "",
        *_table(card.rows()),
        "",
        "## Tokenizer",
        "",
        *_table([asdict(card.tokenizer) | {"eos_token": f"`{card.tokenizer.eos_token}`"}]),
        "",
        "## Settings",
        "",
        *_table([{"setting": name, "value": value} for name, value in sorted(card.settings.items())]),
    ]
    for source in card.sources:
        lines += ["", f"## Source {source.name}", ""]
        shown = source.files[:_LISTED_FILES]
        lines += _table([{"file": each.name, "bytes": each.size_bytes, "SHA-256": each.sha256} for each in shown])
        if len(source.files) > len(shown):
            lines += ["", f"and {len(source.files) - len(shown)} more files"]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Rows with the same keys as a Markdown table."""
    head = [*rows[0]]
    body = ["| " + " | ".join(_cell(row[key]) for key in head) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]


def _cell(value: object) -> str:
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
