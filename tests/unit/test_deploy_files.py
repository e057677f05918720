"""deploy/: the compose file against the compose specification, pins, secrets, and metric names that the server really has."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from model_optimizer.paths import REPOSITORY_ROOT
from model_optimizer.serving.metrics import Metrics

DEPLOY = REPOSITORY_ROOT / "deploy"
DIGEST = re.compile(r"[a-z0-9./_-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}")
METRIC = re.compile(r"model_optimizer_[a-z_]+")


@pytest.fixture(scope="module")
def compose() -> dict:  # type: ignore[type-arg]
    return yaml.safe_load((DEPLOY / "compose.yaml").read_bytes())


def exposed() -> set[str]:
    """Every sample name of /metrics, with those of histograms and counters that only have labels."""
    metrics = Metrics()
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.finished.labels("stop").inc()
    metrics.swaps.labels("followed").inc()
    return {re.split(r"[{ ]", line)[0] for line in metrics.text().decode().splitlines() if not line.startswith("#")}


def test_compose_satisfies_the_specification(compose: dict) -> None:  # type: ignore[type-arg]
    schema = get_builtin_schema("vendor.compose-spec")
    jsonschema.validate(compose, schema)
    with pytest.raises(jsonschema.ValidationError, match="healthchecks"):
        jsonschema.validate({"services": {"redis": {"image": "redis", "healthchecks": {}}}}, schema)


def test_compose_has_the_six_services_each_with_a_health_check(compose: dict) -> None:  # type: ignore[type-arg]
    services = compose["services"]
    assert set(services) == {"postgres", "redis", "prefect", "mlflow", "prometheus", "grafana"}
    assert all(service["healthcheck"]["test"] for service in services.values())
    for service in services.values():
        waits = service.get("depends_on", {})
        assert all(it["condition"] == "service_healthy" for it in waits.values())


def test_every_image_is_pinned_by_digest_or_built_on_one_that_is(compose: dict) -> None:  # type: ignore[type-arg]
    images = {name: service["image"] for name, service in compose["services"].items() if "build" not in service}
    assert set(images) == {"postgres", "redis", "prometheus", "grafana"}
    assert all(DIGEST.fullmatch(image) for image in images.values())
    for path in (DEPLOY / "images").glob("*.Dockerfile"):
        bases = re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)
        assert bases and all(DIGEST.fullmatch(base) for base in bases)


def test_compose_publishes_on_loopback_alone(compose: dict) -> None:  # type: ignore[type-arg]
    published = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert published["postgres"] == []
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_secrets_come_from_a_file_that_is_not_committed(compose: dict) -> None:  # type: ignore[type-arg]
    text = (DEPLOY / "compose.yaml").read_text()
    needed = set(re.findall(r"\$\{([A-Z_]+):\?", text))
    example = dict(line.split("=", 1) for line in (DEPLOY / ".env.example").read_text().splitlines() if "=" in line)
    assert needed == {"POSTGRES_PASSWORD", "REDIS_PASSWORD", "GRAFANA_PASSWORD"} == set(example)
    assert set(example.values()) == {""}, "an example holds no password that somebody would keep"
    assert "deploy/.env" in (REPOSITORY_ROOT / ".gitignore").read_text().splitlines()
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            assert "PASSWORD" not in name or value.startswith("${"), name


def test_every_file_that_compose_mounts_is_there(compose: dict) -> None:  # type: ignore[type-arg]
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if volume[0] == "."
    ]
    assert len(mounted) == 4 and all((DEPLOY / path).exists() for path in mounted)
    named = {volume.split(":")[0] for service in compose["services"].values() for volume in service.get("volumes", [])}
    assert {name for name in named if name[0] != "."} == set(compose["volumes"])


def test_rules_and_dashboard_ask_for_metrics_that_the_server_has() -> None:
    known = exposed()
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_bytes())
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "server.json").read_bytes())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in METRIC.findall(expression)}
    assert len(names) == 14
    assert names <= known, names - known


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_promtool_accepts_configuration_and_rules() -> None:
    command = ["promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "4 rules found" in done.stdout, done.stdout + done.stderr


def test_grafana_finds_its_source_and_its_dashboards(compose: dict) -> None:  # type: ignore[type-arg]
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_bytes())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "files.yaml").read_bytes())["providers"]
    assert source["url"] == "http://prometheus:9090" and source["url"].split("/")[2].split(":")[0] in compose["services"]
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "server.json").read_bytes())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["services"]["grafana"]["volumes"]


def test_prefects_settings_have_the_names_that_prefect_reads(compose: dict) -> None:  # type: ignore[type-arg]
    stated = {name: "x" for name in compose["services"]["prefect"]["environment"] if name.startswith("PREFECT_")}
    code = "import prefect.settings as s; from prefect.settings.legacy import _get_settings_fields as f; print(*f(s.Settings))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    known = set(done.stdout.split())
    assert stated.keys() <= known, stated.keys() - known


def fake_docker(folder: Path, digest: str) -> dict[str, str]:
    """An environment whose `docker buildx imagetools inspect` knows one digest for everything."""
    program = folder / "docker"
    program.write_text(f'#!/bin/sh\n[ "$3" = inspect ] && echo "{digest}"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def copy_of_deploy(folder: Path) -> Path:
    place = folder / "deploy"
    (place / "images").mkdir(parents=True)
    for name in ("pin.py", "compose.yaml", "images/servers.Dockerfile"):
        (place / name).write_bytes((DEPLOY / name).read_bytes())
    return place


def test_pin_tells_of_moved_tags_and_writes_them_when_asked(tmp_path: Path) -> None:
    place, digest = copy_of_deploy(tmp_path), "sha256:" + "0" * 64
    environment = fake_docker(tmp_path, digest)
    command = [sys.executable, place / "pin.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 5)
    assert (place / "compose.yaml").read_bytes() == (DEPLOY / "compose.yaml").read_bytes()
    done = subprocess.run([*command, "--write"], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert (place / "compose.yaml").read_text().count(digest) == 4
    assert subprocess.run(command, env=environment, capture_output=True, check=False, timeout=60).returncode == 0


def test_pin_changes_nothing_when_docker_cannot_tell(tmp_path: Path) -> None:
    place = copy_of_deploy(tmp_path)
    environment = fake_docker(tmp_path, "unauthorized")
    command = [sys.executable, place / "pin.py", "--write"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.startswith("postgres:17.11-alpine: ")) == (2, True)
    assert (place / "compose.yaml").read_bytes() == (DEPLOY / "compose.yaml").read_bytes()
