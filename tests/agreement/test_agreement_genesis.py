import json

import pytest
import torch

from templar.agreement.checkpoint import MANIFEST_FILE, publish_checkpoint
from templar.agreement.genesis import NO_GENESIS, check_settings, draft_birth, find_birth, load_genesis, publish_genesis
from templar.agreement.model_folder import write_model
from templar.agreement.state import genesis_root, parameters_digest
from templar.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_embedded_tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import SETTINGS_KEY, START_WINDOW_KEY, Kind, checkpoint_key
from templar.hparams import SETTINGS_FILE, HParams, with_agreed
from templar.neuron.configuration import NeuronConfig
from templar.training.model import WEIGHTS_FILE, genesis_parameters
from tests.support.errors import raising
from tests.support.scripted_store import fail_once, failing
from tests.support.subnet import NETUID, Subnet, fields_of, signed_anyhow

START = 5
DATASET = "da" * 32
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


class Scene:
    """Two validators who may start a network, and a miner who wants to join it."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        self.subnet = Subnet(folder, stakes=(100.0, 50.0), num_miners=1)
        self.hparams = self.subnet.hparams
        self.params = genesis_parameters(self.hparams.model)
        training = self.hparams.training.model_copy(update={"outer_learning_rate": 0.5})
        storage = self.hparams.storage.model_copy(update={"snapshots_kept": 99})
        self.other_hparams = self.hparams.model_copy(update={"training": training, "storage": storage})

    def publish(self, index=0, **changes):
        member, chain = self.subnet.validators[index], self.subnet.chain
        numbers = {"dataset_digest": DATASET, "start_window": START} | changes
        model = {"params": numbers.pop("params", self.params), "tokenizer": self.tokenizer}
        neuron = chain.metagraph().by_hotkey(member.hotkey.address)
        birth = draft_birth(chain, self.hparams, neuron, **model, **numbers)
        who = self.store(index), member.hotkey, chain.clock, self.hparams
        publish_genesis(birth, *who, **model, folder=self.folder / f"genesis-{member.uid}", concurrency=1)
        return birth

    def find(self, pinned=None, hparams=None):
        return find_birth(self.subnet.chain, self.subnet.buckets(), hparams or self.hparams, pinned=pinned)

    def load(self, birth):
        return load_genesis(birth, self.subnet.buckets(), self.hparams.model, self.folder / "joined")

    def config(self, name="miner"):
        """Of a miner that starts with another preset."""
        buckets = self.subnet.buckets()
        return NeuronConfig(name, self.home(name), self.other_hparams, self.subnet.chain, buckets, None, None)

    def home(self, name):
        home = self.folder / name
        home.mkdir(exist_ok=True)
        return home

    def store(self, index=0):
        return self.subnet.store(self.subnet.validators[index])


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer(["the quick brown fox"], 258)


@pytest.fixture
def scene(tmp_path, tokenizer):
    return Scene(tmp_path, tokenizer)


def writes(store):
    return [key for operation, key in store.calls if operation.startswith("put")]


def test_a_network_is_found_with_all_that_nodes_must_have_in_common(scene):
    """The digest of the start window, which is written last, is the network's; the parameters are the published."""
    birth = scene.publish()
    assert writes(scene.store())[-3:] == [checkpoint_key(START - 1, 1, MANIFEST_FILE), SETTINGS_KEY, START_WINDOW_KEY]
    assert scene.find() == birth
    params, joined = scene.load(birth), scene.folder / "joined"
    assert params.keys() == scene.params.keys()
    assert all(torch.equal(params[name], scene.params[name]) for name in params)
    assert load_tokenizer("embedded", embedded=(joined / TOKENIZER_FILE).read_bytes()).digest == scene.tokenizer.digest
    start, mark = birth.start, birth.mark
    assert (start.start_window, start.hparams, start.dataset) == (START, scene.hparams.digest, DATASET)
    assert (start.tokenizer, start.genesis) == (scene.tokenizer.digest, NO_GENESIS)
    assert start.root == genesis_root(NETUID, parameters_digest(scene.params))
    assert (birth.network.netuid, birth.network.genesis) == (NETUID, start.digest)
    assert (mark.window, mark.outer_steps, mark.root) == (START - 1, 0, start.root)


@pytest.mark.parametrize("name", [WEIGHTS_FILE, START_WINDOW_KEY])
@pytest.mark.parametrize("lost", [False, True])
def test_a_publication_that_was_cut_off_goes_on(scene, name, lost):
    key = name if name == START_WINDOW_KEY else checkpoint_key(START - 1, 1, name)
    fail_once(scene.store(), BUSY, "put_if_absent", "put_file", key=key, lost=lost)
    with pytest.raises(TransientError):
        scene.publish()
    if not (name == START_WINDOW_KEY and lost):
        with raising(TransientError, Reason.GENESIS_MISSING):
            scene.find()
    birth = scene.publish()
    assert scene.publish() == birth
    assert len([key for key in writes(scene.store()) if key != SETTINGS_KEY]) == 8 + (not lost)
    scene.load(scene.find())


def test_a_second_network_is_refused_before_anything_of_it_is_stored(scene):
    first = scene.publish()
    before = list(scene.store().inner.list())
    for changes in (
        {"start_window": START + 1},
        {"dataset_digest": "00" * 32},
        {"params": {name: tensor + 1 for name, tensor in scene.params.items()}},
    ):
        with raising(PermanentError, Reason.OBJECT_DIFFERS):
            scene.publish(**changes)
    assert list(scene.store().inner.list()) == before
    assert scene.find() == first


def test_the_validator_with_the_most_stake_is_followed_and_a_pinned_genesis_is_found_at_any_rank(scene):
    second = scene.publish(1)
    assert scene.find() == second
    first = scene.publish(0)
    assert scene.find() == first
    assert first.network != second.network
    for birth in (first, second):
        assert scene.find(pinned=birth.start.digest) == birth
    with raising(TransientError, Reason.GENESIS_MISSING, match="ab" * 32):
        scene.find(pinned="ab" * 32)


def test_other_hparams_are_another_network_but_storage_is_everybodys_own_business(scene):
    birth = scene.publish()
    storage = scene.hparams.storage.model_copy(update={"snapshots_kept": 99})
    check_settings(birth.start, scene.hparams.model_copy(update={"storage": storage}).digest)
    assert scene.find(hparams=scene.other_hparams) == birth
    with raising(PermanentError, Reason.BAD_HPARAMS, match="preset"):
        check_settings(birth.start, scene.other_hparams.digest)


def test_a_neuron_takes_the_settings_that_its_network_started_with(scene):
    """With any preset; they are kept in its folder, where nobody can take them away."""
    assert scene.config().of_network().hparams == scene.other_hparams  # no network has started
    birth = scene.publish()
    with raising(PermanentError, Reason.BAD_HPARAMS, match="start again"):
        scene.config().birth()
    joined = scene.config().of_network()
    assert joined.hparams == scene.hparams.model_copy(update={"storage": scene.other_hparams.storage})
    assert joined.join() == birth
    scene.store().delete([SETTINGS_KEY])
    again = scene.config().of_network()
    assert (again.hparams, again.birth()) == (joined.hparams, birth)
    assert scene.config("newcomer").of_network().hparams == scene.other_hparams


def test_a_folder_that_joined_before_there_were_settings_stays_in_its_network(scene):
    """Somebody with more stake starts another network, with other settings, before its next start."""
    scene.hparams, scene.other_hparams = scene.other_hparams, scene.hparams
    first = scene.publish(1)
    joined = scene.config().of_network()
    assert joined.join() == first
    (scene.home("miner") / SETTINGS_FILE).unlink()
    scene.hparams, own = scene.other_hparams, scene.hparams
    later = scene.publish(0)
    assert scene.find() == later != first
    again = scene.config().of_network()
    assert (again.join(), again.hparams.training) == (first, own.training)


def test_settings_that_a_store_hides_for_a_moment_are_asked_for_again(scene):
    birth = scene.publish()
    fail_once(scene.store(), BUSY, "get", key=SETTINGS_KEY)
    with raising(TransientError, Reason.STORE_BUSY):
        scene.config().of_network()
    assert scene.config().of_network().birth() == birth


def test_a_setting_that_a_network_does_not_name_has_the_value_of_before_it_was_there(scene, monkeypatch):
    """An older release started it; settings that this one does not know are refused with the remedy."""
    older = json.loads(scene.hparams.agreed)
    assert older["training"].pop("max_step_batches") == 1
    with monkeypatch.context() as patch:
        patch.setattr(HParams, "agreed", json.dumps(older).encode())
        birth = scene.publish()
    assert birth.start.hparams != scene.hparams.digest
    config = scene.config().of_network()
    assert (config.join(), config.hparams.training) == (birth, scene.hparams.training)
    assert scene.config().of_network().birth() == birth


@pytest.mark.parametrize(
    ("agreed", "complaint"),
    [
        (b'{"training": {"momentum_of_tomorrow": 1}}', "momentum_of_tomorrow: unknown key"),
        (b'{"model": 1}', "model"),
        (b"[" * 60_000, "JSON"),
        (b'{"model": 1, "model": 2}', "twice"),
        (b"[]", "must be an object"),
    ],
)
def test_settings_of_a_release_that_is_not_known_are_refused_in_one_line(scene, agreed, complaint):
    with raising(PermanentError, Reason.BAD_HPARAMS, complaint) as caught:
        with_agreed(scene.hparams, agreed)
    assert "\n" not in str(caught.value)


def test_settings_that_the_start_window_does_not_name_are_refused(scene):
    scene.publish()
    scene.store().put(SETTINGS_KEY, scene.other_hparams.agreed)
    with raising(PermanentError, Reason.BAD_HPARAMS, SETTINGS_KEY):
        scene.config().of_network()


@pytest.mark.parametrize("changes", [{"netuid": NETUID + 1}, {"root": "no"}])
def test_an_illegal_start_window_is_passed_over(scene, changes):
    first, second = scene.publish(0), scene.publish(1)
    author = scene.subnet.validators[0]
    illegal = signed_anyhow(Kind.START_WINDOW, fields_of(first.start, **changes), author.hotkey)
    scene.subnet.put(author, START_WINDOW_KEY, illegal)
    assert scene.find() == second


def test_a_bucket_that_refuses_is_passed_over_and_named_and_one_that_fails_just_now_is_not(scene):
    first = scene.publish(0)
    scene.store().before = failing(PermanentError(Reason.ACCESS_DENIED, "for a test"))
    with pytest.raises(TransientError, match="uid 1: access_denied"):
        scene.find()
    second = scene.publish(1)
    assert scene.find() == second
    scene.store().before = failing(BUSY, times=1)
    with raising(TransientError, Reason.STORE_BUSY, match="pin"):
        scene.find()
    assert scene.find() == first
    scene.store().before = failing(BUSY)
    assert scene.find(pinned=second.start.digest) == second


def test_forged_parameters_are_found(scene):
    birth = scene.publish()
    forged = {name: tensor.clone() for name, tensor in scene.params.items()}
    next(iter(forged.values())).view(-1)[0] += 1e-3
    folder = scene.folder / "forged"
    write_model(folder, forged, scene.hparams.model, scene.tokenizer)
    store, who = scene.store(), {"uid": 1, "signer": scene.subnet.validators[0].hotkey, "clock": scene.subnet.clock}
    store.inner.delete([info.key for info in list(store.inner.list("checkpoint-"))])
    publish_checkpoint(store, folder, birth.mark, network=birth.network, **who)
    with raising(PermanentError, Reason.ROOT_DIFFERS):
        scene.load(scene.find())
