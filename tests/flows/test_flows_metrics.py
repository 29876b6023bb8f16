"""Every window of every role leaves its numbers: in the neuron's folder, and on one line of its log."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from templar.housekeeping.metrics import FILE_NAME
from tests.support.flow_network import run_windows
from tests.support.network import Network, tiny
from tests.support.prefect_server import RunningPrefectServer


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    network = Network(tmp_path, tiny(), actors=["honest"])
    yield network
    network.stop()


def test_numbers_of_every_role(
    network: Network, prefect_api: RunningPrefectServer, caplog: pytest.LogCaptureFixture
) -> None:
    del prefect_api
    with caplog.at_level(logging.INFO, "templar.metrics"):
        states = run_windows(network, [1])
    assert {state.name for found in states.values() for state in found} == {"Completed"}
    lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "templar.metrics"]
    by_neuron = {line["neuron"]: line for line in lines}
    assert (len(lines), set(by_neuron)) == (3, set(network.nodes))
    for name, node in network.nodes.items():
        line = by_neuron[name]
        assert (line["record"], line["window"]) == ("metrics", 1)
        assert line[f"{node.role}/network/applied_uids"] == 1
        assert line[f"{node.role}/timing/window_total"] > 0
        text = (node.home / FILE_NAME).read_text()
        names = {family.name for family in text_string_to_metric_families(text)}
        assert names == {f"templar_{key.replace('/', '_')}" for key in line if "/" in key}
    evidence = network.validator.book.evidence(1)
    assert evidence is not None
    scores = by_neuron[network.name(network.validator)]["validator/final_scores"]
    assert set(scores) == {str(record.uid) for record in evidence.miners}
