"""The format of `.env`: what is written there is read, and a line that cannot be read is an error.

The parser is python-dotenv's. Its own reader passes over lines that it cannot parse, takes an unset `${NAME}` for
nothing, and expands `${NAME}` within single quotes, which are the only way to write such a text.
"""

import io
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dotenv.parser import Binding, parse_stream
from dotenv.variables import Literal, parse_variables

from templar.errors import PermanentError, Reason

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=~-]*")  # values that need no quotes, also in a shell
_NEXT_LINE = re.compile(r"\n[^\S\n]*(?:export\s+)?[A-Z][A-Z0-9_]*=")
"""A variable within a value: the quotation mark before it was never closed."""
_TYPOGRAPHIC = "“”„‟‘’‚‛«»"  # noqa: RUF001 - as a word processor writes quotation marks
_LITERAL = "put the value between single quotes"


def read_env_file(path: Path) -> dict[str, str]:
    """Read the variables of an `.env`.

    A value between single quotes is taken as it stands; in others `${NAME}` is replaced by that variable's value, as
    python-dotenv does, and ` #` begins a comment where there are no quotes.

    Raises:
        PermanentError: `bad_environment`; the file is not there, cannot be read, or has a line that cannot be: no
            `NAME=value`, a name that stands twice with different values, a variable in `${}` that is not set.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise _bad(f"{path}: no such file; copy .env.example to it and fill it in") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(f"{path}: cannot be read: {error}") from None
    values, lines = dict[str, str](), dict[str, int]()
    for binding in parse_stream(io.StringIO(text)):
        if binding.key is None and not binding.error:
            continue  # a comment, or nothing
        written = binding.original.string.lstrip()
        blank = binding.original.string[: len(binding.original.string) - len(written)]
        line = binding.original.line + len(re.findall(r"\r\n|\r|\n", blank))
        if (problem := _problem(binding, written)) is not None:
            raise _bad(f"{path}, line {line}: {problem}")
        name, value = str(binding.key), str(binding.value)
        if not written.partition("=")[2].lstrip().startswith("'"):
            value = _expanded(value, {**os.environ, **values}, f"{path}, line {line}: {name}")
        if values.get(name, value) != value:
            raise _bad(f"{path}, line {line}: {name} has another value in line {lines[name]}: remove one of them")
        values[name], lines[name] = value, line
    return values


def read_environment(file: Path | None = None, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A process's own environment over that of a file; what is empty in the environment is read from the file.

    Without one it is `./.env`, if that is there: the log says so. Errors as in `read_env_file`.
    """
    if file is None and (usual := Path.cwd() / ".env").is_file():
        log.warning("variables that are not set are read from %s", usual)
        file = usual
    values = {} if file is None else read_env_file(file)
    # An empty variable is no value. It stays if the file has none: an empty CUDA_VISIBLE_DEVICES means no device.
    return values | {name: value for name, value in own.items() if value.strip() or name not in values}


def _problem(binding: Binding, written: str) -> str | None:
    """Return what is wrong with a line, without its value, which may be a secret."""
    name = re.sub(r"\Aexport\s+", "", written.partition("=")[0]).strip()
    if _NAME.fullmatch(name) is None or "=" not in written:
        shown = re.match(r"[A-Z][A-Z0-9_]*(?=[\s:]|\Z)", written)  # the rest may be a secret
        return f"{f'after {shown[0]} ' if shown else ''}this is no NAME=value: write it so, or put # before it"
    if binding.error or binding.value is None:
        return f"the value of {name} cannot be read: {_LITERAL}, with \\' for one within it, or close the quotes"
    if _NEXT_LINE.search(binding.value):
        return f"the quotation mark before the value of {name} is not closed: close it"
    if binding.value.startswith(tuple(_TYPOGRAPHIC)) and "'" not in written.partition("=")[2].lstrip()[:1]:
        return f"the value of {name} begins with a typographic quotation mark: {_LITERAL}"
    return None


def _expanded(value: str, known: Mapping[str, str], where: str) -> str:
    """The value with each `${NAME}` replaced; `${NAME:-default}` has what it is if there is no such variable."""
    text = ""
    for atom in parse_variables(value):
        if not isinstance(atom, Literal) and getattr(atom, "default", None) is None:
            name = str(getattr(atom, "name", ""))
            if name not in known:
                raise _bad(f"{where}: ${{{name}}} is not set: set it, or {_LITERAL} to take it as it stands")
        text += atom.resolve(known)
    return text


def env_lines(values: Mapping[str, str]) -> Iterable[str]:
    """The lines of an `.env` from which `read_env_file` reads these values; errors as in `env_value`."""
    return (f"{name}={env_value(name, value)}\n" for name, value in values.items())


def env_value(name: str, value: str) -> str:
    """A value as it stands in an `.env`; `bad_environment` if no file or environment can hold it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _bad(f"{name} is not UTF-8: choose another value") from None
    if "\0" in value or _NEXT_LINE.search(value):
        raise _bad(f"{name} has a zero byte, or a line that reads as another variable: choose another value")
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _bad(message: str) -> PermanentError:
    return PermanentError(Reason.BAD_ENVIRONMENT, message)
