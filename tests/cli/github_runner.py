"""What GitHub's runner does with a composite action: its `run:` blocks one after another, their files, their log.

`uses:` steps are skipped and named. It knows the expressions of action.yml: `inputs.x`, `steps.x.outputs.y`, `==`, `!=`, `&&`.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")
_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


@dataclass
class Ended:
    """How a use of the action ended."""

    outputs: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    """Step -> exit status, of the steps that ran."""
    skipped: list[str] = field(default_factory=list)
    """Other actions that would have been called."""
    summaries: list[bytes] = field(default_factory=list)
    """What each step wrote; the limit is one step's."""
    log: str = ""

    @property
    def failed(self) -> bool:
        return any(self.codes.values())

    def commands(self) -> list[str]:
        """Return the lines that the runner takes for workflow commands; none between `stop-commands` and its token."""
        found, token = [], None
        for line in re.split("\r\n|\r|\n", self.log):
            if token is not None:
                token = None if line.strip() == f"::{token}::" else token
            elif stop := re.match(r"\s*::stop-commands::(.+)", line):
                token = stop[1]
            elif re.match(r"\s*::[\w-]+.*::", line) or "##[" in line:
                found.append(line)
        return found


@dataclass(frozen=True)
class Runner:
    """A runner with a checkout; `environment` wins over its own variables."""

    action: Path
    workspace: Path
    temp: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def use(self, **given: str) -> Ended:
        """Run the action's steps with inputs, whose names are written with underscores here."""
        action = yaml.safe_load((self.action / "action.yml").read_text(encoding="utf-8"))
        inputs = {name: str(it.get("default", "")) for name, it in action["inputs"].items()}
        stated = {name.replace("_", "-"): value for name, value in given.items()}
        assert set(stated) <= set(inputs), set(stated) - set(inputs)
        known = {f"inputs.{name}": value for name, value in {**inputs, **stated}.items()}
        known |= {"github.action_path": str(self.action), "runner.os": "Linux", "runner.arch": "X64"}
        ended = Ended()
        for number, step in enumerate(action["runs"]["steps"]):
            name = str(step.get("id") or step.get("name") or number)
            if not _holds(str(step.get("if", "")), known, failed=ended.failed):
                continue
            if "uses" in step:
                ended.skipped.append(step["uses"].partition("@")[0])
                continue
            self._run(name, number, step, known, ended)
        ended.outputs = {name: _filled(it["value"], known) for name, it in action["outputs"].items()}
        return ended

    def _run(self, name: str, number: int, step: Mapping[str, object], known: dict[str, str], ended: Ended) -> None:
        assert step["shell"] == "bash" and isinstance(step["run"], str) and "${{" not in step["run"]
        stated = step.get("env", {})
        assert isinstance(stated, dict)
        files = {variable: self.temp / f"{variable.lower()}-{number}" for variable in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for path in files.values():
            path.touch()
        script = self.temp / f"step-{number}.sh"
        script.write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            [*SHELL, str(script)],
            cwd=self.workspace,
            env={
                **self._variables(),
                **{variable: str(path) for variable, path in files.items()},
                **{variable: _filled(str(value), known) for variable, value in stated.items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=900,
            check=False,
        )
        ended.codes[name] = done.returncode
        ended.log += done.stdout.decode()
        ended.summaries.append(files["GITHUB_STEP_SUMMARY"].read_bytes())
        for line in files["GITHUB_OUTPUT"].read_text(encoding="utf-8").splitlines():
            output, _, value = line.partition("=")
            known[f"steps.{name}.outputs.{output}"] = value

    def _variables(self) -> dict[str, str]:
        """Return the environment of every step: this process's without what GitHub or a test set, then GitHub's own."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "PREFECT_", "MLFLOW_"))}
        return {
            **mine,
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_SERVER_URL": "https://github.test",
            "GITHUB_REPOSITORY": "owner/models",
            "GITHUB_RUN_ID": "7",
            "GITHUB_ACTOR": "carol",
            "GITHUB_SHA": "0123456789abcdef0123456789abcdef01234567",
            "GITHUB_WORKSPACE": str(self.workspace),
            "RUNNER_TEMP": str(self.temp),
            "PYTHONPATH": str(self.action),
            **self.environment,
        }


def clean_checkout(repository: Path, folder: Path) -> Path:
    """Return a clone of the commit that is checked out, with what is changed or new in the working tree on top."""
    subprocess.run(["git", "clone", "--quiet", "--local", str(repository), str(folder)], check=True)
    listed = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True).stdout.split("\0"):
        source, target = repository / name, folder / name
        if name and source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode)
        elif name:
            target.unlink(missing_ok=True)
    return folder


def this_environment() -> str:
    """Return the interpreter whose environment holds model-optimizer."""
    return str(Path(sys.executable))


def _holds(condition: str, known: Mapping[str, str], *, failed: bool) -> bool:
    terms = [term.strip() for term in condition.split("&&") if term.strip()]
    if failed and "always()" not in terms:
        return False
    return all(term == "always()" or _compared(term, known) for term in terms)


def _compared(term: str, known: Mapping[str, str]) -> bool:
    name, operator, literal = re.fullmatch(r"([\w.-]+) (==|!=) '(.*)'", term).groups()  # type: ignore[union-attr]
    return (known.get(name, "") == literal) is (operator == "==")


def _filled(text: str, known: Mapping[str, str]) -> str:
    return _EXPRESSION.sub(lambda found: known.get(found[1], ""), text)
