"""Which tasks are retried, with which policy, and after which errors."""

import importlib
import pkgutil

import pytest
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

import tasks
from tasks.policy import CHAIN, HOUSEKEEPING, LOCAL, SETTLE, STORE, WEIGHTS, is_transient
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.interrupt import StoppedError

UNRETRIED = {"train", "gather"}  # `tasks/window.py` says why
DEFAULTS = {"retries": 0, "retry_delay_seconds": 0, "retry_jitter_factor": None, "retry_condition_fn": None}
POLICIES = [DEFAULTS | policy for policy in (CHAIN, STORE, SETTLE, LOCAL, WEIGHTS, HOUSEKEEPING)]

ALL: dict[str, Task] = {
    name: member
    for module in pkgutil.iter_modules(tasks.__path__, "tasks.")
    for name, member in vars(importlib.import_module(module.name)).items()
    if isinstance(member, Task)
}


@pytest.mark.parametrize("name", ALL)
def test_a_task_has_its_own_name_and_is_retried_by_a_policy(name):
    settings = {field: getattr(ALL[name], field) for field in DEFAULTS}
    assert settings == DEFAULTS if name in UNRETRIED else settings in POLICIES
    assert str(ALL[name].task_run_name).split(" {")[0].replace(" ", "_") in {name, "roster"}


@pytest.mark.parametrize("name", ["plan_dataset", "build_unit", "assemble_dataset"])
def test_a_plan_of_many_files_is_not_hashed(name):
    assert ALL[name].cache_policy is NO_CACHE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransientError(Reason.STORE_BUSY, "busy"), True),
        (TransientError(Reason.CHAIN_UNREACHABLE, "away"), True),
        (PermanentError(Reason.ACCESS_DENIED, "denied"), False),
        (RejectedError(Reason.BAD_SIGNATURE, "forged"), False),
        (StoppedError("stopped"), False),
        (OSError("disk"), True),
        (ValueError("a bug"), True),
    ],
)
def test_only_permanent_errors_and_stops_are_final(error, expected):
    assert is_transient(None, None, Failed(data=error)) is expected
