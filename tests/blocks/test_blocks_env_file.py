"""The format of `.env`: what was written is read, and what cannot be read is named by file and line."""

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st

from blocks.env_file import env_lines, read_env_file
from templar.errors import PermanentError, Reason
from tests.support.errors import raising

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.text("a #'\"\\${}=\n\r\t")
NAMES = st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,8}\Z")


def read(folder, text):
    path = folder / ".env"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_env_file(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("env")


@given(st.dictionaries(NAMES, TEXTS))
def test_what_was_written_is_read(folder, values):
    try:
        text = "".join(env_lines(values))
    except PermanentError:  # a line of a value reads as another variable
        assert any("\n" in value for value in values.values())
        return
    assert read(folder, text) == values
    if not any("${" in value or "\r" in value for value in values.values()):
        assert dotenv_values(folder / ".env") == values  # any other reader of the format agrees


@given(TEXTS)
def test_no_file_gives_another_error_or_less_than_it_says(folder, text):
    said = ", line "
    try:
        read(folder, f"A=1\n{text}\nB='2'\n")
    except PermanentError as error:
        said = error.message
    assert ", line " in said


def test_forms_of_a_line(folder, monkeypatch):
    monkeypatch.setenv("THERE", "there")
    monkeypatch.delenv("NOWHERE", raising=False)
    text = "\ufeff# note\r\n\r\nexport A = \"x\"  # note\r\nB='pa${THERE}ss'\r\nC=${THERE}/${A} # note\r\n"
    expected = {"A": "x", "B": "pa${THERE}ss", "C": "there/x", "D": "", "E": "", "F": "or"}
    assert read(folder, text + 'D=\r\nE= # note\r\nF="${NOWHERE:-or}"\nA=x\n') == expected
    assert read(folder, "LIST='[\n  {\"a\": 1}\n]'\n") == {"LIST": '[\n  {"a": 1}\n]'}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("NETWORK: test", "after NETWORK this is no NAME=value"),
        ("NETWORK", "after NETWORK this is no NAME=value"),
        ("- NETWORK=test", "this is no NAME=value"),
        ("set NETWORK=test", "this is no NAME=value"),
        ("NETWORK:=test", "after NETWORK this is no NAME=value"),
        ("hush-hush", "this is no NAME=value"),
        ("KEY='hush", "the value of KEY cannot be read"),
        ("KEY='hush' hush", "the value of KEY cannot be read"),
        ('KEY="hush\nOTHER=hush\nNOTE="', "the quotation mark before the value of KEY is not closed"),
        ("KEY=“hush”", "the value of KEY begins with a typographic quotation mark"),
        ("KEY=hush${NOWHERE}", "KEY: ${NOWHERE} is not set: set it, or put the value between single quotes"),
        ("FIRST=2", "FIRST has another value in line 1"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(folder, bad, said):
    with raising(PermanentError, Reason.BAD_ENVIRONMENT) as caught:
        read(folder, f"FIRST=1\n\n# a note\n{bad}\nLAST=3\n")
    assert f"{folder / '.env'}, line 4: {said}" in caught.value.message
    assert "hush" not in caught.value.message


def test_what_no_file_can_hold_is_refused(folder):
    for value in ("a\0b", "a\udcffb", "a\nB=b"):
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, "NAME"):
            list(env_lines({"NAME": value}))
    for content in ("A=1\n".encode("utf-16"), b"A=\xff\n"):
        with raising(PermanentError, Reason.BAD_ENVIRONMENT, "cannot be read"):
            read(folder, content)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, "no such file"):
        read_env_file(folder / "missing")
