"""Clean-up of a neuron's folder and of what its programs left elsewhere on this machine.

A running neuron prunes its spool and its payloads itself when it finishes a window, and its snapshots when it makes
one. What is left for here is what nobody comes back for: files of processes that died, downloads that were read,
snapshots of networks that were left, kernels of releases that are gone.

It is safe beside a running neuron and takes no lock: it deletes only what a restart does not need and what nobody has
changed for hours. Change times count, by this machine's clock; nothing can set them, and reading does not move them, so
what may be being read for long stays for a day at least.
"""

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numba

from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network
from templar.gradient.kernels import machine  # noqa: F401 - it tells numba where to keep them
from templar.hparams import Storage
from templar.neuron.snapshot import Snapshots

FOREIGN_HOURS = 7 * 24
"""Snapshots of another network stay this long at least: an operator may have taken the wrong one for a while."""


READ_HOURS = 24
"""What is read for hours without a change stays this long at least: a checkpoint that is uploaded, what is copied."""


GONE = ".gone-"
"""Beginning of the name of what is being deleted."""


DOWNLOADS = ("genesis", "genesis.part", "checkpoint", "checkpoint.part")
"""What is fetched again when it is needed."""


PUBLISHING = ("publishing",)
"""A checkpoint while it is published."""


STATE_FILES = ("journal.sqlite", "journal.sqlite-wal", "scores.sqlite", "scores.sqlite-wal", "tokenizer.json")
"""What is never touched here; the neuron drops old windows from them itself."""


TEMPORARY = ("templar-copy-", "templar-dataset-", "templar-gauntlet-", "templar-preview-")
"""Beginnings of the names of folders that commands make in the system's place for temporary ones."""


_PART = re.compile(r"\..+\.(part|partial)|\.gone-.+")


_HALF_SNAPSHOT = (".writing-", GONE)


_SPOOLED = re.compile(r"[a-z]+-([0-9]+)\.[a-z]+")


_KERNELS = re.compile(r"(kernels-)?[0-9a-f]{16}")


@dataclass(frozen=True)
class LocalRow:
    """One room of the neuron's folder, or of this machine.

    Attributes:
        room: Its name.
        num_bytes: Bytes that it took before.
        removed: Files and folders that were removed, or would be.
        freed: Their bytes.
    """

    room: str
    num_bytes: int
    removed: int
    freed: int


@dataclass(frozen=True)
class LocalReport:
    """What a clean-up of this machine did.

    Attributes:
        rows: One per room.
        failed: Path and reason of what could not be removed.
    """

    rows: tuple[LocalRow, ...]
    failed: tuple[tuple[str, str], ...]

    def total(self, name: str) -> int:
        """A column's sum, such as `total("freed")`."""
        return sum(getattr(row, name) for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: bytes, what was removed, and what could not be."""
        text = f"{self.total('num_bytes')} bytes, {self.total('removed')} removed, {self.total('freed')} bytes of them"
        if not self.failed:
            return text
        return "[{}] {}, {} failed, the first: {} ({})".format(
            Reason.LOCAL_FILE, text, len(self.failed), *self.failed[0]
        )


@dataclass(frozen=True)
class LocalRules:
    """What may go.

    Attributes:
        network: The network that the neuron is in.
        storage: What it keeps.
        hours: How long nobody may have changed what goes.
        now: This machine's time, in seconds since the epoch.
    """

    network: Network
    storage: Storage
    hours: float
    now: float

    def __post_init__(self) -> None:
        if not 1 <= self.hours < float("inf"):
            raise PermanentError(
                Reason.BAD_PARAMETERS, f"hours: {self.hours} is not a number of at least 1, which slow writers need"
            )

    def is_idle(self, path: Path, *, hours: float | None = None) -> bool:
        """Whether nobody has changed a file, or anything in a folder, for long enough."""
        limit = self.now - 3600 * (self.hours if hours is None else hours)
        with suppress(FileNotFoundError):  # it is being worked on
            return all(each.lstat().st_ctime < limit for each in (path, *_everything(path)))
        return False


def kernel_folder() -> Path:
    """Where the compiled kernels of this release are."""
    return Path(getattr(numba.config, "CACHE_DIR"))  # noqa: B009 - the module makes its attributes at run time


def clean_local(home: Path, rules: LocalRules, *, kernels: Path | None, dry_run: bool) -> LocalReport:
    """Remove what nobody needs any more; with `dry_run` only count it.

    Args:
        home: The neuron's folder.
        rules: What may go.
        kernels: Folder of the compiled kernels that this release uses; None leaves those of other releases alone.
        dry_run: Only count.

    Raises:
        PermanentError: `local_file`; there is no such folder.
    """
    if not home.is_dir():
        raise PermanentError(Reason.LOCAL_FILE, f"{home}: no such folder; correct TEMPLAR_HOME")
    reading = max(rules.hours, READ_HOURS)
    rooms = {
        **_of_windows(home, rules),
        "downloads": _idle(_existing(home, DOWNLOADS), rules),
        "publishing": _idle(_existing(home, PUBLISHING), rules, hours=reading),
        "half-written files": _idle([each for each in home.iterdir() if _PART.fullmatch(each.name)], rules),
        "state files": _Room(_existing(home, STATE_FILES)),
        "shards": _Room(_existing(home, ("shards",))),
        "temporary folders": _idle(_temporary_folders(), rules, hours=reading),
        "kernels": _idle([] if kernels is None else _other_kernels(kernels), rules),
    }
    rows, failed = list[LocalRow](), list[tuple[str, str]]()
    for name, room in rooms.items():
        total, removed, freed = sum(map(_size, room.content)), 0, 0
        for path in room.old:
            size = _size(path)
            problem = None if dry_run else _remove(path)
            if problem is None:
                removed, freed = removed + 1, freed + size
            else:
                failed.append((str(path), problem))
        rows.append(LocalRow(name, total, removed, freed))
    return LocalReport(tuple(rows), tuple(failed))


@dataclass(frozen=True)
class _Room:
    """Files and folders that are counted, and those that go."""

    content: list[Path]
    old: list[Path] = field(default_factory=list)


def _of_windows(home: Path, rules: LocalRules) -> dict[str, _Room]:
    """Spool, payloads and snapshots: a restart may go back to the oldest snapshot of its network, and no further."""
    root = home / "snapshots"
    snapshots = Snapshots(root, rules.network, kept=rules.storage.snapshots_kept)
    own = [mark.window for mark in snapshots.marks()]
    oldest = min(own, default=0) - 2  # as `Node.finish` reckons
    half = [each for each in root.iterdir() if each.name.startswith(_HALF_SNAPSHOT)]
    others = [snapshots.folder(window) for window in snapshots.windows() if window not in own] if own else []
    spool, payloads = _existing(home, ("spool",)), _existing(home, ("payloads",))
    return {
        "snapshots": _Room(
            [root],
            [*_idle(half, rules).old, *_idle(others, rules, hours=max(rules.hours, FOREIGN_HOURS)).old],
        ),
        "spool": _Room(spool, _idle([each for each in _inside(spool) if _is_spooled(each, oldest, rules)], rules).old),
        "payloads": _Room(payloads, _idle([each for each in _inside(payloads) if _is_before(each, oldest)], rules).old),
    }


def _is_spooled(path: Path, oldest: int, rules: LocalRules) -> bool:
    match = _SPOOLED.fullmatch(path.name)
    is_old = match is not None and int(match[1]) < oldest - rules.storage.snapshot_frequency
    return is_old or _PART.fullmatch(path.name) is not None


def _is_before(path: Path, window: int) -> bool:
    return path.name.startswith(GONE) or (path.name.isdecimal() and int(path.name) < window)


def _idle(paths: list[Path], rules: LocalRules, *, hours: float | None = None) -> _Room:
    return _Room(paths, [path for path in paths if rules.is_idle(path, hours=hours)])


def _existing(home: Path, names: Iterable[str]) -> list[Path]:
    return [path for name in names if (path := home / name).exists()]


def _inside(folders: list[Path]) -> list[Path]:
    return sorted(path for folder in folders for path in folder.iterdir())


def _temporary_folders() -> list[Path]:
    """Folders of this user's programs in the system's place for them."""
    root = Path(tempfile.gettempdir())
    found = []
    for each in root.iterdir():
        with suppress(FileNotFoundError):
            if each.name.startswith(TEMPORARY) and not each.is_symlink() and each.is_dir():
                found += [each] if each.stat().st_uid == os.getuid() else []
    return found


def _other_kernels(current: Path) -> list[Path]:
    """The folders beside the kernels of this release that hold those of others."""
    if not current.parent.is_dir():
        return []
    return [
        each
        for each in current.parent.iterdir()
        if each.is_dir() and (_KERNELS.fullmatch(each.name) or each.name.startswith(GONE)) and each != current
    ]


def _everything(path: Path) -> Iterator[Path]:
    """Whatever lies in a folder; what somebody deletes meanwhile is passed over, links are not followed."""
    if not path.is_symlink():
        for folder, folders, files in os.walk(path):
            yield from (Path(folder, name) for name in (*folders, *files))


def _size(path: Path) -> int:
    """Bytes that files take; holes take none."""
    total = 0
    for each in (path, *_everything(path)):
        with suppress(FileNotFoundError):
            status = each.lstat()
            total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


def _remove(path: Path) -> str | None:
    """Remove a file or a folder; why it could not be, if so. A folder is out of the way before it is emptied."""
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            gone = path.rename(path.with_name(f"{GONE}{secrets.token_hex(8)}"))
            shutil.rmtree(gone)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None
