"""Dockerfile, compose file and Kubernetes manifests, held without Docker: linters, schemas, and their own commands."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deployments.command import main
from deployments.processes import PROJECT_ROOT
from tests.support.commands import installed, write_env

DOCKER = PROJECT_ROOT / "deployments" / "docker"
KUBERNETES = PROJECT_ROOT / "deployments" / "kubernetes"
SECRETS = {"POSTGRES_PASSWORD": "only-inside", "PREFECT_API_AUTH_STRING": "templar:hush", "GRAFANA_PASSWORD": "shown"}
VERSIONS = ("1.30", kubernetes_validate.latest_version())
"""Of Kubernetes: the oldest and the newest whose schemas are tried."""


def run(*command, **environment):
    """A command's end and what it says, in the repository's root."""
    variables = {name: value for name, value in os.environ.items() if name not in SECRETS} | environment
    return subprocess.run(command, cwd=PROJECT_ROOT, env=variables, capture_output=True, text=True, check=False)


def require_command(words):
    """Check that `templar` knows a command and takes its options."""
    assert words[0] == "templar"
    try:
        status = main([*words[1:], "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0


def require_clean(*command):
    found = run(*command)
    assert found.returncode == 0, found.stdout + found.stderr


def instructions():
    """Each instruction of the Dockerfile, with its arguments on one line."""
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#")).replace("\\\n", " ")
    return [(name, rest) for line in text.splitlines() for name, _, rest in [line.partition(" ")]]


def kept_in_the_image():
    """What the build takes from the repository's root."""
    rules = [line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert rules[0] == "*"
    return {rule.removeprefix("!") for rule in rules if rule.startswith("!")}


class TestDockerfile:
    def test_linters_find_nothing(self):
        require_clean(installed("hadolint"), str(DOCKER / "Dockerfile"))
        scripts = ("debian.sh", "install.sh", "skypilot/machine.sh")
        require_clean(installed("shellcheck"), ".ci/run", *(f"deployments/{script}" for script in scripts))

    def test_it_runs_commands_of_ours_as_a_user(self):
        last = dict(instructions())
        assert last["USER"] == "1000:1000"
        entrypoint = json.loads(last["ENTRYPOINT"])
        require_command([*entrypoint, *json.loads(last["CMD"])])
        require_command(json.loads(last["HEALTHCHECK"].partition(" CMD ")[2]))

    def test_the_image_has_what_a_neuron_runs_on_and_no_secret(self):
        kept = kept_in_the_image()
        project = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text())
        packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
        sources = "".join(path.read_text() for path in (PROJECT_ROOT / "deployments").rglob("*.py"))
        read = set(re.findall(r'PROJECT_ROOT / "([^"]+)"', sources))
        assert kept == packages | read | {"pyproject.toml", "README.md"}
        assert all((PROJECT_ROOT / name).exists() for name in kept)

    def test_the_metadata_is_made_of_what_is_copied_before_the_dependencies(self, tmp_path):
        """A process without the site's `.pth` files does not see this checkout, where it is installed as editable."""
        before = takewhile(lambda each: not each[1].endswith("--constraint constraints.txt ."), instructions())
        for *sources, target in (rest.split() for name, rest in before if name == "COPY"):
            (tmp_path / target).mkdir(exist_ok=True)
            for source in sources:
                shutil.copy(PROJECT_ROOT / source, tmp_path / target)
        script = "import os, sys; os.chdir(sys.argv[1]); sys.path.append(sys.argv[2]); "
        script += "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
        require_clean(sys.executable, "-IS", "-c", script, str(tmp_path), sysconfig.get_path("purelib"))

    @pytest.mark.parametrize(
        ("device", "index", "called", "said"),
        [
            ("cuda", "", "", ""),
            ("cpu", "https://index.example/cpu", "--index-url https://index.example/cpu torch", ""),
            ("cpu", "", "", "TORCH_INDEX: names the index"),
            ("tpu", "", "", "DEVICE is tpu: set cpu or cuda"),
        ],
    )
    def test_the_device_chooses_torch(self, tmp_path, device, index, called, said):
        """The build's own shell command, with a pip that only notes how it is called."""
        (script,) = [rest for name, rest in instructions() if name == "RUN" and rest.startswith("case")]
        (tmp_path / "pip").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
        (tmp_path / "pip").chmod(0o755)
        variables = {"DEVICE": device, "TORCH_INDEX": index, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = run("sh", "-c", script, **variables)
        assert (done.returncode != 0, said in done.stderr) == (bool(said), True)
        noted = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
        assert called in noted
        assert bool(called) is bool(noted)


@pytest.fixture
def compose(tmp_path):
    """What `docker-compose config` makes of the file in a folder like the repository's, with an .env."""
    (tmp_path / "deployments").symlink_to(PROJECT_ROOT / "deployments")

    def call(*files, **variables):
        write_env(tmp_path / ".env", {"NETUID": "3           # with a comment"} | variables)
        chosen = [option for file in files for option in ("--file", str(DOCKER / file))]
        folder = str(tmp_path)
        options = ["--project-directory", folder, "--env-file", f"{folder}/.env", *chosen]
        return run(installed("docker-compose"), *options, "config", "--format", "json")

    return call


class TestCompose:
    @pytest.fixture
    def services(self, compose):
        shown = compose("compose.yaml", "compose.cuda.yaml", **SECRETS)
        assert (shown.returncode, shown.stderr) == (0, "")
        found: dict[str, Any] = json.loads(shown.stdout)["services"]
        return found

    @pytest.mark.parametrize("missing", sorted(SECRETS))
    def test_a_missing_secret_is_one_line(self, compose, missing):
        shown = compose("compose.yaml", **{name: value for name, value in SECRETS.items() if name != missing})
        assert shown.returncode != 0
        assert f"{missing} is missing a value: set it in .env" in shown.stderr
        assert len(shown.stderr.strip().splitlines()) == 1

    def test_its_commands_are_ours_and_its_files_are_there(self, services):
        require_command(["templar", *services["neuron"]["command"]])
        prefect = run(sys.executable, "-m", *services["prefect"]["entrypoint"], "--help")
        assert prefect.returncode == 0, prefect.stderr
        for service in services.values():
            for volume in service.get("volumes", []):
                assert volume["type"] == "volume" or volume["target"] == "/wallets" or Path(volume["source"]).exists()

    def test_nobody_but_this_host_reaches_a_port_and_the_server_asks_for_a_password(self, services):
        published = {name: service["ports"] for name, service in services.items() if "ports" in service}
        assert set(published) == {"prefect", "grafana"}
        assert all(port["host_ip"] == "127.0.0.1" for ports in published.values() for port in ports)
        server, neuron = services["prefect"]["environment"], services["neuron"]["environment"]
        assert server["PREFECT_SERVER_API_AUTH_STRING"] == neuron["PREFECT_API_AUTH_STRING"] == "templar:hush"
        assert neuron["NETUID"] == "3"

    def test_what_names_another_service_names_it_rightly(self, services):
        neuron, grafana = services["neuron"], services["grafana"]
        assert neuron["environment"]["PREFECT_API_URL"] == "http://prefect:4200/api"
        assert "@postgres:5432/prefect" in services["prefect"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
        assert services["postgres"]["environment"]["POSTGRES_USER"] == "prefect"
        port = neuron["environment"]["TEMPLAR_SINK_PROMETHEUS"].partition(":")[2]
        (job,) = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
        assert job["static_configs"] == [{"targets": [f"neuron:{port}"]}]
        (source,) = yaml.safe_load((DOCKER / "grafana" / "sources.yaml").read_text())["datasources"]
        assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
        (provider,) = yaml.safe_load((DOCKER / "grafana" / "dashboards.yaml").read_text())["providers"]
        mounted = {volume["target"]: volume["source"] for volume in grafana["volumes"]}
        assert Path(mounted[provider["options"]["path"]]).resolve() == PROJECT_ROOT / "deployments" / "grafana"

    @pytest.mark.slow
    def test_prometheus_takes_its_configuration(self):
        if shutil.which("promtool") is None:
            pytest.skip("Debian's Prometheus is not installed: ./deployments/debian.sh prometheus")
        require_clean("promtool", "check", "config", str(DOCKER / "prometheus.yml"))


MANIFESTS: list[dict[str, Any]] = [
    manifest for path in sorted(KUBERNETES.glob("*.yaml")) for manifest in yaml.safe_load_all(path.read_text())
]
WITH_PODS = [manifest for manifest in MANIFESTS if "template" in manifest["spec"]]


def container_of(name):
    (pod,) = [each["spec"]["template"]["spec"] for each in WITH_PODS if each["metadata"]["name"] == name]
    found: dict[str, Any]
    (found,) = pod["containers"]
    return found


class TestKubernetes:
    @pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
    def test_it_is_valid_and_its_selectors_find_its_pods(self, manifest):
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        labels, spec = manifest["metadata"]["labels"], manifest["spec"]
        if manifest["kind"] == "Service":
            assert spec["selector"] == labels
        else:
            assert spec["selector"]["matchLabels"] == labels == spec["template"]["metadata"]["labels"]

    def test_each_pod_has_few_rights_and_mounts_what_there_is(self):
        for manifest in WITH_PODS:
            pod, container = manifest["spec"]["template"]["spec"], container_of(manifest["metadata"]["name"])
            assert pod["securityContext"]["runAsNonRoot"]
            assert not pod["automountServiceAccountToken"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            claims = {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])}
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted == claims | {volume["name"] for volume in pod.get("volumes", [])}

    def test_its_commands_are_ours(self):
        containers = {name: container_of(name) for name in ("neuron", "prefect", "postgres")}
        require_command(["templar", *containers["neuron"]["args"]])
        require_command(containers["neuron"]["readinessProbe"]["exec"]["command"])
        composed = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
        assert containers["prefect"]["command"] == composed["prefect"]["entrypoint"]
        for name in ("prefect", "postgres"):
            assert containers[name]["image"] == composed[name].get("image", "templar")

    def test_the_wallet_lies_where_the_variables_say(self):
        (neuron,) = [each for each in WITH_PODS if each["metadata"]["name"] == "neuron"]
        container = container_of("neuron")
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        secrets = next(
            volume["secret"] for volume in neuron["spec"]["template"]["spec"]["volumes"] if volume["name"] == "secrets"
        )
        paths = {f"/secrets/{item['path']}" for item in secrets["items"]}
        assert f"{variables['WALLET_PATH']}/{variables['WALLET_NAME']}/hotkeys/{variables['WALLET_HOTKEY']}" in paths
        assert container["args"][-1] in paths
