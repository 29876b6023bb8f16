"""Published checkpoints: a folder of files and a signed manifest with their hashes (docs/protocol.md 12).

The manifest is written last, and a checkpoint without it does not exist: an unfinished one is never read.
"""

import hashlib
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from templar.agreement.model_folder import WEIGHTS_PATTERN
from templar.agreement.state import StateMark
from templar.canonical import canonical_json, file_sha256, sha256_hex
from templar.chain.base import Clock, NeuronInfo
from templar.chain.hotkey import Signer
from templar.data.assignment import ShardEpoch
from templar.data.tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.object_keys import Kind, ObjectKey, checkpoint_key, parse_current_key
from templar.exchange.objects import CheckpointManifest
from templar.exchange.publish import publish_body, publish_file
from templar.exchange.signed import Network, read_signed, unseal
from templar.hparams import Model
from templar.store.base import ObjectInfo, ObjectStore
from templar.store.deadline import in_parallel
from templar.store.files import link_or_copy, local_file, replacing
from templar.tensorfile import header_bytes
from templar.traffic import watching
from templar.training.model import parameter_shapes

log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
EVALUATION_FILE = "evaluation.json"
"""The checkpoint's result on held-out text, signed; it comes after the manifest, which does not name it."""
_LATER = (MANIFEST_FILE, EVALUATION_FILE)
TOKENIZER_FILES = {TOKENIZER_FILE: MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE: 1 << 16}
"""The files of a checkpoint that are fetched besides those of weights, and their largest sizes."""
REFUSED, MOST_REFUSED = ".refused", 64
"""Suffix of the file beside a folder that has the refused checkpoints, and how many: the newest."""
FILES_AT_ONCE = 3
"""Most files of a checkpoint that are moved at a time; each of them may take a store's memory for parts."""
READ_BYTES = 16 << 20  # memory that reading back a stored file takes
LOGGED_PERCENT = 10
ProvenState = tuple[str, int]  # state root, and number of outer steps
Progress = Callable[[float], None]


def silent(percentage: float) -> None:
    """Show no progress."""


def publish_checkpoint(
    store: ObjectStore,
    folder: Path,
    mark: StateMark,
    *,
    network: Network,
    uid: int,
    signer: Signer,
    clock: Clock,
    concurrency: int = 1,
    on_progress: Progress = silent,
) -> CheckpointManifest:
    """Upload every file of a folder, several at a time, and verify it; then the manifest.

    On failure a later call uploads the missing files only. Files that an earlier call left are read back: what is not
    the folder's is replaced, as long as there is no manifest. `on_progress` is called with the part that is stored, 0
    to 100, from several threads but never from two at a time.

    PermanentError: `object_differs`; another checkpoint of this window is stored. TransientError: The store failed.
    """
    # 1. What will be signed.
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _LATER)
    manifest = CheckpointManifest(
        netuid=network.netuid,
        genesis=network.genesis,
        uid=uid,
        hotkey=signer.address,
        window=mark.window,
        outer_steps=mark.outer_steps,
        root=mark.root,
        previous_root=mark.previous_root,
        null=mark.null,
        epochs=tuple((epoch.first_window, epoch.position) for epoch in mark.epochs),
        plan=mark.plan,
        files={path.name: file_sha256(path) for path in files},
        sizes={path.name: path.stat().st_size for path in files},
    )
    manifest_key = checkpoint_key(mark.window, uid, MANIFEST_FILE)
    is_signed, moving = _is_signed(store, manifest_key), _Moving(manifest_key, manifest.sizes, on_progress)

    # 2. The files; nobody reads them before there is a manifest.
    def upload(path: Path) -> None:
        key = checkpoint_key(mark.window, uid, path.name)
        with moving.file(path.name):
            if not is_signed:
                _replace_other(store, key, path, manifest.files[path.name])
            publish_file(store, key, path, clock=clock)

    in_parallel(upload, files, min(concurrency, FILES_AT_ONCE))
    publish_body(store, manifest_key, manifest, signer, clock=clock)
    return manifest


def _is_signed(store: ObjectStore, key: str) -> bool:
    """Whether a legal manifest is stored; one that a damaged upload left, which no reader takes, is deleted."""
    if store.head(key) is None:
        return False
    try:
        unseal(store.get(key, max_bytes=CheckpointManifest.max_bytes), CheckpointManifest)
    except RejectedError as error:
        log.warning("%s: the stored manifest is not legal and is replaced: %s", key, error)
        store.delete([key])
        return False
    return True


def _replace_other(store: ObjectStore, key: str, path: Path, digest: str) -> None:
    """Store a file again if an earlier call left other bytes at its key: a damaged upload, or an older file."""
    if (info := store.head(key)) is None:
        return
    found = hashlib.sha256()
    for start in range(0, info.size, READ_BYTES):
        found.update(store.get_range(key, start, min(READ_BYTES, info.size - start)))
    if found.hexdigest() != digest:
        log.warning("%s: what an upload that did not end has left is not the file; it is replaced", key)
        store.put_file(key, path)


class _Moving:
    """The share of a checkpoint's files that several threads have moved."""

    def __init__(self, what: str, sizes: Mapping[str, int], on_progress: Progress) -> None:
        self._what, self._left, self._on_progress = what, dict(sizes), on_progress
        self._total, self._logged, self._lock = max(1, sum(sizes.values())), 0, threading.Lock()

    @contextmanager
    def file(self, name: str) -> Iterator[None]:
        """Count the bytes of a file that move within the block; at its end all of them have."""
        with watching(partial(self._move, name)):
            yield
        self._move(name, self._left[name])

    def _move(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._left[name] -= min(num_bytes, self._left[name])  # parts that are moved again count once
            percentage = 100 * (1 - sum(self._left.values()) / self._total)
            if percentage >= self._logged + LOGGED_PERCENT:
                self._logged = int(percentage)
                log.info("%s: %d %% of the files", self._what, self._logged)
            self._on_progress(percentage)


def list_checkpoints(store: ObjectStore, uid: int, file: str = MANIFEST_FILE) -> list[int]:
    """The windows of a publisher's checkpoints with this file, newest first; by default of the complete ones."""
    keys = (parse_current_key(info.key) for info in store.list(f"{Kind.CHECKPOINT}-"))
    windows = (key.window for key in keys if key is not None and (key.uid, key.file) == (uid, file))
    return sorted((window for window in windows if window is not None), reverse=True)


def read_manifest(
    store: ObjectStore, publisher: NeuronInfo, window: int, network: Network
) -> CheckpointManifest | None:
    """The manifest of a publisher's checkpoint, None if there is no such checkpoint; errors as in `read_signed`."""
    key = checkpoint_key(window, publisher.uid, MANIFEST_FILE)
    found = read_signed(store, key, CheckpointManifest, network=network, author=publisher, window=window)
    return None if found is None else found.body


def mark_of(manifest: CheckpointManifest) -> StateMark:
    """The state that a manifest says its checkpoint has."""
    return StateMark(
        manifest.window,
        manifest.outer_steps,
        manifest.root,
        manifest.previous_root,
        manifest.null,
        tuple(ShardEpoch(*epoch) for epoch in manifest.epochs),
        manifest.plan,
    )


def read_refusals(folder: Path) -> list[tuple[str, str]]:
    """A record of what was fetched into a folder and refused: hotkey and digest of what was stored, the newest last."""
    path = folder.with_name(folder.name + REFUSED)
    with local_file(path):
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [(hotkey, stored) for hotkey, _, stored in (line.partition(" ") for line in lines)]


@contextmanager
def _remembering(folder: Path, manifest: CheckpointManifest, files: Sequence[ObjectInfo | None]) -> Iterator[None]:
    """Remember a checkpoint that the block refuses; `checkpoint_broken` if it was refused with these stamps before."""
    stamps = [None if each is None else [each.key, each.size, each.last_modified] for each in files]
    refusal = manifest.hotkey, sha256_hex(canonical_json([manifest.digest, stamps]))
    known, path = read_refusals(folder), folder.with_name(folder.name + REFUSED)
    if refusal in known:
        problem = f"it was refused before and is unchanged; to try again remove {path}"
        raise RejectedError(Reason.CHECKPOINT_BROKEN, problem)
    try:
        yield
    except PermanentError as error:
        if error.reason in (Reason.CHECKPOINT_BROKEN, Reason.ROOT_DIFFERS):
            with replacing(path) as file:
                file.write("\n".join(" ".join(each) for each in [*known, refusal][-MOST_REFUSED:]).encode())
        raise


@contextmanager
def fetched_checkpoint(
    store: ObjectStore,
    publisher: NeuronInfo,
    window: int,
    folder: Path,
    *,
    network: Network,
    model: Model,
    proven: ProvenState | None = None,
    concurrency: int = 1,
    remember: bool = False,
) -> Iterator[CheckpointManifest]:
    """Download weights and tokenizer of a checkpoint, check each file against its manifest, and let the block read it.

    The files appear under `folder` all at once or not at all. After a failed or killed download the next call resumes,
    file by file and part by part; what is in `folder` already is not fetched again. Other files of the checkpoint are
    for programs of others and are never fetched. `model` bounds the sizes, and `proven` is the state that a quorum
    proved, if one did. With `remember`, a checkpoint that is refused, here or by the block, is left alone until it is
    changed. At most `FILES_AT_ONCE` files come at a time.

    Raises:
        RejectedError: There is no manifest, it is not legal, or a file does not match it. `root_differs`; it names
            another state than the proven one, and no file was fetched.
        PermanentError: As the block, or the store refuses. All messages name the checkpoint.
        TransientError: The store failed.
    """
    try:
        # 1. The manifest, and whether state and sizes can be right; then whether it was refused before.
        manifest = read_manifest(store, publisher, window, network)
        if manifest is None:
            raise RejectedError(Reason.CHECKPOINT_BROKEN, "its manifest is not there, so there is no such checkpoint")
        if proven not in (None, (manifest.root, manifest.outer_steps)):
            problem = f"it has the root {manifest.root[:12]}, and a quorum proved {proven[0][:12]}"
            raise RejectedError(Reason.ROOT_DIFFERS, f"it is not the proven state: {problem}")
        names = _fetched_files(manifest, model)
        infos = [store.head(checkpoint_key(window, publisher.uid, name)) for name in names] if remember else []
        with _remembering(folder, manifest, infos) if remember else nullcontext():
            # 2. The files; then the caller reads them.
            place = str(ObjectKey(Kind.CHECKPOINT, window, publisher.uid))
            _fetch_files(store, place, manifest, names, folder, concurrency=concurrency)
            yield manifest
    except PermanentError as error:
        if error.reason is Reason.LOCAL_FILE:
            raise
        what = f"checkpoint of window {window} of uid {publisher.uid}"
        raise type(error)(error.reason, f"{what}: {error.message}") from None


def read_copied_manifest(store: ObjectStore, place: str) -> CheckpointManifest:
    """The manifest of a checkpoint that somebody has copied to a folder of a bucket; its author's signature is checked.

    PermanentError: `object_missing`, and as in `unseal`. All messages name bucket and folder.
    """
    key, where = f"{place}/{MANIFEST_FILE}", f"s3://{store.name}/{place}"
    if store.head(key) is None:
        remedy = "name the folder of a published checkpoint or a copy of it, with every file"
        raise PermanentError(Reason.OBJECT_MISSING, f"{where}: there is no {MANIFEST_FILE}: {remedy}")
    try:
        return unseal(store.get(key, max_bytes=CheckpointManifest.max_bytes), CheckpointManifest).body
    except RejectedError as error:
        raise PermanentError(error.reason, f"{where}/{MANIFEST_FILE}: {error.message}; copy the file again") from None


def fetch_copy(
    store: ObjectStore, place: str, manifest: CheckpointManifest, folder: Path, model: Model, *more: str
) -> None:
    """Download weights, tokenizer and `more` files of a copied checkpoint, and check each against its manifest.

    Errors, and what a later call goes on with, as in `fetched_checkpoint`; the messages name bucket and folder.
    """
    try:
        names = (*_fetched_files(manifest, model), *(name for name in more if name in manifest.files))
        _fetch_files(store, place, manifest, names, folder, concurrency=FILES_AT_ONCE)
    except RejectedError as error:
        is_broken = error.reason is Reason.CHECKPOINT_BROKEN
        remedy = "copy the file again" if is_broken else "name a checkpoint of the preset's model"
        raise PermanentError(error.reason, f"s3://{store.name}/{place}: {error.message}; {remedy}") from None


def _fetched_files(manifest: CheckpointManifest, model: Model) -> tuple[str, ...]:
    """The files of a checkpoint that are read, if their sizes can be those of this model (docs/protocol.md 12)."""
    weights, shapes = [name for name in manifest.files if fnmatch(name, WEIGHTS_PATTERN)], parameter_shapes(model)
    bounds = {name: most for name, most in TOKENIZER_FILES.items() if name in manifest.files}
    total = sum(manifest.sizes[name] for name in weights)
    most = header_bytes(shapes) + 4 * sum(math.prod(shape) for shape in shapes.values())
    problems = [f"{name} has {manifest.sizes[name]} bytes" for name in bounds if manifest.sizes[name] > bounds[name]]
    if total > most or len(weights) > len(shapes):
        problems.append(f"{len(weights)} files of weights have {total} bytes, and {most} are legal for this model")
    if problems:
        raise RejectedError(Reason.WRONG_SIZE, "; ".join(problems))
    return (*weights, *bounds)


def _fetch_files(
    store: ObjectStore,
    place: str,
    manifest: CheckpointManifest,
    names: Sequence[str],
    folder: Path,
    *,
    concurrency: int,
) -> None:
    """Fetch these files of a folder of a bucket into a folder here that appears whole."""
    # 1. Keep the parts of this checkpoint that an earlier call left, and delete all others.
    part, begun = folder.with_name(folder.name + ".part"), tuple(f".{name[:100]}." for name in names)
    with local_file(part):
        part.mkdir(parents=True, exist_ok=True)
        for path in part.iterdir():
            if path.name not in names and not path.name.startswith(begun):
                path.unlink()
        for name in names:
            if not (part / name).exists() and (folder / name).exists():
                link_or_copy(folder / name, part / name)
    # 2. Fetch each file and compare its hash; then replace the folder.
    moving = _Moving(f"{place}/{MANIFEST_FILE}", {each: manifest.sizes[each] for each in names}, silent)

    def fetch(name: str) -> None:
        with moving.file(name):
            _fetch_file(store, f"{place}/{name}", part / name, manifest.sizes[name], manifest.files[name])

    in_parallel(fetch, names, min(concurrency, FILES_AT_ONCE))
    with local_file(part):
        for path in part.iterdir():
            if path.name not in names:
                path.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


def _fetch_file(store: ObjectStore, key: str, path: Path, size: int, digest: str) -> None:
    """Download a file unless it is here; a file with another hash than the manifest's is deleted."""
    if _is_whole(path, digest):
        return
    try:
        store.get_file(key, path, max_bytes=size, resume=True)
    except PermanentError as error:
        if error.reason not in (Reason.OBJECT_MISSING, Reason.OBJECT_TOO_LARGE, Reason.OBJECT_TRUNCATED):
            raise
        raise RejectedError(Reason.CHECKPOINT_BROKEN, f"{key}: {error}") from None
    if not _is_whole(path, digest):
        with local_file(path):
            path.unlink(missing_ok=True)
        raise RejectedError(Reason.CHECKPOINT_BROKEN, f"{key}: SHA-256 is not the manifest's")


def _is_whole(path: Path, digest: str) -> bool:
    with local_file(path):
        return path.is_file() and file_sha256(path) == digest
