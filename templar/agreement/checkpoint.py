"""Published checkpoints: a folder of files and, written last, a signed manifest with their hashes.

A checkpoint without its manifest does not exist, so one that is being written is never read.
"""

import math
import shutil
from pathlib import Path

from templar.agreement.state import StateMark
from templar.canonical import file_sha256
from templar.chain.base import Clock, NeuronInfo
from templar.chain.hotkey import Signer
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


OTHER_FILES_BYTES = 64 << 20
"""Room for what a checkpoint holds besides its float32 parameters: headers, configuration, tokenizer."""


def publish_checkpoint(
    store: ObjectStore, folder: Path, mark: StateMark, *, network: Network, uid: int, signer: Signer, clock: Clock
) -> CheckpointManifest:
    """Upload every file of a folder, then the manifest.

    On failure a later call uploads what is missing; files that are there are not sent again.

    Raises:
        PermanentError: `object_differs`; another checkpoint of this window is stored.
        TransientError: The store failed.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_FILE)
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


def fetch_checkpoint(
    store: ObjectStore, publisher: NeuronInfo, window: int, folder: Path, *, network: Network, model: Model
) -> CheckpointManifest:
    """Download a checkpoint and check every byte of it against its manifest.

    The files appear under `folder` all at once, or not at all. What has come when a download fails or is killed stays
    beside it, and the next call goes on with it, file by file and part by part.

    Args:
        store: The publisher's bucket.
        publisher: Whose checkpoint.
        window: Of which window.
        folder: Where to; what is there is replaced.
        network: The network that it must be made for.
        model: The architecture: a checkpoint that is larger than its parameters can account for is not fetched.

    Raises:
        RejectedError: There is no manifest, it is not legal, or a file is not what it says.
        TransientError: The store failed.
    """
    key = checkpoint_key(window, publisher.uid, MANIFEST_FILE)
    found = read_signed(store, key, CheckpointManifest, network=network, author=publisher, window=window)
    if found is None:
        raise RejectedError(Reason.CHECKPOINT_BROKEN, f"{key} is not there, so there is no such checkpoint")
    manifest = found.body
    total, most = sum(manifest.sizes.values()), _parameter_bytes(model) + OTHER_FILES_BYTES
    if total > most:
        raise RejectedError(Reason.WRONG_SIZE, f"{key}: {total} bytes in all, {most} are legal for this model")
    part, partial = folder.with_name(folder.name + ".part"), tuple(f".{name[:100]}." for name in manifest.files)
    with local_file(part):
        part.mkdir(parents=True, exist_ok=True)
        for path in part.iterdir():
            if path.name not in manifest.files and not path.name.startswith(partial):  # of another checkpoint
                path.unlink()
    for name, digest in manifest.files.items():
        _fetch_file(store, checkpoint_key(window, publisher.uid, name), part / name, manifest.sizes[name], digest)
    with local_file(part):
        for path in part.iterdir():
            if path.name not in manifest.files:  # of another checkpoint
                path.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    return manifest


def _parameter_bytes(model: Model) -> int:
    return 4 * sum(math.prod(shape) for shape in parameter_shapes(model).values())


def _fetch_file(store: ObjectStore, key: str, path: Path, size: int, digest: str) -> None:
    """Download a file, unless it has come before; one that is not what the manifest says is not kept."""
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
