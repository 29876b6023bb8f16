"""The documents name sections, files, tests, settings and commands that exist, and numbers that are right."""

import importlib.util
import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest

from benchmarks import keep
from deployments import command
from docs import from_templar
from templar import PROTOCOL_VERSION
from templar.errors import Reason
from templar.hparams import load_hparams, preset_names
from tests import house

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_protocols_version_is_the_codes():
    named = r"of the protocol: `(\d+)`", r"-v(\d+)[/`]", r"templar:(\d+):", r"version, `(\d+)`", r"one string, `(\d+)`"
    for pattern in (*named, r'`protocol` \(`"(\d+)"`\)'):
        assert set(re.findall(pattern, page("protocol.md"))) == {PROTOCOL_VERSION}, pattern


def test_every_reason_is_explained_once():
    section = page("protocol.md").split("## 16.", 1)[1]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [code for row in rows for code in re.findall(r"`([a-z_]+)`", row)]
    assert sorted(named) == sorted(reason.value for reason in Reason)


def test_the_table_of_penalties_is_that_of_the_hyper_parameters():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]*) ?\|$", page("validator.md"), re.MULTILINE)
    for preset in preset_names():
        hparams = load_hparams(preset)
        told = {
            event: {
                "final": _factor(final, hparams.training.recipe),
                "average": _factor(average, hparams.training.recipe),
                "reset": "fresh card" in more,
                "ban_windows": int(found[1]) if (found := re.search(r"ban of (\d+) windows", more)) else 0,
            }
            for event, final, average, more in rows
        }
        assert told == hparams.scoring.slashing.model_dump(), preset


def _factor(cell, recipe):
    """A factor as it is told: one for both recipes, or another one for `demo` behind it."""
    found = re.fullmatch(r"([\d.]+)(?: \(`demo`: ([\d.]+)\))?", cell)
    assert found, cell
    return float(found[2] if recipe == "demo" and found[2] else found[1])


def test_the_numbers_of_the_presets_are_told():
    table = page("validator.md").split("| setting | ", 1)[1].split("\n\n", 1)[0]
    header, _, *rows = table.splitlines()
    assert rows
    columns = [re.findall(r"`([\w.-]+)`", cell) for cell in header.split("|") if "`" in cell]
    for row in rows:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        section, field = name.strip("`").split(".")
        for presets, cell in zip(columns, cells, strict=True):
            for preset in presets:
                value = getattr(getattr(load_hparams(preset), section), field)
                numbers = list(value) if isinstance(value, tuple) else [value]
                assert numbers == [float(number) for number in cell.split(", ")], f"{name} of {preset}"


def test_every_link_leads_somewhere():
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            name, _, anchor = target.partition("#")
            other = path.parent / name if name else path
            assert other.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in _anchors(other), f"{path.name}: {target}"


def _anchors(path):
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_file_test_and_module_that_is_named_is_there():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:tests|templar|flows|tasks|blocks|deployments|docs)/[\w./-]+\.\w+)`", text):
            assert (ROOT / name).exists(), f"{path.name} names {name}"
        for name in re.findall(r"`(test_\w+)`", text):
            assert f"def {name}(" in tests, f"{path.name} names {name}"
        for name in re.findall(r"python -m ((?:templar|deployments|docs|tests)[\w.]*)", text):
            assert importlib.util.find_spec(name), f"{path.name} names {name}"


def test_every_variable_and_setting_that_is_named_is_there():
    known = "".join((ROOT / name).read_text(encoding="utf-8") for name in (".env.example", "Makefile"))
    known += "PREFECT_API_URL PREFECT_HOME GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME "  # other programs' own
    known += "AWS_CA_BUNDLE HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY NUMBA_CACHE_DIR SSL_CERT_FILE"
    for path in PAGES:
        for name in re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])(?:=[^`]*)?`", path.read_text(encoding="utf-8")):
            assert re.search(rf"\b{name}\b", known), f"{path.name} names {name}"


def test_every_command_line_has_options_that_are_there(monkeypatch, capsys):
    parse_args = ArgumentParser.parse_args

    def only_parse(parser, words):
        parse_args(parser, words)
        raise SystemExit(0)

    monkeypatch.setattr(ArgumentParser, "parse_args", only_parse)
    lines = 0
    for path in [*PAGES, ROOT / "README.md"]:
        for line in _command_lines(path.read_text(encoding="utf-8")):
            # What a reader is to fill in.
            filled = re.sub(r"\b[A-Z]\b", "1", re.sub(r"<[^>]+>", "xxx", line))
            try:
                status = command.main(shlex.split(filled.split(" > ")[0], comments=True))  # shows help, or
            except SystemExit as ended:
                status = ended.code
            assert status == 0, f"{path.name}: templar {line}: {capsys.readouterr().err}"
            lines += 1
    assert lines > 30


def _command_lines(text):
    """What follows `templar` on the lines of a shell, and in a sentence where options follow."""
    for block in re.findall(r"^ *```.*?^ *```", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^ *(?:\$ )?(?:\.venv/bin/)?templar (.+)$", block, re.MULTILINE)
    yield from re.findall(r"`templar ([^`\n]+ --[^`\n]+)`", text)


def test_make_targets_that_are_named_are_there():
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z.][\w-]*)", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert named <= targets, f"{path.name} names {sorted(named - targets)}"


def test_every_section_that_code_cites_is_there():
    numbers = set(re.findall(r"^## (\d+)\.", page("protocol.md"), re.MULTILINE))
    decisions = set(re.findall(r"^### (D\d+) ", page("architecture.md"), re.MULTILINE))
    for folder in ("templar", "flows", "tasks", "blocks", "deployments", "benchmarks", "docs", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r"\s+", " ", path.read_text(encoding="utf-8"))
            for cited in re.findall(r"docs/protocol\.md,? ?(?:sections? )?(\d+)", text):
                assert cited in numbers, f"{path.name} cites docs/protocol.md {cited}"
            for cited in re.findall(r"docs/architecture\.md,? ?(D\d+)", text):
                assert cited in decisions, f"{path.name} cites docs/architecture.md {cited}"
            assert not re.search(r"\bPROTOCOL \d|\bDESIGN [D\d]", text), f"{path.name} cites a page that is not here"


def test_no_page_points_at_a_subnet_of_somebody_else():
    """There is no public network: a number that is copied from a page is a stranger's subnet."""
    for path in (*PAGES, ROOT / ".env.example"):
        found = re.findall(r"NETUID=\d+|--netuid[ =]\d+", path.read_text(encoding="utf-8"))
        assert found == [], f"{path.name}: {found}"
    assert "There is no public network yet" in (DOCS / "miner.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["templar nothing", "training.nothing", "TEMPLAR_NOTHING", "nothing-{window}", "no.py:x"]
)
def test_a_word_of_the_reference_that_leads_nowhere_is_refused(name):
    with pytest.raises((ValueError, KeyError)):
        from_templar.held(name, "Scripts")


def test_a_figure_of_the_readme_is_that_of_its_result(monkeypatch, tmp_path):
    """As `benchmarks.keep` has written it; another figure, another command and a row without a link are found."""
    monkeypatch.setattr(house, "ROOT", tmp_path)
    monkeypatch.setattr(keep, "RESULTS", results := tmp_path / "benchmarks" / "results")
    results.mkdir(parents=True)
    command = ["python", "-c", "print('{\"share\":0.1249}')"]
    assert keep.keep(command) == 0
    assert keep.kept() == [" ".join(command)]
    (file,) = (f"benchmarks/results/{path.name}" for path in results.iterdir())
    assert keep.keep(["python", "-c", "raise"]) == 1

    def problems(figure, shown):
        rows = ("what | figure | command", "---|---|---", f"a share | {figure} | `{shown}`")
        return [*house.unlike_results("\n## Measured\n" + "".join(f"| {row} |\n" for row in rows))]

    right = keep.kept()[0]
    for figure in (f"[0.12]({file}#share)", f"[12]({file}#share) %"):
        assert not problems(figure, right)
    for figure, shown in ((f"[0.13]({file}#share)", right), (f"[0.12]({file}#share)", "another"), ("0.12", right)):
        assert len(problems(figure, shown)) == 1
