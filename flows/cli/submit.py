"""`model-optimizer submit`: hand a profile of one commit to a Prefect server, and return without waiting for it."""

import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flows.cli.github import GithubFiles
from flows.prepare import source_commit
from flows.surroundings import check_prefect
from model_optimizer.errors import ConfigError
from model_optimizer.profile import load_profile

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

DEPLOYMENT = "model-optimizer/on-commit"
ANY_COMMIT, ANY_REPOSITORY = "{{ $MO_COMMIT }}", "{{ $MO_REPOSITORY }}"
"""What the deployment's pull step says where every run brings its own."""
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Submission:
    """What is asked of the server."""

    profile: Path
    overrides: tuple[str, ...]
    commit: str
    """Left empty: the checkout's."""
    repository: str
    """Left empty: the checkout's `origin`."""
    key: str
    """Left empty: repository, commit, profile and overrides."""
    deployment: str = DEPLOYMENT


@dataclass(frozen=True)
class Submitted:
    """The flow run that stands for a submission."""

    flow_run_id: str
    name: str
    state: str
    url: str
    deployment: str
    commit: str
    idempotency_key: str
    already: bool
    """Whether an earlier call had started it."""


def submit_profile(submission: Submission, *, as_json: bool, github: Path | None = None) -> None:
    """Start the run, or find the one that an earlier call started; say where it can be watched.

    Raises:
        ConfigError: the profile is wrong, no commit or repository is known, no server answers, or it has no such deployment,
            or one for another commit.
    """
    with GithubFiles(github, submission.profile, "submit") as files:
        done = submit(submission)
        words = "was started before" if done.already else "is submitted"
        files.outputs |= {"flow-run-id": done.flow_run_id, "flow-run-url": done.url}
        if github is not None:
            text = submitted_markdown(submission.profile, done)
            files.summary, files.comment = text, files.marker.encode() + b"\n\n" + text
        if as_json:
            typer.echo(json.dumps(asdict(done), indent=1))
        else:
            typer.echo(f"{submission.profile} of {done.commit[:12]} {words}: {done.name} ({done.state})\n{done.url}")


def submit(submission: Submission) -> Submitted:
    """Return the flow run of a submission; law: the same submission gives the same run, however often it is made."""
    load_profile(submission.profile, submission.overrides)
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        raise ConfigError(
            "submit needs PREFECT_API_URL, the server whose workers run it; `model-optimizer run` works without one"
        )
    check_prefect(address)
    base = submission.profile.resolve().parent
    commit = submission.commit or source_commit(base)
    if not _COMMIT.fullmatch(commit):
        raise ConfigError(f"--commit is {commit!r}; give the full commit, 40 hexadecimal digits")
    repository = submission.repository or _git(base, "remote", "get-url", "origin")
    if not repository:
        raise ConfigError(f"{base} has no git remote `origin`; say with --repository what the worker clones")
    profile = _in_checkout(submission.profile, base)
    key = submission.key or "|".join([f"{repository}@{commit}:{profile}", *submission.overrides])
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deployment = _deployment(client, submission.deployment, commit)
        before = _started_before(client, key)
        parameters = {"profile": profile, "overrides": list(submission.overrides)}
        run = before or client.create_flow_run_from_deployment(
            deployment.id,
            parameters=parameters,
            idempotency_key=key,
            tags=[f"commit:{commit}"],
            job_variables={"env": {"MO_COMMIT": commit, "MO_REPOSITORY": repository}},
        )
    from prefect.utilities.urls import url_for

    state = run.state.name if run.state and run.state.name else "unknown"
    url = url_for("flow-run", obj_id=run.id) or ""
    return Submitted(str(run.id), run.name, state, url, submission.deployment, commit, key, before is not None)


def submitted_markdown(profile: Path, done: Submitted) -> bytes:
    """Return what is told on GitHub: where the run can be watched."""
    from model_optimizer.reporting.formats.github import neutral
    from model_optimizer.reporting.markup import cell

    words = "was started before" if done.already else "is submitted"
    place = f"[{cell(done.name)}]({done.url})" if done.url.startswith(("http://", "https://")) else cell(done.name)
    return (
        neutral(f"## {cell(str(profile))} of {done.commit[:12]} {words}\n\nFlow run ") + f"{place}: {cell(done.state)}.\n"
    ).encode()


def _deployment(client: "SyncPrefectClient", name: str, commit: str) -> "DeploymentResponse":
    """Return the deployment; one whose pull step names another commit would run that."""
    from prefect.exceptions import ObjectNotFound

    placeholders = f"MO_COMMIT='{ANY_COMMIT}' MO_REPOSITORY='{ANY_REPOSITORY}'"
    mend = f"deploy it: {placeholders} prefect --no-prompt deploy --name {name.rpartition('/')[2]}"
    try:
        deployment = client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError) as error:
        raise ConfigError(f"the server has no deployment {name!r}; {mend}") from error
    pinned = [str(it["commit_sha"]) for step in deployment.pull_steps or () for it in step.values() if "commit_sha" in it]
    if other := [it for it in pinned if _COMMIT.fullmatch(it) and it != commit]:
        raise ConfigError(f"deployment {name} clones commit {other[0]}, not {commit}; {mend}, so that every run brings its own")
    return deployment


def _started_before(client: "SyncPrefectClient", key: str) -> "FlowRun | None":
    """Return the run that an earlier call with this key started."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterIdempotencyKey

    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key])))
    return found[0] if found else None


def _in_checkout(profile: Path, base: Path) -> str:
    """Return the profile's path in the repository, as the worker's clone has it."""
    top = _git(base, "rev-parse", "--show-toplevel")
    full = profile.resolve()
    if not top or not full.is_relative_to(Path(top).resolve()):
        raise ConfigError(f"{profile} lies in no git checkout, so no worker can clone it; commit it first")
    return full.relative_to(Path(top).resolve()).as_posix()


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()
