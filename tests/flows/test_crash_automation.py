"""The crash automation on a server with all its services: a run whose heart stops is crashed, a suspended one is not."""

from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
import yaml
from outside import REPOSITORY, own_surroundings, prefect_command, running, wait_until
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import Event
from prefect.events.schemas.automations import AutomationCore
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Running, Suspended
from services import free_port

WITHIN_S = 12
"""Ten seconds is the shortest that a server takes; the file says ten minutes."""


@flow(name="zombie")
def zombie() -> None:
    """Never run: only its record is looked at."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    environment = own_surroundings() | {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    command = prefect_command("server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui")
    address = f"http://127.0.0.1:{port}/api"
    with (
        running(command, folder, environment),
        temporary_settings({PREFECT_API_URL: address}),
        get_client(sync_client=True) as client,
    ):
        wait_until(lambda: client.api_healthcheck() is None, poll_s=0.5)
        yield client


def beating(client: SyncPrefectClient) -> UUID:
    """Return a run in state Running that has sent one heartbeat."""
    deployment = client.create_deployment(client.create_flow(zombie), name="zombie")  # only runs of deployments can be suspended
    run = client.create_flow_run_from_deployment(deployment, state=Running())
    resource = {"prefect.resource.id": f"prefect.flow-run.{run.id}", "prefect.resource.name": run.name}
    event = Event.model_validate({"event": "prefect.flow-run.heartbeat", "resource": resource})
    client._client.post("/events", json=[event.model_dump(mode="json")]).raise_for_status()
    return run.id


@pytest.mark.full
def test_run_without_heartbeat_is_crashed_and_a_suspended_one_is_left_alone(client: SyncPrefectClient) -> None:
    text = (REPOSITORY / "deploy" / "automations" / "crash-zombies.yaml").read_text(encoding="utf-8")
    automation = AutomationCore.model_validate(yaml.safe_load(text))
    quick = automation.model_copy(
        update={"trigger": automation.trigger.model_copy(update={"within": timedelta(seconds=WITHIN_S)})}
    )
    client._client.post("/automations/", json=quick.model_dump(mode="json")).raise_for_status()
    waiting, dead = beating(client), beating(client)  # in this order, so that the first is judged before the second
    suspended = client.set_flow_run_state(waiting, Suspended(timeout_seconds=600))
    assert suspended.state is not None and suspended.state.name == "Suspended", suspended.details

    def state(run: UUID) -> str:
        found = client.read_flow_run(run).state
        return found.name if found else ""

    wait_until(lambda: state(dead) == "Crashed", poll_s=1.0)
    assert state(waiting) == "Suspended"
