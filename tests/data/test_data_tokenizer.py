import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from templar.data.tokenizer import EOS_TOKEN, Tokenizer, check_fits, load_tokenizer, train_embedded_tokenizer
from templar.errors import PermanentError, Reason
from tests.support.errors import raising

TEXTS = [
    "def read(path):\n    return path.read_text()\n" * 20,
    "The quick brown fox jumps over the lazy dog. " * 30,
    "Überraschung: naïve façade — 東京 🚀\n" * 10,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_embedded_tokenizer(TEXTS, 320)


def test_training_twice_gives_the_same_bytes_and_the_end_token_is_part_of_the_digest(tokenizer: Tokenizer) -> None:
    again = train_embedded_tokenizer(iter(TEXTS), 320)
    assert (again.to_bytes(), again.digest) == (tokenizer.to_bytes(), tokenizer.digest)
    backend = Backend.from_str(tokenizer.to_bytes().decode())
    assert Tokenizer(backend, "a").digest != tokenizer.digest


def test_ids_are_int32_arrays_within_the_vocabulary(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch([*TEXTS, ""])
    assert [tokens.dtype for tokens in encoded] == [np.int32] * 4
    assert len(encoded[3]) == 0
    assert tokenizer.vocab_size == 320
    assert all(tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size for tokens in encoded[:3])
    assert len(encoded[1]) < len(TEXTS[1]) / 1.5


@settings(max_examples=30)
@given(text=st.text())
@example(text=f"before{EOS_TOKEN}after")  # a text cannot forge a document's border
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eos_id not in tokens


def test_the_smallest_vocabulary_holds_every_byte_of_utf8() -> None:
    smallest = train_embedded_tokenizer(TEXTS, 244)
    text = "".join(map(chr, range(0x800))) + "\u0fff\uffff\U0010ffff"
    assert smallest.decode(smallest.encode_batch([text])[0]) == text
    assert smallest.vocab_size == 244
    with pytest.raises(ValueError, match="244 ids"):
        train_embedded_tokenizer(TEXTS, 243)


def test_padding_and_truncation_of_the_original_are_left_behind(tokenizer: Tokenizer) -> None:
    backend = Backend.from_str(tokenizer.to_bytes().decode())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    wrapped = Tokenizer(backend)
    np.testing.assert_array_equal(wrapped.encode_batch(TEXTS)[0], tokenizer.encode_batch(TEXTS)[0])
    assert wrapped.digest == tokenizer.digest


def test_save_and_load_from_a_folder_and_from_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "saved")
    from_folder = load_tokenizer(str(tmp_path / "saved"))
    from_file = load_tokenizer(str(tmp_path / "saved" / "tokenizer.json"))
    assert from_folder.digest == from_file.digest == tokenizer.digest
    np.testing.assert_array_equal(from_folder.encode_batch(TEXTS)[2], tokenizer.encode_batch(TEXTS)[2])


@pytest.mark.parametrize("eos", ["a", {"content": "a", "special": True}])
def test_the_end_token_of_a_folder_is_read_from_its_configuration(
    tokenizer: Tokenizer, tmp_path: Path, eos: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode([loaded.eos_id]) == "a"
    for broken in ("{", '{"eos_token": {"text": "a"}}'):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with raising(PermanentError, Reason.TOKENIZER_MISSING, "eos_token"):
            load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "embedded", "words"),
    [
        ("embedded", None, "the dataset has no tokenizer.json"),
        ("embedded", b"\xff", "not UTF-8"),
        ("embedded", b"{}", "not a tokenizer"),
        ("no/such/folder/at/all", None, "no such file or folder"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named(name: str, embedded: bytes | None, words: str) -> None:
    with raising(PermanentError, Reason.TOKENIZER_MISSING, repr(name), match=words):
        load_tokenizer(name, embedded=embedded)


def test_a_tokenizer_without_the_end_token_or_with_more_ids_than_the_model_is_refused(tokenizer: Tokenizer) -> None:
    with raising(PermanentError, Reason.TOKENIZER_MISSING, "no token '<eos>'"):
        Tokenizer(Backend(models.BPE()))
    check_fits(tokenizer, 320)
    with raising(PermanentError, Reason.BAD_HPARAMS, "320 ids but model.vocab_size is 319"):
        check_fits(tokenizer, 319)


HUB_SCRIPT = """
import json
from templar.errors import PermanentError
from templar.data.tokenizer import load_tokenizer
cached = load_tokenizer("someone/something")
try:
    load_tokenizer("someone/else")
    error = None
except PermanentError as caught:
    error = str(caught)
print(json.dumps({"digest": cached.digest, "eos_token": cached.eos_token, "error": error}))
"""


def test_a_hugging_face_id_comes_from_the_cache_and_is_refused_without(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In a process of its own: the hub library reads its environment once."""
    revision = "0" * 40
    repository = tmp_path / "hub" / "models--someone--something"
    tokenizer.save(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["eos_token"] == EOS_TOKEN
    assert result["digest"] == tokenizer.digest
    assert result["error"].startswith("[tokenizer_missing]")
    assert "'someone/else'" in result["error"]
    assert "HF_TOKEN" in result["error"]
