"""The benchmark of the scoring runs with few miners and tokens, and its last line holds the figures."""

import pytest

from benchmarks import scoring

SMALL = scoring.Sizes(per_grade=1, windows=1, segment=2, timed=1, rounds=1)


@pytest.mark.slow
def test_the_figures(monkeypatch, measure):
    monkeypatch.setattr(scoring, "QUICK", SMALL)
    code, table, figures = measure(scoring.main)
    assert code == (0 if figures["holds"] else 1)
    assert figures["holds"] == (figures["spearman"] >= scoring.RANK_BAR), "too few miners for the cost"
    ratio = figures["ours_cpu_seconds_per_miner"] / figures["reference_cpu_seconds_per_miner"]
    assert figures["cost_fraction"] == pytest.approx(ratio, rel=0.05)
    assert -1 <= figures["spearman"] <= 1
    assert figures["num_miners"] == len(scoring.STEPS)
    assert figures["fresh_tokens"] == scoring.TOKENS_TIMES * figures["batch_tokens"]
    assert all(any(str(steps) in line for line in table) for steps in scoring.STEPS)
