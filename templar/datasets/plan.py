"""The request to build a dataset, its settings, and the plan that follows from the input files."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from templar.canonical import canonical_json, sha256_hex
from templar.data.corpus import DocumentLengths, held_out_masks
from templar.data.shards.shard_writer import ShardLayout
from templar.data.tokenizer import (
    EMBEDDED,
    TOKENIZER_FILE,
    Tokenizer,
    load_tokenizer,
    save_tokenizer,
    train_embedded_tokenizer,
)
from templar.datasets.documents import TextSource
from templar.datasets.units import Census, Unit, checked_texts, in_threads, read_census
from templar.store.files import local_file

LEAST_VOCAB_SIZE = 244  # the bytes of UTF-8 and the end token

FORMAT_VERSION = 2  # version of the results of a build; those of another version are made again

_FOR_CARDS, _WORD = ("license", "language"), re.compile(r"[A-Za-z0-9.,-]{0,100}")
_SINCE = (*_FOR_CARDS, "packing", "mixture", "compression")  # newer than the first cards, which do not name them
_EMBEDDED_ONLY = ("vocab_size", "tokenizer_chars")
Packing = Literal["stream", "best_fit"]
Compression = Literal["none", "zstd"]
CHOICES = {"packing": get_args(Packing), "compression": get_args(Compression)}
_loaded = lru_cache(maxsize=1)(load_tokenizer)


class DatasetLayout(StrEnum):
    """The layout of a dataset in its folder."""

    PAGES = "pages"
    SHARDS = "shards"


def _only(layout: DatasetLayout, default: Any) -> Any:
    return field(default=default, metadata={"layout": layout})


@dataclass(frozen=True)
class BuildSettings:
    """The request to build a dataset. ValueError: A number is out of range."""

    layout: DatasetLayout
    held_out_fraction: float = 0.05  # part of each source's characters, in (0, 1)
    tokenizer: str = EMBEDDED  # trained on the training text; or a name that `load_tokenizer` accepts
    vocab_size: int = 32000  # most ids of an embedded tokenizer
    # Approximate characters to train an embedded tokenizer on: whole documents, chosen by a hash of their names.
    tokenizer_chars: int = 2**26
    # Shards. Blocks are hashed; None chooses their length by the size of a shard.
    sequence_length: int = _only(DatasetLayout.SHARDS, 2048)
    samples_per_shard: int = _only(DatasetLayout.SHARDS, 2**16)
    block_bytes: int | None = _only(DatasetLayout.SHARDS, None)
    packing: Packing = _only(DatasetLayout.SHARDS, "stream")  # noqa: RUF009 - as above
    compression: Compression = _only(DatasetLayout.SHARDS, "none")  # noqa: RUF009 - as above
    # Pages. Most characters in a row, rows in a Parquet row group, most rows in a file.
    row_chars: int = _only(DatasetLayout.PAGES, 800)
    rows_per_group: int = _only(DatasetLayout.PAGES, 64)
    shard_rows: int = _only(DatasetLayout.PAGES, 2**14)
    # For the cards of dataset and models: the hub's identifiers, such as `odc-by` and `en,de`; empty says nothing.
    license: str = ""
    language: str = ""
    # Weights of all sources, as `books=3,code=1`: of the training text so many characters of each; empty for all text.
    mixture: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must be in (0, 1), not {self.held_out_fraction}")
        for each in fields(self):
            value = getattr(self, each.name)
            if type(value) is int and value < 1:
                raise ValueError(f"{each.name} must be at least 1, not {value}")
            choices = CHOICES.get(each.name, (value,))
            if value not in choices:
                raise ValueError(f"{each.name} is {value!r}: choose one of {', '.join(choices)}")
            if each.name in _FOR_CARDS and not re.fullmatch(_WORD, value):
                raise ValueError(f"{each.name} is {value!r}: write letters, digits, dots, hyphens and commas")
        if self.vocab_size < LEAST_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at least {LEAST_VOCAB_SIZE}, not {self.vocab_size}")
        ShardLayout("uint32", self.sequence_length, self.samples_per_shard, self.block_bytes)
        self.weights()

    def weights(self) -> dict[str, float]:
        """The weight of each source in the mixture, by name; empty without one."""
        pairs = [each.rpartition("=") for each in self.mixture.split(",") if self.mixture]
        try:
            weights = {name: float(weight) for name, _, weight in pairs}
        except ValueError:
            weights = {"": 0.0}
        if len(weights) < len(pairs) or not all(name and 0 < weight < math.inf for name, weight in weights.items()):
            raise ValueError(f"mixture is {self.mixture!r}: write a weight above 0 for each source, as books=3,code=1")
        return weights

    def described(self) -> dict[str, Any]:
        """The settings that the bytes of the dataset and its card follow from, beside the tokenizer."""
        own = (each for each in fields(self) if each.metadata.get("layout", self.layout) is self.layout)
        silent = {each.name: each.default for each in fields(self) if each.name in _SINCE}
        values = {each.name: getattr(self, each.name) for each in own}
        values = {name: value for name, value in values.items() if name not in silent or value != silent[name]}
        name = values.pop("tokenizer")
        return values if name == EMBEDDED else {k: v for k, v in values.items() if k not in _EMBEDDED_ONLY}


@dataclass(frozen=True)
class BuildRequest:
    """A dataset to build; every source needs two documents at least.

    ValueError: There is no source, two have one name, or one contains the folder to build or lies in it.
    """

    sources: tuple[TextSource, ...]
    root: Path
    settings: BuildSettings

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise ValueError("sources is empty: name one at least")
        if len(set(names)) < len(names):
            raise ValueError(f"two sources have one name: {', '.join(sorted(names))}; write NAME=PATH")
        if self.settings.mixture and sorted(self.settings.weights()) != sorted(names):
            raise ValueError(f"mixture is {self.settings.mixture!r}: name each of {', '.join(sorted(names))} once")
        for source in self.sources:
            folder = source.root.resolve()
            for own in (self.root.resolve(), self.work.resolve()):
                if own.is_relative_to(folder):
                    raise ValueError(
                        f"{own} lies in source {source.name!r} ({folder}), which would be built of its own results: "
                        "name a folder outside of the source"
                    )
                if folder.is_relative_to(own):
                    raise ValueError(
                        f"source {source.name!r} ({folder}) lies in {own}, which the build makes and removes: name "
                        "another folder to build"
                    )

    @property
    def work(self) -> Path:
        """The folder beside `root` where unfinished work lies."""
        return self.root.with_name(f"{self.root.name}.work")

    @property
    def tokenizers(self) -> Path:
        """The folder of tokenizers, by digest, in that of unfinished work."""
        return self.work / "tokenizers"


@dataclass(frozen=True)
class Plan:
    """A request whose input is known."""

    request: BuildRequest
    units: tuple[Unit, ...]  # in the order of sources and files
    tokenizer_digest: str  # the tokenizer lies in the folder of unfinished work
    digest: str  # a hash of all that the bytes of the dataset follow from

    @property
    def partial_name(self) -> str:
        """Name of the folder of the unfinished dataset, in that of unfinished work."""
        return f"dataset-{self.digest[:16]}"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return _loaded(str(self.request.tokenizers / self.tokenizer_digest))

    def census(self, unit: Unit) -> Census:
        """The documents of a unit."""
        return read_census(unit, self.request.work)

    def splits(self) -> list[NDArray[np.int8]]:
        """For each unit, the split of each of its n documents, shape (n,): its place in `SPLITS`, or -1 for none.

        A document belongs to no split if the mixture leaves it out; errors as in `held_out_masks`.
        """
        return _splits(self.units, [self.census(unit) for unit in self.units], self.request.settings)


def plan_build(request: BuildRequest, units: tuple[Unit, ...], workers: int | None) -> Plan:
    """Choose the tokenizer, of which a copy goes to the folder of unfinished work; errors as in `build`."""
    tokenizer = _choose_tokenizer(units, request, workers)
    _save(tokenizer, request.tokenizers / tokenizer.digest)
    digest = part_key(request.settings.described(), tokenizer.digest, [unit.key for unit in units])
    return Plan(request, units, tokenizer.digest, digest)


def _splits(units: Sequence[Unit], censuses: Sequence[Census], settings: BuildSettings) -> list[NDArray[np.int8]]:
    # 1. Hold documents out, by their names in each source.
    by_source: dict[str, list[Census]] = defaultdict(list)  # units are in the order of their sources' names
    for unit, census in zip(units, censuses, strict=True):
        by_source[unit.source].append(census)
    measured = [
        DocumentLengths(
            name,
            np.concatenate([census.held_out_keys for census in members]),
            np.concatenate([census.num_chars for census in members]),
        )
        for name, members in by_source.items()
    ]
    splits = [mask.astype(np.int8) for mask in held_out_masks(measured, settings.held_out_fraction)]
    # 2. Leave those with the last keys out of sources that have more training text than the mixture takes.
    if weights := settings.weights():
        chars = [each.num_chars * (split == 0) for each, split in zip(measured, splits, strict=True)]
        most = min(each.sum() / weights[name] for name, each in zip(by_source, chars, strict=True))
        for (name, members), split, lengths in zip(by_source.items(), splits, chars, strict=True):
            order = np.argsort(np.concatenate([census.order_keys for census in members]), kind="stable")
            begins = np.cumsum(lengths[order]) - lengths[order]
            late = order[begins >= weights[name] * most]
            split[late] = np.where(split[late] == 0, -1, split[late])
    # 3. The parts of a source that belong to its units.
    parts = [np.cumsum([len(census.num_chars) for census in members])[:-1] for members in by_source.values()]
    return [part for split, borders in zip(splits, parts, strict=True) for part in np.split(split, borders)]


def _choose_tokenizer(units: tuple[Unit, ...], request: BuildRequest, workers: int | None) -> Tokenizer:
    """The tokenizer of the settings."""
    settings = request.settings
    if settings.tokenizer != EMBEDDED:
        return load_tokenizer(settings.tokenizer)
    choices = [settings.held_out_fraction, settings.vocab_size, settings.tokenizer_chars, settings.mixture]
    kept = request.tokenizers / part_key(choices, [unit.key for unit in units])
    if not (kept / TOKENIZER_FILE).exists():
        _save(train_embedded_tokenizer(_sample(units, request, workers), settings.vocab_size), kept)
    return load_tokenizer(str(kept))


def _sample(units: tuple[Unit, ...], request: BuildRequest, workers: int | None) -> list[str]:
    """Training texts of about `tokenizer_chars` characters in all, at least one, in the order of the units."""
    # 1. The largest key of the sample: documents are taken in the order of their keys.
    censuses = [read_census(unit, request.work) for unit in units]
    training = [split == 0 for split in _splits(units, censuses, request.settings)]
    keys = np.concatenate([census.order_keys[mask] for census, mask in zip(censuses, training, strict=True)])
    chars = np.concatenate([census.num_chars[mask] for census, mask in zip(censuses, training, strict=True)])
    order = np.argsort(keys, kind="stable")
    number = int(np.searchsorted(np.cumsum(chars[order]), request.settings.tokenizer_chars)) + 1
    largest = keys[order[min(number, len(order)) - 1]]

    def chosen_texts(index: int) -> list[str]:
        chosen = training[index] & (censuses[index].order_keys <= largest)
        if not chosen.any():
            return []
        texts = checked_texts(units[index], censuses[index])
        return [text for text, take in zip(texts, chosen, strict=True) if take]

    return [text for texts in in_threads(chosen_texts, range(len(units)), workers=workers) for text in texts]


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    """Save under another name and rename, so that a folder that is there is whole."""
    if (folder / TOKENIZER_FILE).exists():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    with local_file(folder):
        save_tokenizer(tokenizer, partial)
        partial.rename(folder)


def part_key(*parts: Any) -> str:
    """The file name of a result that follows from `parts`, which are JSON values."""
    return sha256_hex(canonical_json([FORMAT_VERSION, *parts]))
