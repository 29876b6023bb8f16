"""Clean-up of a neuron's folder and of its programs' temporary folders on this machine.

A running neuron prunes its spool, payloads and private states when it finishes a window, and its snapshots when it
makes one. This clean-up removes the rest: files of processes that died, finished downloads, snapshots of other
networks, kernels of older releases.

It is safe beside a running neuron and takes no lock: it deletes only files that a restart does not need and that have
not changed for hours. Change times count, because no program can set them; reading does not update them, so files that
may be read for long stay for at least a day.
"""

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from templar.errors import PermanentError, Reason
from templar.exchange.signed import Network
from templar.hparams import Storage
from templar.neuron.snapshot import Snapshots

FOREIGN_HOURS = 7 * 24
"""Snapshots of another network stay at least this long: an operator may have named the wrong network for a while."""
READ_HOURS = 24
"""Least age of files that may be read for hours without a change, such as a checkpoint during its upload."""
GONE = ".gone-"  # prefix of files and folders that are being deleted
DOWNLOADS = tuple(f"{name}{end}" for name in ("genesis", "checkpoint", "evaluating") for end in ("", ".part"))
"""Folders that are fetched again when they are needed."""
PUBLISHING = ("publishing", "backup")  # a checkpoint while it is published, and a private backup while it is stored
STATE_FILES = (
    *("journal.sqlite", "journal.sqlite-wal", "scores.sqlite", "scores.sqlite-wal"),
    *("tokenizer.json", "tokenizer_config.json"),
)
"""Files that are only counted; the neuron drops old windows from them itself."""
TEMPORARY = ("templar-dataset-", "templar-gauntlet-", "templar-preview-")
"""Prefixes of the folders that commands make in the system's temporary folder."""
_PART = re.compile(r"\..+\.(part|partial)|\.gone-.+")
_HALF_SNAPSHOT = (".writing-", GONE)
_SPOOLED = re.compile(r"[a-z]+-([0-9]+)\.[a-z]+")
_KERNELS = re.compile(r"(kernels-)?[0-9a-f]{16}|\.gone-.*")


@dataclass(frozen=True)
class LocalRow:
    """One room (a group of files) of the neuron's folder, or of this machine."""

    room: str
    num_bytes: int  # before the clean-up
    removed: int  # files and folders that were removed, or would be
    freed: int  # their bytes


@dataclass(frozen=True)
class LocalReport:
    """Result of a clean-up of this machine."""

    rows: tuple[LocalRow, ...]  # one per room
    failed: tuple[tuple[str, str], ...]  # path and reason of each failure

    def total(self, name: str) -> int:
        """A column's sum, such as `total("freed")`."""
        return sum(getattr(row, name) for row in self.rows)

    @property
    def summary(self) -> str:
        """One line: bytes, removals, and failures."""
        text = f"{self.total('num_bytes')} bytes, {self.total('removed')} removed, {self.total('freed')} bytes of them"
        if not self.failed:
            return text
        path, problem = self.failed[0]
        return f"[{Reason.LOCAL_FILE}] {text}, {len(self.failed)} failed, the first: {path} ({problem})"


@dataclass(frozen=True)
class LocalRules:
    """Which files may be removed."""

    network: Network  # the neuron's network
    storage: Storage  # the neuron's settings
    hours: float  # least time since the last change
    now: float  # this machine's time, in seconds since the epoch

    def __post_init__(self) -> None:
        if not 1 <= self.hours < float("inf"):
            raise PermanentError(Reason.BAD_PARAMETERS, f"hours: {self.hours} is not at least 1, as slow writers need")

    def is_idle(self, path: Path, *, hours: float | None = None) -> bool:
        """Whether a file, or everything in a folder, has not changed for `hours`, the rules' by default."""
        limit = self.now - 3600 * (self.hours if hours is None else hours)
        with suppress(FileNotFoundError):  # it is being worked on
            return all(each.lstat().st_ctime < limit for each in (path, *_everything(path)))
        return False


def clean_local(home: Path, rules: LocalRules, *, kernels: Path | None, dry_run: bool) -> LocalReport:
    """Remove the files that are no longer needed; with `dry_run` only count them.

    `kernels` is the folder of this release's compiled kernels; None leaves those of other releases alone. `local_file`
    if there is no folder `home`.
    """
    if not home.is_dir():
        raise PermanentError(Reason.LOCAL_FILE, f"{home}: no such folder; correct TEMPLAR_HOME")
    reading = max(rules.hours, READ_HOURS)
    beside = [] if kernels is None or not kernels.parent.is_dir() else [*kernels.parent.iterdir()]
    other_kernels = [each for each in beside if each.is_dir() and _KERNELS.fullmatch(each.name) and each != kernels]
    rooms = {
        **_of_windows(home, rules),
        "downloads": _idle(_existing(home, DOWNLOADS), rules),
        "publishing": _idle(_existing(home, PUBLISHING), rules, hours=reading),
        "half-written files": _idle([each for each in home.iterdir() if _PART.fullmatch(each.name)], rules),
        "state files": _Room(_existing(home, STATE_FILES)),
        "shards": _Room(_existing(home, ("shards",))),
        "temporary folders": _idle(_temporary_folders(), rules, hours=reading),
        "kernels": _idle(other_kernels, rules),
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
    """Files and folders that are counted, and those that are removed."""

    content: list[Path]
    old: list[Path] = field(default_factory=list)


def _of_windows(home: Path, rules: LocalRules) -> dict[str, _Room]:
    """Spool, payloads and snapshots: a restart goes back at most to the oldest snapshot of its network."""
    root = home / "snapshots"
    snapshots = Snapshots(root, rules.network, kept=rules.storage.snapshots_kept)
    own = [mark.window for mark in snapshots.marks()]
    oldest = min(own, default=0) - 2  # the same margin as in `Node.finish`
    half = [each for each in root.iterdir() if each.name.startswith(_HALF_SNAPSHOT)]
    others = [snapshots.folder(window) for window in snapshots.windows() if window not in own] if own else []
    foreign = _idle(others, rules, hours=max(rules.hours, FOREIGN_HOURS))

    def is_spooled(name: str) -> bool:
        match = _SPOOLED.fullmatch(name)
        return match is not None and int(match[1]) < oldest - rules.storage.snapshot_frequency

    def room(folder: str, is_old: Callable[[str], object]) -> _Room:
        found = _existing(home, (folder,))
        inside = sorted(path for each in found for path in each.iterdir())
        return _Room(found, _idle([path for path in inside if is_old(path.name)], rules).old)

    return {
        "snapshots": _Room([root], [*_idle(half, rules).old, *foreign.old]),
        # The live private state may be older than all snapshots: only the neuron knows it.
        "private state": room("private", _PART.fullmatch),
        "spool": room("spool", lambda name: is_spooled(name) or _PART.fullmatch(name)),
        "payloads": room("payloads", lambda name: name.startswith(GONE) or (name.isdecimal() and int(name) < oldest)),
    }


def _idle(paths: list[Path], rules: LocalRules, *, hours: float | None = None) -> _Room:
    return _Room(paths, [path for path in paths if rules.is_idle(path, hours=hours)])


def _existing(home: Path, names: Iterable[str]) -> list[Path]:
    return [path for name in names if (path := home / name).exists()]


def _temporary_folders() -> list[Path]:
    """Folders of this user's commands in the system's temporary folder."""
    root = Path(tempfile.gettempdir())
    found = []
    for each in root.iterdir():
        with suppress(FileNotFoundError):
            if each.name.startswith(TEMPORARY) and not each.is_symlink() and each.is_dir():
                found += [each] if each.stat().st_uid == os.getuid() else []
    return found


def _everything(path: Path) -> Iterator[Path]:
    """All entries below a folder; entries that vanish meanwhile are skipped, links are not followed."""
    if not path.is_symlink():
        for folder, folders, files in os.walk(path):
            yield from (Path(folder, name) for name in (*folders, *files))


def _size(path: Path) -> int:
    """Bytes of a file or folder on the disk; holes take none, and each name of a file has an equal share of it."""
    total = 0
    for each in (path, *_everything(path)):
        with suppress(FileNotFoundError):
            status = each.lstat()
            total += status.st_blocks * 512 // status.st_nlink if stat.S_ISREG(status.st_mode) else 0
    return total


def _remove(path: Path) -> str | None:
    """Remove a file or a folder, which is renamed before it is emptied; the problem, if it failed."""
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path.rename(path.with_name(f"{GONE}{secrets.token_hex(8)}")))
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None
