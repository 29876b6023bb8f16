"""The start of a network: genesis checkpoint and start window, published once, verified by every node.

The start window holds the digests of all that two nodes must have in common (hyper-parameters, tokenizer, dataset,
first parameters); its own digest is the genesis hash, which is signed into every later object (docs/protocol.md 2). The
first parameters come from the checkpoint: two builds of a library may initialise a model differently.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from templar.agreement.checkpoint import FILES_AT_ONCE, fetched_checkpoint, publish_checkpoint
from templar.agreement.model_folder import read_weights, write_model
from templar.agreement.state import StateMark, genesis_root, parameters_digest
from templar.canonical import sha256_hex
from templar.chain.base import Chain, Clock, NeuronInfo
from templar.chain.hotkey import Signer
from templar.data.tokenizer import Tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.object_keys import SETTINGS_KEY, START_WINDOW_KEY
from templar.exchange.objects import StartWindow
from templar.exchange.publish import publish_body
from templar.exchange.signed import Network, read_signed
from templar.hparams import HParams, Model
from templar.store.base import ObjectStore

log = logging.getLogger(__name__)

MAX_SETTINGS_BYTES = 1 << 16
NO_GENESIS = "0" * 64  # the genesis field of the start window, which cannot hold its own digest


@dataclass(frozen=True)
class Birth:
    """A start window and the validator that signed it."""

    start: StartWindow
    publisher: NeuronInfo  # its bucket also has the genesis checkpoint

    @property
    def network(self) -> Network:
        """Netuid and genesis hash, which are signed into every later object."""
        return Network(self.start.netuid, self.start.digest)

    @property
    def mark(self) -> StateMark:
        """The state that the network starts from."""
        window = self.start.start_window - 1
        return StateMark(window, outer_steps=0, root=self.start.root, previous_root=NO_GENESIS, null=False)


def draft_birth(
    chain: Chain,
    hparams: HParams,
    publisher: NeuronInfo,
    *,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    dataset_digest: str,
    start_window: int,
    owners: Sequence[str] = (),
    owners_needed: int = 1,
) -> Birth:
    """Return the start of a network that this neuron would publish; nothing is written.

    So many of the `owners`, by default this neuron's hotkey alone, change its plan together.
    """
    start = StartWindow(
        netuid=chain.netuid,
        genesis=NO_GENESIS,
        uid=publisher.uid,
        hotkey=publisher.hotkey,
        start_window=start_window,
        hparams=hparams.digest,
        tokenizer=tokenizer.digest,
        dataset=dataset_digest,
        root=genesis_root(chain.netuid, parameters_digest(params)),
        owners=tuple(owners) or (publisher.hotkey,),
        owners_needed=owners_needed,
    )
    return Birth(start, publisher)


def publish_genesis(
    birth: Birth,
    store: ObjectStore,
    signer: Signer,
    clock: Clock,
    hparams: HParams,
    *,
    params: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    folder: Path,
    concurrency: int = FILES_AT_ONCE,
) -> None:
    """Publish checkpoint and settings of a drafted network in its publisher's bucket, and then the start window.

    On failure a later call with the same arguments continues; if another network was started, nothing is written.

    PermanentError: `object_differs`; this hotkey started another network here before.
    """
    # Compare with an earlier start window before anything is written; write it after the checkpoint it refers to.
    if store.head(START_WINDOW_KEY) is not None:
        publish_body(store, START_WINDOW_KEY, birth.start, signer, clock=clock)  # refuses unless it is this one
    write_model(folder, params, hparams.model, tokenizer)
    publish_checkpoint(
        *(store, folder, birth.mark),
        network=birth.network,
        uid=birth.publisher.uid,
        signer=signer,
        clock=clock,
        concurrency=concurrency,
    )
    store.put(SETTINGS_KEY, hparams.agreed)
    publish_body(store, START_WINDOW_KEY, birth.start, signer, clock=clock)


def validators_now(chain: Chain, hparams: HParams) -> tuple[NeuronInfo, ...]:
    """The validators at the newest block, by falling stake."""
    return replace(chain.metagraph(), validator_min_stake=hparams.peers.validator_min_stake).validators()


def find_birth(chain: Chain, buckets: Buckets, hparams: HParams, *, pinned: str | None = None) -> Birth:
    """The start window of the network: that of the validator with the most stake that has published one.

    Start windows with another genesis hash than `pinned` are skipped, if the operator requires one. Of `hparams` the
    least stake of a validator counts; whether the network has all of them, `check_settings` says.

    TransientError: `genesis_missing`; no validator has published one yet. Or the store of a validator that may have the
    one that counts failed.
    """
    left_out, failed = [], None
    for validator in validators_now(chain, hparams):
        try:
            start = read_start(chain, buckets, validator)
        except (PermanentError, TransientError) as error:
            if pinned is None and isinstance(error, TransientError):
                raise TransientError(
                    error.reason,
                    f"the start window of uid {validator.uid} cannot be read now, and it would come first: {error}; "
                    "try again, or pin the network's genesis hash",
                ) from error
            log.warning("start window of uid %d is left out: %s", validator.uid, error)
            left_out.append(f"uid {validator.uid}: {error.reason}")
            failed = failed or (error.reason if isinstance(error, TransientError) else None)
            continue
        if start is None or pinned not in (None, start.digest):
            continue
        return Birth(start, validator)
    raise TransientError(
        failed or Reason.GENESIS_MISSING,  # a store that fails says nothing of what is in it
        f"no validator of subnet {chain.netuid} shows {START_WINDOW_KEY}"
        + (f" with genesis {pinned}" if pinned else "")
        + (f" ({'; '.join(left_out)})" if left_out else "")
        + ": publish the genesis first, or wait for it",
    )


def check_settings(start: StartWindow, digest: str) -> None:
    """Raise PermanentError, `bad_hparams`, if settings with this digest are not those of the network."""
    if start.hparams != digest:
        raise PermanentError(
            Reason.BAD_HPARAMS,
            f"hparams: digest {digest[:12]} is not the network's {start.hparams[:12]}, whose publisher shows none or "
            "did not answer: start again, or use the preset that the network was started with",
        )


def load_genesis(
    birth: Birth, buckets: Buckets, model: Model, folder: Path, *, concurrency: int = 1
) -> dict[str, Tensor]:
    """Download and verify the genesis checkpoint, some files at a time; its parameters by name.

    Errors as in `fetched_checkpoint`; also `root_differs`.
    """
    store = buckets.reader(birth.publisher)
    with fetched_checkpoint(
        *(store, birth.publisher, birth.mark.window, folder),
        network=birth.network,
        model=model,
        concurrency=concurrency,
    ):
        params = read_weights(folder, model)
        if genesis_root(birth.start.netuid, parameters_digest(params)) != birth.start.root:
            raise PermanentError(Reason.ROOT_DIFFERS, "its parameters are not those that the start window names")
    return params


def read_start(chain: Chain, buckets: Buckets, validator: NeuronInfo) -> StartWindow | None:
    """Return the start window that a validator published, None if it published none; errors as in `read_signed`."""
    store, unborn = buckets.reader(validator), Network(chain.netuid, NO_GENESIS)
    found = read_signed(store, START_WINDOW_KEY, StartWindow, network=unborn, author=validator)
    return None if found is None else found.body


def read_settings(buckets: Buckets, birth: Birth) -> bytes | None:
    """The settings that a network started with, as its publisher shows them; None if it shows none.

    Raises:
        TransientError: The store failed.
        PermanentError: `bad_hparams`; they are not those that the start window names. `access_denied`, ...
    """
    store = buckets.reader(birth.publisher)
    if store.head(SETTINGS_KEY) is None:
        return None
    found = store.get(SETTINGS_KEY, max_bytes=MAX_SETTINGS_BYTES)
    if sha256_hex(found) != birth.start.hparams:
        problem = f"{SETTINGS_KEY} of uid {birth.publisher.uid}: its SHA-256 is not the start window's `hparams`"
        raise PermanentError(Reason.BAD_HPARAMS, f"{problem}: use the preset that the network was started with")
    return found


def require_digest(digest: str, wanted: str) -> None:
    """Check that a dataset is the network's; PermanentError `dataset_malformed` if not."""
    if digest != wanted:
        raise PermanentError(
            Reason.DATASET_MALFORMED,
            f"dataset: digest {digest[:12]} is not the network's {wanted[:12]}; point the dataset bucket and "
            "prefix at the network's dataset",
        )
