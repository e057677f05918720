"""Environment of a run, set before prefect, mlflow or transformers are imported."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.server import LocalServer

HOME = ".model-optimizer"
HOME_VARIABLE = "MODEL_OPTIMIZER_HOME"
"""Names another folder: a worker that clones every commit into a directory of its own keeps one store for all of them."""


def home() -> Path:
    """Return the folder that holds store, bundles and the local databases: below the current directory unless named."""
    return Path(os.environ.get(HOME_VARIABLE) or Path.cwd() / HOME).absolute()


def run_file(flow_run_id: str) -> Path:
    """Return where the outcome of a flow run is kept as JSON."""
    return home() / "runs" / f"{flow_run_id}.json"


def quiet_libraries() -> None:
    """Keep other libraries' bars and notices off the terminal; ours tell what happens. Call before they are imported."""
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "MLFLOW_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)


def prepare_environment(*, quiet: bool) -> "LocalServer | None":
    """Point Prefect and MLflow at their embedded defaults; return this folder's Prefect server unless the user named one.

    The server still starts when this returns: `wait` for it. Law: a variable that is already set is left alone.
    """
    defaults = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "model_optimizer,tasks,flows",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # MLflow's sender works in a thread of its own
        # the terminal shows progress and one line at the end; everything goes to the run's log in the UI
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL" if quiet else "INFO",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
    }
    if "PREFECT_API_URL" not in os.environ:
        defaults["PREFECT_HOME"] = str(home() / "prefect")
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    server = None
    if "PREFECT_API_URL" not in os.environ:
        from flows.server import LocalServer

        server = LocalServer(Path(os.environ["PREFECT_HOME"]))
        os.environ["PREFECT_API_URL"] = server.api_url
    return server
