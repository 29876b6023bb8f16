"""Rotation of the sharded dataset: the shard in use and the next one are on the local disk, and no other.

Which shard is in use follows from the number of outer steps, so every node computes it alike (PROTOCOL 20). Rotating
twice changes nothing; a rotation that is cut off leaves only whole shards behind.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from templar.data.metadata import folder_prefix
from templar.errors import PermanentError, Reason
from templar.store.base import ObjectInfo, ObjectStore

_TOKENS = re.compile(r"train_(\d{6})\.npy")


@dataclass(frozen=True)
class RotationReport:
    """What a rotation did.

    Attributes:
        num_shards: Shards of the dataset; 0 if it is not a sharded one.
        current: The shard in use.
        fetched: Files that were downloaded.
        deleted: Files that were deleted.
        num_bytes: Bytes that were downloaded.
    """

    num_shards: int
    current: int = 0
    fetched: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    num_bytes: int = 0


def shard_files(index: int) -> tuple[str, str]:
    """Names of a shard's tokens and of its sample ids."""
    return f"train_{index:06d}.npy", f"sample_ids_{index:06d}.bin"


def rotate(
    store: ObjectStore,
    prefix: str,
    folder: Path,
    *,
    outer_steps: int,
    outer_steps_per_shard: int,
    on_progress: Callable[[float], None] = lambda _: None,
) -> RotationReport:
    """Bring the current shard and the next one to the disk and delete the others.

    Args:
        store: Where the dataset is.
        prefix: Its folder there.
        folder: Where the shards go; nothing but shards is touched in it.
        outer_steps: Outer steps of the state that training starts from.
        outer_steps_per_shard: Outer steps between two shards; after the last shard comes the first.
        on_progress: Called with the percentage of bytes that are there.

    Raises:
        TransientError: The store failed; a later call fetches what is missing.
        PermanentError: `disk_full` before anything is fetched, `object_missing`, `access_denied`.
    """
    prefix = folder_prefix(prefix)
    names = [info.key.removeprefix(prefix) for info in store.list(f"{prefix}train_")]
    indices = sorted(int(match[1]) for name in names if (match := _TOKENS.fullmatch(name)))
    if not indices:
        return RotationReport(0)
    position = outer_steps // outer_steps_per_shard
    wanted_shards = [indices[position % len(indices)], indices[(position + 1) % len(indices)]]
    wanted = dict.fromkeys(name for index in wanted_shards for name in shard_files(index))
    folder.mkdir(parents=True, exist_ok=True)
    deleted = _delete_others(folder, wanted)
    missing = [info for name in wanted if (info := _missing(store, prefix, folder, name)) is not None]
    _check_space(folder, missing)
    total, done = sum(info.size for info in missing), 0
    for info in missing:
        store.get_file(info.key, folder / info.key.rsplit("/", 1)[-1], max_bytes=info.size)
        done += info.size
        on_progress(100 * done / total if total else 100.0)
    fetched = tuple(info.key.rsplit("/", 1)[-1] for info in missing)
    return RotationReport(len(indices), wanted_shards[0], fetched, deleted, total)


def _missing(store: ObjectStore, prefix: str, folder: Path, name: str) -> ObjectInfo | None:
    info = store.head(f"{prefix}{name}")
    if info is None:
        raise PermanentError(
            Reason.OBJECT_MISSING, f"{store.name}/{prefix}{name}: a shard needs its tokens and its sample ids"
        )
    path = folder / name
    return None if path.exists() and path.stat().st_size == info.size else info


def _delete_others(folder: Path, wanted: dict[str, None]) -> tuple[str, ...]:
    names = [path.name for path in (*folder.glob("train_*.npy"), *folder.glob("sample_ids_*.bin"))]
    others = tuple(sorted(name for name in names if name not in wanted))
    for name in others:
        (folder / name).unlink(missing_ok=True)
    return others


def _check_space(folder: Path, missing: list[ObjectInfo]) -> None:
    needed, free = sum(info.size for info in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise PermanentError(
            Reason.DISK_FULL,
            f"{folder}: the shards need {needed / 2**30:.1f} GiB more and {free / 2**30:.1f} GiB are free; "
            "give the neuron's home a larger disk",
        )
