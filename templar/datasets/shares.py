"""A dataset of shards built by several machines: each makes its share of the parts, and one merges all shares.

    build_share(request)                      # on each machine: census and tokens of every n-th unit, and `share.json`
    merge_shares(folders, root)               # on one: the dataset, with the same bytes as that of a single machine

All machines name the same sources, and each reads only the files of its own share. `share.json` lists every file of the
share with its SHA-256, so that a share that was damaged or cut off on its way is refused before anything is written.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.data.shards.shard_writer import require_absent
from templar.data.tokenizer import load_tokenizer, save_tokenizer
from templar.datasets.build_dataset import (
    LOCK_FILE,
    BuiltDataset,
    alone,
    assemble,
    built_before,
    make_parts,
    prepare,
)
from templar.datasets.documents import InputFile, TextSource
from templar.datasets.plan import BuildRequest, BuildSettings, DatasetLayout, Plan, make_plan
from templar.datasets.token_parts import part_folder
from templar.datasets.units import Unit, census_file, check_ended, find_groups, identify, in_threads
from templar.errors import PermanentError, Reason
from templar.store.files import local_file, replacing, sync

SHARE_FILE = "share.json"
_Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_STEPS_MADE = ("census", "parts")


class _Described(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SharedFile(_Described):
    """One file, by its path in the share or its name in the source."""

    name: str = Field(min_length=1, max_length=4096)
    size: int = Field(ge=0)
    sha256: _Hex64


class SharedUnit(_Described):
    """One unit of the input, and the files that were made of it."""

    index: int = Field(ge=0)  # among the units of all shares
    source: str
    column: str | None
    key: _Hex64
    inputs: tuple[SharedFile, ...]
    results: tuple[SharedFile, ...]


class ShareDescription(_Described):
    """`share.json`."""

    version: Literal[2] = 2
    index: int = Field(ge=0)
    count: int = Field(ge=1)
    settings: dict[str, Any]  # those that the bytes follow from
    tokenizer: _Hex64  # its digest; the tokenizer lies beside
    inputs: _Hex64  # a hash of the names and sizes of the input of all shares
    num_units: int = Field(ge=1)  # of all shares
    units: tuple[SharedUnit, ...]


@dataclass(frozen=True)
class BuiltShare:
    """A complete share."""

    root: Path
    description: ShareDescription

    @property
    def num_bytes(self) -> int:
        """Length of the files that were made."""
        return sum(file.size for unit in self.description.units for file in unit.results)


def build_share(
    request: BuildRequest,
    *,
    workers: int | None = None,
    on_progress: Callable[[str, float], None] = lambda step, percentage: None,
) -> BuiltShare:
    """Make the parts of a machine's share, or resume; if the share is complete already, nothing is done.

    Raises:
        ValueError: The request names no share.
        TransientError, PermanentError: As in `build_dataset.build`.
    """
    if request.share is None:
        raise ValueError("the request names no share")
    groups = find_groups(request.sources)
    if len(groups) < request.share.count:
        raise PermanentError(
            Reason.DATASET_TOO_SMALL,
            f"the sources make {len(groups)} units of work (a file of rows, or text files together), too few for "
            f"{request.share.count} shares: ask for fewer",
        )
    if (request.root / SHARE_FILE).exists():
        return _built_before(request, groups, workers)
    plan = prepare(request, workers=workers, on_progress=lambda done: on_progress("read", done))
    make_parts(plan, workers=workers, on_progress=lambda done: on_progress("parts", done))
    with alone(request.work), local_file(request.root):
        require_absent(request.root)
        description = _describe(plan, groups, workers, lambda done: on_progress("assemble", done))
        save_tokenizer(plan.tokenizer(), request.work)
        with replacing(request.work / SHARE_FILE, durable=True) as file:
            file.write(canonical_json(description.model_dump(mode="json")))
        _sweep(request.work, description)
        request.work.rename(request.root)
        sync(request.root.parent)
        (request.root / LOCK_FILE).unlink(missing_ok=True)
    return BuiltShare(request.root, description)


def _built_before(request: BuildRequest, groups: Sequence[tuple[InputFile, ...]], workers: int | None) -> BuiltShare:
    found = read_share(request.root)
    assert request.share is not None  # noqa: S101 - `build_share` looked
    own = in_threads(identify, groups[request.share.index :: request.share.count], workers)
    same = (
        (found.index, found.count) == (request.share.index, request.share.count)
        and found.settings == request.settings.described()
        and found.tokenizer == load_tokenizer(request.settings.tokenizer).digest
        and found.inputs == _inputs_hash(groups)
        and [unit.key for unit in found.units] == [unit.key for unit in own]
    )
    if not same:
        require_absent(request.root)
    return BuiltShare(request.root, found)


def _describe(
    plan: Plan,
    groups: Sequence[tuple[InputFile, ...]],
    workers: int | None,
    on_progress: Callable[[float], None],
) -> ShareDescription:
    share = plan.request.share
    assert share is not None  # noqa: S101 - `build_share` looked
    work = plan.request.work

    def describe(numbered: tuple[int, Unit]) -> SharedUnit:
        number, unit = numbered
        made = [census_file(unit, work), *sorted(part_folder(plan, unit).iterdir())]
        results: list[SharedFile] = []
        for path in made:
            check_ended()
            with local_file(path):
                size, sha256 = path.stat().st_size, file_sha256(path)
            results.append(SharedFile(name=path.relative_to(work).as_posix(), size=size, sha256=sha256))
        return SharedUnit(
            index=share.index + number * share.count,
            source=unit.source,
            column=unit.files[0].column,
            key=unit.key,
            inputs=tuple(
                SharedFile(name=file.name, size=file.size, sha256=sha256)
                for file, sha256 in zip(unit.files, unit.sha256, strict=True)
            ),
            results=tuple(results),
        )

    return ShareDescription(
        index=share.index,
        count=share.count,
        settings=plan.request.settings.described(),
        tokenizer=plan.tokenizer_digest,
        inputs=_inputs_hash(groups),
        num_units=len(groups),
        units=tuple(in_threads(describe, enumerate(plan.units), workers, on_progress)),
    )


def _inputs_hash(groups: Sequence[tuple[InputFile, ...]]) -> str:
    """A hash that is the same on all machines that name the same input, and the same version of a stream."""
    listed = [
        [[file.source, file.name, file.size, file.column, file.shard.sha256 if file.shard else None] for file in files]
        for files in groups
    ]
    return sha256_hex(canonical_json(listed))


def _sweep(work: Path, description: ShareDescription) -> None:
    """Remove what belongs to no unit of the share: results of other settings, unfinished shards."""
    kept = {work / file.name for unit in description.units for file in unit.results}
    for path in work.iterdir():
        if path.is_dir() and path.name not in _STEPS_MADE:
            shutil.rmtree(path, ignore_errors=True)
    for path in [path for step in _STEPS_MADE for path in (work / step).rglob("*")]:
        if path.is_file() and path not in kept:
            path.unlink()


def read_share(folder: Path) -> ShareDescription:
    """The description of a share in a folder.

    Raises:
        PermanentError: `dataset_missing` if there is none, `dataset_malformed`.
    """
    path = folder / SHARE_FILE
    if not path.is_file():
        raise PermanentError(
            Reason.DATASET_MISSING,
            f"{folder} has no {SHARE_FILE}: finish this share (dataset build --share), or copy it",
        )
    with local_file(path):
        data = path.read_bytes()
    try:
        return ShareDescription.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"])) or "content"
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{path}: {field}: {problem['msg']}; copy the share again, or build it again"
        ) from None


def merge_shares(
    folders: Sequence[Path],
    root: Path,
    *,
    workers: int | None = None,
    on_progress: Callable[[str, float], None] = lambda step, percentage: None,
) -> BuiltDataset:
    """Make the dataset of all shares, which are left as they are; resumes, and does nothing if it is complete already.

    Raises:
        ValueError: No folder is named, or the dataset would lie in one.
        TransientError: `local_file`; the disk is full, for example. Call again to go on.
        PermanentError: `dataset_missing` if a share is missing, `object_differs` if shares have other settings or other
            input, `dataset_malformed` if one is damaged; otherwise as in `build_dataset.build`.
    """
    shares = [(folder, read_share(folder)) for folder in folders]
    _require_one_build(shares)
    # 1. The request and the units of a build on one machine.
    first_folder, first = shares[0]
    request = _request_of(shares, root)
    described = sorted(((unit, folder) for folder, share in shares for unit in share.units), key=lambda it: it[0].index)
    units = [_unit(unit) for unit, _ in described]
    tokenizer = load_tokenizer(str(first_folder))
    found = built_before(request, units, tokenizer.digest)
    if found is not None:
        return found
    require_absent(root)
    if tokenizer.digest != first.tokenizer:
        raise _damaged(first_folder, "tokenizer.json")
    # 2. Check every file of the shares.

    def check(one: tuple[SharedUnit, Path]) -> None:
        unit, folder = one
        for file in unit.results:
            check_ended()
            path = folder / file.name
            if not path.is_file() or path.stat().st_size != file.size or file_sha256(path) != file.sha256:
                raise _damaged(folder, file.name)

    in_threads(check, described, workers, lambda done: on_progress("read", done))
    # 3. Assemble.
    with alone(request.work):
        plan = make_plan(request, units, tokenizer, {unit.key: folder for unit, folder in described})
    return assemble(plan, workers=workers, on_progress=lambda done: on_progress("assemble", done))


def _require_one_build(shares: Sequence[tuple[Path, ShareDescription]]) -> None:
    """Refuse shares that are not all shares of one build, each once."""
    if not shares:
        raise ValueError("name the folder of every share")
    (first_folder, first), *others = shares
    for folder, share in others:
        for field in ("count", "settings", "tokenizer", "inputs", "num_units"):
            if getattr(share, field) != getattr(first, field):
                raise PermanentError(
                    Reason.OBJECT_DIFFERS,
                    f"{folder / SHARE_FILE}: {field} is not that of {first_folder}: build all shares from the same "
                    "sources with the same settings and tokenizer",
                )
    numbers = [share.index for _, share in shares]
    missing = sorted(set(range(first.count)) - set(numbers))
    if missing or len(numbers) > first.count:
        names = ", ".join(f"{index + 1}/{first.count}" for index in missing)
        problem = f"share {names} is missing" if missing else "a share is named twice"
        raise PermanentError(Reason.DATASET_MISSING, f"{problem}: name the folder of each of {first.count} shares once")
    for folder, share in shares:
        if [unit.index for unit in share.units] != list(range(share.index, share.num_units, share.count)):
            raise _damaged(folder, SHARE_FILE)


def _request_of(shares: Sequence[tuple[Path, ShareDescription]], root: Path) -> BuildRequest:
    """The request of the whole dataset; its sources are the shares."""
    folder, first = shares[0]
    try:
        values = first.settings | {"layout": DatasetLayout(str(first.settings.get("layout")))}
        settings = BuildSettings(**values, tokenizer=str(folder))
    except (TypeError, ValueError) as error:
        raise PermanentError(
            Reason.DATASET_MALFORMED, f"{folder / SHARE_FILE}: settings: {error}; build the share again"
        ) from None
    sources = tuple(TextSource(f"share-{share.index + 1}", folder) for folder, share in shares)
    return BuildRequest(sources, root, settings)


def _unit(shared: SharedUnit) -> Unit:
    """A unit whose files are on another machine."""
    files = tuple(
        InputFile(shared.source, each.name, Path(each.name), each.size, shared.column) for each in shared.inputs
    )
    return Unit(shared.source, files, tuple(each.sha256 for each in shared.inputs), shared.key, ())


def _damaged(folder: Path, name: str) -> PermanentError:
    return PermanentError(
        Reason.DATASET_MALFORMED,
        f"{folder / name}: is missing or has other bytes than {SHARE_FILE} says: copy the share again",
    )
