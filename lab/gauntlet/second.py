"""A second process for a neuron that runs already, as on another machine: `python -m lab.gauntlet.second`.

Its settings are one line of JSON on stdin. The answer is one line of JSON on stdout: the reason why the start was
refused, or none.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lab.hotkeys import hotkey_from_seed
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.buckets import Buckets, OwnBucket
from templar.hparams import HParams
from templar.neuron.configuration import NeuronConfig
from templar.neuron.miner import Miner
from templar.store.address import BucketAddress
from templar.store.s3 import S3Store

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SecondProcess:
    """The settings of a second process: those that an operator would copy to another machine, and its own folder."""

    hotkey_seed: str = field(repr=False)  # in hex
    ledger: str  # the chain's file
    home: str
    hparams: str  # as JSON
    endpoint_url: str
    address: tuple[str, str, str] = field(repr=False)  # account, and id and secret of the read key on chain
    write_key: tuple[str, str] = field(repr=False)  # id and secret


@dataclass(frozen=True)
class Start:
    """The outcome of a start."""

    reason: str  # why it was refused; empty if it was not
    message: str


def try_to_start(second: SecondProcess) -> Start:
    """Start the process, wait for its end, and read its answer."""
    answer = subprocess.run(
        [sys.executable, "-m", "lab.gauntlet.second"],
        input=_SECOND.dump_json(second) + b"\n",
        capture_output=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    if answer.returncode != 0:
        return Start("", f"the second process ended with {answer.returncode}: {answer.stderr.decode()[-500:]}")
    return _START.validate_json(answer.stdout)


def _start(second: SecondProcess) -> Start:
    hotkey = hotkey_from_seed(bytes.fromhex(second.hotkey_seed))
    chain = Ledger(Path(second.ledger), hotkey=hotkey)
    address = BucketAddress(*second.address)
    store = _open(second, address.account_id, *second.write_key)
    buckets = Buckets(
        chain,
        lambda other: _open(second, other.account_id, other.access_key_id, other.secret_access_key),
        own=OwnBucket(address, store),
        hotkey=hotkey.address,
    )
    hparams = HParams.model_validate_json(second.hparams)
    try:
        node = Miner(NeuronConfig("second", Path(second.home), hparams, chain, buckets, hotkey, _no_dataset))
    except TemplarError as error:
        return Start(error.reason.value, error.message)
    node.stop()
    return Start("", "it started")


def _open(second: SecondProcess, bucket: str, key_id: str, secret: str) -> S3Store:
    return S3Store(bucket, endpoint_url=second.endpoint_url, access_key_id=key_id, secret_access_key=secret)


def _no_dataset() -> Any:
    raise PermanentError(Reason.DATASET_MISSING, "it was about to join the network")


_SECOND = TypeAdapter(SecondProcess)
_START = TypeAdapter(Start)


def main() -> None:
    """Read the settings, start, and print the outcome."""
    start = _start(_SECOND.validate_json(sys.stdin.readline()))
    print(_START.dump_json(start).decode(), flush=True)


if __name__ == "__main__":
    main()
