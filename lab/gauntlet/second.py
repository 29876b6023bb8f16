"""A second process for a neuron that runs already, as on another machine."""

from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from lab.hotkeys import hotkey_from_seed
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.buckets import Buckets, OwnBucket
from templar.hparams import Data, HParams
from templar.neuron.configuration import NeuronConfig
from templar.neuron.miner import Miner
from templar.store.address import BucketAddress
from templar.store.s3 import S3Store

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SecondProcess:
    """The settings of a second process: those that an operator would copy to another machine, and its own folder."""

    hotkey_seed: bytes = field(repr=False)
    ledger: Path  # the chain's file
    home: Path
    hparams: HParams
    endpoint_url: str
    address: BucketAddress = field(repr=False)
    write_key: tuple[str, str] = field(repr=False)  # id and secret


@dataclass(frozen=True)
class Start:
    """The outcome of a start."""

    reason: str  # why it was refused; empty if it was not
    message: str


def try_to_start(second: SecondProcess) -> Start:
    """Start the process, wait for its answer or its death for a minute, and end it."""
    context = get_context("spawn")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(second, sender))
    process.start()
    sender.close()
    try:
        if not answers.poll(PATIENCE_SECONDS):
            return Start("", f"no answer within {PATIENCE_SECONDS:g} s")
        return cast("Start", answers.recv())
    except EOFError:
        process.join()
        return Start("", f"the second process died with status {process.exitcode}")
    finally:
        process.kill()
        process.join()
        answers.close()


def _answer(second: SecondProcess, sender: Connection) -> None:
    sender.send(_start(second))


def _start(second: SecondProcess) -> Start:
    hotkey = hotkey_from_seed(second.hotkey_seed)
    chain = Ledger(second.ledger, hotkey=hotkey)
    buckets = Buckets(
        chain,
        lambda other: _open(second, other.account_id, other.access_key_id, other.secret_access_key),
        own=OwnBucket(second.address, _open(second, second.address.account_id, *second.write_key)),
        hotkey=hotkey.address,
    )
    try:
        node = Miner(NeuronConfig("second", second.home, second.hparams, chain, buckets, hotkey, _no_dataset))
    except TemplarError as error:
        return Start(error.reason.value, error.message)
    node.stop()
    return Start("", "it started")


def _open(second: SecondProcess, bucket: str, key_id: str, secret: str) -> S3Store:
    return S3Store(bucket, endpoint_url=second.endpoint_url, access_key_id=key_id, secret_access_key=secret)


def _no_dataset(data: Data) -> Any:
    raise PermanentError(Reason.DATASET_MISSING, "it was about to join the network")
