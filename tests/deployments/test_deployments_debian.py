"""deployments/debian.sh installs what it is asked for, and starts no service."""

import os
import subprocess

import pytest

from deployments.processes import PROJECT_ROOT

SCRIPT = PROJECT_ROOT / "deployments" / "debian.sh"
COMMANDS = {
    "python3.11": "exit 0",
    "dpkg-query": 'for package; do :; done; [ "$package" = installed ] && echo installed',
    "apt-get": 'echo "apt-get $*" >> "$CALLS"',
    "sudo": '[ "$1" = -n ] && exit 0; "$@"',
    "systemctl": 'echo "systemctl $*" >> "$CALLS"',
    "chmod": "exit 0",
    "tee": "cat > /dev/null",
    "rm": "exit 0",
}
"""Nothing of this machine is touched: the script finds these first."""


@pytest.fixture
def calls(tmp_path):
    for name, body in COMMANDS.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    return tmp_path / "calls"


def run(calls, *packages):
    environment = {"PATH": f"{calls.parent}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(["sh", str(SCRIPT), *packages], env=environment, check=True)
    return calls.read_text().splitlines() if calls.exists() else []


def test_missing_packages_are_installed_and_do_not_start_with_the_machine(calls):
    install, *disabled = run(calls, "installed", "prometheus", "postgresql")
    words = install.split()
    assert words[:2] == ["apt-get", "install"]
    assert words[-2:] == ["prometheus", "postgresql"]
    assert "installed" not in words
    assert disabled == ["systemctl disable --quiet prometheus", "systemctl disable --quiet postgresql"]
