"""Debian's Prometheus on loopback, and the queries of the dashboards."""

import json
import os
import shutil
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from deployments.processes import PROJECT_ROOT, free_port, start_child, wait_until_ready

DASHBOARDS = PROJECT_ROOT / "deployments" / "grafana"
PATIENCE_SECONDS = 180.0


class Prometheus(httpx.Client):
    def is_ready(self):
        try:
            return self.get("/-/ready").is_success
        except httpx.TransportError:
            return False

    def answers(self, query):
        answer = self.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", (query, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def neurons(self, query):
        return {each["metric"]["neuron"] for each in self.answers(query)}


@contextmanager
def scraping(ports, folder):
    """Debian's Prometheus, which scrapes these ports every second; skips the test where it is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Debian's package prometheus")
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    jobs = [{"job_name": "templar", "static_configs": targets}]
    configuration = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    port = free_port()
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [program, *options, f"--web.listen-address=127.0.0.1:{port}"]
    child = start_child("prometheus", command, log=folder / "log", env=dict(os.environ))
    try:
        with Prometheus(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            wait_until_ready(child, client.is_ready, timeout_seconds=PATIENCE_SECONDS)
            yield client
    finally:
        child.handle.terminate()
        child.handle.wait()


def panel_queries():
    for path in sorted(DASHBOARDS.iterdir()):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield target["expr"].replace("$neuron", ".*")
