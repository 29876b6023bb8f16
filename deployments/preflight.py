"""Look, before a neuron is registered, whether everything that its environment names is there and lets it in.

The neuron's own folder is made, and what its bucket's keys can do is tried with objects that are removed again: the
read key is about to be published on chain. Nothing else is written.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blocks.environment import bucket_variables
from blocks.keyring import credentials_of
from blocks.neuron import Neuron
from templar.chain.remote import public_address
from templar.errors import PermanentError, Reason, TemplarError
from templar.housekeeping.access import check_access
from templar.store.base import ObjectStore
from templar.store.files import local_file


def require_reachable(block: Neuron) -> None:
    """Refuse a neuron whose chain, buckets or dataset do not answer, or that is not registered on its subnet.

    Raises:
        PermanentError: `bad_hparams`, `bad_wallet`, `not_registered`, `access_denied`, `bucket_missing`,
            `read_key_writes`, `write_key_refused`, `dataset_missing`, ...; the message names the variables.
        TransientError: `chain_unreachable`, `store_unreachable`, ...: what is named does not answer.
    """
    hparams = block.hparams()
    address = block.wallet.open().address
    with _named("NETWORK, NETUID"):
        neuron = block.subnet.open(block.wallet).metagraph().by_hotkey(address)
    if neuron is None:
        subnet = f"subnet {block.subnet.netuid} of {public_address(block.subnet.network)}"
        raise PermanentError(
            Reason.NOT_REGISTERED, f"WALLET_HOTKEY: {address} is not registered on {subnet}: register it there first"
        )
    variables, own = bucket_variables(block.role), block.bucket.open()
    with _named(f"{variables}_READ_*"):
        _look_into(block.bucket.endpoint.open_reader(own.address))
    with _named(f"{variables}_WRITE_*"):
        _look_into(own.store)
    with _named(f"{variables}_READ_*, {variables}_WRITE_*"):
        _require_rights(block)
    with _named("R2_DATASET_*"):
        for store in block.dataset.stores():
            _look_into(store)
    with _named("DATASET_BINS_PATH"):
        block.dataset.open(hparams, Path(block.home))
    with _named("TEMPLAR_HOME"), local_file(Path(block.home)):
        Path(block.home).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=block.home).close()


@contextmanager
def _named(variables: str) -> Iterator[None]:
    """Say which variables an error is about."""
    try:
        yield
    except TemplarError as error:
        raise type(error)(error.reason, f"{variables}: {error.message}") from error


def _require_rights(block: Neuron) -> None:
    """Refuse keys to the own bucket that can do less than the node needs, or more than everybody may."""
    own, *_ = credentials_of(block, {})
    report = check_access([own])
    if report.problems:
        raise PermanentError(report.problems[0][0], "; ".join(text for _, text in report.problems))


def _look_into(store: ObjectStore) -> None:
    next(iter(store.list()), None)
