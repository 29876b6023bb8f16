"""The tokenizer of a network: text to ids, one end-of-sequence id, and a digest that two nodes can compare.

A `Tokenizer` turns a text into the same ids on every node: nothing is added, truncated or padded, and the name of a
special token inside a text is ordinary text. The end token never stands inside a text, so that no document can forge a
document border: `encode` marks the end of each document.
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from templar.canonical import canonical_json, keyed_seed, sha256_hex
from templar.errors import PermanentError, Reason, one_line, parsing
from templar.interrupt import check_stop
from templar.store.files import local_file, sync

EMBEDDED = "embedded"
EOS_TOKEN = "<eos>"  # noqa: S105 - a token of text
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MAX_TOKENIZER_BYTES, MAX_CONFIG_BYTES = 2**26, 2**22
_VALUES = 8  # most commas and opening brackets for each token of a vocabulary: an entry has one, and a merge four

BATCH_TOKENS = 2**20  # approximate number of tokens that are packed and written at a time

BATCH_CHARS = 2**20
"""Approximate number of characters that are tokenised at a time: the library keeps about 60 bytes for each."""

TokenType = Literal["uint16", "uint32"]

# Bytes that no UTF-8 text contains. The alphabet is lossless without them, and a small vocabulary has room for pairs.
_NEVER_IN_UTF8 = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}

MOST_RUN_CHARS = 2**10
"""Most characters of a word that an embedded tokenizer is trained on: the cost grows with the square of the length."""

_SPACES = re.compile(rf"\s{{{MOST_RUN_CHARS}}}")
_RUN = re.compile("|".join(rf"(?:{kind}){{{MOST_RUN_CHARS}}}" for kind in (r"[^\W\d_]", r"\d", r"[^\w\s]|_", r"\s")))

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Tokenizer:
    """Encodes batches of texts; made by `load_tokenizer` or `train_embedded_tokenizer`.

    The backend is copied, so that its own truncation and padding change nothing here. `tokenizer_missing` if it has no
    such token.
    """

    def __init__(self, backend: Backend, eos_token: str = EOS_TOKEN) -> None:
        self._backend = Backend.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.eos_token = eos_token
        eos_id = self._backend.token_to_id(eos_token)
        if eos_id is None:
            raise PermanentError(
                Reason.TOKENIZER_MISSING,
                f"tokenizer: it has no token {eos_token!r} to end a document with; "
                f"name its end token as eos_token in {TOKENIZER_CONFIG_FILE}, or choose another tokenizer",
            )
        self.eos_id: int = eos_id
        self._keeps: dict[str, bool] = {}  # by character

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the smallest embedding that fits."""
        return max(self.vocabulary.values()) + 1

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the end token and of everything in `tokenizer.json`."""
        return _digest_of(self.eos_token, json.loads(self._backend.to_str()))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of each text, in order, without any special token.

        PermanentError: `tokenizer_missing`; the tokenizer fails on a text.
        """
        found = [np.array(encoding.ids, dtype=np.int32) for encoding in self._encode(texts)]
        # A model may know the end token's name as a word, and a token that is not marked as special is looked for in
        # texts. So its name is cut behind the first character. What is still the end token, such as an unknown word
        # where both are one, is left out.
        first, rest = self.eos_token[:1], self.eos_token[1:]
        for index in [index for index, tokens in enumerate(found) if (tokens == self.eos_id).any()]:
            parts = texts[index].split(self.eos_token)
            cut = [rest * (place > 0) + part + first * (place < len(parts) - 1) for place, part in enumerate(parts)]
            tokens = np.array([token for encoding in self._encode(cut) for token in encoding.ids], dtype=np.int32)
            found[index] = tokens[tokens != self.eos_id]
        return found

    def _encode(self, texts: Sequence[str], *, with_offsets: bool = False) -> list[Any]:
        work = self._backend.encode_batch if with_offsets else self._backend.encode_batch_fast
        try:
            return work(list(texts), add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - the Rust library raises bare Exception
            problem = f"a text cannot be encoded: {one_line(str(error))}"
            raise _missing(
                self.digest[:12], problem, "choose one with a token for unknown words, or repair it"
            ) from None

    @cached_property
    def _unknown(self) -> tuple[int | None, ...]:
        model = json.loads(self._backend.to_str())["model"]
        return self.eos_id, model.get("unk_id"), self.vocabulary.get(model.get("unk_token"))

    def count_dropped(self, text: str) -> int:
        """Characters of a text, white space aside, that no token stands for, or only the one of unknown words."""
        # 1. Most models say which words or pieces they do not know.
        if not isinstance(self._backend.model, models.BPE):
            (encoding,) = self._encode([text], with_offsets=True)
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            return sum(stop - start for token, (start, stop) in spans if token in self._unknown)
        # 2. BPE knows a character or not. One that is dropped is dropped twice as well.
        chars = {char for char in set(text) if not char.isspace() or char == self.eos_token}
        for char in chars - self._keeps.keys():
            once, twice = (encoding.ids for encoding in self._encode([char, char * 2]))
            self._keeps[char] = once != twice and not any(token in self._unknown for token in once)
        return sum(text.count(char) for char in chars if not self._keeps[char])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens are left out."""
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        """The content, by name, of the files that `load_tokenizer` and transformers read back."""
        config = {"eos_token": self.eos_token, "tokenizer_class": "PreTrainedTokenizerFast"}
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return {TOKENIZER_FILE: self.to_bytes(), TOKENIZER_CONFIG_FILE: text.encode()}

    def to_bytes(self) -> bytes:
        """The content of `tokenizer.json`."""
        return self._backend.to_str(pretty=True).encode()


def _digest_of(eos_token: str, content: object) -> str:
    return sha256_hex(canonical_json({"eos_token": eos_token, "tokenizer": content}))


def load_tokenizer(name_or_path: str, *, embedded: bytes | None = None) -> Tokenizer:
    """Load the tokenizer that `data.tokenizer_name` names.

    The name is `embedded`, a local folder or `tokenizer.json`, or a Hugging Face id, which is taken from the local
    cache or downloaded. `embedded` is the `tokenizer.json` that lies beside the dataset; its end token is `<eos>`.

    PermanentError: `tokenizer_missing`, with the remedy.
    """
    if name_or_path == EMBEDDED:
        if embedded is None:
            raise _missing(
                name_or_path, f"the dataset has no {TOKENIZER_FILE}", "build the dataset again or name another"
            )
        return Tokenizer(_parse(embedded, name_or_path))
    path = Path(name_or_path)
    if path.exists():
        return _load_local(path)
    if not _HUB_ID.fullmatch(name_or_path):
        raise _missing(name_or_path, "no such file or folder", "correct data.tokenizer_name")
    return _load_from_hub(name_or_path)


def network_tokenizer(folder: Path, digest: str, vocab_size: int) -> Tokenizer:
    """The network's tokenizer from a folder that somebody else filled: its parser sees nothing with another digest.

    `model.vocab_size` bounds the values in the file. `checkpoint_broken` if it is another tokenizer.
    """
    file, most = folder / TOKENIZER_FILE, 2**16 + _VALUES * vocab_size
    try:
        data, end = _read(file), _local_eos_token(folder / TOKENIZER_CONFIG_FILE)
        if sum(map(data.count, (b",", b"[", b"{"))) > most:
            raise _missing(str(file), f"it has more than {most} values", "take the files of another validator")
        with parsing(str(file), Reason.CHECKPOINT_BROKEN, size=len(data), most=MAX_TOKENIZER_BYTES):
            content = json.loads(data)
            found = _digest_of(end, content)
        if found != digest:
            raise _missing(str(file), "it is not the network's tokenizer", "take the files of another validator")
        plain = json.dumps(content).encode()  # no key twice, of which another parser may take another one
        return Tokenizer(_parse(plain, str(file)), end)
    except PermanentError as error:
        raise PermanentError(Reason.CHECKPOINT_BROKEN, error.message) from None


def _load_local(path: Path) -> Tokenizer:
    file = path / TOKENIZER_FILE if path.is_dir() else path
    return Tokenizer(_parse(_read(file), str(file)), _local_eos_token(file.with_name(TOKENIZER_CONFIG_FILE)))


def _read(file: Path, most: int = MAX_TOKENIZER_BYTES) -> bytes:
    try:
        with parsing(str(file), Reason.TOKENIZER_MISSING, size=file.stat().st_size, most=most):
            return file.read_bytes()
    except OSError as error:
        remedy = f"point to a folder with {TOKENIZER_FILE}"
        raise _missing(str(file), f"{file.name} cannot be read: {error}", remedy) from None


def _local_eos_token(config_file: Path) -> str:
    if not config_file.exists():
        return EOS_TOKEN
    data = _read(config_file, MAX_CONFIG_BYTES)
    what, remedy = f"tokenizer {str(config_file)!r}: no eos_token in it", "name the end token as eos_token"
    with parsing(what, Reason.TOKENIZER_MISSING, size=len(data), most=MAX_CONFIG_BYTES, remedy=remedy):
        token = json.loads(data.decode("utf-8-sig"))["eos_token"]
        # transformers writes either the token or a description of it.
        text = token["content"] if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is not a string")
        return text


def _parse(data: bytes, origin: str) -> Backend:
    what = f"tokenizer {origin!r}: {TOKENIZER_FILE} is not a tokenizer"
    with parsing(what, Reason.TOKENIZER_MISSING, size=len(data), most=MAX_TOKENIZER_BYTES, remedy="restore the file"):
        return Backend.from_str(data.decode("utf-8-sig"))


def _load_from_hub(name: str) -> Tokenizer:
    """The repository's own `tokenizer.json`, as it is: transformers' classes rebuild it, differently by version."""
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - local tokenizers do without

    try:
        hf_hub_download(name, TOKENIZER_CONFIG_FILE)
        file = hf_hub_download(name, TOKENIZER_FILE)
    except Exception as error:  # hub, HTTP client and file system have no common base
        raise _missing(
            name,
            f"neither in the local cache nor available from Hugging Face: {one_line(str(error))}",
            f"check the id and the network (and HF_TOKEN if it is gated), or name a folder with {TOKENIZER_FILE} and "
            f"{TOKENIZER_CONFIG_FILE}",
        ) from error
    return _load_local(Path(file))


def _missing(name: str, problem: str, remedy: str) -> PermanentError:
    return PermanentError(Reason.TOKENIZER_MISSING, f"tokenizer {name!r}: {problem}; {remedy}")


def train_embedded_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE whose only special token is `<eos>`, id 0; the same texts give the same bytes.

    It has `vocab_size` ids at most, and fewer if the texts hold too few pairs.

    ValueError: `vocab_size` has no room for the bytes of UTF-8 and the end token (244 ids).
    """
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - _NEVER_IN_UTF8)
    if vocab_size < len(alphabet) + 1:
        raise ValueError(f"vocab_size {vocab_size} is too small: bytes and {EOS_TOKEN} need {len(alphabet) + 1} ids")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS_TOKEN], initial_alphabet=alphabet, show_progress=False
    )
    _train(backend, (piece for text in texts for piece in _bounded(text)), trainer)
    return Tokenizer(backend)


def _bounded(text: str) -> Iterator[str]:
    """A text, cut within runs of more than `MOST_RUN_CHARS` characters of one kind and nowhere else."""
    start = 0
    if max(map(len, text.split()), default=0) >= MOST_RUN_CHARS or _SPACES.search(text):
        for run in _RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
    yield text[start:]


def _train(backend: Backend, texts: Iterator[str], trainer: trainers.BpeTrainer) -> None:
    """Train in a thread that ends with the process: within the library, a process neither hears signals nor stops."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            backend.train_from_iterator(texts, trainer)
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the thread that waits must get it
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while wait([done], 0.1).not_done:
        check_stop()
    done.result()


def check_fits(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Refuse a tokenizer with ids beyond the model's embedding.

    PermanentError: `bad_hparams`, if it has more ids than `model.vocab_size`.
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise PermanentError(
            Reason.BAD_HPARAMS,
            f"data.tokenizer_name: the tokenizer has {tokenizer.vocab_size} ids but model.vocab_size is "
            f"{model_vocab_size}; raise model.vocab_size or choose a smaller tokenizer",
        )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer, on the disk before this returns; errors as in `local_file`."""
    with local_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in tokenizer.files().items():
            (folder / name).write_bytes(content)
            sync(folder / name)


def token_type(tokenizer: Tokenizer) -> TokenType:
    """The smaller type that holds every id."""
    return "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"


def order_key(source: str, name: str) -> int:
    """The 64-bit number by which the documents of a split are ordered."""
    return keyed_seed("templar.shards.order", source, name) >> 64


def encode_all(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """`encode` for any number of texts, about `BATCH_CHARS` characters at a time; yields the tokens of each text."""
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if length >= BATCH_CHARS:
            yield from encode(batch, tokenizer)
            batch, length = [], 0
    yield from encode(batch, tokenizer)


def encode(texts: Sequence[str], tokenizer: Tokenizer) -> list[NDArray[np.integer]]:
    """The tokens of each text and exactly one end token; an empty array if it has no other token."""
    end = np.array([tokenizer.eos_id], dtype=np.int32)
    return [np.append(tokens, end) if len(tokens) else tokens for tokens in tokenizer.encode_batch(texts)]


def packed(token_lists: Iterable[NDArray[np.integer]], sequence_length: int) -> Iterator[NDArray[np.integer]]:
    """Cut a stream of tokens, given in pieces, into samples; a rest that fills no sample is dropped.

    Yields:
        Samples of shape (n, sequence_length), about `BATCH_TOKENS` tokens at a time.
    """
    waiting: list[NDArray[np.integer]] = []
    length = 0
    for tokens in token_lists:
        waiting.append(tokens)
        length += len(tokens)
        if length >= max(BATCH_TOKENS, sequence_length):
            stream = np.concatenate(waiting)
            whole = len(stream) // sequence_length * sequence_length
            yield stream[:whole].reshape(-1, sequence_length)
            waiting, length = [stream[whole:]], len(stream) - whole
    if length >= sequence_length:
        stream = np.concatenate(waiting)
        yield stream[: length // sequence_length * sequence_length].reshape(-1, sequence_length)
