"""All commands and their options for docs/commands.md, where `--help` finds them."""

import importlib
import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from unittest.mock import patch

from deployments.command import COMMANDS, Command


def options(command: Command) -> str:
    """What a command's own parser says, on lines of 100 characters."""
    shown, module = StringIO(), importlib.import_module(command.module)
    with redirect_stdout(shown), suppress(SystemExit), patch.dict(os.environ, COLUMNS="100"):
        module.main([*command.given, "--help"])
    return shown.getvalue().strip()


def sections() -> str:
    """A section for each command."""
    return "\n".join(f"## templar {each.words}\n\n```text\n{options(each)}\n```\n" for each in COMMANDS)
