import math

import numpy as np
import pytest

from templar.data.assignment import Assignment, Epoch, SlotPlan, assign
from templar.data.corpus import collect_documents
from templar.data.pages.page_dataset import PageDataset
from templar.data.permutation import Permutation
from templar.data.sampling import held_out_sequences, pack, page_sequences, sample_order, unigram_entropy
from templar.data.tokenizer import encode, load_tokenizer
from templar.datasets.page_writer import build_dataset, upload_dataset
from templar.errors import PermanentError, Reason
from tests.support.datasets import PREFIX
from tests.support.errors import raising
from tests.support.memory_store import MemoryStore


def test_the_samples_of_the_assigned_pages_come_in_the_order_of_the_digest():
    assignment = Assignment(window=5, uid=2, units=(11, 3, 17), digest="ab" * 32)
    natural = [unit * 8 + number for unit in assignment.units for number in range(8)]
    order = Permutation(24, "templar.samples.order", assignment.digest)
    assert sample_order(assignment, 8).tolist() == [natural[order.at(position)] for position in range(24)]
    assert sample_order(Assignment(1, 2, (), "00"), 8).shape == (0,)


LENGTH = 32


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = MemoryStore()
    root = tmp_path_factory.mktemp("samples") / "dataset"
    build_dataset(collect_documents(max_bytes=150_000), root, vocab_size=400, held_out_fraction=0.1)
    upload_dataset(root, store, PREFIX)
    return store


@pytest.fixture(scope="module")
def dataset(store):
    return PageDataset([store], PREFIX, rows_per_page=8)


@pytest.fixture(scope="module")
def tokenizer(dataset):
    return load_tokenizer("embedded", embedded=dataset.beside("tokenizer.json", max_bytes=2**26))


def test_a_window_holds_the_packed_pages_of_its_assignment(dataset, tokenizer):
    epoch = Epoch(dataset.digest, dataset.num_pages)
    assignment = assign(5, 1, epoch=epoch, plan=SlotPlan(4, 2), uids=(1, 2, 3), block_hash="0x" + "12" * 32)
    texts = [text for unit in assignment.units for text in dataset.read_page(unit).texts]
    packed = pack(encode(texts, tokenizer), LENGTH)
    sequences = page_sequences(dataset.read_pages(assignment.units), tokenizer, assignment, LENGTH)
    assert not np.array_equal(sequences, packed)
    assert sorted(map(bytes, sequences)) == sorted(map(bytes, packed))
    assert np.count_nonzero(packed == tokenizer.eos_id) in {len(texts), len(texts) - 1}


def test_the_first_held_out_sequences_do_not_depend_on_their_number(store, tokenizer):
    held_out = PageDataset([store], PREFIX, rows_per_page=8, split="held_out")
    few = held_out_sequences(held_out, tokenizer, LENGTH, 20)
    assert few.shape == (20, LENGTH)
    np.testing.assert_array_equal(held_out_sequences(held_out, tokenizer, LENGTH, 100)[:20], few)
    with raising(PermanentError, Reason.DATASET_TOO_SMALL, "ask for fewer"):
        held_out_sequences(held_out, tokenizer, LENGTH, 10**6)


def test_entropy_known_answers():
    assert unigram_entropy(np.array([[0, 1], [2, 3]], dtype=np.int32), 4) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([5, 5, 5]), 6) == 0.0
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy(np.array([1, 1, 1, 0]), 512) == pytest.approx(expected)
    for tokens in ([], [-1, 0], [0, 4]):
        with pytest.raises(ValueError, match=r"0\.\.3"):
            unigram_entropy(np.array(tokens, dtype=np.int32), 4)
