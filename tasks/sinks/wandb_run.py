"""The process that has a neuron's run at Weights & Biases: a line of JSON in, `ok` or the problem in one line out.

    python -m tasks.sinks.wandb_run '{"project": ...}'

It ends with its standard input.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

AXIS = "window"  # the figure that charts are drawn over
FINISH_SECONDS = 10.0
"""The longest that the end of the run waits for W&B; what is not uploaded by then stays in the run's folder."""


def main() -> None:
    """Log each line's figures to the run that the first argument describes."""
    # 1. What W&B prints must not look like an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings, run = json.loads(sys.argv[1]), None

    # 2. The run starts with the first figures; a failed start leaves nothing behind and may be tried again.
    for line in sys.stdin:
        try:
            run = run or start(dict(settings))
            for row in json.loads(line):
                run.log(row["figures"], step=row["step"])
        except Exception as error:  # noqa: BLE001 - the other side decides
            print(" ".join(str(error).split())[:500] or repr(error), file=answers)
        else:
            print("ok", file=answers)

    # 3. Upload the rest.
    if run is not None:
        run.finish()


def start(settings: dict[str, Any]) -> Any:
    """Start the run, or go on with it."""
    import wandb  # noqa: PLC0415 - only this process needs it

    seconds, folder = settings.pop("seconds"), Path(settings["dir"]) / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    before = {*folder.iterdir()}
    quiet = wandb.Settings(
        init_timeout=seconds,
        finish_timeout=FINISH_SECONDS,
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        save_code=False,
        x_disable_meta=True,  # no host name, no command line
        x_save_requirements=False,
        x_disable_stats=True,
    )
    try:
        run = wandb.init(**settings, settings=quiet)
        run.define_metric("*", step_metric=AXIS)
        return run
    except Exception:
        for left in {*folder.glob(f"run-*-{settings['id']}")} - before:
            shutil.rmtree(left, ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
