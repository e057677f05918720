"""What `prefect.yaml` says, and what of it `deployments serve` serves."""

import pytest
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.utilities.schema_tools import validate

from flows.cli.deployments import SERVED, Deployment, read_deployments, serve_deployments
from model_optimizer.errors import ConfigError
from model_optimizer.paths import REPOSITORY_ROOT

DEPLOYMENTS = read_deployments(REPOSITORY_ROOT / "prefect.yaml")


def test_read_deployments_finds_all_three() -> None:
    assert [it.name for it in DEPLOYMENTS] == ["manual", "on-commit", "nightly-soak"]
    assert set(SERVED) < {it.name for it in DEPLOYMENTS}
    assert [schedule.cron for it in DEPLOYMENTS for schedule in it.schedules] == ["0 21 * * *"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda it: it.name)
def test_deployment_states_parameters_that_its_flow_takes(deployment: Deployment) -> None:
    module, _, name = deployment.entrypoint.partition(".py:")
    entry: Flow[..., object] = load_flow_from_entrypoint(f"{module.replace('/', '.')}.{name}")
    validate(deployment.parameters, entry.parameters.model_dump(), raise_on_error=True)
    assert set(deployment.parameters) <= set(entry.parameters.properties)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "PREFECT_API_URL is not set; start a server"),
        ("127.0.0.1:4200", "allowed: http"),
        ("http://127.0.0.1:9/api", "does not answer"),
    ],
)
def test_serve_deployments_wants_a_server(address: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", address)
    with pytest.raises(ConfigError, match=words):
        serve_deployments()
