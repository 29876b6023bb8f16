import pytest
import torch

from templar.agreement.checkpoint import MANIFEST_FILE, publish_checkpoint
from templar.agreement.genesis import NO_GENESIS, find_birth, load_genesis, publish_genesis
from templar.agreement.model_folder import write_model
from templar.agreement.state import genesis_root, parameters_digest
from templar.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_embedded_tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.object_keys import START_WINDOW_KEY, Kind, checkpoint_key
from templar.hparams import HParams
from templar.training.model import WEIGHTS_FILE, genesis_parameters
from tests.support.errors import raising, refusal
from tests.support.scripted_store import failing
from tests.support.subnet import NETUID, Subnet, fields_of, signed_anyhow

START = 5
DATASET = "da" * 32
BUSY = TransientError(Reason.STORE_BUSY, "for a test")


class Scene:
    """Two validators who may start a network, and a miner who wants to join it."""

    def __init__(self, folder, tokenizer):
        self.folder = folder
        self.tokenizer = tokenizer
        self.subnet = Subnet(folder, stakes=(100.0, 50.0), num_miners=1)
        self.hparams: HParams = self.subnet.hparams
        self.params = genesis_parameters(self.hparams.model)

    def publish(self, index=0, *, who=None, **changes):
        member = who or self.subnet.validators[index]
        arguments = {
            "params": self.params,
            "tokenizer": self.tokenizer,
            "dataset_digest": DATASET,
            "start_window": START,
            "folder": self.folder / f"genesis-{member.uid}",
        }
        ledger, buckets = self.subnet.ledger(member), self.subnet.buckets(member)
        return publish_genesis(ledger, buckets, self.hparams, member.hotkey, **arguments | changes)

    def find(self, pinned=None, hparams=None):
        return find_birth(self.subnet.chain, self.subnet.buckets(), hparams or self.hparams, pinned=pinned)

    def load(self, birth):
        return load_genesis(birth, self.subnet.buckets(), self.hparams.model, self.folder / "joined")

    def store(self, index):
        return self.subnet.store(self.subnet.validators[index])

    def put_start(self, index, start, **changes):
        """Store a start window as its publisher may sign it."""
        signer = self.subnet.validators[index].hotkey
        self.store(index).inner.put(
            START_WINDOW_KEY, signed_anyhow(Kind.START_WINDOW, fields_of(start, **changes), signer)
        )


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer(["the quick brown fox"], 258)


@pytest.fixture
def scene(tmp_path, tokenizer):
    return Scene(tmp_path, tokenizer)


def writes(store):
    return [key for operation, key in store.calls if operation.startswith("put")]


# The round trip.


def test_a_network_is_found_and_its_parameters_are_those_that_were_published(scene):
    published = scene.publish()
    found = scene.find()
    assert found == published
    params = scene.load(found)
    assert params.keys() == scene.params.keys()
    assert all(torch.equal(params[name], scene.params[name]) for name in params)
    joined = scene.folder / "joined"
    assert load_tokenizer("embedded", embedded=(joined / TOKENIZER_FILE).read_bytes()).digest == scene.tokenizer.digest


def test_the_start_window_names_all_that_nodes_must_have_in_common_and_its_digest_the_network(scene):
    birth = scene.publish()
    start = birth.start
    assert (start.start_window, start.hparams, start.dataset) == (START, scene.hparams.digest, DATASET)
    assert start.tokenizer == scene.tokenizer.digest
    assert start.root == genesis_root(NETUID, parameters_digest(scene.params))
    assert start.genesis == NO_GENESIS
    assert (birth.network.netuid, birth.network.genesis) == (NETUID, start.digest)
    assert (birth.mark.window, birth.mark.outer_steps, birth.mark.root) == (START - 1, 0, start.root)


def test_the_start_window_is_written_last(scene):
    scene.publish()
    assert writes(scene.store(0))[-2:] == [checkpoint_key(START - 1, 1, MANIFEST_FILE), START_WINDOW_KEY]


@pytest.mark.parametrize("name", [WEIGHTS_FILE, START_WINDOW_KEY])
@pytest.mark.parametrize("lost", [False, True])
def test_a_publication_that_was_cut_off_goes_on(scene, name, lost):
    key = name if name == START_WINDOW_KEY else checkpoint_key(START - 1, 1, name)
    hook = failing(BUSY, "put_if_absent", "put_file", key=key, times=1)
    if lost:
        scene.store(0).after = hook
    else:
        scene.store(0).before = hook
    with pytest.raises(TransientError):
        scene.publish()
    if not (name == START_WINDOW_KEY and lost):
        refusal(scene.find, TransientError, Reason.GENESIS_MISSING)
    birth = scene.publish()
    assert scene.publish() == birth
    assert len(writes(scene.store(0))) == 8 + (not lost)
    scene.load(scene.find())


def test_a_second_network_is_refused_before_anything_of_it_is_stored(scene):
    first = scene.publish()
    before = list(scene.store(0).inner.list())
    others = [
        {"start_window": START + 1},
        {"dataset_digest": "00" * 32},
        {"params": {name: tensor + 1 for name, tensor in scene.params.items()}},
    ]
    for changes in others:
        refusal(lambda: scene.publish(**changes), PermanentError, Reason.OBJECT_DIFFERS)  # noqa: B023
    assert list(scene.store(0).inner.list()) == before
    assert scene.find() == first


def test_a_miner_starts_no_network(scene):
    refusal(lambda: scene.publish(who=scene.subnet.miners[0]), PermanentError, Reason.NOT_REGISTERED)
    assert writes(scene.subnet.store(scene.subnet.miners[0])) == []


# Finding the network.


def test_the_validator_with_the_most_stake_is_followed(scene):
    second = scene.publish(1)
    assert scene.find() == second
    first = scene.publish(0)
    assert scene.find() == first
    assert first.network != second.network


def test_a_pinned_genesis_is_found_at_any_rank(scene):
    first, second = scene.publish(0), scene.publish(1)
    assert scene.find(pinned=first.start.digest) == first
    assert scene.find(pinned=second.start.digest) == second


def test_a_pinned_genesis_that_nobody_has_is_missing(scene):
    scene.publish(0)
    with raising(TransientError, Reason.GENESIS_MISSING, match="ab" * 32):
        scene.find(pinned="ab" * 32)


def test_other_hparams_are_another_network_but_storage_is_everybodys_own_business(scene):
    birth = scene.publish()
    storage = scene.hparams.storage.model_copy(update={"snapshots_kept": 99})
    assert scene.find(hparams=scene.hparams.model_copy(update={"storage": storage})) == birth
    training = scene.hparams.training.model_copy(update={"outer_learning_rate": 0.5})
    other = scene.hparams.model_copy(update={"training": training})
    with raising(PermanentError, Reason.BAD_HPARAMS, match="preset"):
        scene.find(hparams=other)


@pytest.mark.parametrize("changes", [{"netuid": NETUID + 1}, {"root": "no"}])
def test_an_illegal_start_window_is_passed_over(scene, changes):
    first, second = scene.publish(0), scene.publish(1)
    scene.put_start(0, first.start, **changes)
    assert scene.find() == second


def test_a_bucket_that_refuses_is_passed_over_and_named(scene):
    scene.publish(0)
    scene.store(0).before = failing(PermanentError(Reason.ACCESS_DENIED, "for a test"))
    with pytest.raises(TransientError, match="uid 1: access_denied"):
        scene.find()
    second = scene.publish(1)
    assert scene.find() == second


def test_a_bucket_that_fails_just_now_is_not_passed_over(scene):
    first, second = scene.publish(0), scene.publish(1)
    scene.store(0).before = failing(BUSY, times=1)
    with raising(TransientError, Reason.STORE_BUSY, match="pin"):
        scene.find()
    assert scene.find() == first
    scene.store(0).before = failing(BUSY)
    assert scene.find(pinned=second.start.digest) == second


# The parameters.


def test_forged_parameters_are_found(scene):
    birth = scene.publish()
    forged = {name: tensor.clone() for name, tensor in scene.params.items()}
    next(iter(forged.values())).view(-1)[0] += 1e-3
    folder = scene.folder / "forged"
    write_model(folder, forged, scene.hparams.model, scene.tokenizer)
    store, author = scene.store(0), scene.subnet.validators[0]
    store.inner.delete([info.key for info in list(store.inner.list("checkpoint-"))])
    publish_checkpoint(
        store, folder, birth.mark, network=birth.network, uid=1, signer=author.hotkey, clock=scene.subnet.clock
    )
    refusal(lambda: scene.load(scene.find()), PermanentError, Reason.ROOT_DIFFERS)
