import json
import random
import threading

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from templar import interrupt
from templar.data.tokenizer import (
    EOS_TOKEN,
    MOST_RUN_CHARS,
    Tokenizer,
    check_fits,
    encode,
    load_tokenizer,
    network_tokenizer,
    save_tokenizer,
    train_embedded_tokenizer,
)
from templar.errors import PermanentError, Reason
from tests.support.errors import raising
from tests.support.foreign_bytes import NESTED, PANICKING

TEXTS = [
    "def read(path):\n    return path.read_text()\n" * 20,
    "The quick brown fox jumps over the lazy dog. " * 30,
    "Überraschung: naïve façade — 東京 🚀\n" * 10,
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer(TEXTS, 320)


def test_training_twice_gives_the_same_bytes_and_the_end_token_is_part_of_the_digest(tokenizer):
    again = train_embedded_tokenizer(iter(TEXTS), 320)
    assert (again.to_bytes(), again.digest) == (tokenizer.to_bytes(), tokenizer.digest)
    assert Tokenizer(Backend.from_str(tokenizer.to_bytes().decode()), "a").digest != tokenizer.digest


@settings(max_examples=30)
@given(text=st.text())
@example(text=f"before{EOS_TOKEN}after")  # a text cannot forge a document's border
def test_every_text_comes_back(tokenizer, text):
    (tokens,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(tokens) == text
    assert tokenizer.count_dropped(text) == 0
    assert tokenizer.eos_id not in tokens


LETTERS = [*map(chr, range(97, 123))]
END = "</s>"


def _backend(model, splitter=None, **end):
    backend = Backend(model)
    if splitter is not None:
        backend.pre_tokenizer = splitter
    if end:
        backend.add_tokens([AddedToken(END, **end)])
    return backend


def _vocabulary(*tokens):
    return {token: number for number, token in enumerate((*LETTERS, *tokens))}


WORDS = pre_tokenizers.WhitespaceSplit()
KINDS = {
    "Unigram": lambda: _backend(
        models.Unigram([("<unk>", 0.0), (END, 0.0), *((c, -3.0) for c in (*LETTERS, *"▁<>/"))], unk_id=0),
        pre_tokenizers.Metaspace(),
        special=True,
    ),
    "WordLevel": lambda: _backend(models.WordLevel({"<unk>": 0, END: 1, "the": 2}, unk_token="<unk>"), WORDS),
    "WordPiece": lambda: _backend(models.WordPiece({"<unk>": 0, END: 1, "a": 2, "##b": 3}, unk_token="<unk>"), WORDS),
    "unknown word is the end": lambda: _backend(models.WordLevel({END: 0, "the": 1}, unk_token=END), WORDS),
    "ignore_merges": lambda: _backend(models.BPE(vocab=_vocabulary(*"</>", END), merges=[], ignore_merges=True), WORDS),
    "not special": lambda: _backend(models.BPE(vocab=_vocabulary(*"</> "), merges=[]), special=False),
    "takes spaces": lambda: _backend(models.BPE(vocab=_vocabulary(*"</> "), merges=[]), special=False, lstrip=True),
    "merged": lambda: _backend(
        models.BPE(
            vocab=_vocabulary(*"</>", "</", "s>", END), merges=[("<", "/"), ("s", ">"), ("</", "s>")], unk_token=None
        )
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(
    texts=st.lists(
        st.lists(st.sampled_from([END, "the", "ab", " ", "</S>", "＜/s＞", "é", "s>", "</", "zz"])).map("".join),  # noqa: RUF001
        min_size=1,
        max_size=4,
    )
)
@example(texts=["the cat </s> sat", "a</s></s>b"])
def test_a_document_has_exactly_one_end_token_with_every_kind_of_tokenizer(kind, texts):
    backend = KINDS[kind]()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer = Tokenizer(backend, END)
    for tokens in tokenizer.encode_batch(texts):
        assert tokenizer.eos_id not in tokens
    for tokens in encode(texts, tokenizer):
        assert np.count_nonzero(tokens == tokenizer.eos_id) == min(1, len(tokens))


def test_the_name_of_the_end_token_in_a_text_stays_ordinary_text():
    for kind in ("ignore_merges", "not special", "merged"):
        tokenizer = Tokenizer(KINDS[kind](), END)
        names = {number: token for token, number in tokenizer.vocabulary.items()}
        (tokens,) = tokenizer.encode_batch([f"ab{END}c"])
        assert "".join(names[token] for token in tokens.tolist()) == f"ab{END}c", kind


@pytest.mark.parametrize(
    ("kind", "text", "dropped"),
    [
        ("not special", "ab é 42", 3),
        ("not special", f"ab{END}c", 0),
        ("WordLevel", "the cat", 3),
        ("unknown word is the end", "the cat", 3),
        ("Unigram", "ab 42", 2),
    ],
)
def test_characters_that_a_tokenizer_drops_are_counted(kind, text, dropped):
    assert Tokenizer(KINDS[kind](), END).count_dropped(text) == dropped


def test_an_end_token_that_is_a_character_is_left_out_and_counted():
    for end in ("\n", "a"):
        tokenizer = Tokenizer(Backend(models.BPE(vocab={"a": 0, "\n": 1, "b": 2}, merges=[])), end)
        (tokens,) = tokenizer.encode_batch([f"b{end}b{end}"])
        assert (tokens.tolist(), tokenizer.count_dropped(f"b{end}b{end}")) == ([2, 2], 2)


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"a": 0, END: 1}),
        models.WordPiece({"a": 0, END: 1}),
        models.Unigram([("a", -1.0), (END, -2.0)], unk_id=None),
        models.BPE(vocab={"a": 0, END: 1}, merges=[], unk_token="<unk>"),
    ],
)
def test_a_tokenizer_that_fails_on_a_text_is_named(model):
    tokenizer = Tokenizer(_backend(model, WORDS), END)
    assert [tokens.tolist() for tokens in tokenizer.encode_batch(["a"])] == [[0]]
    for work in (tokenizer.encode_batch, lambda texts: tokenizer.count_dropped(texts[0])):
        with raising(PermanentError, Reason.TOKENIZER_MISSING, tokenizer.digest[:12], "token for unknown words"):
            work(["a é"])


@pytest.mark.parametrize("alphabet", ["ACGT", "0123456789", "+-*/", " \t\n"])
def test_training_takes_a_long_run_of_one_kind_in_pieces(alphabet):
    run = "".join(random.Random(1).choices(alphabet, k=3 * MOST_RUN_CHARS + 100))
    pieces = [run[start : start + MOST_RUN_CHARS] for start in range(0, len(run), MOST_RUN_CHARS)]
    border = "x" if alphabet == "+-*/" else "+"
    cut = [border + pieces[0], *pieces[1:-1], pieces[-1] + border]
    whole = train_embedded_tokenizer([border + run + border], 400)
    assert whole.to_bytes() == train_embedded_tokenizer(cut, 400).to_bytes()


def test_a_stop_ends_the_training():
    ended = threading.Event()

    def texts():
        yield TEXTS[0]
        interrupt.request_stop()
        ended.wait(60)

    try:
        with pytest.raises(interrupt.StoppedError):
            train_embedded_tokenizer(texts(), 300)
    finally:
        ended.set()
        interrupt.clear_stop()


def test_the_smallest_vocabulary_holds_every_byte_of_utf8():
    smallest = train_embedded_tokenizer(TEXTS, 244)
    text = "".join(map(chr, range(0x800))) + "\u0fff\uffff\U0010ffff"
    assert smallest.decode(smallest.encode_batch([text])[0]) == text
    assert smallest.vocab_size == 244
    with pytest.raises(ValueError, match="244 ids"):
        train_embedded_tokenizer(TEXTS, 243)


def test_padding_and_truncation_of_the_original_are_left_behind(tokenizer):
    backend = Backend.from_str(tokenizer.to_bytes().decode())
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    wrapped = Tokenizer(backend)
    np.testing.assert_array_equal(wrapped.encode_batch(TEXTS)[0], tokenizer.encode_batch(TEXTS)[0])
    assert wrapped.digest == tokenizer.digest


def test_a_mark_of_byte_order_is_no_part_of_a_file(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_tokenizer(str(path)).digest == tokenizer.digest


@pytest.mark.parametrize("eos", ["a", {"content": "a", "special": True}])
def test_the_end_token_of_a_folder_is_read_from_its_configuration(tokenizer, tmp_path, eos):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.decode([loaded.eos_id]) == "a"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"text": "a"}}')
    with raising(PermanentError, Reason.TOKENIZER_MISSING, "eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "embedded", "words"),
    [
        ("embedded", None, "the dataset has no tokenizer.json"),
        ("embedded", b"\xff", "utf-8"),
        ("embedded", b"{}", "not a tokenizer"),
        ("no/such/folder/at/all", None, "no such file or folder"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named(name, embedded, words):
    with raising(PermanentError, Reason.TOKENIZER_MISSING, repr(name), match=words):
        load_tokenizer(name, embedded=embedded)


def test_a_tokenizer_without_the_end_token_or_with_more_ids_than_the_model_is_refused(tokenizer):
    with raising(PermanentError, Reason.TOKENIZER_MISSING, "no token '<eos>'"):
        Tokenizer(Backend(models.BPE()))
    check_fits(tokenizer, 320)
    with raising(PermanentError, Reason.BAD_HPARAMS, "320 ids but model.vocab_size is 319"):
        check_fits(tokenizer, 319)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "data", [NESTED, PANICKING.encode(), b"\xff\xfe", b"[]", b"", b"[" + b"[]," * 10**5 + b"0]", b'{"eos_token": [1]}']
)
def test_files_that_somebody_else_made_give_one_short_error(tokenizer, tmp_path, file, data):
    """Whether they are an operator's choice or a peer's; of a peer's nothing else than the network's is parsed."""
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / file).write_bytes(data)
    for reason, load in {
        Reason.TOKENIZER_MISSING: lambda: load_tokenizer(str(tmp_path)),
        Reason.CHECKPOINT_BROKEN: lambda: network_tokenizer(tmp_path, tokenizer.digest, tokenizer.vocab_size),
    }.items():
        with raising(PermanentError, reason, tmp_path) as caught:
            load()
        assert len(str(caught.value)) < 900


def test_only_the_networks_tokenizer_is_parsed(tokenizer, tmp_path, monkeypatch):
    save_tokenizer(tokenizer, tmp_path)
    loaded = network_tokenizer(tmp_path, tokenizer.digest, tokenizer.vocab_size)
    assert loaded.digest == tokenizer.digest
    assert loaded.to_bytes() == tokenizer.to_bytes()
    monkeypatch.setattr("templar.data.tokenizer._parse", lambda *_: pytest.fail("it was parsed"))
    content = json.loads(tokenizer.to_bytes())
    for other in (content | {"decoder": None}, content | {"normalizer": json.loads(PANICKING)["normalizer"]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(other))
        with raising(PermanentError, Reason.CHECKPOINT_BROKEN, "not the network's tokenizer"):
            network_tokenizer(tmp_path, tokenizer.digest, tokenizer.vocab_size)


def test_a_hugging_face_id_is_fetched_as_it_is_or_refused_with_the_remedy(tokenizer, tmp_path, monkeypatch):
    save_tokenizer(tokenizer, tmp_path)

    def download(name, file):
        if name != "someone/something":
            raise OSError("offline")
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_tokenizer("someone/something").digest == tokenizer.digest
    with raising(PermanentError, Reason.TOKENIZER_MISSING, "'someone/else'", "offline", "HF_TOKEN"):
        load_tokenizer("someone/else")
