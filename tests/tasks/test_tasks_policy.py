"""Which tasks are retried, with which policy, and after which errors."""

import ast
import importlib
import pkgutil

import pytest
from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

import tasks
from tasks.policy import CHAIN, HOUSEKEEPING, LOCAL, STORE, WEIGHTS, is_transient
from templar.errors import PermanentError, Reason, RejectedError, TransientError
from templar.interrupt import StoppedError
from tests.support.servers import REPOSITORY

POLICIES = {
    "open_window": CHAIN,
    "update_peers": CHAIN,
    "fetch_pages": STORE,
    "train": {},
    "compress": LOCAL,
    "commit": STORE,
    "upload": STORE,
    "gather": {},
    "settle": STORE,
    "settle_and_publish": STORE,
    "decide": STORE,
    "evaluate": STORE,
    "rate": LOCAL,
    "apply": LOCAL,
    "publish_evidence": STORE,
    "set_weights": WEIGHTS,
    "publish_sync_proof": STORE,
    "close_window": STORE,
    "upload_dataset": STORE,
    **dict.fromkeys(("publish_checkpoint", "clean_bucket", "purge_bucket", "clean_temporary"), HOUSEKEEPING),
    **dict.fromkeys(("check_access", "clean_local", "rotate_shards", "audit_evidence"), HOUSEKEEPING),
    **dict.fromkeys(("show_leaderboard", "find_dataset", "read_sources", "make_parts"), HOUSEKEEPING),
    "assemble_dataset": HOUSEKEEPING,
}

ALL: dict[str, Task] = {
    name: member
    for module in pkgutil.iter_modules(tasks.__path__, "tasks.")
    for name, member in vars(importlib.import_module(module.name)).items()
    if isinstance(member, Task)
}


def test_every_task_has_a_policy_here() -> None:
    assert ALL.keys() == POLICIES.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_a_task_has_its_policy(name: str) -> None:
    task, policy = ALL[name], POLICIES[name]
    assert task.retries == policy.get("retries", 0)
    assert task.retry_delay_seconds == policy.get("retry_delay_seconds", 0)
    assert task.retry_jitter_factor == policy.get("retry_jitter_factor")
    assert task.retry_condition_fn is (is_transient if policy else None)


@pytest.mark.parametrize("name", ["read_sources", "make_parts", "assemble_dataset"])
def test_a_plan_of_many_files_is_not_hashed(name: str) -> None:
    assert ALL[name].cache_policy is NO_CACHE


@pytest.mark.parametrize("name", POLICIES)
def test_a_task_says_what_it_does_in_few_lines(name: str) -> None:
    task = ALL[name]
    assert isinstance(task.task_run_name, str)
    assert task.task_run_name.split(" {")[0].replace(" ", "_") in {name, "roster"}
    tree = ast.parse((REPOSITORY / f"{task.fn.__module__.replace('.', '/')}.py").read_text())
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    assert ast.get_docstring(function)
    assert function.end_lineno is not None
    assert function.end_lineno - function.lineno < 30
    assert not any(isinstance(node, ast.Try | ast.While) for node in ast.walk(function))


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
def test_only_permanent_errors_and_stops_are_final(error: BaseException, expected: bool) -> None:
    assert is_transient(None, None, Failed(data=error)) is expected
