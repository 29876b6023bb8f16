"""A built dataset into a store: compared first, in parallel, checked, and never over another one."""

from collections.abc import Callable
from pathlib import Path

from templar.data.build import require_free
from templar.data.copying import CopyReport, copy_dataset
from templar.store.base import ObjectStore
from templar.store.directory import DirectoryStore


def upload_built(
    root: Path,
    store: ObjectStore,
    prefix: str,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CopyReport:
    """Put a dataset's folder into a store, the files that describe it last; after a failure, call it again.

    Args:
        root: The folder.
        store: Where to.
        prefix: Folder of the dataset in the store; empty for its root.
        on_progress: Called with the bytes that are done and those of all files, after each file.

    Raises:
        TransientError, PermanentError: As in `require_free` and `copy_dataset`: `object_differs`, before anything is
            written, if something else is there.
    """
    require_free(root, store, prefix)
    return copy_dataset([DirectoryStore(root, writable=False)], store, "", prefix, on_progress=on_progress)
