"""A git commit that becomes a flow run: repository, deployment by `prefect.yaml`, process worker, failure in compile, Retry."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from outside import REPOSITORY, made_at, prefect_command, running, surroundings, wait_until
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.states import AwaitingRetry
from tiny import write_project

CODE = ("flows", "tasks", "model_optimizer", "profiles", "golden_sets", "prefect.yaml")
PROFILE = "commit/tiny.yaml"
OVERRIDES = ["scan.runtimes=[torch]"]
LAST_TASK = "register"
MARK = "source-of-the-commit"
"""Name of a task that only the commit's code has."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at the flow run: its last state, the tasks that it ran, and what the store then held."""

    run: FlowRun
    tasks: tuple[TaskRun, ...]
    made_at: dict[str, str]

    def states(self, stage: str) -> set[str]:
        """Return the last states of a stage's task runs."""
        return {str(task.state and task.state.name) for task in self.tasks if task.name.startswith(f"{stage}-")}


@dataclass(frozen=True)
class Story:
    """What happened."""

    commit: str
    home: Path
    first: Attempt
    second: Attempt


def commit_project(folder: Path, model: Path) -> str:
    """Write a repository with this checkout's code and a tiny profile; return its only commit."""
    for name in CODE:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    task = folder / "tasks" / "profile_target.py"
    task.write_text(task.read_text().replace('name="source"', f'name="{MARK}"'))
    write_project(folder / "commit", model)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    for words in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "a model commit")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


class Volume:
    """A disk that holds the engines: `store/compile` is a link to it, and it can be gone."""

    def __init__(self, place: Path, link: Path):
        self._place, self._link = place, link
        place.mkdir()
        link.parent.mkdir(parents=True)
        link.symlink_to(place, target_is_directory=True)

    @contextmanager
    def lost_after(self, pattern: str) -> Iterator[None]:
        """Unmount it as soon as a file that matches appears below the store; a new, empty one is mounted in the end."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.005):
                if any(self._link.parent.glob(pattern)):
                    self._place.rename(self._place.with_name("unmounted"))
                    return

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
        self._place.mkdir()


def run_and_retry(folder: Path, model: Path, client: SyncPrefectClient) -> Story:
    """Commit, deploy, start a worker, lose the engines' disk behind the scan, mount a new one, and retry."""
    (folder / "repository").mkdir()
    home, commit = folder / "home", commit_project(folder / "repository", model)
    environment = surroundings(MODEL_OPTIMIZER_HOME=str(home), MO_REPOSITORY=(folder / "repository").as_uri(), MO_COMMIT=commit)
    for name in ("GITHUB_SHA", "PYTHONPATH"):
        environment.pop(name, None)
    client.create_work_pool(WorkPoolCreate(name="model-optimizer", type="process"))
    deploy = prefect_command("--no-prompt", "deploy", "--name", "on-commit")
    subprocess.run(deploy, cwd=folder / "repository", env=environment, check=True, stdout=subprocess.DEVNULL)
    engines = Volume(folder / "engines", home / "store" / "compile")
    with running(prefect_command("worker", "start", "--pool", "model-optimizer"), folder, environment):
        with engines.lost_after("scan/*/artifact.json"):
            deployment = client.read_deployment_by_name("model-optimizer/on-commit")
            parameters = {"profile": PROFILE, "overrides": OVERRIDES}
            run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
            failed = _ended(client, run.id, 1)
            held = made_at(home)
        client.set_flow_run_state(run.id, AwaitingRetry(message="Retry from the UI"), force=True)
        done = _ended(client, run.id, 2)
    tasks = _task_runs(client, run.id)
    first, second = (tuple(task for task in tasks if task.flow_run_run_count == number) for number in (1, 2))
    return Story(commit, home, Attempt(failed, first, held), Attempt(done, second, made_at(home)))


def _ended(client: SyncPrefectClient, run: UUID, num_attempts: int) -> FlowRun:
    """Return the flow run after so many attempts, all of them over."""

    def over() -> bool:
        found = client.read_flow_run(run)
        return found.run_count == num_attempts and found.state is not None and found.state.is_final()

    wait_until(over, poll_s=0.2)
    return client.read_flow_run(run)


def _task_runs(client: SyncPrefectClient, run: UUID) -> list[TaskRun]:
    """Return the task runs of all attempts; the server writes them down a little later than they happen."""

    def read() -> list[TaskRun]:
        return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))

    def complete() -> bool:
        found = read()
        return any(task.name.startswith(LAST_TASK) for task in found) and all(
            task.state is not None and task.state.is_final() for task in found
        )

    wait_until(complete, poll_s=0.2)
    return read()
