"""Take pictures of a home folder's runs in the pages of Prefect and MLflow, to be looked at.

    python -m benchmarks.screens HOME OUT_DIRECTORY      # HOME: the .model-optimizer of a folder with runs

Both servers are started on loopback on the databases that are there, and end with this. Needs a browser (see
benchmarks/report_screens.py) and `pip install playwright`, which clicks in it; no browser is downloaded.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report_screens import find_browser

if TYPE_CHECKING:
    from playwright.sync_api import Page

START_S = 240
PREPARED = ('[data-component-id="mlflow.assistant.chat_panel.close"]', 'text="Model training"')
"""What is clicked on every page of MLflow first: a panel that takes a quarter of it goes, and models are no agents."""
AXES = ("accuracy/kl_nats", "speed/generation_throughput_tok_per_s")
SIZE = {"width": 1500, "height": 950}
SETTLE_MS = 2500
"""Both pages draw after their last request."""


@dataclass(frozen=True)
class Sight:
    """A page to look at, and what is clicked on it before the picture is taken."""

    name: str
    address: str
    act: "Callable[[Page], None] | None" = None


@contextmanager
def served(name: str, command: list[str], environment: dict[str, str], health: str) -> Iterator[None]:
    """Run a server for the body; ready when entered."""
    with Path(os.devnull).open("wb") as nowhere:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=nowhere, stderr=nowhere)
    try:
        deadline = time.monotonic() + START_S
        while not _is_up(health):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name} does not come up; start it by hand to see why: {' '.join(command)}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def prefect(home: Path) -> Iterator[str]:
    """Run the home's Prefect server; yield its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [str(Path(sys.executable).with_name("prefect")), "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_UI_API_URL": f"{address}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    with served("Prefect", command, environment, f"{address}/api/health"):
        yield address


@contextmanager
def mlflow(home: Path) -> Iterator[str]:
    """Run an MLflow server on the home's database; yield its address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}",
    ]  # fmt: skip
    with served("MLflow", command, {"MLFLOW_DISABLE_TELEMETRY": "true"}, f"{address}/health"):
        yield address


def prefect_sights(address: str) -> list[Sight]:
    """Return the runs, one run with its artifacts, the form of a run that waits, and the question before a retry."""
    os.environ["PREFECT_API_URL"] = f"{address}/api"
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=50)
        artifacts = {artifact.key: artifact for artifact in client.read_artifacts(limit=200)}
    done = next((run for run in runs if run.state and run.state.is_completed()), None)
    waiting = next((run for run in runs if run.state and run.state.is_paused()), None)
    sights = [Sight("prefect-runs", f"{address}/runs")]
    if done:
        page = f"{address}/runs/flow-run/{done.id}"
        sights += [Sight("prefect-run", page), Sight("prefect-artifacts", page, _tab)]
        sights += [Sight("prefect-retry", page, _click("Retry"))]
    sights += [
        Sight(f"prefect-artifact-{key}", f"{address}/artifacts/artifact/{artifacts[key].id}")
        for key in ("verdict", "pareto", "scan", "signoff")
        if key in artifacts
    ]
    if waiting:
        sights.append(Sight("prefect-form", f"{address}/runs/flow-run/{waiting.id}", _click("Resume")))
    return sights


def mlflow_sights(address: str) -> list[Sight]:
    """Return the runs, two of them side by side, the candidates with their scatter, and the registered versions."""
    os.environ["MLFLOW_TRACKING_URI"] = address
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=address, registry_uri=address)
    experiment = next(it for it in client.search_experiments() if it.name.startswith("model-optimizer/"))
    number = experiment.experiment_id
    runs = client.search_runs([number], order_by=["attributes.start_time DESC"], max_results=500)
    parents = [run.info.run_id for run in runs if "mlflow.parentRunId" not in run.data.tags and "mo.verdict" in run.data.tags]
    scan = next((run.info.run_id for run in runs if run.data.tags.get("mo.stage") == "scan"), None)
    candidates = [run.info.run_id for run in runs if run.data.tags.get("mlflow.parentRunId") == scan]
    base = f"{address}/#/experiments/{number}"
    sights = [
        Sight("mlflow-runs", f"{base}/runs"),
        Sight("mlflow-models", f"{base}/models"),
        Sight("mlflow-models-chart", f"{base}/models", _charts),
    ]
    sights += [Sight("mlflow-run", f"{base}/runs/{parents[0]}")] if parents else []
    if len(parents) > 1:
        sights.append(Sight("mlflow-comparison", compare_address(address, number, parents[:2])))
    if len(candidates) > 1:
        sights.append(Sight("mlflow-scatter", compare_address(address, number, candidates), _scatter))
    for model in client.search_registered_models(max_results=1):
        sights.append(Sight("mlflow-versions", f"{address}/#/models/{model.name}"))
    return sights


def compare_address(address: str, experiment: str, runs: list[str]) -> str:
    """Return MLflow's page of several runs side by side."""
    listed = ",".join(f"%22{run}%22" for run in runs)
    return f"{address}/#/compare-runs?runs=[{listed}]&experiments=[%22{experiment}%22]"


def _click(words: str) -> "Callable[[Page], None]":
    def act(page: "Page") -> None:
        page.get_by_role("button", name=re.compile(f"^{words}")).first.click()

    return act


def _tab(page: "Page") -> None:
    page.get_by_text(re.compile("^Artifacts")).first.click()


def _charts(page: "Page") -> None:
    page.locator('[data-component-id="mlflow.logged_model.list.view-mode"] label').nth(1).click()


def _scatter(page: "Page") -> None:
    """Draw the front: throughput over damage."""
    page.get_by_role("tab", name="Scatter Plot").click()
    for index, axis in enumerate(AXES):
        page.get_by_role("combobox").nth(index).click()
        page.get_by_role("option", name=axis).first.click()


def take(sights: list[Sight], folder: Path) -> None:
    """Write one picture per page; a page on which nothing could be clicked is told, its picture shows why."""
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": SIZE["width"], "height": SIZE["height"]})
        page.set_default_timeout(60_000)
        for sight in sights:
            page.goto("about:blank")
            page.goto(sight.address, wait_until="domcontentloaded")
            page.wait_for_timeout(4 * SETTLE_MS)
            for selector in PREPARED:
                if (found := page.locator(selector)).count():
                    found.first.click()
            try:
                if sight.act:
                    sight.act(page)
            except Error as error:
                print(f"{sight.name}: {str(error).splitlines()[0]}", file=sys.stderr)
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=folder / f"{sight.name}.png")
            print(folder / f"{sight.name}.png")
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("home", type=Path, help="the .model-optimizer of a folder with runs")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    home = options.home.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    with mlflow(home) as address:
        take(mlflow_sights(address), options.out)
    with prefect(home) as address:
        take(prefect_sights(address), options.out)


if __name__ == "__main__":
    main()
