"""Building and checking datasets of either layout, and reading them in other programs (`streaming`)."""

from typing import Any

__all__ = ["MixedDataset", "StreamingDataset", "StreamingLoader"]


def __getattr__(name: str) -> Any:
    """The readers, imported when they are asked for: a command that builds a dataset needs no torch."""
    if name in __all__:
        from templar.datasets import streaming  # noqa: PLC0415

        return getattr(streaming, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
