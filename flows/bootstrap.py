"""Environment of a run, set before prefect, mlflow or transformers are imported."""

import os
from pathlib import Path

HOME = ".model-optimizer"


def home() -> Path:
    """Return the folder that holds store, bundles and the local databases: below the current directory."""
    return Path.cwd() / HOME


def run_file(flow_run_id: str) -> Path:
    """Return where the outcome of a flow run is kept as JSON."""
    return home() / "runs" / f"{flow_run_id}.json"


def quiet_libraries() -> None:
    """Keep other libraries' bars and notices off the terminal; ours tell what happens. Call before they are imported."""
    for name, value in {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "MLFLOW_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)


def prepare_environment(*, quiet: bool) -> None:
    """Point Prefect and MLflow at their embedded defaults unless the user named a server.

    Law: a variable that is already set is left alone.
    """
    defaults = {
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "model_optimizer,tasks,flows",
        # the terminal shows progress and one line at the end; everything goes to the run's log in the UI
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL" if quiet else "INFO",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
    }
    if "PREFECT_API_URL" not in os.environ:
        defaults["PREFECT_HOME"] = str(home() / "prefect")
        (home() / "prefect").mkdir(parents=True, exist_ok=True)  # Prefect makes the folder but not its parent
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
