"""Tasks of lm-evaluation-harness on a model's folder, through its own interface. It is the extra `evaluation`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from templar.errors import PermanentError, Reason

BATCH = 16


def run_tasks(folder: Path, tasks: Sequence[str], *, include: Path | None = None) -> list[tuple[str, str, float]]:
    """Run tasks on the CPU; their data sets are downloaded unless they are on this disk.

    The folder has the model in the Hugging Face layout; `include` is a folder with more tasks. The result has task,
    metric and value, in the order of the tasks' names. PermanentError: `bad_environment`, the extra is not installed;
    `bad_parameters`, there is no such task.
    """
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
    model: Any = HFLM(pretrained=str(folder), device="cpu", batch_size=BATCH)
    found: Any = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)
    return [
        (task, metric.removesuffix(",none"), float(value))
        for task, figures in sorted(found["results"].items())
        for metric, value in figures.items()
        if isinstance(value, int | float) and not metric.startswith(("alias", "sample_len"))
    ]
