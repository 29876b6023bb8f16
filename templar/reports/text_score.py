"""Measure how well a model predicts text, as lm-evaluation-harness counts it, and what it scores in the tasks of that.

Every text stands for itself: its first token is predicted from the end token, as documents follow each other in
training, and every token exactly once. A text that is longer than the model's context is cut into windows; the last
one goes back as far as there is room. So the figures agree with those of a `loglikelihood_rolling` task on the same
texts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from templar.data.tokenizer import Tokenizer
from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings
from templar.training.device import Work, choose_device
from templar.training.loss import single_threaded, torch_threads
from templar.training.memory import on_device
from templar.training.model import logits

BATCH = 16  # windows of one length that are computed at once
TASKS = Work("the tasks of lm-evaluation-harness", "their batches", "this checkpoint has no results")


@dataclass(frozen=True)
class TextScore:
    """The prediction of some texts; sums over all of them."""

    texts: int
    tokens: int
    num_bytes: int  # of UTF-8
    nats: float  # negative log-likelihood of all tokens

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text: comparable between tokenizers."""
        return self.nats / math.log(2) / self.num_bytes


def score_texts(net: nn.Module, tokenizer: Tokenizer, texts: Sequence[str], length: int) -> TextScore:
    """Score texts, on one thread, so that the result is the same every time.

    The model is on the CPU and sees at most `length` tokens at once; an empty text counts in `texts` alone.
    PermanentError: `dataset_too_small`, there is no token to predict; `non_finite_loss`.
    """
    # 1. The windows of all texts; those of one length go through the model together.
    token_lists = [tokens.tolist() for tokens in tokenizer.encode_batch(texts)]
    windows = [window for tokens in token_lists for window in text_windows(tokens, tokenizer.eos_id, length)]
    if not windows:
        raise PermanentError(Reason.DATASET_TOO_SMALL, "there is no held-out text: build the dataset with some")
    windows.sort(key=lambda window: len(window[0]))

    # 2. The log-likelihood of each window's targets.
    nats = list[float]()
    with single_threaded(), torch.no_grad():
        start = 0
        while start < len(windows):
            size = len(windows[start][0])
            batch = [each for each in windows[start : start + BATCH] if len(each[0]) == size]
            scores = torch.log_softmax(logits(net, torch.tensor([inputs for inputs, _ in batch])), dim=-1)
            for row, (_, targets) in zip(scores, batch, strict=True):
                chosen = row[len(row) - len(targets) :].gather(1, torch.tensor(targets).unsqueeze(1))
                nats.append(-float(chosen.double().sum()))
            start += len(batch)
    total = math.fsum(nats)
    if not math.isfinite(total):
        raise PermanentError(Reason.NON_FINITE_LOSS, "the model's loss on held-out text is not finite")
    return TextScore(len(texts), sum(map(len, token_lists)), sum(len(text.encode()) for text in texts), total)


def text_windows(tokens: Sequence[int], first: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut a text into inputs of at most `length` tokens, each with the tokens that follow its last ones.

    There are as many targets as inputs, or fewer in the last window of several.
    """
    stream = [first, *tokens]
    for done in range(0, len(tokens), length):
        end = min(done + length, len(tokens))
        yield stream[max(0, end - length) : end], list(tokens[done:end])


def run_tasks(
    folder: Path, tasks: Sequence[str], settings: TrainerSettings, *, include: Path | None = None
) -> list[tuple[str, str, float]]:
    """Run tasks of lm-evaluation-harness, which is the extra `evaluation`, on the device of these settings, in float32.

    The folder has the model in the Hugging Face layout; `include` is a folder with more tasks. Their data sets are
    downloaded unless they are here. The result has task, metric and value, in the order of the tasks' names.

    Raises:
        PermanentError: `bad_environment`; the extra is not installed, or there is no such device. `bad_parameters`;
            there is no such task. `out_of_memory`.
        TransientError: `trainer_failed`; torch or the device's driver refuses something.
    """
    whole = settings.model_copy(update={"precision": "float32", "compile_layers": False})
    device = choose_device(whole, TASKS)
    if find_spec("lm_eval") is None:
        problem = "lm-evaluation-harness, which has the tasks, is not installed: `pip install -e '.[evaluation]'`"
        raise PermanentError(Reason.BAD_ENVIRONMENT, problem)
    from lm_eval import simple_evaluate  # noqa: PLC0415 - it takes seconds, and is optional
    from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    manager: Any = TaskManager(include_path=None if include is None else str(include))
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        problem = f"--tasks: lm-evaluation-harness has no task {', '.join(unknown)}: `lm_eval ls tasks` lists them"
        raise PermanentError(Reason.BAD_PARAMETERS, problem)
    with torch_threads(device.threads), on_device(device, TASKS):
        model: Any = HFLM(pretrained=str(folder), device=str(device.place), batch_size=BATCH)
        found: Any = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)
    return [
        (task, metric.removesuffix(",none"), float(value))
        for task, figures in sorted(found["results"].items())
        for metric, value in figures.items()
        if isinstance(value, int | float) and not metric.startswith(("alias", "sample_len"))
    ]
