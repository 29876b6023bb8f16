"""Published checkpoints: a folder of files and a signed manifest with their hashes (docs/protocol.md 12).

The manifest is written last, and a checkpoint without it does not exist: an unfinished one is never read.
"""

import math
import shutil
from pathlib import Path

from templar.agreement.state import StateMark
from templar.canonical import file_sha256
from templar.chain.base import Clock, NeuronInfo
from templar.chain.hotkey import Signer
from templar.data.assignment import ShardEpoch
from templar.errors import PermanentError, Reason, RejectedError
from templar.exchange.object_keys import Kind, checkpoint_key, parse_current_key
from templar.exchange.objects import CheckpointManifest
from templar.exchange.publish import publish_body, publish_file
from templar.exchange.signed import Network, read_signed
from templar.hparams import Model
from templar.store.base import ObjectStore
from templar.store.files import local_file
from templar.training.model import parameter_shapes

MANIFEST_FILE = "manifest.json"
EVALUATION_FILE = "evaluation.json"
"""How the checkpoint did on held-out text, signed; it comes after the manifest, which does not name it."""
_LATER = (MANIFEST_FILE, EVALUATION_FILE)
OTHER_FILES_BYTES = 64 << 20
"""Allowed size of a checkpoint besides its float32 parameters: headers, configuration, tokenizer."""


def publish_checkpoint(
    store: ObjectStore, folder: Path, mark: StateMark, *, network: Network, uid: int, signer: Signer, clock: Clock
) -> CheckpointManifest:
    """Upload every file of a folder, then the manifest.

    On failure a later call uploads the missing files only.

    Raises:
        PermanentError: `object_differs`; another checkpoint of this window is stored.
        TransientError: The store failed.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _LATER)
    for path in files:
        publish_file(store, checkpoint_key(mark.window, uid, path.name), path, clock=clock)
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
        files={path.name: file_sha256(path) for path in files},
        sizes={path.name: path.stat().st_size for path in files},
    )
    publish_body(store, checkpoint_key(mark.window, uid, MANIFEST_FILE), manifest, signer, clock=clock)
    return manifest


def list_checkpoints(store: ObjectStore, uid: int) -> list[int]:
    """The windows of a publisher's complete checkpoints, newest first."""
    keys = (parse_current_key(info.key) for info in store.list(f"{Kind.CHECKPOINT}-"))
    return sorted(
        (
            key.window
            for key in keys
            if key is not None and key.uid == uid and key.file == MANIFEST_FILE and key.window is not None
        ),
        reverse=True,
    )


def read_manifest(
    store: ObjectStore, publisher: NeuronInfo, window: int, network: Network
) -> CheckpointManifest | None:
    """The manifest of a publisher's checkpoint; None if there is no such checkpoint.

    Raises:
        RejectedError: It is not legal.
        TransientError: The store failed.
    """
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
    )


def fetch_checkpoint(
    store: ObjectStore, publisher: NeuronInfo, window: int, folder: Path, *, network: Network, model: Model
) -> CheckpointManifest:
    """Download a checkpoint and check every byte of it against its manifest.

    The files appear under `folder` all at once or not at all. After a failed or killed download the next call resumes,
    file by file and part by part.

    Args:
        store: The publisher's bucket.
        publisher: The checkpoint's author.
        window: The checkpoint's window.
        folder: Replaced by the downloaded files.
        network: The network that it must be made for.
        model: The architecture; it bounds the size of a checkpoint that is fetched.

    Raises:
        RejectedError: There is no manifest, it is not legal, or a file does not match it.
        TransientError: The store failed.
    """
    # 1. The manifest, and whether the size can be right.
    key = checkpoint_key(window, publisher.uid, MANIFEST_FILE)
    manifest = read_manifest(store, publisher, window, network)
    if manifest is None:
        raise RejectedError(Reason.CHECKPOINT_BROKEN, f"{key} is not there, so there is no such checkpoint")
    total, most = sum(manifest.sizes.values()), _parameter_bytes(model) + OTHER_FILES_BYTES
    if total > most:
        raise RejectedError(Reason.WRONG_SIZE, f"{key}: {total} bytes in all, {most} are legal for this model")
    # 2. Keep the parts of this checkpoint that an earlier call left, and delete all others.
    part, partial = folder.with_name(folder.name + ".part"), tuple(f".{name[:100]}." for name in manifest.files)
    with local_file(part):
        part.mkdir(parents=True, exist_ok=True)
        for path in part.iterdir():
            if path.name not in manifest.files and not path.name.startswith(partial):
                path.unlink()
    # 3. Fetch each file and compare its hash; then replace the folder.
    for name, digest in manifest.files.items():
        _fetch_file(store, checkpoint_key(window, publisher.uid, name), part / name, manifest.sizes[name], digest)
    with local_file(part):
        for path in part.iterdir():
            if path.name not in manifest.files:
                path.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    return manifest


def _parameter_bytes(model: Model) -> int:
    return 4 * sum(math.prod(shape) for shape in parameter_shapes(model).values())


def _fetch_file(store: ObjectStore, key: str, path: Path, size: int, digest: str) -> None:
    """Download a file unless it is here; a file with another hash than the manifest's is deleted."""
    if _is_whole(path, digest):
        return
    try:
        store.get_file(key, path, max_bytes=size, resume=True)
    except PermanentError as error:
        if error.reason is Reason.LOCAL_FILE:  # this machine's fault, not the publisher's
            raise
        raise RejectedError(Reason.CHECKPOINT_BROKEN, f"{key}: {error}") from None
    if not _is_whole(path, digest):
        with local_file(path):
            path.unlink(missing_ok=True)
        raise RejectedError(Reason.CHECKPOINT_BROKEN, f"{key}: SHA-256 is not the manifest's")


def _is_whole(path: Path, digest: str) -> bool:
    with local_file(path):
        return path.is_file() and file_sha256(path) == digest
