"""A git commit that becomes a signed-off version: repository, deployments by `prefect.yaml`, process worker, failure in compile,
Retry, suspension for a sign-off, and the answer through the API."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from listening import Call, Mailbox, mail_server, webhook
from mlflow.tracking import MlflowClient
from outside import REPOSITORY, made_at, prefect_command, running, surroundings, wait_until
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.states import AwaitingRetry
from tiny import write_project

AUTOMATIC, MANUAL = "release: {signer:", "release: {approval: manual, signer:"
"""What the model commit changes: from now on a person signs off."""
SECRET = "of-the-webhook"
CODE = ("flows", "tasks", "model_optimizer", "profiles", "golden_sets", "prefect.yaml")
PROFILE = "commit/tiny.yaml"
PARAMETERS = {"profile": PROFILE, "overrides": ["scan.runtimes=[torch]"], "refresh": ["scan"]}
"""As the form sends them; a Retry must not make again what this run itself has refreshed."""
LAST_TASK, NUM_ENDS = "package", 2
"""Before and after the sign-off."""
MARK = "source-of-the-commit"
"""Name of a task that only the commit's code has."""


@dataclass(frozen=True)
class Attempt:
    """One attempt at the flow run: its last state, the tasks that it ran, and what the store then held."""

    run: FlowRun
    tasks: tuple[TaskRun, ...]
    made_at: dict[str, str]

    def states(self, stage: str) -> set[str]:
        """Return the last states of a task's runs, whatever their role."""
        return {str(task.state and task.state.name) for task in self.tasks if task.name.startswith(f"{stage}-")}


@dataclass(frozen=True)
class Waiting:
    """The run as it waits for a reviewer."""

    run: FlowRun
    outcome: dict[str, Any]
    num_processes: int
    """Of the run, which should be none: the machine is free."""
    alias_tags: dict[str, str]


@dataclass
class Phases:
    """When things happened, in seconds from one to the next."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic)

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self._last
        self._last = now


@dataclass(frozen=True)
class Story:
    """What happened."""

    commit: str
    home: Path
    first: Attempt
    second: Attempt
    waiting: Waiting
    approved: Attempt
    phases: dict[str, float]
    calls: list[Call]
    box: Mailbox


def commit_project(folder: Path, model: Path) -> str:
    """Write a repository with this checkout's code and a tiny profile, and a commit that changes the profile; return that one."""
    for name in CODE:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    task = folder / "tasks" / "profile_target.py"
    task.write_text(task.read_text().replace('name="source"', f'name="{MARK}"'))
    profile = write_project(folder / "commit", model)
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
    for words in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-q", "-m", "code and a profile")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    text = profile.read_text(encoding="utf-8")
    assert AUTOMATIC in text
    profile.write_text(text.replace(AUTOMATIC, MANUAL), encoding="utf-8")
    subprocess.run(["git", *identity, "commit", "-q", "-a", "-m", "a model commit"], cwd=folder, check=True)
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
    """Commit, deploy, start a worker, lose the engines' disk behind the scan, mount a new one, retry, and sign off."""
    (folder / "repository").mkdir()
    home, commit = folder / "home", commit_project(folder / "repository", model)
    with webhook() as hook, mail_server() as (box, address):
        environment = surroundings(
            MODEL_OPTIMIZER_HOME=str(home),
            MO_REPOSITORY=(folder / "repository").as_uri(),
            MO_COMMIT=commit,
            MODEL_OPTIMIZER_WEBHOOK_URL=hook.url,
            MODEL_OPTIMIZER_WEBHOOK_SECRET=SECRET,
            MODEL_OPTIMIZER_NOTIFY_EMAIL="team@example.com",
            MODEL_OPTIMIZER_SMTP_URL=f"smtp://{address}",
        )
        for name in ("GITHUB_SHA", "PYTHONPATH"):
            environment.pop(name, None)
        phases = Phases()
        client.create_work_pool(WorkPoolCreate(name="model-optimizer", type="process"))
        deploy = prefect_command("--no-prompt", "deploy", "--all")
        subprocess.run(deploy, cwd=folder / "repository", env=environment, check=True, stdout=subprocess.DEVNULL)
        phases.end("deploy_s")
        engines = Volume(folder / "engines", home / "store" / "compile")
        with running(prefect_command("worker", "start", "--pool", "model-optimizer"), folder, environment) as worker:
            with engines.lost_after("scan/*/artifact.json"):
                deployment = client.read_deployment_by_name("model-optimizer/on-commit")
                run = client.create_flow_run_from_deployment(deployment.id, parameters=PARAMETERS)
                wait_until(lambda: client.read_flow_run(run.id).run_count == 1, poll_s=0.2)
                phases.end("commit_to_run_s")
                failed = _ended(client, run.id, 1)
                held = made_at(home)
            phases.end("until_failure_s")
            client.set_flow_run_state(run.id, AwaitingRetry(message="Retry from the UI"), force=True)
            suspended = _ended(client, run.id, 2)
            phases.end("retry_to_bundle_s")
            waiting = _waiting(suspended, home, worker.pid)
            made = made_at(home)
            waivers = [f"{gate}=tiny" for gate in waiting.outcome["signoff"]["needs_waivers"]]
            answer = {"reviewer": "bob", "decision": "approve", "waivers": waivers, "comment": "read"}
            approved_at = datetime.now(UTC)
            client.resume_flow_run(run.id, run_input=answer)
            wait_until(lambda: _is_over(client.read_flow_run(run.id)), poll_s=0.2)
            done = client.read_flow_run(run.id)
            phases.end("approval_to_end_s")
    tasks = _task_runs(client, run.id)
    first = tuple(task for task in tasks if task.flow_run_run_count == 1)
    later = [task for task in tasks if task.flow_run_run_count == 2]  # a run that is resumed does not count as run again
    second, third = (tuple(task for task in later if (_asked_for(task) > approved_at) is after) for after in (False, True))
    return Story(
        commit,
        home,
        Attempt(failed, first, held),
        Attempt(suspended, second, made),
        waiting,
        Attempt(done, third, made_at(home)),
        phases.seconds,
        hook.calls,
        box,
    )


def _waiting(run: FlowRun, home: Path, worker: int) -> Waiting:
    """Look at a run that waits: its outcome, its processes, and the tags of its version."""
    children = psutil.Process(worker).children
    wait_until(lambda: not children(recursive=True))
    outcome = json.loads((home / "runs" / f"{run.id}.json").read_text(encoding="utf-8"))
    version = MlflowClient(tracking_uri=f"sqlite:///{home / 'mlflow.db'}").get_model_version_by_alias("tiny", "candidate")
    return Waiting(run, outcome, len(children(recursive=True)), dict(version.tags))


def _is_over(run: FlowRun) -> bool:
    return run.state is not None and run.state.is_final()


def _asked_for(task: TaskRun) -> datetime:
    assert task.expected_start_time is not None
    return task.expected_start_time


def _ended(client: SyncPrefectClient, run: UUID, num_attempts: int) -> FlowRun:
    """Return the flow run after so many attempts, all of them over or, the last, suspended."""

    def over() -> bool:
        found = client.read_flow_run(run)
        return found.run_count == num_attempts and (_is_over(found) or (found.state is not None and found.state.is_paused()))

    wait_until(over, poll_s=0.2)
    return client.read_flow_run(run)


def _task_runs(client: SyncPrefectClient, run: UUID) -> list[TaskRun]:
    """Return the task runs of all attempts; the server writes them down a little later than they happen."""

    def read() -> list[TaskRun]:
        return client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))

    def complete() -> bool:
        found = read()
        ends = [task for task in found if task.name.startswith(LAST_TASK)]
        return len(ends) == NUM_ENDS and all(task.state is not None and task.state.is_final() for task in found)

    wait_until(complete, poll_s=0.2)
    return read()
