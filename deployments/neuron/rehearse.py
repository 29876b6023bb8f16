"""Say what a miner on this machine would have earned: `templar neuron rehearse`.

    templar neuron rehearse --env-file .env [--seconds 60] [--json]

Takes the newest window that is over and that validators have published their evidence of. If the neuron's payload of
that window counts, it is measured; otherwise this machine trains on the window's data, for a minute at most. The
payload passes every check of a reader and is rated on the memory of the validator with the most stake. Nothing is
published. The exit status is 1 if the payload would have been refused or not scored.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.options import NEURON, command_parser, environment_of
from deployments.why import Answer, explain
from deployments.why import show as show_answers
from tasks.observing import auditing, network_of
from templar.arguments import positive
from templar.audit.rehearsal import Rehearsal, rehearse
from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings
from templar.training.cluster import open_trainer, rank_count
from templar.training.torchrun import launch

FOLDER = "rehearsal"  # in a neuron's folder: what a rehearsal replays and stores
SECONDS = 60.0  # training of a rehearsal takes no longer, unless told otherwise


def run(block: Neuron, seconds: float) -> Rehearsal:
    """Rehearse with a neuron's settings, as `rehearse`; `bad_environment` if the neuron is no miner."""
    if block.role != "miner":
        raise PermanentError(
            Reason.BAD_ENVIRONMENT,
            f"TEMPLAR_ROLE is {block.role}: only a miner can rehearse; `templar audit` checks a validator's evidence",
        )
    signer, config = block.wallet.open(), network_of(block).config
    config = replace(config, name=FOLDER, home=config.home.with_name(FOLDER))
    hparams = config.hparams
    with auditing(config, None) as auditor:
        trainer = open_trainer(hparams.model, of_this_host(block), config.home)
        trainer.check(hparams.training, length=hparams.data.sequence_length)
        return rehearse(auditor, trainer, signer, seconds)


def of_this_host(block: Neuron) -> TrainerSettings:
    """A neuron's trainer without the other hosts, which train with the neuron."""
    return block.trainer.model_copy(update={"hosts": 1, "rendezvous": ""})


def verdict(found: Rehearsal) -> str:
    """The result in one line."""
    if found.refused is not None:
        return f"every reader would refuse the payload: {found.refused}"
    if found.place is None:
        return "the payload counts, but was not scored: the table says why"
    place, number = found.place
    return f"the payload counts; its score is number {place} of {number} in window {found.window}"


def show(found: Rehearsal) -> None:
    """Print what was done, and the result."""
    print(f"uid {found.uid}, window {found.window}, rated on what validator {found.validator} remembered")
    if (trained := found.trained) is None:
        print("the payload that this neuron published in that window was measured")
    else:
        print(f"no payload of this neuron counts in that window [{found.missed}]: trained one")
        print(
            f"{trained.num_steps} inner steps in {trained.seconds:.1f} s, loss {trained.first_loss:.4f} to "
            f"{trained.last_loss:.4f}, {trained.tokens_per_second:.0f} tokens per second, "
            f"a payload of {trained.payload_bytes} bytes"
        )
    print(verdict(found))
    if found.evidence is not None:
        answer = Answer(found.validator, found.evidence.digest, explain(found.evidence, found.uid))
        show_answers([answer], Console())


def as_json(found: Rehearsal) -> dict[str, Any]:
    """The result for programs."""
    points = () if found.evidence is None else explain(found.evidence, found.uid)
    return {
        "window": found.window,
        "uid": found.uid,
        "validator": found.validator,
        "missed": found.missed,
        "trained": None if found.trained is None else asdict(found.trained),
        "refused": None if found.refused is None else found.refused.reason,
        "place": found.place,
        "verdict": verdict(found),
        "points": [asdict(point) for point in points],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and rehearse; 1 if the payload would have been refused or not scored."""
    parser = command_parser("templar neuron rehearse", __doc__, *NEURON, "--json")
    parser.add_argument("--seconds", type=positive, default=SECONDS, help="longest training (60)")
    arguments = parser.parse_args(words)
    block = neuron_from_environment(dict(environment_of(arguments)))
    settings, is_launched = of_this_host(block), "TORCHELASTIC_RUN_ID" in os.environ
    if block.role == "miner" and not is_launched and rank_count(settings) > 1:
        command = ["deployments", "neuron", "rehearse", *(sys.argv[1:] if words is None else words)]
        return launch(settings, Path(block.home) / FOLDER / "ranks", command)
    found = run(block, arguments.seconds)
    if arguments.json:
        print(json.dumps(as_json(found)))
    else:
        show(found)
    return 0 if found.place is not None else 1
