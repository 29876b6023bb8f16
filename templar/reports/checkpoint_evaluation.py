"""Checkpoints on held-out text: each publisher measures its own once, and anybody reads what all of them measured.

A result is a signed object beside the checkpoint. It stays when the checkpoint expires, so the held-out curve of a
network goes back to its first one.
"""

import logging
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from templar.agreement.checkpoint import EVALUATION_FILE, list_checkpoints
from templar.agreement.genesis import Birth
from templar.agreement.model_folder import write_model
from templar.agreement.proven_state import fetch_checked, proven_state
from templar.agreement.settings_plan import SettingsPlan
from templar.agreement.state import StateMark
from templar.chain.base import NeuronInfo
from templar.data.tokenizer import Tokenizer
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import checkpoint_key
from templar.exchange.objects import MAX_RESULTS, CheckpointEvaluation
from templar.exchange.publish import publish_body
from templar.exchange.signed import read_signed
from templar.hparams import MAX_PEERS
from templar.interrupt import check_stop
from templar.neuron.configuration import NeuronConfig
from templar.reports.history import CONCURRENCY, decided_entries
from templar.reports.published_plan import newest_mark
from templar.reports.text_score import TextScore, score_texts
from templar.store.deadline import in_parallel
from templar.timeline import closing_block, window_of
from templar.training.model import build_model, load_parameters, parameters_of

log = logging.getLogger(__name__)

TEXTS = 256  # held-out texts that a checkpoint is measured on, at most
FOLDER = "evaluating"  # in the neuron's folder: the checkpoint that is measured
MOST_READ = 500  # evaluations of one publisher that are read: the newest
TOLERANCE = 1e-3  # two evaluations of one checkpoint agree if their figures are this close, relative to the larger one
_ADDRESS = re.compile(r"[/:]|\.(?!\d)|(?<!\d)\.")
Results = tuple[tuple[str, str, float], ...]  # task, metric and value, of lm-evaluation-harness
RunTasks = Callable[[Path], Sequence[tuple[str, str, float]]]  # runs tasks on a model's folder
Place = tuple[str, int | None]  # hotkey and window of an evaluation; None for a bucket as a whole


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """The result of one checkpoint."""

    window: int
    root: str
    score: TextScore
    results: Results
    is_new: bool  # whether it was measured now
    trained: int | None = None  # as in `HeldOutPoint`


@dataclass(frozen=True)
class HeldOutPoint:
    """The evaluation of one checkpoint that counts."""

    window: int
    uids: tuple[int, ...]  # that found it, the most stake first
    hours: float  # of chain time, from the start of the network to the close of the window
    trained: int | None  # tokens in the payloads applied up to the window, as their authors say
    score: TextScore
    results: Results


@dataclass(frozen=True)
class HeldOut:
    """The evaluations that the validators of a network show."""

    points: tuple[HeldOutPoint, ...] = ()  # by rising window, one for each
    left_out: Mapping[Place, TemplarError] = field(default_factory=dict)  # and why
    found: Mapping[Place, CheckpointEvaluation] = field(default_factory=dict)  # all that are legal


# Measuring the own checkpoints.


def evaluate_checkpoints(
    config: NeuronConfig, read_texts: Callable[[Tokenizer, int], list[str]], run_tasks: RunTasks | None = None
) -> tuple[EvaluatedCheckpoint, ...]:
    """Measure every complete checkpoint of the own bucket that has no evaluation yet; the results of all, oldest first.

    A second call measures nothing and changes nothing. `read_texts` reads so many held-out texts at most.

    Raises:
        TransientError: Chain, bucket or dataset failed; a later call goes on with the next checkpoint.
        PermanentError: `not_registered`; `object_missing`, there is no checkpoint; `checkpoint_broken`,
            `root_differs`, `dataset_missing`, `non_finite_loss`; `bad_parameters`, the tasks have too many results.
    """
    birth, store = config.birth(), config.buckets.own
    neuron = config.own_neuron()
    windows = [each for each in list_checkpoints(store, neuron.uid) if each >= birth.mark.window]
    if not windows:
        problem = f"bucket {store.name} has no checkpoint of uid {neuron.uid}: publish one first"
        raise PermanentError(Reason.OBJECT_MISSING, problem)
    exchange = config.reading(birth)
    trained: dict[int, int | None] | None = None
    results = []
    for window in reversed(windows):
        key = checkpoint_key(window, neuron.uid, EVALUATION_FILE)
        found = read_signed(store, key, CheckpointEvaluation, network=birth.network, author=neuron, window=window)
        if found is not None:
            body = found.body
        else:
            if trained is None:
                trained = {each.window: each.trained for each in read_evaluations(exchange, birth).points}
            body = _measure(config, birth, neuron, window, read_texts=read_texts, run_tasks=run_tasks, known=trained)
            trained[window] = body.trained
            publish_body(store, key, body, config.own_signer, clock=config.chain.clock)
        results.append(
            EvaluatedCheckpoint(window, body.root, score_of(body), body.results, found is None, body.trained)
        )
    return tuple(results)


def score_of(body: CheckpointEvaluation) -> TextScore:
    """The score that an evaluation states."""
    return TextScore(body.texts, body.tokens, body.num_bytes, body.nats)


def shown_results(results: Results) -> str:
    """Results of tasks in one line; empty if there are none.

    The names are another validator's: they are shown without what renderers make links of.
    """
    return ", ".join(_ADDRESS.sub("_", f"{task} {metric}") + f" {value:.4f}" for task, metric, value in results)


def _measure(
    config: NeuronConfig,
    birth: Birth,
    neuron: NeuronInfo,
    window: int,
    *,
    read_texts: Callable[[Tokenizer, int], list[str]],
    run_tasks: RunTasks | None,
    known: Mapping[int, int | None],
) -> CheckpointEvaluation:
    """Fetch a checkpoint as a reader would, check its root, and score it; `known` as of `_trained`."""
    folder, model, exchange = config.home / FOLDER, config.hparams.model, config.reading(birth)
    fetched, tokenizer = fetch_checked(exchange, birth, neuron, window, folder, proven=None)
    net = build_model(model)
    load_parameters(net, fetched.params)
    if run_tasks is not None:  # tasks read the whole layout
        write_model(folder, parameters_of(net), model, tokenizer)
    score = score_texts(net, tokenizer, read_texts(tokenizer, TEXTS), model.max_position_embeddings)
    found = [] if run_tasks is None else [each for each in run_tasks(folder) if math.isfinite(each[2])]
    if len(found) > MAX_RESULTS:
        problem = f"tasks: they have {len(found)} results, at most {MAX_RESULTS} fit: name fewer tasks"
        raise PermanentError(Reason.BAD_PARAMETERS, problem)
    shutil.rmtree(folder, ignore_errors=True)
    return CheckpointEvaluation(
        **asdict(birth.network),
        **asdict(score),
        uid=neuron.uid,
        hotkey=neuron.hotkey,
        window=window,
        root=fetched.mark.root,
        trained=_trained(exchange, birth, fetched.mark, known),
        results=tuple(found),
    )


def _trained(exchange: NetworkView, birth: Birth, mark: StateMark, known: Mapping[int, int | None]) -> int | None:
    """Tokens in the payloads applied up to a state, counted on from the newest earlier window for which it is known.

    None if a roster in between cannot be read any more. No payload counts for more than its window's whole training.
    """
    window, plan = mark.window, SettingsPlan(exchange.hparams, mark.plan)
    counts = {each: tokens for each, tokens in known.items() if tokens is not None} | {birth.mark.window: 0}
    base = max(each for each in counts if each <= window)
    if window - base > exchange.hparams.storage.retention_windows:
        return None
    tokens = counts[base]
    for each in range(base + 1, window + 1):
        entries = decided_entries(exchange, each)
        if entries is None:
            log.info("the tokens up to window %d are not known", window)
            return None
        tokens += sum(min(entry.tokens, _most_tokens(plan, each)) for entry in entries)
    return tokens


def _most_tokens(plan: SettingsPlan, window: int) -> int:
    """Tokens of one miner in a window, if it does all inner steps."""
    return plan.at(window).training.most_sequences * plan.genesis.data.sequence_length


# Reading everybody's.


def read_evaluations(exchange: NetworkView, birth: Birth, known: HeldOut | None = None) -> HeldOut:
    """Read what the validators measured of published checkpoints, and check each evaluation.

    An evaluation counts if its author signed it for a closed window of this network, for the state that a quorum
    proved (as long as buckets keep the proofs), and if no other one of that checkpoint has more stake behind it. What
    is not legal, or cannot be read, is left out. What an earlier call found, `known`, is not read again. TemplarError
    if the chain failed.
    """
    # 1. The newest evaluations that each bucket shows.
    known, newest = known or HeldOut(), window_of(exchange.chain.block(), exchange.hparams.windows) - 1
    validators = exchange.newest_metagraph().validators()
    wanted, left_out = list[tuple[NeuronInfo, int]](), dict[Place, TemplarError]()
    for validator in validators:
        try:
            windows = list_checkpoints(exchange.buckets.reader(validator), validator.uid, EVALUATION_FILE)
        except TemplarError as error:
            left_out[validator.hotkey, None] = error
            continue
        wanted += [(validator, window) for window in windows[:MOST_READ]]

    # 2. Each of them, unless it is known or was refused before.
    def read(each: tuple[NeuronInfo, int]) -> CheckpointEvaluation | TemplarError:
        place = each[0].hotkey, each[1]
        refused = known.left_out.get(place)
        if (body := known.found.get(place)) is not None:
            return body
        if isinstance(refused, RejectedError) and refused.reason is not Reason.WRONG_WINDOW:
            return refused
        try:
            return _read(exchange, birth, *each, newest)
        except TemplarError as error:
            log.warning("the evaluation of window %d of uid %d is left out: %s", each[1], each[0].uid, error)
            return error

    found = dict[Place, CheckpointEvaluation]()
    for (validator, window), result in zip(wanted, in_parallel(read, wanted, CONCURRENCY), strict=True):
        if isinstance(result, TemplarError):
            left_out[validator.hotkey, window] = result
        else:
            found[validator.hotkey, window] = result

    # 3. One point per window.
    stakes, points = {validator.hotkey: validator.stake for validator in validators}, list[HeldOutPoint]()
    hours = {point.window: point.hours for point in known.points}
    for window in sorted({body.window for body in found.values()}):
        bodies = [body for body in found.values() if body.window == window]
        agreeing = _most_stake(bodies, stakes)
        uids = tuple(body.uid for body in agreeing)
        for body in bodies:
            if body not in agreeing:
                by = ", ".join(f"uid {uid}" for uid in uids)
                text = f"evaluation of window {window} of uid {body.uid}: that of {by} has more stake, and differs"
                left_out[body.hotkey, window] = RejectedError(Reason.EVIDENCE_DIFFERS, text)
        if window not in hours:
            hours[window] = (_closed(exchange, window) - _closed(exchange, birth.mark.window)) / 3600
        trained = next((body.trained for body in agreeing if body.trained is not None), None)
        results = next((body.results for body in agreeing if body.results), ())
        points.append(HeldOutPoint(window, uids, hours[window], trained, score_of(agreeing[0]), results))
    return HeldOut(tuple(points), left_out, found)


def _read(exchange: NetworkView, birth: Birth, author: NeuronInfo, window: int, newest: int) -> CheckpointEvaluation:
    """Read one evaluation and check it; every failure is a TemplarError."""
    check_stop()
    what, first = f"evaluation of window {window} of uid {author.uid}", birth.mark.window
    if not first <= window <= newest:
        raise RejectedError(Reason.WRONG_WINDOW, f"{what}: the closed windows are {first} to {newest}")
    store, key = exchange.buckets.reader(author), checkpoint_key(window, author.uid, EVALUATION_FILE)
    found = read_signed(store, key, CheckpointEvaluation, network=exchange.network, author=author, window=window)
    if found is None:
        raise RejectedError(Reason.OBJECT_MISSING, f"{what}: it was deleted while it was read")
    body = found.body
    if body.trained is not None and body.trained > _possible(SettingsPlan(exchange.hparams), first, window):
        most = _possible(SettingsPlan(exchange.hparams, newest_mark(exchange, birth, newest + 1).plan), first, window)
        if body.trained > most:
            problem = f"trained is {body.trained}, by then at most {most} is possible"
            raise RejectedError(Reason.MALFORMED, f"{what}: {problem}")
    # The root that a quorum proved, as long as buckets keep the proofs, and the chain the block that they rest on.
    root = birth.start.root if window == first else None
    if root is None and window > newest + 1 - exchange.hparams.storage.retention_windows:
        try:
            if (proven := proven_state(exchange, window)) is None:
                raise TransientError(Reason.ROOT_DIFFERS, f"no quorum of stake proves a state of window {window}")
            root = proven[0]
        except PermanentError as error:
            if error.reason is not Reason.BLOCK_UNKNOWN:
                raise
            log.info("window %d: its proofs cannot be read: %s", window, error)
    if root not in (None, body.root):
        raise RejectedError(Reason.ROOT_DIFFERS, f"{what}: root is {body.root[:12]}, and {str(root)[:12]} is proven")
    return body


def _possible(plan: SettingsPlan, first: int, window: int) -> int:
    """Tokens of as many payloads as rosters may have, from the window after the first one to this one."""
    return MAX_PEERS * sum(_most_tokens(plan, each) for each in range(first + 1, window + 1))


def _most_stake(
    bodies: Sequence[CheckpointEvaluation], stakes: Mapping[str, float]
) -> tuple[CheckpointEvaluation, ...]:
    """Of the evaluations of one window those that agree with each other and have the most stake, by falling stake."""
    ranked = sorted(bodies, key=lambda body: (-stakes[body.hotkey], body.uid))
    groups = (tuple(other for other in ranked if _agree(body, other)) for body in ranked)
    return max(groups, key=lambda group: sum(stakes[body.hotkey] for body in group))


def _agree(first: CheckpointEvaluation, second: CheckpointEvaluation) -> bool:
    one, other = score_of(first), score_of(second)
    pairs = (one.loss, other.loss), (one.bits_per_byte, other.bits_per_byte)
    return first.root == second.root and all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in pairs)


def _closed(exchange: NetworkView, window: int) -> float:
    """The chain time of a window's close, estimated from the newest block if the endpoint lacks the old one."""
    chain, block = exchange.chain, closing_block(window, exchange.hparams.windows)
    try:
        return chain.block_time(block)
    except PermanentError as error:
        if error.reason is not Reason.BLOCK_UNKNOWN:
            raise
    newest = chain.block()
    return chain.block_time(newest) - (newest - block) * chain.block_seconds
