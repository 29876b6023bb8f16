import math
import threading
from functools import partial
from pathlib import Path

import pytest

from templar.agreement.checkpoint import (
    MANIFEST_FILE,
    MOST_REFUSED,
    TOKENIZER_FILES,
    fetched_checkpoint,
    list_checkpoints,
    mark_of,
    publish_checkpoint,
    read_refusals,
)
from templar.agreement.state import StateMark
from templar.canonical import sha256_hex
from templar.chain.clock import SimulatedClock
from templar.data.assignment import ShardEpoch
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.exchange.object_keys import Kind, ObjectKey, checkpoint_key
from templar.exchange.objects import PlanEntry
from templar.exchange.publish import COMPARE_BYTES
from templar.hparams import load_hparams
from templar.interrupt import StoppedError
from templar.tensorfile import header_bytes
from templar.training.model import parameter_shapes
from tests.support.errors import raising
from tests.support.scripted_store import fail_once, failing
from tests.support.subnet import NETWORK, ROOT, Bucket, fields_of, member, signed_anyhow

ALICE = member(5)
ENTRY = PlanEntry(number=1, previous="ab" * 32, first_window=17, changes={"training.inner_steps": 3})
MARK = StateMark(12, 7, ROOT, "ab" * 32, False, (ShardEpoch(9, 4), ShardEpoch(14, 5)), (ENTRY,))
WEIGHTS = "model.safetensors"
FETCHED = {WEIGHTS: bytes(range(256)) * (COMPARE_BYTES // 128), "tokenizer.json": b"[]"}
FILES = {"config.json": b"{}", **FETCHED}
PRESET = load_hparams("simulation", path=Path(__file__).parents[2] / "hparams.json")
MODEL = PRESET.model.model_copy(update={"vocab_size": 2**15})  # room for the files
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


def key(name, window=12):
    return checkpoint_key(window, 5, name)


class Scene:
    """The files of a checkpoint, a bucket for it, and the folder of a reader."""

    def __init__(self, folder):
        self.folder, self.target, self.bucket = folder / "checkpoint", folder / "fetched", Bucket(ALICE)
        self.store = self.bucket.store
        self.folder.mkdir()
        for name, data in FILES.items():
            (self.folder / name).write_bytes(data)

    def publish(self, mark=MARK, **options):
        who = {"network": NETWORK, "uid": 5, "signer": ALICE.hotkey, "clock": SimulatedClock(0)}
        return publish_checkpoint(self.store, self.folder, mark, **who, **options)

    def fetched(self, **options):
        """What is to be read within a block."""
        options = {"network": NETWORK, "model": MODEL, **options}
        return fetched_checkpoint(self.store, ALICE.neuron, 12, self.target, **options)

    def fetch(self, **options):
        """Fetch it, with any bytes that it should have."""
        with self.fetched(**options) as manifest:
            assert self.content() == FETCHED
        return manifest

    def refused(self, reason, *words, family=RejectedError, **options):
        with raising(family, reason, *words):
            self.fetch(**options)

    def content(self):
        return {path.name: path.read_bytes() for path in self.target.iterdir()}

    def forge(self, manifest, **changes):
        data = signed_anyhow(Kind.CHECKPOINT, fields_of(manifest, **changes), ALICE.hotkey)
        self.bucket.put(key(MANIFEST_FILE), data, at=0)

    def written(self):
        return [called for operation, called in self.store.calls if operation.startswith("put")]

    def asked(self):
        return [called for operation, called in self.store.calls if operation == "get_file"]


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_a_checkpoint_is_read_back_byte_by_byte(scene):
    manifest = scene.publish()
    assert scene.written() == [*(key(name) for name in sorted(FILES)), key(MANIFEST_FILE)], "the manifest comes last"
    assert scene.fetch() == manifest
    assert manifest.files == {name: sha256_hex(data) for name, data in FILES.items()}
    assert manifest.sizes == {name: len(data) for name, data in FILES.items()}
    assert mark_of(manifest) == MARK


def test_files_are_moved_several_at_a_time_and_the_progress_only_grows(scene):
    together, seen = threading.Barrier(len(FILES)), []
    scene.store.before = lambda operation, key: (
        together.wait() if operation in {"put_if_absent", "put_file"} and MANIFEST_FILE not in key else None
    )
    scene.publish(concurrency=3, on_progress=seen.append)
    assert seen == sorted(seen)
    assert (len(seen), seen[-1]) == (len(FILES), 100.0)
    both = threading.Barrier(len(FETCHED))
    scene.store.before = lambda operation, key: both.wait() if operation == "get_file" else None
    scene.fetch(concurrency=3)


def test_another_state_than_the_proven_one_or_another_window_costs_no_transfer(scene):
    manifest = scene.publish()
    for proven in (("00" * 32, 7), (ROOT, 8)):
        scene.refused(Reason.ROOT_DIFFERS, "is not the proven state", proven=proven)
    scene.forge(manifest, files={"../../evil": "ab" * 32}, sizes={"../../evil": 2})
    scene.refused(Reason.MALFORMED)
    scene.forge(manifest, window=11)
    scene.refused(Reason.WRONG_WINDOW)
    assert scene.asked() == []


def test_another_checkpoint_of_the_window_is_refused_and_a_manifest_in_the_folder_is_no_part_of_it(scene):
    (scene.folder / MANIFEST_FILE).write_bytes(b"left from a download")
    (scene.folder / "subfolder").mkdir()
    assert scene.publish().files.keys() == FILES.keys()
    scene.fetch()
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        scene.publish(StateMark(12, 8, "00" * 32, "ab" * 32, null=False))
    (scene.folder / "config.json").write_bytes(b"{ }")
    with raising(PermanentError, Reason.OBJECT_DIFFERS):
        scene.publish()


def test_complete_checkpoints_are_listed_newest_first(scene):
    for window in (9, 100, 11):
        scene.publish(StateMark(window, 7, ROOT, "ab" * 32, null=False))
    for nobodys in (
        key(WEIGHTS, window=200),  # it is unfinished
        checkpoint_key(300, 55, MANIFEST_FILE),  # another publisher's
        str(ObjectKey(Kind.CHECKPOINT, 400, 5, version="0.2.82", file=MANIFEST_FILE)),  # another version's
        "checkpoint-500-5-v1/manifest.json.part",
        "checkpoint-now",
    ):
        scene.bucket.put(nobodys, b"nothing", at=0)
    assert list_checkpoints(scene.store, 5) == [100, 11, 9]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: None,
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_a_damaged_file_is_found_and_nothing_appears(scene, damage):
    scene.publish()
    damaged = damage(FILES[WEIGHTS])
    if damaged is None:
        scene.bucket.memory.delete([key(WEIGHTS)])
    else:
        scene.bucket.put(key(WEIGHTS), damaged, at=0)
    scene.refused(Reason.CHECKPOINT_BROKEN)
    assert not scene.target.exists()
    scene.bucket.put(key(WEIGHTS), FILES[WEIGHTS], at=0)
    scene.fetch()


def test_a_download_continues_with_the_next_file_and_replaces_a_folder_when_it_is_whole(scene):
    scene.target.mkdir()
    (scene.target / "old").write_bytes(b"old")
    scene.publish()
    fail_once(scene.store, BUSY, "get_file", key=key(WEIGHTS))
    with pytest.raises(TransientError):
        scene.fetch()
    assert scene.content() == {"old": b"old"}
    scene.fetch()
    assert scene.asked() == [key(name) for name in (WEIGHTS, WEIGHTS, "tokenizer.json")]


@pytest.mark.parametrize("left", [b"", FILES[WEIGHTS][:-1], bytes(len(FILES[WEIGHTS]))])
def test_parts_of_a_killed_download_or_another_checkpoint_are_not_used(scene, left):
    scene.publish()
    part = scene.target.with_name("fetched.part")
    part.mkdir()
    for name, data in ((WEIGHTS, left), (f".{WEIGHTS}.0123456789abcdef.partial", b"half"), ("of-another-one", b"old")):
        (part / name).write_bytes(data)
    scene.fetch()
    assert not part.exists()


def test_a_full_disk_is_not_the_publishers_fault(scene):
    scene.publish()
    for family in (TransientError, PermanentError):
        scene.store.before = failing(family(Reason.LOCAL_FILE, "for a test"), "get_file")
        scene.refused(Reason.LOCAL_FILE, family=family)
    scene.store.before = failing(StoppedError("for a test"), "get_file")
    with pytest.raises(StoppedError):
        scene.fetch()


def test_a_checkpoint_that_is_too_large_for_the_model_is_not_fetched(scene):
    """Weights by the parameters and the headers that the model allows, a tokenizer by its own bound."""
    manifest, shapes = scene.publish(), parameter_shapes(MODEL)
    most = 4 * sum(math.prod(shape) for shape in shapes.values()) + header_bytes(shapes)
    for name, bound in {WEIGHTS: most, **TOKENIZER_FILES}.items():
        for size in (bound + 1, 5 * 2**30, 2**53):
            files, sizes = manifest.files | {name: "ab" * 32}, manifest.sizes | {name: size}
            scene.forge(manifest, files=files, sizes=sizes)
            scene.refused(Reason.WRONG_SIZE)
    many = {f"model-{number}.safetensors": 1 for number in range(len(shapes) + 1)}
    scene.forge(manifest, files=dict.fromkeys(many, "ab" * 32), sizes=many)
    scene.refused(Reason.WRONG_SIZE)
    assert scene.asked() == []
    scene.forge(manifest, sizes=manifest.sizes | {WEIGHTS: most})
    scene.fetch()


def test_files_for_programs_of_others_are_never_fetched(scene):
    """They may be of any size, or not there."""
    manifest = scene.publish()
    scene.bucket.memory.delete([key("config.json")])
    names = ("config.json", "README.md", "held_out.svg", "evil.safetensors", "model.safetensors.index.json", "model.py")
    files, sizes = dict.fromkeys(names, "ab" * 32), dict.fromkeys(names, 2**50)
    scene.forge(manifest, files=manifest.files | files, sizes=manifest.sizes | sizes)
    scene.fetch()
    assert set(scene.asked()) == set(map(key, FETCHED))


REFUSED = PermanentError(Reason.ROOT_DIFFERS, "for a test")


def read_refusing(scene, error=REFUSED):
    """Fetch a checkpoint whose reader refuses it."""
    with scene.fetched(remember=True):
        raise error


def test_a_refused_checkpoint_is_left_alone_until_its_publisher_changes_it(scene):
    manifest = scene.publish()
    with raising(PermanentError, Reason.ROOT_DIFFERS, "checkpoint of window 12 of uid 5", "for a test"):
        read_refusing(scene)
    for _ in range(3):
        with raising(RejectedError, Reason.CHECKPOINT_BROKEN, "refused before", f"{scene.target}.refused"):
            read_refusing(scene)

    # A new manifest, or a file that is stored again, is looked at; what is here already does not come again.
    scene.forge(manifest, previous_root="cd" * 32)
    store_again = partial(scene.bucket.put, key(WEIGHTS), FILES[WEIGHTS], at=99)
    for change in (lambda: None, store_again):
        assert len(scene.asked()) == len(FETCHED)
        change()
        with raising(PermanentError, Reason.ROOT_DIFFERS):
            read_refusing(scene)
    with raising(RejectedError, Reason.CHECKPOINT_BROKEN):
        read_refusing(scene)
    assert [hotkey for hotkey, _ in read_refusals(scene.target)] == [ALICE.hotkey.address] * 3


def test_a_file_that_is_not_the_manifests_is_remembered_and_a_repair_is_looked_at(scene):
    scene.publish()
    scene.bucket.put(key(WEIGHTS), FILES[WEIGHTS][:-1] + b"!", at=7)
    for words in ("SHA-256", "refused before"):
        scene.refused(Reason.CHECKPOINT_BROKEN, words, remember=True)
    scene.bucket.put(key(WEIGHTS), FILES[WEIGHTS], at=8)
    scene.fetch(remember=True)


def test_passing_failures_and_those_of_this_machine_are_not_remembered(scene):
    scene.publish()
    ours = [PermanentError(reason, "for a test") for reason in (Reason.LOCAL_FILE, Reason.ACCESS_DENIED)]
    for error in (BUSY, *ours, StoppedError("for a test")):
        with pytest.raises(type(error)):
            read_refusing(scene, error)
    assert read_refusals(scene.target) == []


def test_the_memory_of_refusals_is_bounded_and_survives_damage(scene):
    manifest = scene.publish()
    scene.target.with_name("fetched.refused").write_bytes(b"\xff\0\n\n \n" * MOST_REFUSED)
    for number in range(MOST_REFUSED + 5):
        scene.forge(manifest, previous_root=f"{number:064x}")
        with raising(PermanentError, Reason.ROOT_DIFFERS):
            read_refusing(scene)
    assert len(read_refusals(scene.target)) == MOST_REFUSED
    with raising(RejectedError, Reason.CHECKPOINT_BROKEN):
        read_refusing(scene)
