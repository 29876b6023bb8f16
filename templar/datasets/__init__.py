"""Building and checking datasets of either layout, and writing and reading them in other programs (`streaming`)."""

from importlib import import_module
from typing import Any

_MODULES = {
    "templar.data.shards.shard_writer": ("ShardLayout", "write_shards"),
    "templar.data.tokenizer": ("load_tokenizer",),
    "templar.datasets.page_writer": ("write_records",),
    "templar.datasets.streaming": ("MixedDataset", "StreamingDataset", "StreamingLoader"),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    """What other programs use, imported when it is asked for: a command that builds a dataset needs no torch."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
