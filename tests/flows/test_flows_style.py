"""Flows, one per file: their names, and the parameters that they take."""

import importlib
import inspect
import pkgutil

import pytest
from prefect import Flow

import flows
from flows import window_run_name

FLOW_FILES = [module.name for module in pkgutil.iter_modules(flows.__path__)]

BUCKET = {"bucket", "account", "bucket_name", "credentials"}
CHOICES = {
    "bucket_purge": BUCKET | {"mode", "version", "hours", "prefix", "suffix", "confirm_bucket"},
    "temporary_cleanup": BUCKET | {"hours", "confirm_bucket"},
    "local_cleanup": {"hours"},
    "leaderboard": {"windows", "validator"},
    "audit_window": {"validator", "tolerance"},
    "evaluate_checkpoint": {"tasks"},
}
"""What flows for an operator take besides: numbers and names, never a secret."""


def flow_in(name):
    module = importlib.import_module(f"flows.{name}")
    (flow,) = (
        member
        for member in vars(module).values()
        if isinstance(member, Flow) and member.fn.__module__ == module.__name__
    )
    return flow


@pytest.mark.parametrize("name", FLOW_FILES)
def test_a_flow_has_the_name_of_its_file(name):
    flow = flow_in(name)
    assert flow.name == name.replace("_", "-")
    assert inspect.iscoroutinefunction(flow.fn)  # a sync flow pays a second for its heartbeat


@pytest.mark.parametrize("name", sorted({*FLOW_FILES} - {"build_dataset"}))  # it has no neuron
def test_a_flow_is_told_by_numbers_and_names(name):
    flow = flow_in(name)
    parameters = flow.parameters.properties
    assert set(parameters) <= {"window", "neuron", "dry_run"} | CHOICES.get(name, set())
    assert parameters["neuron"]["default"] == "default"
    assert flow.parameters.required == (["mode"] if name == "bucket_purge" else [])
    if "window" in parameters:
        assert flow.flow_run_name is window_run_name
    else:
        assert str(flow.flow_run_name).startswith("{neuron} ")
    assert flow.retries == 0
