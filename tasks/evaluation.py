"""The evaluation of published checkpoints as a Prefect task."""

from functools import partial
from pathlib import Path

from prefect import task

from tasks.artifacts import Rows, table
from tasks.host import load_block
from tasks.policy import HOUSEKEEPING
from templar.errors import PermanentError, Reason
from templar.housekeeping.lm_tasks import run_tasks
from templar.reports.checkpoint_evaluation import EvaluatedCheckpoint, evaluate_checkpoints, shown_results


@task(task_run_name="evaluate published", **HOUSEKEEPING)
def evaluate_published(neuron: str, tasks: tuple[str, ...] = ()) -> tuple[EvaluatedCheckpoint, ...]:
    """Measure the neuron's checkpoints on held-out text and in tasks, each once; their figures are a table artifact.

    It is empty for a neuron that has published no checkpoint, such as a miner.
    """
    block = load_block(neuron)
    config = block.config(neuron)
    read_texts = partial(block.dataset.held_out_texts, config.hparams, Path(block.home))
    harness = partial(run_tasks, tasks=tasks) if tasks else None
    try:
        results = evaluate_checkpoints(config, read_texts, harness)
    except PermanentError as error:
        if error.reason is not Reason.OBJECT_MISSING:
            raise
        return ()
    finally:
        config.buckets.close()
    table(f"evaluation-{neuron}", _rows(results), "Checkpoints on held-out text, the newest last.")
    return results


def _rows(results: tuple[EvaluatedCheckpoint, ...]) -> Rows:
    """One row per checkpoint."""
    return [
        {
            "window": each.window,
            "loss": round(each.score.loss, 4),
            "perplexity": round(each.score.perplexity, 2),
            "bits per byte": round(each.score.bits_per_byte, 4),
            "texts": each.score.texts,
            "tokens": each.score.tokens,
            "tasks": shown_results(each.results),
            "root": each.root[:12],
        }
        for each in results
    ]
