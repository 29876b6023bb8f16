"""The states that a quorum of stake proved, and the published checkpoints of them (docs/protocol.md 12).

A checkpoint is trusted for the proofs of its window's state alone, never for its publisher.
"""

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from templar.agreement.ballot_rules import Stakes
from templar.agreement.checkpoint import (
    FILES_AT_ONCE,
    ProvenState,
    fetch_copy,
    fetched_checkpoint,
    list_checkpoints,
    mark_of,
    read_copied_manifest,
)
from templar.agreement.genesis import Birth, load_genesis
from templar.agreement.model_folder import read_weights, write_model
from templar.agreement.state import StateMark, check_mark, genesis_root, parameters_digest, state_root
from templar.agreement.sync_proof import read_proofs
from templar.chain.base import NeuronInfo
from templar.data.tokenizer import Tokenizer, network_tokenizer
from templar.errors import PermanentError, Reason, RejectedError, TemplarError, TransientError, as_reader_failure
from templar.exchange.network_view import NetworkView
from templar.exchange.object_keys import Kind, parse_current_key
from templar.exchange.signed import Network
from templar.hparams import Model
from templar.store.base import ObjectStore
from templar.store.files import local_file
from templar.timeline import window_of

log = logging.getLogger(__name__)

DOWNLOAD = "download"  # in the folder of fetched models: the files of a publisher, until they are checked


@dataclass(frozen=True)
class FetchedModel:
    """A published checkpoint whose parameters are those of its mark."""

    params: dict[str, Tensor]
    mark: StateMark
    tokenizer: Tokenizer | None = None  # the network's, if it was asked for


@dataclass(frozen=True)
class KeptModel:
    """A model on this disk, in the Hugging Face layout, with the proven state of a window."""

    folder: Path
    window: int
    root: str
    outer_steps: int


def proven_state(exchange: NetworkView, window: int, *, concurrency: int = 1) -> ProvenState | None:
    """The state that a quorum of all announced stake proved for a window; None if there is none."""
    provers: dict[ProvenState, set[int]] = defaultdict(set)
    validators = {each.uid: each for each in exchange.announced(window)}
    for uid, proof in read_proofs(exchange, validators, window, concurrency=concurrency).items():
        if isinstance(proof, TemplarError):
            log.warning("proof of uid %d is left out: %s", uid, proof)
        elif proof is not None:
            provers[proof.root, proof.outer_steps].add(uid)
    stakes = Stakes({uid: each.stake for uid, each in validators.items()}, exchange.hparams.windows.quorum)
    return next((state for state, uids in provers.items() if stakes.is_quorum(uids)), None)


def newest_proven_window(exchange: NetworkView) -> int | None:
    """The newest window whose state a quorum proved, by what the validators' buckets show; None if there is none."""
    windows, newest = set[int](), window_of(exchange.chain.block(), exchange.hparams.windows)
    for validator in exchange.newest_metagraph().validators():
        try:
            keys = (parse_current_key(info.key) for info in exchange.buckets.reader(validator).list(f"{Kind.PROOF}-"))
            windows.update(key.window for key in keys if key is not None and key.window is not None)
        except TemplarError as error:
            log.warning("proofs of uid %d are left out: %s", validator.uid, error)
    # Anybody may name windows that are still to come, and their metagraphs would be waited for.
    closed = (window for window in sorted(windows, reverse=True) if window <= newest)
    return next((window for window in closed if proven_state(exchange, window)), None)


def fetch_proven(
    exchange: NetworkView,
    publisher: NeuronInfo,
    window: int,
    folder: Path,
    proven: ProvenState | None,
    *,
    concurrency: int,
    tokenizer: str | None = None,
) -> FetchedModel:
    """Fetch a validator's checkpoint of a proven state into a folder, and check it; as `fetched_checkpoint`.

    What is refused is not fetched again until its publisher changes it. The tokenizer is read if its digest is given.

    Also `root_differs`, `checkpoint_broken`: parameters or tokenizer are not those of the root and of the digest.
    """
    store, model = exchange.buckets.reader(publisher), exchange.hparams.model
    with (
        as_reader_failure(f"checkpoint of uid {publisher.uid}"),
        fetched_checkpoint(
            *(store, publisher, window, folder),
            network=exchange.network,
            model=model,
            proven=proven,
            concurrency=concurrency,
            remember=True,
        ) as manifest,
    ):
        mark, params = mark_of(manifest), read_weights(folder, model)
        check_mark(params, mark, "its manifest's root")
        read = None if tokenizer is None else network_tokenizer(folder, tokenizer, model.vocab_size)
        return FetchedModel(params, mark, read)


def fetch_checked(
    exchange: NetworkView, birth: Birth, publisher: NeuronInfo, window: int, folder: Path, *, proven: ProvenState | None
) -> tuple[FetchedModel, Tokenizer]:
    """The genesis checkpoint, or that of a later window as in `fetch_proven`, and the network's tokenizer in it."""
    digest, model = birth.start.tokenizer, exchange.hparams.model
    if window == birth.mark.window:
        params = load_genesis(birth, exchange.buckets, model, folder, concurrency=FILES_AT_ONCE)
        fetched = FetchedModel(params, birth.mark)
    else:
        fetched = fetch_proven(
            *(exchange, publisher, window, folder, proven), concurrency=FILES_AT_ONCE, tokenizer=digest
        )
    return fetched, fetched.tokenizer or network_tokenizer(folder, digest, model.vocab_size)


def fetch_model(exchange: NetworkView, birth: Birth, home: Path, *, window: int | None = None) -> KeptModel:
    """Fetch the newest checkpoint of a proven state, or that of a window, from any validator that shows it.

    The genesis checkpoint needs no proof: the start window is signed for its root. Each model gets a folder of its own
    in `home`, and is not fetched again.

    Raises:
        PermanentError: `object_missing`; no validator shows such a checkpoint. Or the only ones were refused: the
            reason is the first one's, and the message has all. `local_file`.
        TransientError: Chain or stores failed, and nothing else was found; a later call goes on. `local_file`.
    """
    # 1. Who shows checkpoints of which windows; the newest ones of each, as others may be named without end.
    shown, problems = list[tuple[int, NeuronInfo]](), list[TemplarError]()
    hparams = exchange.hparams
    kept, newest = hparams.storage.checkpoints_kept, window_of(exchange.chain.block(), hparams.windows)
    for validator in exchange.newest_metagraph().validators():
        try:
            listed = list_checkpoints(exchange.buckets.reader(validator), validator.uid)
        except TemplarError as error:
            problems.append(error)
            continue
        past = [each for each in listed if each <= newest]
        shown += [(each, validator) for each in past if each in (*past[:kept], window, birth.mark.window)]
    wanted = [each for each in shown if window in (None, each[0])]

    # 2. The newest of a proven state; of one window, that of the validator with the most stake.
    for at, validator in sorted(wanted, key=lambda each: -each[0]):
        try:
            return _keep(exchange, birth, validator, at, home)
        except TemplarError as error:
            if error.reason in (Reason.STOPPED, Reason.LOCAL_FILE):
                raise
            log.warning("the checkpoint of window %d of uid %d is left out: %s", at, validator.uid, error)
            problems.append(error)
    raise _nothing(window, sorted({each[0] for each in shown}), problems)


def fetch_copied_model(exchange: NetworkView, birth: Birth, home: Path, store: ObjectStore, place: str) -> KeptModel:
    """Fetch a checkpoint of this network that lies in a folder of any bucket, if a quorum proved its state.

    The bucket is trusted for nothing. The model is kept as `fetch_model` does.

    Raises:
        PermanentError: `object_missing`, `wrong_network`, `root_differs`, `checkpoint_broken`, ...; `local_file`.
        TransientError: Chain or stores failed; a later call goes on. `local_file`.
    """
    manifest, where = read_copied_manifest(store, place), f"s3://{store.name}/{place}"
    if Network(manifest.netuid, manifest.genesis) != birth.network:
        problem = f"it is of the network {manifest.genesis[:12]} on subnet {manifest.netuid}"
        wanted = f"{birth.network.genesis[:12]} on {birth.network.netuid}: name one of this network"
        raise PermanentError(Reason.WRONG_NETWORK, f"{where}: {problem}, not of {wanted}")
    proven = _proven(exchange, birth, manifest.window, where)
    if proven != (manifest.root, manifest.outer_steps):
        problem = f"it has the root {manifest.root[:12]}, and a quorum proved {proven[0][:12]}; name another checkpoint"
        raise PermanentError(Reason.ROOT_DIFFERS, f"{where}: {problem}")

    def fetch(download: Path) -> tuple[FetchedModel, Tokenizer]:
        model, mark = exchange.hparams.model, mark_of(manifest)
        fetch_copy(store, place, manifest, download, model)
        params = read_weights(download, model)
        digest, is_first = parameters_digest(params), mark.window == birth.mark.window
        root = genesis_root(birth.network.netuid, digest) if is_first else state_root(mark, digest)
        if root != mark.root:
            problem = f"its parameters give the root {root[:12]}, not {mark.root[:12]}: name another checkpoint"
            raise PermanentError(Reason.ROOT_DIFFERS, f"{where}: {problem}")
        return FetchedModel(params, mark), network_tokenizer(download, birth.start.tokenizer, model.vocab_size)

    return _kept(home, manifest.window, proven, exchange.hparams.model, fetch)


def _proven(exchange: NetworkView, birth: Birth, window: int, what: str) -> ProvenState:
    """The state that a checkpoint of a window must have; RejectedError `root_differs` if no quorum proved one."""
    proven = (birth.start.root, 0) if window == birth.mark.window else proven_state(exchange, window)
    if proven is None:
        problem = f"no quorum of stake proves a state of window {window}: {what} cannot be verified"
        raise RejectedError(Reason.ROOT_DIFFERS, problem)
    return proven


def _keep(exchange: NetworkView, birth: Birth, publisher: NeuronInfo, window: int, home: Path) -> KeptModel:
    """Fetch and check one checkpoint, unless it is kept already."""
    proven = _proven(exchange, birth, window, f"the checkpoint of uid {publisher.uid}")
    fetch = partial(fetch_checked, exchange, birth, publisher, window, proven=proven)
    return _kept(home, window, proven, exchange.hparams.model, fetch)


def _kept(
    home: Path, window: int, proven: ProvenState, model: Model, fetch: Callable[[Path], tuple[FetchedModel, Tokenizer]]
) -> KeptModel:
    """Keep the model of a proven state that `fetch` brings into a folder and checks, unless it is kept already."""
    folder, download = home / f"{window}-{proven[0][:16]}", home / DOWNLOAD
    kept = KeptModel(folder, window, *proven)
    if folder.exists():
        return kept
    fetched, tokenizer = fetch(download)
    # The other files are written here: no proof covers those of the publisher.
    part = home / f"{folder.name}.part"
    write_model(part, fetched.params, model, tokenizer)
    with local_file(folder):
        part.rename(folder)
        shutil.rmtree(download)
    return kept


def _nothing(window: int | None, shown: list[int], problems: list[TemplarError]) -> TemplarError:
    """The error of a fetch that found nothing: a failure that may pass, a refusal, or that there is none."""
    what = "a checkpoint" if window is None else f"a checkpoint of window {window}"
    there = f"; there are those of windows {', '.join(map(str, shown))}" if shown else ""
    if not problems:
        return PermanentError(Reason.OBJECT_MISSING, f"no validator shows {what}{there}")
    passing = next((each for each in problems if isinstance(each, TransientError)), None)
    text = "; ".join(each.message for each in problems)
    if passing is not None:
        return TransientError(passing.reason, f"{what} cannot be fetched now: {text}; try again")
    return PermanentError(problems[0].reason, f"{what} cannot be used: {text}{there}")
