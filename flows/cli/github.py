"""What a command leaves for a GitHub workflow: summary, comment, annotations and outputs as files, whatever its end.

The workflow only moves them: `cat summary.md >> "$GITHUB_STEP_SUMMARY"`, `cat outputs.txt >> "$GITHUB_OUTPUT"`,
`cat annotations.txt`. Nothing here talks to GitHub.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer

from flows.bootstrap import home
from model_optimizer.artifacts.base import file_sha256
from model_optimizer.disk import storage_fault
from model_optimizer.errors import ConfigError, GateFailed, ModelOptimizerError
from model_optimizer.store import write_atomically
from model_optimizer.yaml_file import read_yaml

if TYPE_CHECKING:
    from model_optimizer.reporting.annotations import Annotation, LineOf

WAITING, INTERRUPTED = 7, 130
LONGEST_FAILURE = 800
"""Characters; four bytes each still leave room beside a summary that is as long as it may be."""
_AT_LINE = re.compile(r"^(?P<file>.+?):(?P<line>\d+): (?P<message>.*)", re.DOTALL)


@dataclass
class GithubFiles:
    """Collects what is to be told while a command runs, and writes it when it ends; without a folder it does nothing."""

    folder: Path | None
    profile: Path | None
    what: str
    """The command, as a title says it: `plan`, `run`."""
    report: Path | None = None
    """report.json of the bundle that the command made or looked at."""
    outputs: dict[str, str] = field(default_factory=dict)
    summary: bytes = b""
    comment: bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.folder is None:
            return
        if isinstance(error, GateFailed):
            self.report = error.report.with_name("report.json")
        annotations = self._told(error)
        for name, content in (("summary.md", self.summary), ("comment.md", self.comment), ("annotations.txt", annotations)):
            write_atomically(self.folder / name, content)
        write_atomically(self.folder / "outputs.txt", _assignments({**self.outputs, **self._status(error)}))

    def read_outcome(self, path: Path) -> None:
        """Take the report from the outcome document of a run; a run that was to end early has none."""
        page = json.loads(path.read_bytes()).get("report")
        if page is not None:
            self.report = Path(page).with_name("report.json")

    def _told(self, error: BaseException | None) -> bytes:
        """Fill summary and comment, and return the annotations."""
        from model_optimizer.reporting.annotations import Annotation, commands

        reported = self.report is not None and self.report.is_file()
        told: list[Annotation] = []
        failure = ""
        if error is not None and not (reported and (isinstance(error, GateFailed) or exit_code(error) == WAITING)):
            message = _message(error)
            told.append(failure_annotation(self.what, message, self.profile))
            failure = failure_markdown(self.what, message, exit_code(error))
        if reported:
            told += self._tell_report(failure)
        elif failure:
            text = f"{failure}{run_link(chr(10))}\n".encode()
            self.summary, self.comment = text, self.marker.encode() + b"\n\n" + text
        return commands(told).encode()

    def _tell_report(self, failure: str) -> "tuple[Annotation, ...]":
        """Fill summary, comment and outputs from the report, and return what is told on the profile's lines."""
        from model_optimizer.artifacts.report import Report
        from model_optimizer.reporting.annotations import gate_annotations
        from model_optimizer.reporting.formats.github import render_comment, render_github

        assert self.report is not None
        bundle = self.report.parents[1]
        report = Report.model_validate_json(self.report.read_bytes())
        self.outputs = {**self.outputs, **_released(bundle, report.verdict.value)}
        where = f"Bundle `{bundle.name}` · report `{self.outputs['report-sha256'][:16]}`{run_link()}"
        notes = (failure, where) if failure else (where,)
        self.summary, self.comment = render_github(report, notes), render_comment(report, notes, self.marker)
        profile = self.profile
        return () if profile is None else gate_annotations(report, shown_path(profile), line_of(profile))

    def _status(self, error: BaseException | None) -> dict[str, str]:
        """Return the exit code, and the state and description of a commit status."""
        code, verdict = exit_code(error), self.outputs.get("verdict", "")
        waits = code == WAITING or (error is None and self.outputs.get("decision") == "waiting")
        if error is None and self.what == "submit":
            state, words = "pending", "handed to the Prefect server"
        elif waits:
            state, words = "pending", f"{verdict}, waits for its sign-off"
        else:
            told = verdict and (error is None or isinstance(error, GateFailed))
            refused = error is not None or self.outputs.get("decision") == "refused"
            state, words = "failure" if refused else "success", verdict if told else f"{self.what} ended with exit code {code}"
        return {"exit-code": str(code), "state": state, "description": words}

    @property
    def marker(self) -> str:
        """Return the comment's first line, by which the workflow finds the comment of this command and profile again."""
        subject = hashlib.sha256(f"{self.what}\0{self.profile}".encode()).hexdigest()[:16]
        return f"<!-- model-optimizer {subject} -->"


def exit_code(error: BaseException | None) -> int:
    """Return the status that the command line ends with for an error."""
    if error is None:
        return 0
    if isinstance(error, ModelOptimizerError):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return INTERRUPTED
    fault = storage_fault(error, home()) if isinstance(error, Exception) else None
    return fault.exit_code if fault else 1


def _released(bundle: Path, verdict: str) -> dict[str, str]:
    """Return what names a bundle, its report and its sign-off record, as the files beside it say."""
    record, metrics = bundle.with_name(f"{bundle.name}.signoff.json"), bundle / "metrics"
    known = {
        "verdict": verdict,
        "bundle": str(bundle),
        "report": str(metrics / "report.html"),
        "report-sha256": file_sha256(metrics / "report.json"),
        "manifest-sha256": file_sha256(bundle / "manifest.json"),
    }
    if not record.is_file():
        return known
    told = json.loads(record.read_bytes())
    return {**known, "record": str(record), "decision": str(told["decision"]), "level": str(told["level"])}


def failure_markdown(what: str, message: str, code: int) -> str:
    """Return what is told where there is no report."""
    from model_optimizer.reporting.formats.github import neutral
    from model_optimizer.reporting.markup import cell
    from model_optimizer.reporting.text import shortened

    return neutral(f"## ✘ {what} ended with exit code {code}\n\n{cell(shortened(message, LONGEST_FAILURE))}\n")


def _message(error: BaseException) -> str:
    """Return what the command line says of an error."""
    words = " ".join(str(error).split())
    if isinstance(error, ModelOptimizerError):
        return words
    return "interrupted" if exit_code(error) == INTERRUPTED else f"unexpected {type(error).__name__}: {words}"


def failure_annotation(what: str, message: str, profile: Path | None) -> "Annotation":
    """Return the error, at the line of the profile that the message names, else at its first."""
    from model_optimizer.reporting.annotations import Annotation

    found = _AT_LINE.match(message)
    if profile is not None and found and Path(found["file"]) == profile:
        return Annotation("error", f"{what}: the profile is wrong", found["message"], shown_path(profile), int(found["line"]))
    return Annotation("error", f"{what} failed", message, None if profile is None else shown_path(profile))


def line_of(profile: Path) -> "LineOf":
    """Return what tells the line of a field; where the profile cannot be read any more, every field is in its first."""
    try:
        return read_yaml(profile, "a profile").line
    except ConfigError:
        return lambda _: 1


def shown_path(path: Path) -> str:
    """Return a path as GitHub knows it: relative to the checkout where it lies in it."""
    full, root = path.absolute(), Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).absolute()
    return full.relative_to(root).as_posix() if full.is_relative_to(root) else path.as_posix()


def run_link(before: str = " · ") -> str:
    """Return a link to the workflow run that this process belongs to; nothing outside GitHub."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    server, repository, number = (os.environ.get(name, "") for name in names)
    return f"{before}[workflow run]({server}/{repository}/actions/runs/{number})" if server and repository and number else ""


def _assignments(outputs: Mapping[str, str]) -> bytes:
    """Return `name=value` lines; a value stays on its line, whatever it holds."""
    return "".join(f"{name}={' '.join(value.split())}\n" for name, value in outputs.items()).encode()
