"""Print as JSON what SkyPilot makes of a task file; its own virtual environment executes this.

    .venv-skypilot/bin/python -P tests/support/skypilot_task.py FILE SECRETS_FILE [NAME=VALUE ...]

File and options are read as `sky jobs launch FILE --secret-file SECRETS_FILE --env NAME=VALUE` reads them, and `setup`
and `run` are the shell scripts that a machine executes.
"""

import json
import sys

from dotenv import dotenv_values
from sky.skylet.log_lib import make_task_bash_script
from sky.task import get_plaintext_envs_and_secrets, get_plaintext_secrets
from sky.utils.dag_utils import load_chain_dag_from_yaml


def main(file, secrets_file, *variables):
    secrets = list(dotenv_values(secrets_file).items())
    envs = [tuple(variable.split("=", 1)) for variable in variables]
    (task,) = load_chain_dag_from_yaml(file, envs, secrets).tasks
    task.expand_and_validate_workdir()
    given = get_plaintext_envs_and_secrets(task.envs_and_secrets)
    found = {
        "name": task.name,
        "envs": task.envs,
        "secrets": get_plaintext_secrets(task.secrets),
        "resources": [each.to_yaml_config() for each in task.resources],
        "unresolved": [reference.name for reference in task._managed_secret_refs],
        "setup": make_task_bash_script(task.setup, env_vars=given),
        "run": make_task_bash_script(task.run, env_vars=given),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
