"""The two files that describe a page dataset: `_metadata.yaml` and `_shard_sizes.json`.

`_metadata.yaml` lists the configs and where the files of each split lie, in Hugging Face's form; an entry `default`
stands first, means all of them, and is no config of its own. `_shard_sizes.json` lists the files with their rows:
under the config's name for the split `train`, under `{config}/{split}` for every other split. Paths are relative to
the dataset's folder. Both come from a store and are trusted only after they have been parsed here.
"""

from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, field_validator, model_validator

from templar.errors import PermanentError, Reason, one_line
from templar.store.base import is_key

METADATA_FILE = "_metadata.yaml"
SHARD_SIZES_FILE = "_shard_sizes.json"
DEFAULT_CONFIG = "default"
TRAIN_SPLIT = "train"
HELD_OUT_SPLIT = "held_out"
MAX_METADATA_BYTES = 2**20
MAX_SHARD_SIZES_BYTES = 2**25
MAX_CONFIGS = 10_000
MAX_SHARDS = 1_000_000
_Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Path = Annotated[str, Field(min_length=1, max_length=1024)]


class DataFiles(BaseModel):
    """The files of one split, as patterns."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    split: _Name
    path: _Path | Annotated[list[_Path], Field(min_length=1, max_length=MAX_SHARDS)]


class ConfigEntry(BaseModel):
    """One config of the dataset; Hugging Face's further keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    config_name: _Name
    data_files: Annotated[list[DataFiles], Field(min_length=1, max_length=100)]


class Metadata(BaseModel):
    """`_metadata.yaml`; further keys, as in a dataset card, are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    configs: Annotated[list[ConfigEntry], Field(min_length=1, max_length=MAX_CONFIGS)]

    @field_validator("configs")
    @classmethod
    def _names_are_unique(cls, configs: list[ConfigEntry]) -> list[ConfigEntry]:
        names = [entry.config_name for entry in configs]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if repeated:
            raise ValueError(f"config_name is listed twice: {', '.join(repeated)}")
        return configs

    def configs_with(self, split: str) -> tuple[str, ...]:
        """Names of the configs that have a split, sorted, without `default`."""
        return tuple(
            sorted(
                entry.config_name
                for entry in self.configs
                if entry.config_name != DEFAULT_CONFIG and any(files.split == split for files in entry.data_files)
            )
        )


class PageShard(BaseModel):
    """One Parquet file. The reference knows only its path and rows; size and hash pin its bytes where they stand."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    path: _Path
    num_rows: int = Field(ge=1)
    size_bytes: int | None = Field(default=None, ge=12, le=2**50)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")

    @field_validator("path")
    @classmethod
    def _stays_in_the_folder(cls, path: str) -> str:
        if not is_key(path) or not path.endswith(".parquet"):
            raise ValueError(f"{path!r} must be a .parquet file below the dataset's folder")
        return path


class SplitSizes(BaseModel):
    """The files of one split of one config, in the order of their rows."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    split: _Name
    shards: Annotated[list[PageShard], Field(min_length=1, max_length=MAX_SHARDS)]
    total_rows: int = Field(ge=1)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        counted = sum(shard.num_rows for shard in self.shards)
        if counted != self.total_rows:
            raise ValueError(f"total_rows is {self.total_rows} but the shards have {counted}")
        if len({shard.path for shard in self.shards}) < len(self.shards):
            raise ValueError("shards list a path twice")
        return self


class ShardSizes(RootModel[dict[str, SplitSizes]]):
    """`_shard_sizes.json`."""

    model_config = ConfigDict(frozen=True, strict=True)


def folder_prefix(prefix: str) -> str:
    """The common start of the keys of a dataset's objects: its folder and one slash, or empty for a bucket's root."""
    folder = prefix.strip("/")
    return f"{folder}/" if folder else ""


def sizes_key(config: str, split: str) -> str:
    """Key of a split in `_shard_sizes.json`."""
    return config if split == TRAIN_SPLIT else f"{config}/{split}"


def parse_metadata(data: bytes, origin: str) -> Metadata:
    """Parse and validate `_metadata.yaml`; messages name its `origin`.

    PermanentError: `dataset_malformed`, naming file and field.
    """
    try:
        content = yaml.load(data, Loader=_PlainLoader)  # noqa: S506 - a SafeLoader
        return Metadata.model_validate(content)
    except ValidationError as error:
        raise malformed(origin, error) from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, LookupError, AttributeError, TypeError) as error:
        # An explicit tag on the wrong value, or a number beyond a float, makes the loader raise one of these.
        raise malformed(origin, f"not plain YAML: {error}") from None


def parse_shard_sizes(data: bytes, origin: str, configs: tuple[str, ...], split: str) -> dict[str, SplitSizes]:
    """Parse `_shard_sizes.json`; the files of one split by config, in the order of `configs`.

    PermanentError: `dataset_malformed`, naming file and field.
    """
    try:
        sizes = ShardSizes.model_validate_json(data).root
    except ValidationError as error:
        raise malformed(origin, error) from None
    found: dict[str, SplitSizes] = {}
    for config in configs:
        key = sizes_key(config, split)
        if key not in sizes:
            raise malformed(origin, f"{key}: is missing, although {METADATA_FILE} lists the config with that split")
        if sizes[key].split != split:
            raise malformed(origin, f"{key}.split: is {sizes[key].split!r}, must be {split!r}")
        found[config] = sizes[key]
    return found


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases: a few of them can stand for gigabytes."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


def malformed(origin: str, problem: str | ValidationError) -> PermanentError:
    """The error of a malformed file of a dataset; of a failed validation it names the first fields."""
    if isinstance(problem, ValidationError):
        found = problem.errors(include_url=False, include_input=False)[:5]
        problem = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'content'}: {item['msg']}" for item in found)
    return PermanentError(
        Reason.DATASET_MALFORMED, f"{origin}: {one_line(problem, 1000)}; build the dataset and upload it again"
    )
