"""Take a neuron over on this machine: `templar neuron restore --from-bucket`.

    templar neuron restore --from-bucket --env-file .env [--unattended] [--json]

Reads the newest intact private backup of a miner from its own bucket and writes the miner's folder, TEMPLAR_HOME, as it
was in the window of the backup; whole, or not at all. The folder must not be there, or be empty. It takes the neuron's
lease meanwhile: a machine that still runs the neuron must be stopped first. Then it says what was lost.

With `--unattended` it is a step of a machine's start (docs/clouds.md): a folder with content and a bucket without a
backup are right as they are, and the lease of a machine that was killed is waited for. A signal ends the wait.
"""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blocks.environment import neuron_from_environment
from blocks.neuron import Neuron
from deployments.options import NEURON, command_parser, environment_of
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import Kind, parse_current_key
from templar.neuron.backup import RestoreReport, list_backups, restore_home
from templar.neuron.configuration import NeuronConfig

PAUSE_SECONDS = 30.0  # between two looks at the lease of another machine


def lost(report: RestoreReport) -> str:
    """Return what the windows after a backup leave of it, in one line."""
    if not report.abandoned:
        return (
            "nothing was lost: this neuron has committed to no payload since, and goes on with the error feedback and "
            "optimizer that the other machine had"
        )
    windows = ", ".join(map(str, report.abandoned))
    return (
        f"lost: what windows {windows} changed in the private state. This neuron has committed to payloads in them and "
        "publishes nothing more for them. If one of these was applied, the error feedback starts afresh, and the inner "
        f"optimizer goes on from window {report.window}"
    )


def standing(block: Neuron, name: str) -> str:
    """Why a validator or an aggregator needs no restore, and from which window a start would go on."""
    if block.role == "aggregator":
        return "an aggregator has no private state: start it, it catches up with the network"
    store = block.config(name).buckets.own
    keys = (parse_current_key(info.key) for info in store.list(f"{Kind.EVIDENCE}-"))
    newest = max((key.window for key in keys if key is not None and key.window is not None), default=None)
    found = "there is none in its bucket yet" if newest is None else f"the newest is of window {newest}"
    return (
        f"a validator's standing is the evidence that it published ({found}): start it on this machine, it reads its "
        "score cards from there and catches up with the network"
    )


def nothing_to_restore(config: NeuronConfig) -> str | None:
    """Say why a start needs no restore: the folder has content, or there is no backup; None if it needs one."""
    if config.home.exists() and any(config.home.iterdir()):
        return f"{config.home}: the neuron's folder is on this machine, nothing was restored"
    if not list_backups(config.buckets.own):
        return f"bucket {config.buckets.own.name} has no private backup: a start begins at the network's checkpoint"
    return None


def restore_patiently(config: NeuronConfig) -> RestoreReport:
    """As `restore_home`, but wait for as long as another machine holds the lease; a line says so at each look."""
    while True:
        try:
            return restore_home(config)
        except PermanentError as error:
            if error.reason is not Reason.ALREADY_RUNNING:
                raise
            print(f"waiting: {error}", file=sys.stderr, flush=True)
        config.chain.clock.sleep_until(config.chain.clock.now() + PAUSE_SECONDS)


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and restore."""
    parser = command_parser("templar neuron restore", __doc__, *NEURON, "--json")
    parser.add_argument("--from-bucket", action="store_true", required=True, help="from the neuron's own bucket")
    parser.add_argument("--unattended", action="store_true", help="wait for the lease; nothing to restore is no error")
    arguments = parser.parse_args(words)
    block = neuron_from_environment(dict(environment_of(arguments)))
    if block.role != "miner":
        text = standing(block, arguments.name)
        print(json.dumps({"restored": False, "why": text}) if arguments.json else text)
        return 0
    config = block.config(arguments.name)
    if arguments.unattended:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the lease is given back
        if (why := nothing_to_restore(config)) is not None:
            print(json.dumps({"restored": False, "why": why}) if arguments.json else why)
            return 0
    report = restore_patiently(config) if arguments.unattended else restore_home(config)
    if arguments.json:
        print(json.dumps({"restored": True, **asdict(report), "lost": lost(report)}))
        return 0
    for window, why in report.refused:
        print(f"the backup of window {window} was left out: {why}")
    print(
        f"{Path(block.home)}: restored from the backup of window {report.window}, root {report.root[:12]}, "
        f"{report.num_bytes} bytes; the chain is in window {report.current}, {report.current - report.window} later"
    )
    print(lost(report))
    print("`templar neuron start` goes on from here: it catches up with the windows that passed")
    return 0
