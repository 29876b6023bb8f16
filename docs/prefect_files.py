"""The files that `prefect deploy --all` reads, one for each role: `python -m docs.prefect_files`.

What they deploy is what `templar neuron register` deploys for a neuron `default` of the preset `150M`. A test compares
them with deployments/register.py and deployments/schedules.py.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deployments.register import BY_HAND, WINDOW
from deployments.schedules import HOUSEKEEPING_POOL, Work, scheduled_work
from templar.hparams import load_hparams

ROOT = Path(__file__).resolve().parent.parent
NEURON, PRESET = "default", "150M"
FILES = {
    "miner": ROOT / "prefect.yaml",
    "validator": ROOT / "deployments" / "validator.yaml",
    "aggregator": ROOT / "deployments" / "aggregator.yaml",
}
HEADER = """\
# The flows of {article} {role} that is called `{neuron}`, for Prefect's own commands, in this folder:
#
#   prefect work-pool create neuron-{neuron} --type resident
#   prefect work-pool create {housekeeping} --type process
#   prefect --no-prompt deploy --all{option}
#   set -a; . ./.env; set +a     # .env.example, filled in
#   prefect worker start --pool neuron-{neuron} --type resident
#   prefect worker start --pool {housekeeping} --type process
#   templar clock                # a run for every window; one by hand: prefect deployment run {role}-window/{neuron}
#
# The workers' flows read the neuron's settings from its block, or, if none was saved, from their environment.
# `templar neuron register` deploys the same, for any name and the network's own numbers, and automations.
# Written by `python -m docs.prefect_files`; the schedules are those of the preset `{preset}`.

prefect-version: 3.8.8
pull: []  # the package is installed; a pull step would change the warm process's folder

definitions:
  neuron: &neuron {{neuron: {neuron}}}
  tags: &tags ["neuron:{neuron}", "role:{role}"]
  warm: &warm {{name: neuron-{neuron}}}
  housekeeping: &housekeeping {{name: {housekeeping}}}

deployments:
"""


def text(role: str) -> str:
    """The file of a role."""
    option = "" if role == "miner" else f" --prefect-file {FILES[role].relative_to(ROOT)}"
    article = "an" if role == "aggregator" else "a"
    words = {"neuron": NEURON, "housekeeping": HOUSEKEEPING_POOL, "preset": PRESET, "role": role}
    return HEADER.format(article=article, option=option, **words) + "\n".join(_deployments(role))


def _deployments(role: str) -> Iterator[str]:
    yield _deployment(f"{role}_window", WINDOW.format(neuron=NEURON), "warm")
    for work in scheduled_work(role, load_hparams(PRESET)):
        yield _deployment(work.flow, work.description, "housekeeping", work)
    for flow, description in BY_HAND.items():
        yield _deployment(flow, description, "housekeeping")


def _deployment(flow: str, description: str, pool: str, work: Work | None = None) -> str:
    lines = [
        f"- name: {NEURON}",
        f"  description: {json.dumps(description)}",
        f"  entrypoint: flows.{flow}.{flow}",
        "  parameters: *neuron",
        "  tags: *tags",
        f"  work_pool: *{pool}",
    ]
    if work is not None:
        lines += ["  schedules:", f"  - {json.dumps(_schedule(work))}"]
    return "\n".join(lines) + "\n"


def _schedule(work: Work) -> dict[str, Any]:
    interval = work.schedule(NEURON)
    return {
        "slug": interval.slug,
        "interval": work.every.total_seconds(),
        "anchor_date": str(interval.anchor_date),
        "timezone": interval.timezone,
        "active": True,
    }


def main() -> int:
    """Write them."""
    for role, file in FILES.items():
        file.write_text(text(role), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
