"""Artifacts in the UI: tables, pictures and progress bars, and the rows of every table.

An artifact is worth less than its step: a server that does not take it costs a warning in the log. The UI keeps the
history of a key.
"""

import base64
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from templar.agreement.conflicts import AuditReport
from templar.audit.evidence_audit import WindowAudit
from templar.exchange.gather import GatherReport
from templar.exchange.objects import PlanEntry
from templar.housekeeping.bucket_cleanup import CleanupReport
from templar.neuron.miner import PageReport, TrainReport
from templar.scoring.evidence import Estimate, Evidence, Measurement, MinerRecord
from templar.scoring.standing import Rating

log = logging.getLogger("templar.artifacts")

Rows = list[dict[str, Any]]
ONCE = {PREFECT_CLIENT_MAX_RETRIES: 0}  # with Prefect's retries a server that is away would hold up a step for minutes
_LIVE = re.compile(r"([\\`\[\]<!@]|:(?=//)|(?<=[wW]{3})\.)")  # what Markdown makes more of than text


def table(key: str, rows: Rows, description: str) -> None:
    """Show rows as a table in the UI; an empty table says so."""
    with _optional(key):
        create_table_artifact(key=key, table=rows or [{"": "nothing"}], description=description)


def picture(key: str, svg: bytes, description: str) -> None:
    """Show a drawing in the UI, embedded in Markdown: an image artifact takes an address only, and prints it."""
    with _optional(key):
        create_markdown_artifact(key=key, markdown=_embedded(key, svg), description=description)


def page(
    key: str, drawings: Iterable[bytes], description: str, tables: Iterable[Rows] = (), *, replace: bool = True
) -> UUID | None:
    """Show drawings with tables below them, in place of what the page showed before; the id of its artifact.

    The UI shows an artifact's content under its id and only the history under its key, so a page keeps its id.
    None if the server does not take it. Without `replace` a page that is there stays as it is.
    """
    parts = (*(_embedded(key, svg) for svg in drawings), *(_markdown(rows) for rows in tables if rows))
    markdown = "\n\n".join(parts)
    with _optional(key), get_client(sync_client=True) as client:
        known = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])), limit=1)
        for artifact in known:
            if replace:
                client.update_artifact(artifact.id, ArtifactUpdate(data=markdown, description=description))
            return artifact.id
        new = ArtifactCreate(key=key, type="markdown", data=markdown, description=description)
        return client.create_artifact(new).id
    return None


def _embedded(key: str, svg: bytes) -> str:
    return f"![{key}](data:image/svg+xml;base64,{base64.b64encode(svg).decode()})"


def _markdown(rows: Rows) -> str:
    """Rows as a table in Markdown; the columns are those of the first."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([_plain(str(value)) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """A text that peers may have chosen, for a cell: no picture, link or code comes of it."""
    return _LIVE.sub(r"\\\1", " ".join(text.replace("|", "/").split()))


def progress(key: str, description: str) -> Callable[[float], None]:
    """Show a progress bar in the UI; the function that moves it sends whole percents only."""
    artifact: Any = None
    shown = 0
    with _optional(key):
        create: Any = create_progress_artifact  # `_sync`, also in an async flow, is not in the type
        artifact = create(progress=0.0, key=key, description=description, _sync=True)

    def show(percentage: float) -> None:
        nonlocal shown
        if artifact is not None and int(percentage) != shown:
            shown = int(percentage)
            with _optional(key):
                update: Any = update_progress_artifact
                update(artifact, percentage, _sync=True)

    return show


def name_run(name: str) -> None:
    """Give the flow run of this process another name in the UI."""
    run = FlowRunContext.get()
    if run is not None and run.flow_run is not None:
        with _optional(name), get_client(sync_client=True) as client:
            client.update_flow_run(run.flow_run.id, name=name)


@contextmanager
def _optional(key: str) -> Iterator[None]:
    try:
        with temporary_settings(ONCE):
            yield
    except (httpx.HTTPError, PrefectException) as error:
        log.warning("%s is not shown: %r", key, error)


# Rows of a window's tables.


def gather_rows(report: GatherReport) -> Rows:
    """One row per gathered miner; its steps and tokens are what it says itself."""
    return [
        {
            "uid": outcome.uid,
            "tier": outcome.tier.value,
            "accepted": outcome.submission is not None,
            "reason": outcome.reason.value if outcome.reason else "",
            "bytes": outcome.num_bytes,
            "seconds": round(outcome.seconds, 3),
            "steps": outcome.submission.manifest.steps if outcome.submission else "",
            "tokens": outcome.submission.manifest.tokens if outcome.submission else "",
        }
        for outcome in report.outcomes
    ]


def plan_rows(entries: Sequence[PlanEntry]) -> Rows:
    """One row per setting that an entry of the plan changes."""
    return [
        {"entry": entry.number, "from window": entry.first_window, "setting": name, "value": str(entry.changes[name])}
        for entry in entries
        for name in sorted(entry.changes)
    ]


def endpoint_rows(report: PageReport) -> Rows:
    """One row per endpoint of the dataset, numbered: two accounts may each have a bucket of the same name."""
    return [
        {
            "number": number,
            "endpoint": endpoint.name,
            "reads": endpoint.reads,
            "bytes": endpoint.num_bytes,
            "seconds": round(endpoint.seconds, 3),
            "failures": endpoint.failures,
            "last failure": endpoint.last_failure.value if endpoint.last_failure else "",
            "resting": endpoint.resting,
        }
        for number, endpoint in enumerate(report.endpoints, start=1)
    ]


MFU_FORMULA = "at 6 N + 12 * layers * hidden * length operations per token"  # see `flops_per_token`


def training_rows(report: TrainReport) -> Rows:
    """One row: the device and why it was taken, tokens, speed, share of each phase, and memory."""
    figures = report.figures
    if figures is None:
        return [{"reason": report.reason.value if report.reason else "not trained"}]
    spent = sum(figures.phases.values())
    peak = "" if figures.assumed_peak is None else f" of {figures.assumed_peak / 1e12:.0f} TFLOP/s, {MFU_FORMULA}"
    return [
        {
            "device": figures.device,
            "precision": figures.precision,
            "chosen": figures.choice,
            "steps": report.num_steps,
            "micro-batch": figures.micro_batch,
            "tokens": figures.tokens,
            "seconds": round(figures.seconds, 3),
            "tokens/s": round(figures.tokens_per_second, 1),
            "MFU": "" if figures.mfu is None else f"{figures.mfu:.1%}{peak}",
            **{name: f"{seconds / spent:.1%}" if spent else "" for name, seconds in figures.phases.items()},
            "peak MiB": round(figures.peak_bytes / 2**20, 1),
        }
    ]


def time_rows(seconds: Mapping[str, float]) -> Rows:
    """One row: the seconds of a window at this node, and the share of each activity."""
    total = sum(seconds.values())
    shares = {name: f"{spent / total:.1%}" for name, spent in seconds.items()} if total else {}
    return [{"seconds": round(total, 1), **shares}]


def finding_rows(audit: AuditReport) -> Rows:
    """One row per finding of the roster audit."""
    return [
        {
            "reason": finding.reason,
            "suspects": ", ".join(f"uid {suspect.uid}" for suspect in finding.suspects),
            "detail": finding.detail,
        }
        for finding in audit.findings
    ]


def score_summary(evidence: Evidence) -> str:
    """The window's loss, counts and baseline in one line."""
    records = evidence.miners
    loss = "nothing was measured" if evidence.loss is None else f"loss {evidence.loss:.4f}"
    measured = sum(record.facts.estimate is not None for record in records)
    earning = sum(record.weight > 0 for record in evidence.weights if record.uid in {each.uid for each in records})
    punished = sum(bool(record.slashes) for record in records)
    counts = f"{measured} of {len(records)} miners measured, {earning} earn, {punished} punished"
    typical = f"advantage is {evidence.typical_advantage:.6f}, the typical own excess {evidence.typical_own_excess:.6f}"
    baseline = f"The baseline is rated {_rating(evidence.baseline)}, the typical {typical}."
    return f"Window {evidence.window}: {loss}; {counts}. {baseline}"


def score_rows(evidence: Evidence) -> Rows:
    """One row per miner, the best final score first: its weight, the numbers behind it, discount and penalties."""
    weights = {record.uid: record.weight for record in evidence.weights}
    bans = {ban.subject: ban.last_window for ban in evidence.bans}
    ranked = sorted(evidence.miners, key=lambda record: (-record.final, record.uid))
    return [_score_row(record, weights.get(record.uid, 0.0), bans) for record in ranked]


def _score_row(record: MinerRecord, weight: float, bans: dict[str, int]) -> dict[str, Any]:
    facts, card = record.facts, record.after
    sign = "" if record.indicator is None else f" ({record.indicator:+d})"
    return {
        "uid": record.uid,
        "weight": round(weight, 4),
        "final": f"{card.final:.4f} ({card.final - record.before.final:+.4f})",
        "rating": _rating(card.rating),
        "advantage": f"{card.advantage:+.6f}",
        "own excess": f"{card.own_excess:+.6f}",
        "indicator": f"{card.binary_average:.4f}{sign}",
        "sync": f"{card.sync:.4f}" + (f" ({facts.windows_behind} behind)" if facts.windows_behind else ""),
        "score": "" if record.gradient_score is None else f"{record.gradient_score:+.6f}",
        "own loss": _estimated(facts.estimate, "own"),
        "random loss": _estimated(facts.estimate, "random"),
        "discount": "" if record.discount is None else record.discount.value,
        "measured exactly": _measured(facts.measurement),
        "slashes": ", ".join(f"{slash.event.value} ({slash.reason.value})" for slash in record.slashes),
        "no payload": _absence(record, bans),
    }


def _rating(rating: Rating) -> str:
    return f"{rating.mu:.2f} ± {rating.sigma:.2f}"


def _absence(record: MinerRecord, bans: dict[str, int]) -> str:
    """Return why the miner has no payload in this window, and how long it is banned."""
    facts = record.facts
    if facts.payload_sha256 is not None:
        why = ""
    elif facts.reason is not None:
        why = facts.reason.value
    else:
        why = "not asked" if facts.assigned else "no slot"
    last = max((bans[subject] for subject in (facts.hotkey, facts.bucket) if subject in bans), default=None)
    ban = "" if last is None else f"banned until window {last}"
    return ", ".join(text for text in (why, ban) if text)


def _estimated(estimate: Estimate | None, which: str) -> str:
    if estimate is None:
        return ""
    gain = getattr(estimate, f"{which}_gain")
    return _change(getattr(estimate, f"{which}_before"), None if gain is None else -gain)


def _measured(measurement: Measurement | None) -> str:
    if measurement is None:
        return ""
    before, after = measurement.random_before, measurement.random_after
    return _change(before, None if before is None or after is None else after - before)


def _change(before: float | None, change: float | None) -> str:
    """A loss and its change; either may be not finite."""
    if before is None:
        return "not finite"
    return f"{before:.4f} {'not finite' if change is None else f'{change:+.6f}'}"


# Rows of housekeeping's tables.


def cleanup_rows(report: CleanupReport) -> Rows:
    """A row per kind of object, then one per object that could not be deleted."""
    return with_failures([asdict(row) for row in report.rows], report.failed)


def with_failures(rows: Rows, failed: Sequence[tuple[str, str]]) -> Rows:
    """Rows, then one per failure; the UI takes the columns from the first row, so all rows have the same."""
    if not failed:
        return rows
    columns = dict.fromkeys(rows[0] if rows else ("kind",), "")
    first, *_ = columns
    return [
        *({**row, "left": "", "answer": ""} for row in rows),
        *({**columns, first: "not deleted", "left": key, "answer": answer} for key, answer in failed),
    ]


AUDIT_COLUMNS = ("window", "audited", "what", "field", "published", "recomputed", "at fault", "kind")


def audit_rows(audit: WindowAudit) -> Rows:
    """A row per difference, then one per note; a part with neither has one row that says it is verified."""
    rows: Rows = []
    for part in audit.parts:
        found = [("cannot be audited", str(part.problem))] if part.problem is not None else []
        found += [("note", note) for note in part.notes]
        if not found and not part.differences:
            found = [("verified", "")]
        differences = [
            (
                *("difference", each.where, each.published, each.recomputed),
                " or ".join(f"uid {uid}" for uid in each.suspects),
                each.kind or "",
            )
            for each in part.differences
        ]
        cells = [*differences, *((what, "", text, "", "", "") for what, text in found)]
        rows += [dict(zip(AUDIT_COLUMNS, (part.window, part.title, *each), strict=True)) for each in cells]
    return rows
