"""Loss, perplexity and bits per byte against an independent computation, and against lm-evaluation-harness's own."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from templar.agreement.model_folder import write_model
from templar.data.tokenizer import train_embedded_tokenizer
from templar.errors import PermanentError, Reason
from templar.hparams import PRODUCTION_TRAINER, TrainerSettings, load_hparams
from templar.reports.text_score import run_tasks, score_texts, text_windows
from templar.training.device import choose_device
from templar.training.model import build_model, parameters_of
from tests.support.errors import raising

MODEL = load_hparams("simulation").model
LENGTH = MODEL.max_position_embeddings
TEXTS = [
    "def add(a, b):\n    return a + b\n" * 5,
    "x",
    "Grüße, Welt: ein längerer Satz, der nicht in ein Fenster passt.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_embedded_tokenizer(TEXTS, MODEL.vocab_size)


@pytest.fixture(scope="module")
def net():
    net = build_model(MODEL)
    for param in parameters_of(net).values():
        param.mul_(3)
    return net


@given(st.integers(0, 90), st.integers(1, 33))
def test_every_token_is_predicted_once_from_what_precedes_it(count, length):
    tokens, stream = list(range(1, count + 1)), list(range(count + 1))
    windows = list(text_windows(tokens, 0, length))
    assert [token for _, targets in windows for token in targets] == tokens
    for inputs, targets in windows:
        assert len(targets) <= len(inputs) <= length
        end = targets[-1]
        assert inputs == stream[end - len(inputs) : end]
        assert len(inputs) == min(length, end), "as much context as there is room for"


def test_the_figures_are_those_of_transformers_token_by_token(net, tokenizer):
    score, nats, count = score_texts(net, tokenizer, TEXTS, LENGTH), 0.0, 0
    for text in TEXTS:
        stream = [tokenizer.eos_id, *tokenizer.encode_batch([text])[0].tolist()]
        for place in range(1, len(stream)):
            first = (place - 1) // LENGTH * LENGTH
            last = min(first + LENGTH, len(stream) - 1)
            with torch.no_grad():
                row = net(input_ids=torch.tensor([stream[max(0, last - LENGTH) : place]])).logits[0, -1]
            nats += float(functional.cross_entropy(row.double(), torch.tensor(stream[place])))
            count += 1
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (score.texts, score.tokens, score.num_bytes) == (len(TEXTS), count, num_bytes)
    assert score.loss == pytest.approx(nats / count, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert score_texts(net, tokenizer, TEXTS, LENGTH) == score


def test_without_text_or_with_a_broken_model_there_is_no_score(tokenizer):
    broken = build_model(MODEL)
    with raising(PermanentError, Reason.DATASET_TOO_SMALL):
        score_texts(broken, tokenizer, ["", ""], LENGTH)
    parameters_of(broken)["lm_head.weight"].fill_(math.nan)
    with raising(PermanentError, Reason.NON_FINITE_LOSS):
        score_texts(broken, tokenizer, TEXTS, LENGTH)


def test_tasks_are_refused_a_device_that_is_not_there_as_training_is(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    settings = PRODUCTION_TRAINER.model_copy(update={"device": "cuda"})
    with raising(PermanentError, Reason.BAD_ENVIRONMENT, "TEMPLAR_DEVICE is 'cuda'") as training:
        choose_device(settings)
    with raising(PermanentError, Reason.BAD_ENVIRONMENT) as caught:
        run_tasks(tmp_path, ["arc_easy"], settings)
    assert caught.value.message == training.value.message


@pytest.mark.slow  # most of it is the import of the harness
class TestHarness:
    """The same texts as a task of our own, from this disk."""

    @pytest.fixture
    def folder(self, tmp_path, net, tokenizer, monkeypatch):
        pytest.importorskip("lm_eval")
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        for offline in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            monkeypatch.setenv(offline, "1")
        write_model(tmp_path / "model", parameters_of(net), MODEL, tokenizer)
        data = tmp_path / "texts.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        task = {
            "task": "own_texts",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "output_type": "loglikelihood_rolling",
            "test_split": "test",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
        }
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks" / "own.yaml").write_text(json.dumps(task))
        return tmp_path

    def test_its_code_agrees_on_the_same_text_on_the_device_of_the_settings(self, folder, net, tokenizer, monkeypatch):
        from lm_eval.models import huggingface

        real, places = huggingface.HFLM, list[str]()
        monkeypatch.setattr(huggingface, "HFLM", lambda **given: places.append(given["device"]) or real(**given))
        settings = TrainerSettings().model_copy(update={"device": "cpu:0", "precision": "bfloat16"})
        found = run_tasks(folder / "model", ["own_texts"], settings, include=folder / "tasks")
        assert places == ["cpu:0"]
        values = {metric: value for task, metric, value in found if task == "own_texts"}
        score = score_texts(net, tokenizer, TEXTS, LENGTH)
        assert values["bits_per_byte"] == pytest.approx(score.bits_per_byte, rel=1e-4)
        assert values["byte_perplexity"] == pytest.approx(2**score.bits_per_byte, rel=1e-4)
        with raising(PermanentError, Reason.BAD_PARAMETERS, match="has no task no_such_task"):
            run_tasks(folder / "model", ["own_texts", "no_such_task"], settings, include=folder / "tasks")
