"""The model card of a checkpoint: what was trained, by whom, how the loss fell, and how a reader verifies it.

Everything in it is read from public objects of the checkpoint's window and earlier ones. The buckets keep these for
`retention_windows`, so the card says which windows it counts. Evaluations of earlier checkpoints are kept for ever.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from templar.agreement.genesis import Birth
from templar.agreement.proven_state import KeptModel
from templar.agreement.state import StateMark
from templar.data.dataset import DatasetOrigin
from templar.exchange.network_view import NetworkView
from templar.exchange.objects import RosterEntry
from templar.hparams import HParams
from templar.reports.checkpoint_evaluation import HeldOutPoint, read_evaluations
from templar.reports.history import CONCURRENCY, decided_entries, first_published
from templar.reports.training_curve import held_out_rows
from templar.store.deadline import in_parallel
from templar.training.device import num_parameters

PICTURE_FILE = "held_out.svg"  # the held-out curve, beside the card
MOST_ROWS = 20  # rows of each table: more windows are thinned out, and of more contributors the largest are named
USE = """\
## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (kind.from_pretrained(FOLDER) for kind in (AutoModelForCausalLM, AutoTokenizer))
ids = tokenizer("def ", return_tensors="pt", add_special_tokens=False)
print(tokenizer.decode(model.generate(**ids, max_new_tokens=32)[0]))
```

Every document of the training data ends with the end token, and none begins with another special token.
"""
VERIFY = """## Verify

The state root covers every parameter and the whole history. A quorum of the validators' stake proved it.

```console
$ templar model fetch --window {window}    # hashes, and the root against the proofs of the stake
$ templar model verify --window {window}   # the same state, computed again from the miners' payloads
```
"""


@dataclass(frozen=True)
class TrainingHistory:
    """The training up to a window, as public objects show it."""

    windows: range  # that are counted
    entries: Mapping[int, tuple[RosterEntry, ...]]  # by window, none in a null one; unreadable rosters miss
    losses: Mapping[int, float]  # by window: loss of a validator's evaluation batch before the window's step
    measured_by: int | None = None  # the validator's uid; None if no evidence was found
    pay: Mapping[str, float] = field(default_factory=dict)  # by hotkey: share of the weight that its evidence gave
    held_out: tuple[HeldOutPoint, ...] = ()  # of earlier checkpoints and the genesis, by rising window


def read_history(exchange: NetworkView, birth: Birth, window: int) -> TrainingHistory:
    """Read the training of the windows up to this one whose objects the buckets keep.

    TransientError if the chain could not be reached, or no validator's evidence can be read now.
    """
    first = max(birth.start.start_window, window - exchange.hparams.storage.retention_windows + 1)
    windows = range(first, window + 1)
    found = in_parallel(partial(decided_entries, exchange), windows, CONCURRENCY)
    entries = {each: entries for each, entries in zip(windows, found, strict=True) if entries is not None}
    held_out = tuple(point for point in read_evaluations(exchange, birth).points if point.window <= window)
    published = first_published(exchange, windows)
    if published is None:
        return TrainingHistory(windows, entries, {}, held_out=held_out)
    losses = {each.window: each.loss for each in published.evidences if each.loss is not None}

    # Each miner's share of the weight of all miners, over all windows.
    weights = defaultdict[str, float](float)
    for evidence in published.evidences:
        hotkeys = {record.uid: record.facts.hotkey for record in evidence.miners}
        for record in evidence.weights:
            if record.uid in hotkeys:
                weights[hotkeys[record.uid]] += record.weight
    total = sum(weights.values())
    pay = {hotkey: weight / total for hotkey, weight in weights.items()} if total else {}
    return TrainingHistory(windows, entries, losses, published.validator.uid, pay, held_out)


def model_card(
    hparams: HParams,
    preset: str,
    birth: Birth,
    mark: StateMark | KeptModel,
    history: TrainingHistory,
    *,
    origin: DatasetOrigin | None,
) -> str:
    """The card in Markdown, with the header that the Hugging Face Hub reads; `origin` is that of the dataset.

    `hparams` are the settings of the mark's window, or of the genesis for a kept model: it has no plan.
    """
    model, start, kind = hparams.model, birth.start, "Qwen 3" if hparams.model.query_key_norm else "Llama"
    when = "at the start" if isinstance(mark, KeptModel) else f"in window {mark.window}"
    dataset = hparams.data.other_dataset or start.dataset
    facts = [
        ("Preset", preset),
        ("Parameters", f"{num_parameters(model):,}"),
        ("Architecture", f"{kind}, {model.num_hidden_layers} layers of {model.hidden_size}, float32"),
        ("Context", f"{model.max_position_embeddings} tokens"),
        ("Window", f"{mark.window}, the first was {start.start_window}"),
        ("Outer steps", f"{mark.outer_steps:,}"),
        ("State root", f"`{mark.root}`"),
        ("Network", f"subnet {start.netuid}, genesis `{start.digest}`"),
        ("Hyper-parameters", f"`{start.hparams}`"),
        (f"Dataset {when}", f"`{dataset}`, layout {hparams.data.layout}, sequences of {hparams.data.sequence_length}"),
        ("Tokenizer", f"{hparams.data.tokenizer_name}, `{start.tokenizer}`"),
    ]
    said = {} if origin is None else {name: _plain(text) for name, text in origin.settings if text}
    if origin is not None:
        facts += [
            ("Sources of the text, by the dataset's card", _plain(", ".join(each.name for each in origin.sources)))
        ]
        facts += [(f"Its {name}, by the same", text) for name, text in said.items()]
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [templar, llama]",
        *(f"{name}: {text if name == 'license' else f'[{text}]'}" for name, text in said.items()),
        "---",
        "",
        f"# Model of window {mark.window}",
        "",
        "Miners who do not know each other trained this model together. It is the agreed state of their network after",
        f"window {mark.window}. The digests below are SHA-256.",
        "",
        *_table(("", ""), facts),
        "",
        USE,
        *_training(hparams, when, history),
        *_held_out(history.held_out),
        *_contributors(history),
        VERIFY.format(window=mark.window),
    ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """A text of somebody else's card, without characters that mean something in Markdown or YAML."""
    return re.sub(r"[^A-Za-z0-9., -]+", "-", text)[:1000]


def _training(hparams: HParams, when: str, history: TrainingHistory) -> list[str]:
    """Tell how much was trained in the windows that are counted, and the loss."""
    entries = list(chain.from_iterable(history.entries.values()))
    null = sum(not each for each in history.entries.values())
    training = hparams.training
    lines = [
        "## Training",
        "",
        f"Recipe `{training.recipe}`, {when} up to {training.inner_steps} inner steps and {training.most_sequences} "
        "sequences by each miner in a window.",
        f"Of the windows {history.windows.start} to {history.windows.stop - 1}, {len(history.entries)} are counted: "
        f"{null} of them without a step.",
        f"{len(entries)} payloads were applied. By their authors' word they stand for "
        f"{sum(entry.tokens for entry in entries):,} tokens.",
        "",
    ]
    if not history.losses:
        return lines
    windows = _thinned(sorted(history.losses))
    rows = [(str(window), f"{history.losses[window]:.4f}") for window in windows]
    return [
        *lines,
        f"Loss before the window's step, in nats per token, on the evaluation batch of uid {history.measured_by}:",
        "",
        *_table(("window", "loss"), rows),
        "",
    ]


def _held_out(points: Sequence[HeldOutPoint]) -> list[str]:
    """Tell how well earlier checkpoints predict text that nobody trained on."""
    if not points:
        return []
    rows = held_out_rows(_thinned(points))
    return [
        "## Held-out text",
        "",
        f"![Loss on held-out text over tokens and over time]({PICTURE_FILE})",
        "",
        "Validators measured earlier checkpoints on text that is not in the training data. The loss is in nats per",
        "token. The time is that of the chain. The tokens are those of the applied payloads, by their authors' word.",
        "",
        *_table([*rows[0]], [[*row.values()] for row in rows]),
        "",
    ]


def _contributors(history: TrainingHistory) -> list[str]:
    """Name the miners by the share of the pay: it follows how far a miner's payloads lowered the loss."""
    payloads, tokens = Counter[str](), Counter[str]()
    for entry in chain.from_iterable(history.entries.values()):
        payloads[entry.hotkey] += 1
        tokens[entry.hotkey] += entry.tokens
    if not payloads:
        return []
    pay = history.pay
    largest = sorted(payloads, key=lambda hotkey: (-pay.get(hotkey, 0.0), -payloads[hotkey], hotkey))
    rows = [
        (f"`{hotkey}`", f"{pay.get(hotkey, 0.0):.1%}", str(payloads[hotkey]), f"{tokens[hotkey]:,}")
        for hotkey in largest[:MOST_ROWS]
    ]
    rest = len(largest) - len(rows)
    return [
        "## Contributors",
        "",
        *_table(("hotkey", "share of the pay", "payloads", "tokens, by its own word"), rows),
        *((f"| {rest} more | | | |",) if rest else ()),
        "",
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _thinned(items: Sequence[Any]) -> Sequence[Any]:
    """At most `MOST_ROWS` of them, evenly spread, with the first and the last."""
    if len(items) <= MOST_ROWS:
        return items
    step = (len(items) - 1) / (MOST_ROWS - 1)
    return [items[round(index * step)] for index in range(MOST_ROWS)]
