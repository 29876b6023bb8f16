"""Each published checkpoint is measured once, and the result lies signed beside it."""

import pytest

from templar.agreement.checkpoint import EVALUATION_FILE
from templar.errors import PermanentError, Reason
from templar.exchange.object_keys import checkpoint_key
from templar.housekeeping.maintenance import publish_newest_checkpoint
from templar.reports import checkpoint_evaluation
from templar.reports.checkpoint_evaluation import evaluate_checkpoints, shown_results
from templar.reports.text_score import score_texts
from templar.training.model import build_model, load_parameters
from tests.support.errors import raising

AGGREGATOR = "aggregator-1"
TEXTS = ["a text that nobody trains on", "and another one"]


def evaluate(network, name=AGGREGATOR):
    def read_texts(tokenizer, most):
        return TEXTS[:most]

    return evaluate_checkpoints(network.config(name), read_texts)


def test_a_second_run_changes_nothing(network):
    network.run([1, 2])
    publish_newest_checkpoint(network.config(AGGREGATOR))
    first = evaluate(network)
    assert [(each.window, each.is_new) for each in first] == [(0, True), (2, True)]

    state, hparams = network.aggregator.state, network.hparams
    net = build_model(hparams.model)
    load_parameters(net, state.params)
    tokenizer = network.aggregator.workload.tokenizer
    assert first[1].root == state.root
    assert first[1].score == score_texts(net, tokenizer, TEXTS, hparams.model.max_position_embeddings)

    before = network.objects(AGGREGATOR)
    assert [(each.window, each.score, each.is_new) for each in evaluate(network)] == [
        (each.window, each.score, False) for each in first
    ]
    assert network.objects(AGGREGATOR) == before
    sizes = [len(data) for key, (_, data) in before.items() if key.endswith(EVALUATION_FILE)]
    assert max(sizes) < 1000, "they are kept for ever"
    assert not (network.config(AGGREGATOR).home / "evaluating").exists()


def test_without_a_checkpoint_of_this_network_it_says_so(network, monkeypatch):
    monkeypatch.setattr(checkpoint_evaluation, "list_checkpoints", lambda *_: [-1])  # of one that began earlier
    with raising(PermanentError, Reason.OBJECT_MISSING, match="publish one first"):
        evaluate(network, network.miners[0].name)


def test_an_evaluation_that_is_not_the_publishers_is_refused(network):
    network.bucket(AGGREGATOR).put(checkpoint_key(0, network.member(AGGREGATOR).uid, EVALUATION_FILE), b"{}")
    with pytest.raises(PermanentError):
        evaluate(network)


def test_names_of_tasks_are_shown_without_what_renderers_make_links_of():
    names = [("arc_easy", "acc_norm", 0.5), ("mmlu_1.0", "exact_match,strict", 0.25)]
    assert shown_results(tuple(names)) == "arc_easy acc_norm 0.5000, mmlu_1.0 exact_match,strict 0.2500"
    for address in ("http://a.example/x", "www.a.example", "a.example", "//a", "mailto:a", "ftp://1.example", "a1.b"):
        shown = shown_results(((address, address, 1.0),)).removesuffix(" 1.0000")
        assert not set("/:.") & set(shown), shown
