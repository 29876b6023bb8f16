"""Start a network: `templar network init`, once, under a hotkey with a validator permit.

    templar network init --env-file .env [--dry-run] [--opens-in 600] [--from MODEL]

Everything is checked before anything is written: what `templar neuron register` checks, the hotkey's permit and stake,
and whether the subnet has a network already. Then the hotkey announces role and bucket on chain, and the genesis
checkpoint and the start window go to its bucket. After a failure the same command goes on; once it is done, it says so
and changes nothing. `--dry-run` only says what would be started. The first parameters are those of the preset's seed,
or with `--from` those of a model: a folder in the Hugging Face layout, a published checkpoint at `s3://BUCKET/FOLDER`,
or a repository of the Hub.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blocks.neuron import Neuron
from deployments.first_parameters import SOURCE_FOLDER, first_parameters
from deployments.neuron.subnet import require_yuma
from deployments.options import NEURON, command_parser, environment_of
from deployments.register import checked_neuron
from templar.agreement.genesis import Birth, draft_birth, publish_genesis, read_start, validators_now
from templar.arguments import positive, whole_number
from templar.chain.base import Chain, NeuronInfo
from templar.data.tokenizer import check_fits, load_tokenizer
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.buckets import Buckets
from templar.exchange.objects import StartWindow
from templar.hparams import HParams
from templar.neuron.configuration import announce_role
from templar.timeline import first_block, window_of
from templar.training.device import num_parameters

GENESIS_FOLDER = "genesis-published"  # in the neuron's folder: the checkpoint as it was published
OPENS_IN_SECONDS = 600.0
"""The first window opens this long after the command at the earliest: others start their nodes meanwhile."""


@dataclass(frozen=True)
class Started:
    """The network, and how this call found it."""

    birth: Birth
    is_new: bool  # False if this hotkey had started it before
    opens_at: float  # expected chain time of its first window
    num_parameters: int


def start_network(
    block: Neuron,
    *,
    opens_in_seconds: float,
    folder: Path,
    data_folder: Path,
    source: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    owners: Sequence[str] = (),
    owners_needed: int = 1,
    dry_run: bool = False,
) -> Started:
    """Start a network under a neuron's hotkey, or find that it has started.

    The checkpoint is made in `folder`, and the dataset opened in `data_folder`. `source` is the model of the first
    parameters, and the `environment` has its keys, as in `first_parameters`. So many of the `owners`, by default this
    hotkey alone, change settings later. A `dry_run` writes nothing.

    Raises:
        PermanentError: `bad_environment`; the subnet has room for one validator. `not_registered`; the hotkey lacks
            permit or stake. `object_differs`; it has started a network with other numbers, text, tokenizer or
            parameters, or another validator has started one. And as in `first_parameters`.
        TransientError: Chain, bucket, dataset or the Hub failed; a later call goes on.
    """
    # 1. Who starts it, and whether it has started.
    owning: Any = {"owners": _checked(owners, owners_needed), "owners_needed": owners_needed}
    hparams, hotkey = block.preset_hparams(), block.wallet.open()
    chain = block.subnet.open(block.wallet)
    buckets = Buckets(chain, block.bucket.endpoint.open_reader, own=block.bucket.open(), hotkey=hotkey.address)
    require_yuma(chain)
    publisher = _publisher(chain, hparams, hotkey.address)
    _require_no_other(chain, buckets, hparams, hotkey.address)

    # 2. What the network's members must have in common.
    dataset = block.dataset.open(hparams, data_folder)
    tokenizer = load_tokenizer(hparams.data.tokenizer_name, embedded=dataset.tokenizer_json())
    window = window_of(chain.head() + int(opens_in_seconds / chain.block_seconds) + 1, hparams.windows) + 1
    check_fits(tokenizer, hparams.model.vocab_size)
    download = folder.with_name(SOURCE_FOLDER)
    params = first_parameters(source, hparams.model, tokenizer, environment=environment, download=download)
    common: Any = {"params": params, "tokenizer": tokenizer}
    numbers: Any = {"dataset_digest": dataset.digest, "start_window": window, **owning}
    draft = draft_birth(chain, hparams, publisher, **common, **numbers)
    # The start window in the own bucket; there is none before the chain names the bucket.
    known = None if publisher.commitment is None else read_start(chain, buckets, publisher)
    if known is not None and _common(known) != _common(draft.start):
        other = "with other hyper-parameters, text, tokenizer, owners or first parameters (--from): use those"
        problem = f"hotkey {hotkey.address} has started the network {known.digest[:12]} {other}, or another hotkey"
        raise PermanentError(Reason.OBJECT_DIFFERS, problem)
    birth = draft if known is None else Birth(known, publisher)

    # 3. Role and bucket on chain, then the checkpoint, then the start window that names it.
    if not dry_run and known is None:
        announce_role(chain, hotkey.address, "validator")
        buckets.announce()
        publish_genesis(birth, buckets.own, hotkey, chain.clock, hparams, **common, folder=folder)
    blocks = first_block(birth.start.start_window, hparams.windows) - chain.head()
    opens_at = chain.clock.now() + blocks * chain.block_seconds
    return Started(birth, known is None, opens_at, num_parameters(hparams.model))


def _checked(owners: Sequence[str], needed: int) -> Sequence[str]:
    """The owners; `bad_parameters` if there are too few, or one is named twice."""
    if len(set(owners)) == len(owners) and needed <= max(1, len(owners)):
        return owners
    problem = f"{needed} owners are needed, and {len(set(owners)) or 1} are named: name each once (--owner)"
    raise PermanentError(Reason.BAD_PARAMETERS, problem)


def _publisher(chain: Chain, hparams: HParams, address: str) -> NeuronInfo:
    neuron, least = chain.metagraph().by_hotkey(address), hparams.peers.validator_min_stake
    if neuron is None:
        raise PermanentError(Reason.NOT_REGISTERED, f"{address} is not registered on subnet {chain.netuid}")
    if not neuron.validator_permit or neuron.stake < least:
        permit = "a" if neuron.validator_permit else "no"
        problem = f"uid {neuron.uid} has {permit} validator permit and {neuron.stake:g} of stake; {least:g} are needed"
        raise PermanentError(Reason.NOT_REGISTERED, f"{problem}, and a permit: add stake")
    return neuron


def _require_no_other(chain: Chain, buckets: Buckets, hparams: HParams, address: str) -> None:
    """Refuse a second network: nodes would take that of the validator with more stake."""
    for validator in validators_now(chain, hparams):
        if validator.hotkey == address:
            continue
        try:
            start = read_start(chain, buckets, validator)
        except TransientError as error:
            raise TransientError(
                error.reason,
                f"whether uid {validator.uid} has started a network cannot be read now: {error.message}: try again",
            ) from error
        except PermanentError:
            continue  # it shows nothing that a node would follow
        if start is not None:
            where = f"{start.digest} on subnet {chain.netuid}, first window {start.start_window}"
            problem = f"uid {validator.uid} has started the network {where}: join it with `templar neuron start`"
            raise PermanentError(Reason.OBJECT_DIFFERS, problem)


def _common(start: StartWindow) -> tuple[object, ...]:
    return start.hparams, start.tokenizer, start.dataset, start.root, start.owners, start.owners_needed


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and start the network."""
    parser = command_parser("templar network init", __doc__, *NEURON, "--json")
    parser.add_argument(
        "--opens-in", type=positive, default=OPENS_IN_SECONDS, help="seconds to the first window at least (600)"
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="MODEL",
        help="begin with this: a folder, s3://BUCKET/FOLDER, or one of the Hub",
    )
    parser.add_argument("--owner", action="append", default=[], metavar="HOTKEY", help="may change settings later")
    parser.add_argument("--owners-needed", type=whole_number(1), default=1, metavar="K", help="of the owners (1)")
    parser.add_argument("--dry-run", action="store_true", help="check everything and write nothing")
    arguments = parser.parse_args(words)
    environment = environment_of(arguments)
    block = checked_neuron(environment)
    home = Path(block.home)
    started = start_network(
        block,
        opens_in_seconds=arguments.opens_in,
        folder=home / GENESIS_FOLDER,
        data_folder=home,
        source=arguments.source,
        environment=environment,
        owners=arguments.owner,
        owners_needed=arguments.owners_needed,
        dry_run=arguments.dry_run,
    )
    if arguments.json:
        record = started.birth.start.model_dump() | {
            "genesis": started.birth.network.genesis,
            "is_new": started.is_new,
            "opens_at": started.opens_at,
            "written": started.is_new and not arguments.dry_run,
        }
        print(json.dumps(record))
        return 0
    start, opens = started.birth.start, datetime.fromtimestamp(started.opens_at, UTC)
    verb = "has started" if not started.is_new else "would start" if arguments.dry_run else "starts"
    first = f"first window {start.start_window}, {opens:%Y-%m-%d %H:%M:%S} UTC"
    print(f"uid {start.uid} {verb} a network on subnet {start.netuid}: {first}")
    digests = f"hyper-parameters {start.hparams[:12]}, tokenizer {start.tokenizer[:12]}, dataset {start.dataset[:12]}"
    print(f"{started.num_parameters:,} parameters, root {start.root[:12]}, {digests}")
    if arguments.dry_run:
        print("nothing was written")
        return 0
    remedy = "run this neuron with `templar neuron start` before the first window opens"
    print(f"tell its members to set TEMPLAR_GENESIS={started.birth.network.genesis}; {remedy}")
    return 0
