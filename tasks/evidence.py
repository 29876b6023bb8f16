"""Published evidence as Prefect tasks: audit a window, rank the miners over many, show the network to everybody."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from prefect import task
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from blocks.buckets import names_page, page_bucket
from blocks.neuron import Neuron
from tasks.artifacts import audit_rows, picture, table
from tasks.host import load_block
from tasks.observing import auditing, network_of
from tasks.policy import HOUSEKEEPING
from templar.audit.evidence_audit import WindowAudit
from templar.errors import PermanentError, Reason, TransientError
from templar.neuron.configuration import NeuronConfig
from templar.reports.checkpoint_evaluation import HeldOut, read_evaluations
from templar.reports.history import read_recent
from templar.reports.leaderboard import Leaderboard, draw
from templar.reports.public_page import PAGE_KEY, network_page
from templar.reports.training_curve import NetworkCurve, newest_evaluations
from templar.store.base import ObjectStore
from templar.timeline import window_of

KEPT_FILE = "page.json"  # in a node's folder: what the last page was made of


@task(task_run_name="audit evidence", **HOUSEKEEPING)
def audit_evidence(neuron: str, window: int | None, validator: int | None, tolerance: float | None) -> WindowAudit:
    """Rebuild a closed window from public objects and compare; the differences are a table artifact.

    An object that a failing store hides is tried again, unless a difference is known already.
    """
    with auditing(network_of(load_block(neuron)).config, tolerance) as auditor:
        audit = auditor.audit(auditor.newest_window(validator) if window is None else window, validator)
    if audit.differing is None and isinstance(audit.problem, TransientError):
        raise audit.problem
    table(f"audit-{neuron}", audit_rows(audit), audit.summary)
    return audit


def audit_state(audit: WindowAudit) -> State[None]:
    """The final state of an audit, `Verified`, `Differs` or `NotAudited`, with its summary."""
    if audit.differing is not None:
        return Failed(name="Differs", message=audit.summary)
    if audit.problem is not None:
        return Failed(name="NotAudited", message=audit.summary)
    return Completed(name="Verified", message=audit.summary)


@dataclass(frozen=True)
class Standings:
    """The content of what was shown, in one line; `skipped` says why there is no table."""

    summary: str
    skipped: Reason | None = None


@task(task_run_name="show leaderboard", **HOUSEKEEPING)
def show_leaderboard(neuron: str, windows: int, validator: int | None) -> Standings:
    """Rank the miners by a validator's evidence: the standings are a table artifact, their curves a picture."""
    config = load_block(neuron).config(neuron)
    try:
        published, held_out = read_recent(config, windows, uid=validator), evaluations_of(config)
    except PermanentError as error:
        if error.reason is not Reason.EVIDENCE_MISSING:
            raise
        return Standings(error.message, error.reason)  # a network that has none yet is no failure
    finally:
        config.buckets.close()
    if not published.evidences:
        return Standings(published.summary, published.left_out[-1][1].reason)
    board = Leaderboard(published.evidences)
    summary = f"{published.summary}: {board.summary}"
    table(f"leaderboard-{neuron}", board.cells(), summary)
    if held_out.points:
        rows = [dict(row) for row in newest_evaluations(held_out.points)]
        shown = f"The newest {len(rows)} of {len(held_out.points)} measured checkpoints."
        table(f"held-out-{neuron}", rows, shown)
    picture(f"leaderboard-plot-{neuron}", draw(board), published.summary)
    return Standings(summary)


@task(task_run_name="publish page", **HOUSEKEEPING)
def publish_page(neuron: str) -> Standings:
    """Replace the network's page in the bucket of `R2_PAGE_*`, or else in the neuron's own."""
    block = load_block(neuron)
    config = block.config(neuron)
    try:
        store = page_store(block, config, os.environ)
        store.put(PAGE_KEY, data := page_of(config))
    except PermanentError as error:
        if error.reason is not Reason.EVIDENCE_MISSING:
            raise
        return Standings(error.message, error.reason)
    finally:
        config.buckets.close()
    return Standings(f"{len(data):,} bytes as {PAGE_KEY} in bucket {store.name}")


def page_store(block: Neuron, config: NeuronConfig, environment: Mapping[str, str]) -> ObjectStore:
    """The bucket of a neuron's page: that of `R2_PAGE_*`, or else its own; `bad_environment`."""
    return page_bucket(block.bucket.endpoint, environment) if names_page(environment) else config.buckets.own


def page_of(config: NeuronConfig) -> bytes:
    """The page of a node's network up to the newest window that is measured by now.

    The node's folder keeps what was read for the next page, which then reads what is new alone.

    PermanentError: `evidence_missing`; no window is over yet. TransientError: chain or store failed.
    """
    birth, rules, block = config.birth(), config.hparams.windows, config.chain.block()
    window, first = window_of(block, rules) - 2, birth.start.start_window
    if window < first:
        raise PermanentError(Reason.EVIDENCE_MISSING, f"wait {(first - window) * rules.seconds:.0f} s for a window")
    curve, kept = NetworkCurve(config.reading(birth), birth, {}), config.home / KEPT_FILE
    curve.restore(kept)
    glance = curve.look(window)
    curve.keep(kept)
    return network_page(glance, birth, rules.seconds, config.chain.block_time(block))


def evaluations_of(config: NeuronConfig) -> HeldOut:
    """Return what the validators of a node's network measured of its checkpoints."""
    birth = config.birth()
    return read_evaluations(config.reading(birth), birth)
