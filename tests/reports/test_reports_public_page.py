"""The network's page: what it shows, and that no text of a peer is read as markup."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from templar.reports.public_page import network_page
from templar.reports.training_curve import NetworkCurve
from tests.support.network import tiny

TAGS = {
    *("html", "meta", "title", "style", "body", "h1", "h2", "p", "pre", "footer", "figure", "div"),
    *("table", "tr", "th", "td", "svg", "rect", "text", "path", "circle"),
}
MARKUP = (
    "<script>alert(1)</script>",
    "</td></tr></table><h1>paid",
    '"><img src=x onerror=alert(1)>',
    "</style><style>body{display:none}",
    "&lt;b&gt; &amp; &#60;",
    "<!--",
    "]]>",
    "javascript:alert(1)",
    "\u202eevil",
    "<svg/onload=alert(1)>",
)
HOSTILE = [
    before + text + after
    for text in MARKUP
    for before, after in (("", ""), ("\"'", "`"), ("]]>", "<"), ("&", ";"), ("é", "</td"))
]
"""Fifty names that a browser must show and not read."""


class Reader(HTMLParser):
    """The tags, the attributes' names, and the texts of the table cells."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.cells, self._cell = set(), set(), [], None
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._cell = "" if tag in ("td", "th") else self._cell

    def handle_data(self, data):
        self._cell = None if self._cell is None else self._cell + data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cells.append(self._cell)
            self._cell = None


@pytest.fixture(scope="module")
def network(build_shared):
    return build_shared(tiny(), actors=["honest", "silent"], windows=(1, 2, 3))


@pytest.fixture(scope="module")
def seen(network):
    miner = network.miners[0]
    return NetworkCurve(miner.exchange, miner.birth, {}).look(3), miner.birth


def test_the_page_shows_what_the_network_published(network, seen):
    page = network_page(*seen, 60.0, 1e9)
    found = Reader(page)
    assert found.tags <= TAGS
    assert not {name for name in found.attributes if name.startswith("on")} | (found.attributes & {"src", "href"})
    uids = [str(network.uid(miner)) for miner in network.miners]
    assert set(uids) <= set(found.cells)
    assert f"{network.evidence(3).loss:.4f}" in found.cells
    text = page.decode()
    assert network.world.birth.network.genesis in text
    assert "09 September 2001, 01:46 UTC" in text
    assert text.count("<svg") == 2  # over windows, and over tokens and time
    assert "There are none yet." in text  # no checkpoint was measured
    assert network_page(*seen, 60.0, 1e9) == page


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=60), min_size=1, max_size=8))
@example(HOSTILE)
def test_what_a_peer_writes_is_shown_as_text(seen, texts):
    glance, birth = seen
    miners = tuple({"uid": "7", "newest payload": text} for text in texts)
    found = Reader(
        network_page(replace(glance, miners=miners, rows=[(text, text) for text in texts]), birth, 60.0, 0.0)
    )
    assert found.tags <= TAGS
    shown = iter(found.cells)
    assert all(any(cell == text for cell in shown) for text in texts for _ in range(2))
