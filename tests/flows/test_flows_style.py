"""Flows: their names, and the parameters that they take."""

import importlib
import inspect
import pkgutil

import pytest
from prefect import Flow

import flows
from flows import window_run_name

MODULES = [importlib.import_module(f"flows.{module.name}") for module in pkgutil.iter_modules(flows.__path__)]
FLOWS = {name: each for module in MODULES for name, each in vars(module).items() if isinstance(each, Flow)}

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


@pytest.mark.parametrize("name", sorted(FLOWS))
def test_a_flow_has_the_name_of_its_function_and_takes_numbers_and_names(name):
    flow = FLOWS[name]
    assert flow.name == name.replace("_", "-")
    assert inspect.iscoroutinefunction(flow.fn)  # a sync flow pays a second for its heartbeat
    assert flow.retries == 0
    if name == "build_dataset":  # it has no neuron
        return
    parameters = flow.parameters.properties
    assert set(parameters) <= {"window", "neuron", "dry_run"} | CHOICES.get(name, set())
    assert parameters["neuron"]["default"] == "default"
    assert flow.parameters.required == (["mode"] if name == "bucket_purge" else [])
    if "window" in parameters:
        assert flow.flow_run_name is window_run_name
    else:
        assert str(flow.flow_run_name).startswith("{neuron} ")
