import math
import threading
from pathlib import Path

import pytest

from templar.agreement.checkpoint import (
    MANIFEST_FILE,
    MOST_REFUSED,
    TOKENIZER_FILES,
    fetched_checkpoint,
    list_checkpoints,
    publish_checkpoint,
    read_refusals,
)
from templar.agreement.state import StateMark
from templar.canonical import sha256_hex
from templar.chain.clock import SimulatedClock
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, ObjectKey, checkpoint_key
from templar.exchange.publish import COMPARE_BYTES
from templar.hparams import load_hparams
from templar.interrupt import StoppedError
from templar.tensorfile import header_bytes
from templar.training.model import parameter_shapes
from tests.support.checkpoints import fetch_checkpoint
from tests.support.errors import raising, refusal
from tests.support.scripted_store import failing
from tests.support.subnet import NETWORK, ROOT, Bucket, fields_of, member, signed_anyhow

ALICE, BOB = member(5), member(6)
MARK = StateMark(window=12, outer_steps=7, root=ROOT, previous_root="ab" * 32, null=False)
FETCHED = {"model.safetensors": bytes(range(256)) * (COMPARE_BYTES // 128), "tokenizer.json": b"[]"}
FILES = {"config.json": b"{}", **FETCHED}
PRESET = load_hparams("simulation", path=Path(__file__).parents[2] / "hparams.json")
MODEL = PRESET.model.model_copy(update={"vocab_size": 2**15})  # room for the files
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def bucket():
    return Bucket(ALICE)


def publish(bucket, folder, mark=MARK):
    return publish_checkpoint(
        bucket.store, folder, mark, network=NETWORK, uid=5, signer=ALICE.hotkey, clock=SimulatedClock(0)
    )


def fetch(bucket, target, window=12, network=NETWORK):
    return fetch_checkpoint(bucket.store, ALICE.neuron, window, target, network=network, model=MODEL)


def key(name, window=12):
    return checkpoint_key(window, 5, name)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Publishing.


def test_a_checkpoint_is_read_back_byte_by_byte(bucket, folder, tmp_path):
    manifest = publish(bucket, folder)
    assert fetch(bucket, tmp_path / "fetched") == manifest
    assert content(tmp_path / "fetched") == FETCHED
    assert manifest.files == {name: sha256_hex(data) for name, data in FILES.items()}
    assert manifest.sizes == {name: len(data) for name, data in FILES.items()}
    mark = StateMark(manifest.window, manifest.outer_steps, manifest.root, manifest.previous_root, manifest.null)
    assert mark == MARK


def test_the_manifest_is_written_last(bucket, folder):
    publish(bucket, folder)
    written = [called for operation, called in bucket.store.calls if operation.startswith("put")]
    assert written == [*(key(name) for name in sorted(FILES)), key(MANIFEST_FILE)]


def test_files_are_moved_several_at_a_time_and_the_progress_only_grows(bucket, folder, tmp_path):
    together, seen = threading.Barrier(len(FILES)), []
    bucket.store.before = lambda operation, key: (
        together.wait() if operation in {"put_if_absent", "put_file"} and MANIFEST_FILE not in key else None
    )
    options = {"network": NETWORK, "uid": 5, "signer": ALICE.hotkey, "clock": SimulatedClock(0)}
    publish_checkpoint(bucket.store, folder, MARK, **options, concurrency=3, on_progress=seen.append)
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (len(FILES), 100.0)
    both = threading.Barrier(len(FETCHED))
    bucket.store.before = lambda operation, key: both.wait() if operation == "get_file" else None
    store, target = bucket.store, tmp_path / "fetched"
    fetch_checkpoint(store, ALICE.neuron, 12, target, network=NETWORK, model=MODEL, concurrency=3)
    assert content(target) == FETCHED


def test_another_state_than_the_proven_one_costs_no_transfer(bucket, folder, tmp_path):
    publish(bucket, folder)
    for proven in (("00" * 32, 7), (ROOT, 8)):
        with raising(RejectedError, Reason.ROOT_DIFFERS, "is not the proven state"):
            fetch_checkpoint(
                *(bucket.store, ALICE.neuron, 12, tmp_path / "fetched"), network=NETWORK, model=MODEL, proven=proven
            )
    assert bucket.store.count("get_file") == 0


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST_FILE])
@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupted_upload_continues(bucket, folder, tmp_path, name, lost):
    hook = failing(BUSY, "put_if_absent", "put_file", key=key(name), times=1)
    if lost:
        bucket.store.after = hook
    else:
        bucket.store.before = hook
    with pytest.raises(TransientError):
        publish(bucket, folder)
    if not (name == MANIFEST_FILE and lost):
        assert list_checkpoints(bucket.store, 5) == []
        refusal(lambda: fetch(bucket, tmp_path / "fetched"), RejectedError, Reason.CHECKPOINT_BROKEN)
    publish(bucket, folder)
    publish(bucket, folder)
    written = [called for operation, called in bucket.store.calls if operation.startswith("put")]
    assert len(written) == len(FILES) + 1 + (not lost)
    fetch(bucket, tmp_path / "fetched")


def test_another_checkpoint_of_the_window_is_refused(bucket, folder):
    publish(bucket, folder)
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        publish(bucket, folder, StateMark(12, 8, "00" * 32, "ab" * 32, null=False))
    (folder / "config.json").write_bytes(b"{ }")
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        publish(bucket, folder)


def test_a_manifest_in_the_folder_is_not_part_of_the_checkpoint(bucket, folder, tmp_path):
    (folder / MANIFEST_FILE).write_bytes(b"left from a download")
    (folder / "subfolder").mkdir()
    assert publish(bucket, folder).files.keys() == FILES.keys()
    fetch(bucket, tmp_path / "fetched")


# Finding.


def test_complete_checkpoints_are_listed_newest_first(bucket, folder):
    for window in (9, 100, 11):
        publish(bucket, folder, StateMark(window, 7, ROOT, "ab" * 32, null=False))
    bucket.put(key("model.safetensors", window=200), b"unfinished", at=0)
    bucket.put(checkpoint_key(300, 55, MANIFEST_FILE), b"another publisher's", at=0)
    other = str(ObjectKey(Kind.CHECKPOINT, 400, 5, version="0.2.82", file=MANIFEST_FILE))
    bucket.put(other, b"another version's", at=0)
    bucket.put("checkpoint-500-5-v1/manifest.json.part", b"nobody's", at=0)
    bucket.put("checkpoint-now", b"nobody's", at=0)
    assert list_checkpoints(bucket.store, 5) == [100, 11, 9]


# Fetching.


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: None,
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_a_damaged_file_is_found_and_nothing_appears(bucket, folder, tmp_path, damage):
    publish(bucket, folder)
    name = "model.safetensors"
    damaged = damage(FILES[name])
    if damaged is None:
        bucket.memory.delete([key(name)])
    else:
        bucket.put(key(name), damaged, at=0)
    refusal(lambda: fetch(bucket, tmp_path / "fetched"), RejectedError, Reason.CHECKPOINT_BROKEN)
    assert not (tmp_path / "fetched").exists()
    bucket.put(key(name), FILES[name], at=0)
    fetch(bucket, tmp_path / "fetched")
    assert content(tmp_path / "fetched") == FETCHED


def test_a_download_continues_with_the_next_file_and_replaces_a_folder_when_it_is_whole(bucket, folder, tmp_path):
    target = tmp_path / "fetched"
    target.mkdir()
    (target / "old").write_bytes(b"old")
    publish(bucket, folder)
    bucket.store.before = failing(BUSY, "get_file", key=key("model.safetensors"), times=1)
    with pytest.raises(TransientError):
        fetch(bucket, target)
    assert content(target) == {"old": b"old"}
    fetch(bucket, target)
    assert content(target) == FETCHED
    asked = [called for operation, called in bucket.store.calls if operation == "get_file"]
    assert asked == [key(name) for name in ("model.safetensors", "model.safetensors", "tokenizer.json")]


@pytest.mark.parametrize("left", [b"", FILES["model.safetensors"][:-1], bytes(len(FILES["model.safetensors"]))])
def test_parts_of_a_killed_download_or_another_checkpoint_are_not_used(bucket, folder, tmp_path, left):
    publish(bucket, folder)
    part = tmp_path / "fetched.part"
    part.mkdir()
    (part / "model.safetensors").write_bytes(left)
    (part / ".model.safetensors.0123456789abcdef.partial").write_bytes(b"half")
    (part / "of-another-one").write_bytes(b"old")
    fetch(bucket, tmp_path / "fetched")
    assert content(tmp_path / "fetched") == FETCHED
    assert not part.exists()


def test_a_full_disk_is_not_the_publishers_fault(bucket, folder, tmp_path):
    publish(bucket, folder)
    for family in (TransientError, PermanentError):
        bucket.store.before = failing(family(Reason.LOCAL_FILE, "for a test"), "get_file")
        with pytest.raises(family) as caught:
            fetch(bucket, tmp_path / "fetched")
        assert caught.value.reason is Reason.LOCAL_FILE
    bucket.store.before = failing(StoppedError("for a test"), "get_file")
    with pytest.raises(StoppedError):
        fetch(bucket, tmp_path / "fetched")


def forge(bucket, manifest, **changes):
    data = signed_anyhow(Kind.CHECKPOINT, fields_of(manifest, **changes), ALICE.hotkey)
    bucket.put(key(MANIFEST_FILE), data, at=0)


def test_a_checkpoint_that_is_too_large_for_the_model_is_not_fetched(bucket, folder, tmp_path):
    """Weights by the parameters and the headers that the model allows, a tokenizer by its own bound."""
    manifest, shapes = publish(bucket, folder), parameter_shapes(MODEL)
    most = 4 * sum(math.prod(shape) for shape in shapes.values()) + header_bytes(shapes)
    for name, bound in {"model.safetensors": most, **TOKENIZER_FILES}.items():
        for size in (bound + 1, 5 * 2**30, 2**53):
            files, sizes = manifest.files | {name: "ab" * 32}, manifest.sizes | {name: size}
            forge(bucket, manifest, files=files, sizes=sizes)
            refusal(lambda: fetch(bucket, tmp_path / "fetched"), RejectedError, Reason.WRONG_SIZE)
    many = {f"model-{number}.safetensors": 1 for number in range(len(shapes) + 1)}
    forge(bucket, manifest, files=dict.fromkeys(many, "ab" * 32), sizes=many)
    refusal(lambda: fetch(bucket, tmp_path / "fetched"), RejectedError, Reason.WRONG_SIZE)
    assert bucket.store.count("get_file") == 0
    forge(bucket, manifest, sizes=manifest.sizes | {"model.safetensors": most})
    fetch(bucket, tmp_path / "fetched")


def test_files_for_programs_of_others_are_never_fetched(bucket, folder, tmp_path):
    """They may be of any size, or not there."""
    manifest = publish(bucket, folder)
    bucket.memory.delete([key("config.json")])
    names = ("config.json", "README.md", "held_out.svg", "evil.safetensors", "model.safetensors.index.json", "model.py")
    forge(
        bucket,
        manifest,
        files=manifest.files | dict.fromkeys(names, "ab" * 32),
        sizes=manifest.sizes | dict.fromkeys(names, 2**50),
    )
    fetch(bucket, tmp_path / "fetched")
    assert content(tmp_path / "fetched") == FETCHED
    assert {called for operation, called in bucket.store.calls if operation == "get_file"} == set(map(key, FETCHED))


# Refusing.


def read_refusing(bucket, target):
    """Fetch a checkpoint whose reader refuses it."""
    options = {"network": NETWORK, "model": MODEL, "remember": True}
    with fetched_checkpoint(bucket.store, ALICE.neuron, 12, target, **options):
        raise PermanentError(Reason.ROOT_DIFFERS, "for a test")


def test_a_refused_checkpoint_is_left_alone_until_its_publisher_changes_it(bucket, folder, tmp_path):
    target, name = tmp_path / "fetched", "model.safetensors"
    manifest = publish(bucket, folder)
    with raising(PermanentError, Reason.ROOT_DIFFERS, "checkpoint of window 12 of uid 5", "for a test"):
        read_refusing(bucket, target)
    fetched = bucket.store.count("get_file")
    for _ in range(3):
        with raising(RejectedError, Reason.CHECKPOINT_BROKEN, "refused before", f"{target}.refused"):
            read_refusing(bucket, target)
    assert bucket.store.count("get_file") == fetched == len(FETCHED)

    # A new manifest, or a file that is stored again, is looked at; what is here already does not come again.
    forge(bucket, manifest, previous_root="cd" * 32)
    refusal(lambda: read_refusing(bucket, target), PermanentError, Reason.ROOT_DIFFERS)
    assert bucket.store.count("get_file") == fetched
    bucket.put(key(name), FILES[name], at=99)
    refusal(lambda: read_refusing(bucket, target), PermanentError, Reason.ROOT_DIFFERS)
    refusal(lambda: read_refusing(bucket, target), RejectedError, Reason.CHECKPOINT_BROKEN)
    assert [hotkey for hotkey, _ in read_refusals(target)] == [ALICE.hotkey.address] * 3


def test_a_file_that_is_not_the_manifests_is_remembered_and_a_repair_is_looked_at(bucket, folder, tmp_path):
    options = {"network": NETWORK, "model": MODEL, "remember": True}
    name, arguments = "model.safetensors", (bucket.store, ALICE.neuron, 12, tmp_path / "fetched")
    publish(bucket, folder)
    bucket.put(key(name), FILES[name][:-1] + b"!", at=7)
    for words in ("SHA-256", "refused before"):
        with raising(RejectedError, Reason.CHECKPOINT_BROKEN, words):
            fetch_checkpoint(*arguments, **options)
    bucket.put(key(name), FILES[name], at=8)
    fetch_checkpoint(*arguments, **options)


OURS = [PermanentError(reason, "for a test") for reason in (Reason.LOCAL_FILE, Reason.ACCESS_DENIED)]


def test_passing_failures_and_those_of_this_machine_are_not_remembered(bucket, folder, tmp_path):
    publish(bucket, folder)
    options = {"network": NETWORK, "model": MODEL, "remember": True}
    for error in (BUSY, *OURS, StoppedError("for a test")):
        with (
            pytest.raises(type(error)),
            fetched_checkpoint(*(bucket.store, ALICE.neuron, 12, tmp_path / "fetched"), **options),
        ):
            raise error
    assert read_refusals(tmp_path / "fetched") == []


def test_the_memory_of_refusals_is_bounded_and_survives_damage(bucket, folder, tmp_path):
    manifest, target = publish(bucket, folder), tmp_path / "fetched"
    (tmp_path / "fetched.refused").write_bytes(b"\xff\0\n\n \n" * MOST_REFUSED)
    for number in range(MOST_REFUSED + 5):
        forge(bucket, manifest, previous_root=f"{number:064x}")
        refusal(lambda: read_refusing(bucket, target), PermanentError, Reason.ROOT_DIFFERS)
    assert len(read_refusals(target)) == MOST_REFUSED
    refusal(lambda: read_refusing(bucket, target), RejectedError, Reason.CHECKPOINT_BROKEN)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"files": {"../../evil": "ab" * 32}, "sizes": {"../../evil": 2}}, Reason.MALFORMED),
        ({"window": 11}, Reason.WRONG_WINDOW),
        ({"genesis": "00" * 32}, Reason.WRONG_NETWORK),
    ],
)
def test_an_illegal_manifest_is_rejected(bucket, folder, tmp_path, changes, reason):
    forge(bucket, publish(bucket, folder), **changes)
    refusal(lambda: fetch(bucket, tmp_path / "fetched"), RejectedError, reason)
    assert bucket.store.count("get_file") == 0
