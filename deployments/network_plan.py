"""Change settings of a running network: `templar network plan show|draft|publish`.

    templar network plan show --env-file .env
    templar network plan draft --env-file .env --set training.adamw.learning_rate=0.0003 [--first-window 120]
    templar network plan publish plan.json --env-file .env

The owners that the start window names change the plan (docs/protocol.md 2): each publishes the same file with its own
hotkey. Once enough have, the next roster adopts the entry, and it holds from its first window on, in every node.
`draft` says what the network would refuse before anybody signs.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from deployments.neuron.status import folding_table
from deployments.options import NEURON, add_shared, command_parser, environment_of
from deployments.register import checked_neuron
from templar.agreement.genesis import Birth, require_digest
from templar.agreement.settings_plan import check_changes, propose
from templar.arguments import whole_number
from templar.errors import PermanentError, Reason, TransientError
from templar.exchange.objects import PlanEntry
from templar.neuron.configuration import NeuronConfig
from templar.reports.published_plan import PublishedPlan, problem_of, published_plan
from templar.store.files import local_file
from templar.training.schedule import inner_learning_rate

SPARE_WINDOWS = 5
"""Windows that a draft leaves, beyond the notice, for the owners to publish it."""


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line and do what it says."""
    parser = command_parser("templar network plan", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="the entries, and what the owners propose")
    drafted = commands.add_parser("draft", help="write an entry to a file, once the network would take it")
    drafted.add_argument("--set", action="append", required=True, metavar="NAME=VALUE", help="a setting, as in JSON")
    drafted.add_argument("--first-window", type=whole_number(1), help="the first window that it changes")
    drafted.add_argument("--file", type=Path, default=Path("plan.json"), help="where it is written (plan.json)")
    published = commands.add_parser("publish", help="propose the entry of a file, as an owner")
    published.add_argument("file", type=Path)
    for each in (shown, drafted, published):
        add_shared(each, *NEURON, "--json")
    arguments = parser.parse_args(words)
    config = checked_neuron(environment_of(arguments)).config(arguments.name)
    with closing(config.buckets):
        birth = config.birth()
        known = published_plan(config.reading(birth), birth, config.home)
        if arguments.command == "show":
            show(known, as_json=arguments.json)
        elif arguments.command == "draft":
            draft(arguments, config, birth, known)
        else:
            publish(arguments.file, config, birth, known)
    return 0


def show(known: PublishedPlan, *, as_json: bool) -> None:
    """Print the entries and the owners' proposals."""
    if as_json:
        proposals = [
            {"uid": each.uid, "hotkey": each.hotkey, "entry": each.entry and each.entry.digest, "problem": each.problem}
            for each in known.proposals
        ]
        entries = [entry.model_dump(mode="json") for entry in known.plan.entries]
        print(
            json.dumps(
                {"window": known.current, "known_to": known.known_to} | {"entries": entries, "proposals": proposals}
            )
        )
        return
    console = Console(width=120)
    rows = [
        (f"entry {entry.number}{', holds' if entry.first_window <= known.current else ''}", entry.summary)
        for entry in known.plan.entries
    ] or [("no entry", "all settings are those of the genesis")]
    for each in known.proposals:
        what = each.problem
        if (wanted := each.entry) is not None:
            then = each.problem or "the next roster may adopt it"
            what = f"entry {wanted.number}, {wanted.summary}; {then}"
        rows.append((f"owner {'' if each.uid is None else f'uid {each.uid} '}{each.hotkey[:8]}", what))
    console.print(folding_table("plan", "", rows=rows, title=f"window {known.current}, read up to {known.known_to}"))


def require_newest(known: PublishedPlan) -> None:
    """Refuse to go on from an old plan; a window may still be decided."""
    if known.known_to < known.current - 2:
        problem = (
            f"the plan is known up to window {known.known_to}, and window {known.current} is open: try again later"
        )
        raise TransientError(Reason.DECISION_MISSING, problem)


def draft(arguments: argparse.Namespace, config: NeuronConfig, birth: Birth, known: PublishedPlan) -> None:
    """Write the next entry to a file; nothing is written (`plan_unknown`, `plan_invalid`) if nobody could take it."""
    # 1. The entry.
    require_newest(known)
    plan = known.plan
    notice = plan.genesis.windows.plan_notice_windows
    after = max([known.current + notice + SPARE_WINDOWS, *(each.first_window + 1 for each in plan.entries[-1:])])
    entry = made_entry(
        number=len(plan.entries) + 1,
        previous=plan.head(birth.start),
        first_window=arguments.first_window or after,
        changes=dict(map(setting, arguments.set)),
    )

    # 2. What the network would say.
    before, owners = plan.at(entry.first_window), plan.owners(birth.start, entry.first_window)
    changed = check_changes(before, entry.changes)
    if problem := problem_of(plan, entry, known.current + 1, birth):
        raise PermanentError(Reason.PLAN_INVALID, problem)
    if changed == before and plan.after(entry).owners(birth.start, entry.first_window) == owners:
        raise PermanentError(Reason.PLAN_INVALID, "these settings have these values already")
    if (digest := entry.changes.get("data.other_dataset")) is not None:
        require_digest(config.open_dataset(changed.data).digest, str(digest))
    with local_file(arguments.file):
        arguments.file.write_text(json.dumps(entry.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
    blocks = config.hparams.windows.blocks_per_window
    hours = (entry.first_window - known.current) * blocks * config.hparams.windows.block_seconds / 3600
    if arguments.json:
        print(json.dumps({"file": str(arguments.file), "digest": entry.digest, "first_window": entry.first_window}))
        return
    print(f"entry {entry.number}, {entry.digest[:12]}, {entry.summary}")
    steps = known.outer_steps + entry.first_window - known.known_to - 1
    old, new = (f"{inner_learning_rate(each.training, steps, 0):.3g}" for each in (before, changed))
    print(f"its first inner step, after about {steps} outer steps, has the learning rate {new} instead of {old}")
    needed, latest = birth.start.owners_needed, entry.first_window - notice
    print(f"window {known.current} is open, that is in {hours:.1f} hours; the roster of window {latest} must adopt it")
    print(
        f"{needed} of {len(birth.start.owners)} owners publish this file: templar network plan publish {arguments.file}"
    )


def publish(file: Path, config: NeuronConfig, birth: Birth, known: PublishedPlan) -> None:
    """Propose the entry of a file in the own bucket."""
    owner = config.own_neuron()
    if owner.hotkey not in (owners := known.plan.owners(birth.start, known.current)):
        others = ", ".join(owners) or "nobody"
        raise PermanentError(Reason.PLAN_INVALID, f"{owner.hotkey} does not own this network: its owners are {others}")
    try:
        entry = made_entry(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        problem = f"{file}: it is not an entry that `draft` wrote: {error}"
        raise PermanentError(Reason.PLAN_INVALID, problem) from None
    require_newest(known)
    if problem := problem_of(known.plan, entry, known.current, birth):
        raise PermanentError(Reason.PLAN_INVALID, problem)
    propose(config.buckets.own, birth.start, owner, config.own_signer, entry)
    agreeing = {each.hotkey for each in known.proposals if each.entry == entry} | {owner.hotkey}
    needed = birth.start.owners_needed
    print(f"uid {owner.uid} proposes entry {entry.number}, {entry.digest[:12]}: {len(agreeing)} of {needed} owners do")


def setting(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE; a value that is no JSON is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise PermanentError(Reason.PLAN_INVALID, f"{text}: write the setting and its value as NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def made_entry(**fields: Any) -> PlanEntry:
    """Make an entry; `plan_invalid`, which names the field that is wrong."""
    try:
        return PlanEntry.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PermanentError(Reason.PLAN_INVALID, f"{where}: {first['msg']}") from None
