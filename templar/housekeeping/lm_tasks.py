"""Tasks of lm-evaluation-harness on a model's folder, through its own interface. It is the extra `evaluation`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from templar.errors import PermanentError, Reason
from templar.hparams import TrainerSettings
from templar.training.device import Work, choose_device
from templar.training.loss import torch_threads
from templar.training.memory import on_device

BATCH = 16
TASKS = Work("the tasks of lm-evaluation-harness", "their batches", "this checkpoint has no results")


def run_tasks(
    folder: Path, tasks: Sequence[str], settings: TrainerSettings, *, include: Path | None = None
) -> list[tuple[str, str, float]]:
    """Run tasks on the device of these settings, in float32; their data sets are downloaded unless they are here.

    The folder has the model in the Hugging Face layout; `include` is a folder with more tasks. The result has task,
    metric and value, in the order of the tasks' names.

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
