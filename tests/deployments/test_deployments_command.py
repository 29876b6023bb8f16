"""`templar`: every command is found by its words, and words that are none are answered with those that are."""

import importlib
import inspect
import os
import subprocess
import sys

import pytest

from deployments.command import COMMANDS, exit_status, main
from docs.command_help import options
from templar.errors import PermanentError, Reason, TransientError


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.words)
def test_each_command_is_the_main_of_its_module_and_its_help_is_the_parsers(command, capsys):
    words, module = command.words.split(), importlib.import_module(command.module)  # type: ignore[attr-defined]
    assert list(inspect.signature(module.main).parameters) == ["words"]
    assert main([*words, "--help"]) == 0
    assert capsys.readouterr().out.strip() == options(command)


def test_a_setting_that_prefect_refuses_is_named():
    environment = os.environ | {"PREFECT_LOGGING_LEVEL": "verbose"}
    command = [sys.executable, "-m", "deployments", "clock"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    *_, last = ended.stderr.splitlines()  # Prefect says something before, without the variable
    assert last.startswith("[bad_environment] PREFECT_LOGGING_LEVEL is refused: Input should be 'DEBUG', ")
    assert "Traceback" not in ended.stderr


def test_a_part_of_a_command_lists_those_that_begin_so(capsys):
    assert main(["neuron", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "templar neuron start" in shown
    assert "templar leaderboard" not in shown


def test_errors_and_an_interrupt_are_one_line(monkeypatch, capsys):
    errors = TransientError(Reason.STORE_BUSY, "later"), PermanentError(Reason.LOCAL_FILE, "never"), KeyboardInterrupt()

    def fails(error):
        raise error

    for advice in ("", "; run the same command again: it goes on where it was"):
        monkeypatch.setattr(sys.modules[__name__], "RESUMABLE", bool(advice), raising=False)
        assert [exit_status(fails, error) for error in errors] == [1, 1, 130]
        assert capsys.readouterr().err == f"[store_busy] later{advice}\n[local_file] never\ninterrupted{advice}\n"


@pytest.mark.parametrize("words", [["nothing"], ["neuron", "fly"], ["neuron"]])
def test_what_is_no_command_is_refused(words, capsys):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert f"there is no command {' '.join(words)!r}" in shown
    assert "templar neuron start" in shown
