"""Copy a dataset into another store and check it, so that other operators can host it.

A dataset without `_metadata.yaml` or `_shards.json` does not exist, so that file goes last: if an earlier step fails,
no reader ever sees half a dataset, and a later call resumes. Nothing is ever overwritten or deleted.
"""

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from templar.canonical import file_sha256, sha256_hex
from templar.data.pages.metadata import folder_prefix
from templar.datasets.dataset_files import OPTIONAL, DatasetFile, Inventory, Originals, for_each
from templar.errors import PermanentError, Reason, TransientError
from templar.store.base import ObjectStore
from templar.store.files import local_file


class CopyOutcome(StrEnum):
    """Whether an object was copied to the target."""

    COPIED = "copied"
    ALREADY_THERE = "already there"


class Check(StrEnum):
    """The way in which an object at the target was checked."""

    SIZE = "size"
    """It has the right length."""
    SOURCE_HASH = "source hash"
    """The bytes that were written had the metadata's SHA-256, and the object has their length."""
    READ_BACK = "read back"
    """The object was read and has the SHA-256 of the metadata or, where they give none, of the source's file."""


@dataclass(frozen=True)
class CopiedObject:
    """One object that is at the target now; its path is relative to the dataset's folder."""

    path: str
    num_bytes: int
    outcome: CopyOutcome
    check: Check


@dataclass(frozen=True)
class CopyReport:
    """A dataset that is complete at the target; its objects by path."""

    objects: tuple[CopiedObject, ...]

    def having(self, what: CopyOutcome | Check) -> tuple[CopiedObject, ...]:
        """The objects with this outcome, or that were checked like this."""
        return tuple(each for each in self.objects if what in {each.outcome, each.check})


@dataclass(frozen=True)
class _Finding:
    """The comparison of a file with the object at its place in the target."""

    file: DatasetFile
    there: Check | None = None  # the object is the file, checked like this
    difference: str = ""  # how another object differs

    @property
    def path(self) -> str:
        return self.file.path


def copy_dataset(
    sources: Sequence[ObjectStore],
    target: ObjectStore,
    prefix_from: str,
    prefix_to: str,
    *,
    concurrency: int = 4,
    verify: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> CopyReport:
    """Copy every file of every split, the optional files beside them, and the files that describe them.

    Optional files are `tokenizer.json` and `OPTIONAL`. The files that describe a dataset of pages are
    `_shard_sizes.json` and `_metadata.yaml`; for one of shards it is `_shards.json` alone, and the manifests are copied
    with the shards.

    The target is compared first: if it has other objects, nothing is written. A call that fails or is killed leaves
    whole files without the last one; the next one compares their hashes, for they may be of another dataset, and
    resumes.

    Args:
        sources: Stores that hold the same dataset; read in turn, with fail-over.
        target: The store to copy to; it is listed, read and written.
        prefix_from: Folder of the dataset in the sources; empty for their root.
        prefix_to: Folder of the dataset in the target; empty for its root.
        concurrency: Most files that are moved at the same time. As many lie on the disk at once. Memory holds
            `_metadata.yaml` and `_shard_sizes.json`, or `_shards.json`; `tokenizer.json`; name, length and outcome of
            every file; a shard's manifest for each file of a shard that is moved; and the buffers of the stores' own
            transfers.
        verify: Read back all objects at the target, also those that were there already, and compare hashes.
        on_progress: Called with the bytes that are done and those of all files, after each file.

    Returns:
        Every object and how it was checked. Data files that have no hash in the metadata are read back when they are
        copied. So are the other files, and they are compared by their bytes also if they were there already; of data
        files that were there, the length is compared unless `verify` is set or the target has no dataset yet.

    Raises:
        TransientError: A store failed; a later call resumes.
        PermanentError: `dataset_missing` or `dataset_malformed` if the source lacks a file or it has other bytes than
            the metadata say, `object_differs` if the target has other objects, `disk_full`, `access_denied`, ....
            All name the file.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    originals = Originals(sources, prefix_from)
    with local_file(Path(tempfile.gettempdir())):
        folder = tempfile.TemporaryDirectory(prefix="templar-copy-")
    with folder as name:
        copier = _Copier(originals, target, folder_prefix(prefix_to), concurrency, verify, Path(name))
        return _copy(copier, originals.inventory(concurrency), on_progress)


def _copy(copier: "_Copier", inventory: Inventory, on_progress: Callable[[int, int], None]) -> CopyReport:
    total, finished, done = sum(file.size for file in inventory.files), list[CopiedObject](), 0
    # 1. Compare the target with the source.
    findings = copier.examine(inventory)
    differing = [finding for finding in findings if finding.difference]
    if differing:
        raise copier.conflict(differing)
    # 2. Copy the data files, then the files that describe them, one after the other.
    data, description = findings[: len(inventory.data)], findings[len(inventory.data) :]
    for batch in (data, *([finding] for finding in description)):
        for copied in copier.complete(batch):
            finished.append(copied)
            done += copied.num_bytes
            on_progress(done, total)
    return CopyReport(tuple(sorted(finished, key=lambda each: each.path)))


@dataclass(frozen=True)
class _Copier:
    """The steps of a copy; `prefix` ends in a slash or is empty."""

    originals: Originals
    target: ObjectStore
    prefix: str
    concurrency: int
    verify: bool
    spool: Path

    def examine(self, inventory: Inventory) -> list[_Finding]:
        """Compare the target with the files, in their order; nothing is written."""
        files = inventory.files
        there = {info.key: info.size for info in self.target.list(self.prefix)}
        verify = self.verify or self.prefix + files[-1].path not in there

        def is_read(file: DatasetFile) -> bool:
            return verify or file.data is not None or file.path in OPTIONAL

        self._require_space([file for file in files if self.prefix + file.path in there and is_read(file)])

        def compare(file: DatasetFile) -> _Finding:
            size = there.get(self.prefix + file.path)
            if size is None:
                return _Finding(file)
            if size != file.size:
                return _Finding(file, difference=f"has {size} bytes, the source's has {file.size}")
            if not is_read(file):
                return _Finding(file, there=Check.SIZE)
            found, wanted = self._stored_sha256(file), file.sha256 or self._original_sha256(file)
            if found != wanted:
                return _Finding(file, difference=f"has SHA-256 {found}, the source's has {wanted}")
            return _Finding(file, there=Check.READ_BACK)

        findings = {finding.path: finding for finding in for_each(compare, files, self.concurrency)}
        return [findings[file.path] for file in files]

    def complete(self, findings: Sequence[_Finding]) -> Iterator[CopiedObject]:
        """Copy and check the missing files; yields every object when it is done."""
        missing: list[_Finding] = []
        for finding in findings:
            if finding.there is None:
                missing.append(finding)
            else:
                yield CopiedObject(finding.path, finding.file.size, CopyOutcome.ALREADY_THERE, finding.there)
        self._require_space([finding.file for finding in missing])
        yield from for_each(self._transfer, missing, self.concurrency)

    def conflict(self, differing: Sequence[_Finding]) -> PermanentError:
        """The error about objects that are not the source's."""
        others = f" (so do {len(differing) - 1} more objects)" if len(differing) > 1 else ""
        return PermanentError(
            Reason.OBJECT_DIFFERS,
            f"{self.target.name}/{self.prefix}{differing[0].path}: {differing[0].difference}{others}; nothing was "
            "written: name another folder for the copy, or delete what is there first",
        )

    def _transfer(self, finding: _Finding) -> CopiedObject:
        file, key = finding.file, self.prefix + finding.path
        if self.target.head(key) is not None:
            raise PermanentError(
                Reason.OBJECT_DIFFERS,
                f"{self.target.name}/{key}: appeared while the dataset was copied; does another process write there?",
            )
        if file.data is not None:
            self.target.put(key, file.data)
            sha256 = sha256_hex(file.data)
        else:
            with self._spooled() as path:
                sha256 = self.originals.fetch(file, path)
                self.target.put_file(key, path)
        return CopiedObject(file.path, file.size, CopyOutcome.COPIED, self._confirm(file, sha256))

    def _confirm(self, file: DatasetFile, sha256: str) -> Check:
        """Check an object that was written: its length always, its bytes if the metadata have no hash of them."""
        where = f"{self.target.name}/{self.prefix}{file.path}"
        info = self.target.head(self.prefix + file.path)
        if info is None:
            raise TransientError(Reason.OBJECT_MISSING, f"{where}: not there after it was written; retry")
        reads_back = self.verify or file.data is not None or file.sha256 is None
        if info.size != file.size or (reads_back and self._stored_sha256(file) != sha256):
            raise PermanentError(
                Reason.OBJECT_DIFFERS, f"{where}: is not what was written; does another process write there?"
            )
        return Check.READ_BACK if reads_back else Check.SOURCE_HASH

    def _stored_sha256(self, file: DatasetFile) -> str:
        key = self.prefix + file.path
        if file.data is not None:
            return sha256_hex(self.target.get(key, max_bytes=file.size))
        with self._spooled() as path:
            self.target.get_file(key, path, max_bytes=file.size)
            with local_file(path):
                return file_sha256(path)

    def _original_sha256(self, file: DatasetFile) -> str:
        with self._spooled() as path:
            return self.originals.fetch(file, path)

    @contextmanager
    def _spooled(self) -> Iterator[Path]:
        path = self.spool / secrets.token_hex(8)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _require_space(self, files: Sequence[DatasetFile]) -> None:
        sizes = sorted((file.size for file in files if file.data is None), reverse=True)
        needed, free = sum(sizes[: self.concurrency]), shutil.disk_usage(self.spool).free
        if needed > free:
            raise PermanentError(
                Reason.DISK_FULL,
                f"{self.spool.parent}: {self.concurrency} files at a time need {needed / 2**30:.1f} GiB and "
                f"{free / 2**30:.1f} GiB are free; move fewer at a time, or name another folder (TMPDIR)",
            )
