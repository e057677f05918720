"""`model-optimizer deployments serve`: the flows of this checkout as Prefect deployments, run by this process's children."""

import os
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from flows.bootstrap import prepare_environment
from flows.progress import terminal
from flows.surroundings import check_prefect
from model_optimizer.errors import ConfigError
from model_optimizer.paths import REPOSITORY_ROOT

SERVED = ("manual", "nightly-soak")
"""Without `on-commit`: that one is for a worker, which clones the commit."""


class Schedule(BaseModel):
    """When a deployment runs by itself."""

    model_config = ConfigDict(extra="forbid")

    cron: str
    timezone: str = "UTC"
    active: bool = True


class Deployment(BaseModel):
    """What `prefect.yaml` says of a deployment; what only a worker needs is left alone."""

    name: str
    description: str
    entrypoint: str
    parameters: dict[str, object] = {}
    schedules: tuple[Schedule, ...] = ()


class DeploymentFile(BaseModel):
    """The part of `prefect.yaml` that is read here."""

    deployments: tuple[Deployment, ...]


def read_deployments(path: Path) -> tuple[Deployment, ...]:
    """Return what `prefect.yaml` deploys."""
    return DeploymentFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))).deployments


def serve_deployments() -> None:
    """Serve until interrupted; each run is a process of its own, and one at a time works.

    Raises:
        ConfigError: no Prefect server is named, or it does not answer.
    """
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        raise ConfigError(
            "PREFECT_API_URL is not set; start a server (`prefect server start`) and set it, e.g. "
            "PREFECT_API_URL=http://127.0.0.1:4200/api"
        )
    check_prefect(address)
    prepare_environment(quiet=False)
    from prefect import serve
    from prefect.client.schemas.objects import ConcurrencyLimitConfig
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.deployments.runner import RunnerDeployment
    from prefect.flows import Flow, load_flow_from_entrypoint
    from prefect.types.entrypoint import EntrypointType

    one_at_a_time = ConcurrencyLimitConfig.model_validate({"limit": 1, "collision_strategy": "ENQUEUE"})
    stated = {it.name: it for it in read_deployments(REPOSITORY_ROOT / "prefect.yaml")}
    served: list[RunnerDeployment] = []
    for deployment in (stated[name] for name in SERVED):
        module, _, name = deployment.entrypoint.partition(".py:")
        entry: Flow[..., object] = load_flow_from_entrypoint(f"{module.replace('/', '.')}.{name}")
        made = entry.to_deployment(
            deployment.name,
            description=deployment.description,
            parameters=deployment.parameters,
            schedules=[CronSchedule(cron=it.cron, timezone=it.timezone) for it in deployment.schedules if it.active],
            concurrency_limit=one_at_a_time,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        assert isinstance(made, RunnerDeployment)  # a coroutine only inside an event loop
        served.append(made)
    terminal().print(f"serving {', '.join(SERVED)} to {address} from {Path.cwd()}; end with Ctrl-C", highlight=False)
    serve(*served, limit=1)
