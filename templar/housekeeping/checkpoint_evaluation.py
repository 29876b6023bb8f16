"""Evaluation of this neuron's published checkpoints on held-out text, once for each, as a signed object beside it."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from templar.agreement.checkpoint import EVALUATION_FILE, fetch_checkpoint, list_checkpoints
from templar.agreement.genesis import Birth, load_genesis
from templar.agreement.proven_state import read_fetched
from templar.chain.base import NeuronInfo
from templar.data.tokenizer import Tokenizer, load_tokenizer
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import checkpoint_key
from templar.exchange.objects import CheckpointEvaluation
from templar.exchange.publish import publish_body
from templar.exchange.signed import read_signed
from templar.housekeeping.text_score import TextScore, score_texts
from templar.neuron.join import Context
from templar.training.model import build_model, load_parameters

log = logging.getLogger(__name__)

TEXTS = 256
"""Held-out texts that a checkpoint is measured on, at most."""
FOLDER = "evaluating"
"""In the neuron's folder: the checkpoint that is measured."""


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """The result of one checkpoint."""

    window: int
    root: str
    score: TextScore
    is_new: bool  # whether it was measured now


def evaluate_checkpoints(
    context: Context, read_texts: Callable[[Tokenizer, int], list[str]]
) -> tuple[EvaluatedCheckpoint, ...]:
    """Measure every complete checkpoint of the own bucket that has no evaluation yet; the results of all, oldest first.

    A second call measures nothing and changes nothing.

    Args:
        context: The neuron.
        read_texts: Reads held-out texts, at most so many.

    Raises:
        TransientError: Chain, bucket or dataset failed; a later call goes on with the next checkpoint.
        PermanentError: `not_registered`; `object_missing`, there is no checkpoint; `checkpoint_broken`,
            `root_differs`, `dataset_missing`, `non_finite_loss`.
    """
    birth, store = context.birth(), context.buckets.own
    neuron = context.own_neuron()
    windows = list_checkpoints(store, neuron.uid)
    if not windows:
        raise PermanentError(
            Reason.OBJECT_MISSING, f"bucket {store.name} has no checkpoint of uid {neuron.uid}: publish one first"
        )
    results = []
    for window in reversed(windows):
        key = checkpoint_key(window, neuron.uid, EVALUATION_FILE)
        found = read_signed(store, key, CheckpointEvaluation, network=birth.network, author=neuron, window=window)
        body = _measure(context, birth, neuron, window, read_texts) if found is None else found.body
        if found is None:
            publish_body(store, key, body, context.own_signer, clock=context.chain.clock)
        score = TextScore(body.texts, body.tokens, body.num_bytes, body.nats)
        results.append(EvaluatedCheckpoint(window, body.root, score, found is None))
    return tuple(results)


def _measure(
    context: Context, birth: Birth, neuron: NeuronInfo, window: int, read_texts: Callable[[Tokenizer, int], list[str]]
) -> CheckpointEvaluation:
    """Fetch a checkpoint as a reader would, check its root, and score it."""
    folder, model = context.home / FOLDER, context.hparams.model
    if window == birth.mark.window:
        params, root = load_genesis(birth, context.buckets, model, folder), birth.start.root
    else:
        reader = context.buckets.reader(neuron)
        manifest = fetch_checkpoint(reader, neuron, window, folder, network=birth.network, model=model)
        params, root = read_fetched(folder, manifest, model).params, manifest.root
    net = build_model(model)
    load_parameters(net, params)
    tokenizer = load_tokenizer(str(folder))
    score = score_texts(net, tokenizer, read_texts(tokenizer, TEXTS), model.max_position_embeddings)
    shutil.rmtree(folder, ignore_errors=True)
    log.info(
        "checkpoint of window %d: %.4f nats per token, %.4f bits per byte", window, score.loss, score.bits_per_byte
    )
    return CheckpointEvaluation(
        netuid=birth.network.netuid,
        genesis=birth.network.genesis,
        uid=neuron.uid,
        hotkey=neuron.hotkey,
        window=window,
        root=root,
        texts=score.texts,
        tokens=score.tokens,
        num_bytes=score.num_bytes,
        nats=score.nats,
    )
