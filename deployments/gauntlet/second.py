"""A second process for a neuron that runs already, as on another machine: `python -m deployments.gauntlet.second`.

What it must know is one line of JSON on stdin. What came of it is one line of JSON on stdout: the reason for which the
start was refused, or none.
"""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from templar.chain.hotkey import hotkey_from_seed
from templar.chain.ledger import Ledger
from templar.errors import PermanentError, Reason, TemplarError
from templar.exchange.buckets import Buckets, OwnBucket
from templar.hparams import HParams
from templar.neuron.join import Context
from templar.neuron.miner import Miner
from templar.store.address import BucketAddress
from templar.store.s3 import S3Store

PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class SecondProcess:
    """What a second process knows: all that an operator would copy to another machine, and a folder of its own.

    Attributes:
        hotkey_seed: Makes the hotkey, in hex.
        ledger: The chain.
        home: The folder.
        hparams: The network's numbers, as JSON.
        endpoint_url: Where the bucket is.
        address: Account, and id and secret of the key that is committed on chain.
        write_key: Id and secret of the key to write with.
    """

    hotkey_seed: str = field(repr=False)
    ledger: str
    home: str
    hparams: str
    endpoint_url: str
    address: tuple[str, str, str] = field(repr=False)
    write_key: tuple[str, str] = field(repr=False)


@dataclass(frozen=True)
class Start:
    """What came of a start.

    Attributes:
        reason: Why it was refused; empty if it was not.
        message: The same for people.
    """

    reason: str
    message: str


def try_to_start(second: SecondProcess) -> Start:
    """Start the process and wait for its end."""
    answer = subprocess.run(
        [sys.executable, "-m", "deployments.gauntlet.second"],
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
    store = _open(second, address.bucket, *second.write_key)
    buckets = Buckets(
        chain,
        lambda other: _open(second, other.bucket, other.access_key_id, other.secret_access_key),
        own=OwnBucket(address, store),
        hotkey=hotkey.address,
    )
    hparams = HParams.model_validate_json(second.hparams)
    try:
        node = Miner(Context("second", Path(second.home), hparams, chain, buckets, hotkey, _no_dataset))
    except TemplarError as error:
        return Start(error.reason.value, error.message)
    node.stop()
    return Start("", "it started")


def _open(second: SecondProcess, bucket: str, key_id: str, secret: str) -> S3Store:
    return S3Store(bucket, endpoint_url=second.endpoint_url, access_key_id=key_id, secret_access_key=secret)


def _no_dataset() -> Any:
    raise PermanentError(Reason.DATASET_MISSING, "nobody refused the second process: it was about to join")


_SECOND = TypeAdapter(SecondProcess)
_START = TypeAdapter(Start)


def main() -> None:
    """Read, start, say what came of it."""
    start = _start(_SECOND.validate_json(sys.stdin.readline()))
    print(_START.dump_json(start).decode(), flush=True)


if __name__ == "__main__":
    main()
