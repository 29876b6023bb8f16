"""A network as one page of HTML that anybody can open: its curves, its miners, its checkpoints, how to check and join.

It is made of public objects alone, has no script, and loads nothing. Every text is escaped, so what a peer writes is
shown and never read as markup. The same look at the network gives the same bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from templar.agreement.genesis import Birth
from templar.reports.training_curve import (
    FAULTS,
    OWN_NAME,
    CurvePoint,
    NetworkGlance,
    draw_curve,
    draw_held_out,
    draw_over_tokens,
    newest_evaluations,
)

PAGE_KEY = "index.html"  # in a bucket; no object of the protocol has such a key, so no clean-up touches it
LOSS = "loss of the validators' batch, nats per token"
NEWEST_WINDOWS = 12  # that the table of windows has
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --ground: #ffffff; --line: #d1d5db; --faint: #6b7280 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --ground: #111827; --line: #374151; --faint: #9ca3af }
  svg rect[fill="#fff"] { fill: #111827 } svg rect[fill="#93c5fd"] { fill: #1e40af }
  svg path[stroke="#ddd"] { stroke: #374151 } svg path[stroke="#1d4ed8"] { stroke: #60a5fa }
  svg circle { fill: #60a5fa }
}
body { color: var(--text); background: var(--ground); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  padding: 1rem; max-width: 60rem; overflow-wrap: break-word }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
figure { margin: 0 } svg { width: 100%; min-width: 30rem; height: auto } svg text { fill: var(--text) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .875rem; width: max-content }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
td { font-variant-numeric: tabular-nums; max-width: 20rem }
@media (max-width: 30rem) {
  td:first-child:nth-last-child(2) { max-width: 7rem }
  td:last-child:nth-child(2) { max-width: 11rem }
}
pre { overflow-x: auto } footer { color: var(--faint); margin-top: 2rem }
"""


def network_page(glance: NetworkGlance, birth: Birth, window_seconds: float, seconds: float) -> bytes:
    """The page of a network with windows of this length, as it was at a time of its chain in seconds; UTF-8."""
    title = f"Subnet {birth.start.netuid}: a model that strangers train"
    drawings = [draw_curve(glance.points, LOSS)]
    over_tokens = draw_over_tokens(
        glance.points, f"{LOSS}, over tokens and time", window_seconds / 3600, birth.start.start_window
    )
    drawings += [] if over_tokens is None else [over_tokens]
    if len(glance.held_out) > 1:
        drawings.append(draw_held_out(glance.held_out))
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f'<figure class="wide">{drawing.decode()}</figure>' for drawing in drawings),
        _section("Training", _table([{"figure": name, "value": text} for name, text in glance.rows if name != FAULTS])),
        _section("Miners", _table([{name: row[name] for name in row if name != OWN_NAME} for row in glance.miners])),
        _section("Checkpoints on held-out text", _table(newest_evaluations(glance.held_out))),
        _section("Newest windows", _table(list(_windows(glance.points)))),
        _section("Check it, and join", _commands(birth)),
        f"<footer>{_moment(seconds)}, from the network's public objects alone.</footer>",
    ]
    head = (
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
    )
    lines = ("<!doctype html>", '<html lang="en">', *head, "<body>", *body, "</body>", "</html>")
    return ("\n".join(lines) + "\n").encode()


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a table whose columns are those of the first; an empty one says so."""
    if not rows:
        return "<p>There are none yet.</p>"
    lines = [_row("th", rows[0]), *(_row("td", row.values()) for row in rows)]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _row(cell: str, texts: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"


def _windows(points: Sequence[CurvePoint]) -> Iterator[Mapping[str, str]]:
    """A row per window, the newest one first."""
    for point in reversed(points[-NEWEST_WINDOWS:]):
        yield {
            "window": str(point.window),
            "loss": "" if point.loss is None else f"{point.loss:.4f}",
            "payloads": "not known" if point.applied is None else f"{point.applied}",
            "tokens": "" if point.tokens is None else f"{point.tokens:,}",
        }


def _commands(birth: Birth) -> str:
    """What somebody types who wants to check the network, and to join it."""
    lines = (
        f"genesis hash   {birth.network.genesis}",
        "templar model verify --env-file .env    # compute the model again from the miners' payloads",
        "templar audit --env-file .env           # measure again what a validator says of a window",
        "templar neuron init                     # write an .env, to join as a miner or a validator",
    )
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%d %B %Y, %H:%M UTC")
