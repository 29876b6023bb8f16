"""constraints.txt: what `make` installs, exactly: no library's service runs on a release that nobody tried."""

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
OF_THE_PLATFORM = "cuda", "nvidia", "triton"
"""Beginnings of what torch brings along on machines with a GPU, in the versions that it asks for itself."""


def brought_along(name, extras, seen):
    """Each package that an installed one needs, directly or not, with its installed version."""
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        key = f"{canonicalize_name(needed.name)}{sorted(needed.extras)}"
        if key not in seen:
            seen.add(key)
            yield canonicalize_name(needed.name), distribution(needed.name).version
            yield from brought_along(needed.name, frozenset(needed.extras), seen)


def test_everything_that_is_installed_is_pinned_in_its_version():
    lines = [line.split("==") for line in PINS.read_text().splitlines() if "==" in line and not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in lines}
    assert len(pins) == len(lines), "a package stands there twice"
    installed = {
        name: version.partition("+")[0]
        for name, version in brought_along("templar-flows", frozenset({"dev"}), set())
        if name != "templar-flows" and not name.startswith(OF_THE_PLATFORM)
    }
    assert len(installed) > 200
    assert {name: pins.get(name) for name in installed} == installed
