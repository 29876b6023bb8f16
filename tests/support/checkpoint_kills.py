"""A checkpoint in a bucket in a folder: what a process that is killed at any step publishes, and what readers see."""

from templar.agreement.checkpoint import list_checkpoints, publish_checkpoint
from templar.agreement.state import StateMark
from templar.chain.clock import SimulatedClock
from templar.exchange.publish import COMPARE_BYTES
from templar.hparams import load_hparams
from templar.store.directory import DirectoryStore
from tests.support.checkpoints import fetch_checkpoint
from tests.support.commands import contents
from tests.support.subnet import NETWORK, ROOT, member

ALICE = member(5)
MARK = StateMark(window=12, outer_steps=7, root=ROOT, previous_root="ab" * 32, null=False)
FILES = {
    "model-1.safetensors": b"{}",
    "model-2.safetensors": bytes(range(256)) * (COMPARE_BYTES // 256 + 1),
    "tokenizer.json": b"[]",
}
MODEL = load_hparams("simulation").model.model_copy(update={"vocab_size": 2**16})  # room for the files
OPTIONS = {"network": NETWORK, "uid": 5, "signer": ALICE.hotkey, "clock": SimulatedClock(0)}


def write_files(folder):
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def publish(store, folder, *, concurrency=3):
    publish_checkpoint(store, folder, MARK, **OPTIONS, concurrency=concurrency)


def is_shown(store, target):
    """Whether a reader finds the checkpoint; one that is found must be whole.

    A manifest that is not legal shows nothing: readers refuse it before they fetch a file.
    """
    if list_checkpoints(store, 5) != [MARK.window]:
        return False
    fetch_checkpoint(store, ALICE.neuron, MARK.window, target, network=NETWORK, model=MODEL, concurrency=3)
    assert contents(target) == FILES
    return True


def bucket_in(folder):
    return DirectoryStore(folder / "bucket")


def prepare(folder):
    """An empty bucket, and the files."""
    (folder / "bucket").mkdir(parents=True)
    write_files(folder / "files")


def work(folder):
    """Publish the checkpoint, one file after the other: the n-th operation is the same in every copy."""
    publish(bucket_in(folder), folder / "files", concurrency=1)
