"""The dashboards name metrics that neurons have."""

import json
import re
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from deployments.processes import PROJECT_ROOT
from tasks.sinks.prometheus import DROPPED, WAITING
from templar.reports.metrics import COUNTERS, HELP

FOLDER = PROJECT_ROOT / "deployments" / "grafana"
ROLES = ("miner", "validator", "aggregator")
LABELS = {"neuron", "uid", "event", "reason", "sink", "store", "instance"}
SUFFIXES = {name: "_total" if name in COUNTERS else "" for name in HELP}
KNOWN = {f"templar_{role}_{name.replace('/', '_')}{SUFFIXES[name]}" for role in ROLES for name in HELP}
QUEUES = (CounterMetricFamily(DROPPED, "", value=0.0), GaugeMetricFamily(WAITING, "", value=0.0))
KNOWN |= {sample.name for family in QUEUES for sample in family.samples}


@pytest.fixture(params=sorted(FOLDER.iterdir()), ids=lambda path: path.stem)
def dashboard(request):
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def names_in(query):
    """The metrics of a query; one that matches a pattern names every role's."""
    query = query.replace("$neuron", "")
    pattern = re.search(r'__name__=~"templar_\(([a-z|]+)\)_([a-z_]+)"', query)
    if pattern is not None:
        return {f"templar_{role}_{pattern[2]}" for role in pattern[1].split("|")}
    return set(re.findall(r"templar_[a-z_]+", query))


def test_every_query_names_metrics_and_labels_that_exist(dashboard):
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [target["expr"] for target in targets]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    for query in queries:
        assert names_in(query), query
        assert names_in(query) <= KNOWN, query
    for target in targets:
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= LABELS
