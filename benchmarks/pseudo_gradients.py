"""Real pseudo-gradients for the other benchmarks: a small network that trains on real text through its codec.

Nothing is measured here. `train` runs windows of SparseLoCo (arXiv 2508.15706): each of a few workers takes inner AdamW
steps on text of its own from the common parameters, their pseudo-gradients are exchanged as payloads, with error
feedback, and all workers take the same outer step. Training, compression, wire format, aggregate and outer step are the
project's own; only chain and stores are missing.

A seed decides parameters and data, and nothing else is random: a run
gives the same bits with any number of threads.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.reference_codes import StatisticalQuantiser
from templar.data.assignment import Epoch, SlotPlan, assign
from templar.data.corpus import collect_documents
from templar.data.dataset import HELD_OUT_ROWS_PER_PAGE
from templar.data.pages.metadata import HELD_OUT_SPLIT
from templar.data.pages.page_dataset import PageDataset
from templar.data.sampling import held_out_sequences, page_sequences
from templar.data.tokenizer import Tokenizer, load_tokenizer
from templar.datasets.page_writer import build_dataset
from templar.gradient.aggregate import aggregate, outer_step
from templar.gradient.codec import wire
from templar.gradient.codec.wire import Header, Payload
from templar.gradient.compress import Compressed, FeedbackRule, FeedbackState, accumulated, compress, top_k
from templar.gradient.layout import Layout
from templar.hparams import HParams, load_hparams
from templar.neuron.private_state import feedback_rule
from templar.store.directory import DirectoryStore
from templar.training.loss import sequence_losses
from templar.training.model import build_model, parameter_shapes, parameters_of
from templar.training.optimizers import OptimizerState
from templar.training.train import Trainer

NUM_HELD_OUT = 256
HELD_OUT_BATCH = 64
TEXT_BYTES = 8_000_000  # enough for 60 windows of four workers before a page is read again
REFERENCE = StatisticalQuantiser(num_bins=4, sigmas=6.0)  # the value code of templar 2.1.3, with its settings


def small_network(seed: int) -> HParams:
    """The `local` network of 148 k parameters, cut into the 64 x 64 chunks of the large ones, with short windows.

    With so few of its coefficients published it learns more at half of `local`'s learning rate, with every code.
    """
    overrides: dict[str, dict[str, Any]] = {
        "model": {"initializer_seed": seed},
        "data": {"pages_per_window": 1},
        "training": {"inner_steps": 10, "adamw": {"learning_rate": 0.002}},
        "gradient": {
            "target_chunk": 64,
            "topk_compression": 64,
            "momentum_decay": 0.95,
            "feedback_carry": 0.0,
            "mean_over": "contributors",
        },
    }
    return load_hparams("local", overrides=overrides)


@dataclass(frozen=True)
class Text:
    """The text of this machine as a dataset."""

    pages: PageDataset  # to train on
    held_out: PageDataset  # of other documents
    tokenizer: Tokenizer  # trained on the text of `pages`


@contextmanager
def embedded_text() -> Iterator[Text]:
    """Build the dataset, which takes seconds; it is deleted at the end of the block."""
    hparams = small_network(seed=0)
    with tempfile.TemporaryDirectory(prefix="templar-bench-") as folder:
        root = Path(folder) / "text"
        build_dataset(collect_documents(max_bytes=TEXT_BYTES), root, vocab_size=hparams.model.vocab_size)
        stores = [DirectoryStore(root, writable=False)]
        pages = PageDataset(stores, "", rows_per_page=hparams.data.rows_per_page)
        held_out = PageDataset(stores, "", rows_per_page=HELD_OUT_ROWS_PER_PAGE, split=HELD_OUT_SPLIT)
        yield Text(
            pages,
            held_out,
            load_tokenizer(hparams.data.tokenizer_name, embedded=pages.beside("tokenizer.json", max_bytes=2**26)),
        )


@dataclass(frozen=True)
class Setup:
    """All inputs of a run."""

    hparams: HParams
    sequences: tuple[tuple[Tensor, ...], ...]  # training data by window and worker, each of shape (n, L)
    held_out: Tensor  # shape (NUM_HELD_OUT, L), of documents that no worker trains on

    @classmethod
    def of(cls, text: Text, *, seed: int, workers: int, windows: int, hparams: HParams | None = None) -> "Setup":
        """Assign pages as the network does: two workers never share one, and none comes twice within a round.

        The network is `small_network` unless another one is given.
        """
        hparams = hparams or small_network(seed)
        length, uids = hparams.data.sequence_length, tuple(range(workers))
        epoch = Epoch(f"seed {seed}", text.pages.num_pages)
        plan = SlotPlan(workers, hparams.data.pages_per_window)

        def sequences(window: int, uid: int) -> Tensor:
            assignment = assign(window, uid, epoch=epoch, plan=plan, uids=uids, block_hash="")
            return torch.from_numpy(
                page_sequences(text.pages.read_pages(assignment.units), text.tokenizer, assignment, length)
            )

        shares = tuple(tuple(sequences(window, uid) for uid in uids) for window in range(windows))
        held_out = held_out_sequences(text.held_out, text.tokenizer, length, NUM_HELD_OUT)
        return cls(hparams, shares, torch.from_numpy(held_out))

    @property
    def num_workers(self) -> int:
        """Workers of the network."""
        return len(self.sequences[0])

    @property
    def layout(self) -> Layout:
        """The chunks of the model."""
        hparams = self.hparams
        return Layout.of(parameter_shapes(hparams.model), hparams.gradient, hparams.training.recipe)

    def held_out_loss(self, net: PreTrainedModel) -> float:
        """Mean loss of a model on the held-out sequences, in nats per token."""
        losses = sequence_losses(net, self.held_out, micro_batch_size=HELD_OUT_BATCH)
        return statistics.fmean(losses.tolist())


@dataclass(frozen=True)
class Learnt:
    """The workers' results of a window before they exchange payloads."""

    window: int  # from 0
    layout: Layout
    rule: FeedbackRule
    states: tuple[FeedbackState, ...]  # of each worker
    pseudo_gradients: tuple[Mapping[str, Tensor], ...]  # of each worker, by parameter name


@dataclass(frozen=True)
class NetworkView:
    """The payloads and the agreed update of a window."""

    compressed: tuple[Compressed, ...]  # each worker's coefficients and new error feedback
    num_bytes: tuple[int, ...]  # length of each worker's payload
    update: Mapping[str, Tensor]  # agreed, by parameter name
    payloads: tuple[Payload, ...]  # as read


def exchange(learnt: Learnt) -> NetworkView:
    """Exchange this network's payloads, as bytes."""
    layout, rule = learnt.layout, learnt.rule
    compressed = tuple(
        compress(state, update, layout=layout, rule=rule)
        for state, update in zip(learnt.states, learnt.pseudo_gradients, strict=True)
    )
    headers = (
        Header(layout.recipe, learnt.window, uid, f"worker-{uid}", layout.digest) for uid in range(len(compressed))
    )
    payloads = [Payload.of(header, one.tensors, layout) for header, one in zip(headers, compressed, strict=True)]
    published = [wire.encode(payload, layout) for payload in payloads]
    read = tuple(wire.decode(data, layout) for data in published)
    return NetworkView(compressed, tuple(map(len, published)), aggregate(read, layout), read)


@dataclass(frozen=True)
class Window:
    """One window of a run, after its outer step."""

    net: PreTrainedModel  # the next window changes it
    learnt: Learnt
    exchange: NetworkView


def train(setup: Setup, steps: Callable[[int], int] | None = None) -> Iterator[Window]:
    """Train a network from its genesis parameters, window by window; `steps` gives the inner steps of a uid."""
    layout = setup.layout
    inner_steps = map(steps or (lambda _: setup.hparams.training.inner_steps), range(setup.num_workers))
    trainings = [setup.hparams.training.model_copy(update={"inner_steps": each}) for each in inner_steps]
    net = build_model(setup.hparams.model)
    params, trainer = parameters_of(net), Trainer(setup.hparams.model)
    optimizers = [OptimizerState.zeros(params)] * setup.num_workers
    states = (FeedbackState.zeros(layout),) * setup.num_workers
    for window, shares in enumerate(setup.sequences):
        results = [
            trainer.learn(
                params, tokens, training=training, outer_steps=window, optimizer=optimizer, keep_going=lambda: True
            )
            for tokens, training, optimizer in zip(shares, trainings, optimizers, strict=True)
        ]
        optimizers = [result.optimizer for result in results if result.optimizer is not None]
        rule = feedback_rule(setup.hparams, window)
        learnt = Learnt(window, layout, rule, states, tuple(result.update for result in results))
        exchanged = exchange(learnt)
        outer_step(params, exchanged.update, learning_rate=rule.learning_rate, weight_decay=0.0)
        yield Window(net, learnt, exchanged)
        states = tuple(one.state for one in exchanged.compressed)


@dataclass(frozen=True)
class Chosen:
    """The coefficients of one tensor that a worker publishes, before they are coded."""

    indices: Tensor  # shape (C, k), int64, ascending in each row
    values: Tensor  # shape (C, k), float32: error feedback and pseudo-gradient together


def chosen_coefficients(learnt: Learnt) -> Iterator[dict[str, Chosen]]:
    """Each worker's chosen coefficients by parameter name: the input of a value code."""
    for state, update in zip(learnt.states, learnt.pseudo_gradients, strict=True):
        yield chosen(state, update, learnt.layout, learnt.rule)


def chosen(state: FeedbackState, update: Mapping[str, Tensor], layout: Layout, rule: FeedbackRule) -> dict[str, Chosen]:
    """The coefficients that a compression chooses, by parameter name."""
    found, call = dict[str, Chosen](), rule.call(state.num_calls)
    for tensor in layout.tensors:
        buffer, new = state.buffers[tensor.name], update[tensor.name]
        chunks = accumulated(buffer, new, tensor, call, use_dct=layout.use_dct)
        indices = top_k(chunks, tensor.k)
        found[tensor.name] = Chosen(indices, chunks.gather(1, indices))
    return found
