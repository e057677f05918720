"""What a run needs around it, asked before it starts: a folder to write, room on its disk, and the servers that were named."""

import os
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from flows.bootstrap import home
from flows.prepare import Request
from model_optimizer.disk import require_writable
from model_optimizer.errors import ConfigError
from model_optimizer.release.sign import check_key

SERVER_WAIT_S = 5.0
DATABASE_BYTES = 8 << 20
"""Room for Prefect's and MLflow's records. Source: a first run of the tiny test project left 3.5 MB of them, and SQLite keeps
what it writes twice for a while."""
BYTES_PER_PARAMETER = 4
"""The unquantized engine, which every run writes as the baseline; a bound from below."""
_TRACKING = ("", "file", "http", "https", "databricks", "databricks-uc", "uc")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def check_surroundings(request: Request) -> None:
    """Refuse what would end a run after minutes; nothing is written.

    Raises:
        ConfigError: a server's address is malformed or dead, or the signing key is none.
        StorageError: the working folder cannot be written or has too little room.
    """
    require_writable(home(), DATABASE_BYTES + BYTES_PER_PARAMETER * request.num_parameters)
    for part in ("store", "bundles", "prefect", "runs", "spool"):
        require_writable(home() / part)
    check_key(request.profile.release.signer.key)
    if address := os.environ.get("PREFECT_API_URL"):
        check_prefect(address)
    if address := os.environ.get("MLFLOW_TRACKING_URI"):
        _check_tracking(address)


def check_prefect(address: str) -> None:
    """Ask the named server for its health; without it no step of a run can be recorded.

    Raises:
        ConfigError: the address is malformed, or nothing there answers.
    """
    mend = "start it (`prefect server start`), mend the variable, or unset it: then a server of this folder is used"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"PREFECT_API_URL is {address!r}; allowed: http(s)://HOST:PORT/api; {mend}")
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=SERVER_WAIT_S):
            return
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):  # it is there and wants a name, which prefect knows how to give
            return
        raise ConfigError(
            f"PREFECT_API_URL {address}: /health answers {error.code}, so no Prefect API is there; {mend}"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConfigError(f"PREFECT_API_URL {address} does not answer ({reason}); {mend}") from error


def _check_tracking(address: str) -> None:
    """Look at the form only: an MLflow server that is down never stops a run."""
    parts = urlsplit(address) if "://" in address else None
    scheme = parts.scheme if parts else address.partition(":")[0] if ":" in address and not Path(address).exists() else ""
    known = scheme in _TRACKING or scheme.partition("+")[0] in _DATABASES
    if not known or (scheme in ("http", "https") and not (parts and parts.hostname)):
        allowed = "http(s)://HOST:PORT, sqlite:///FILE, postgresql://..., mysql://..., databricks, a folder"
        raise ConfigError(
            f"MLFLOW_TRACKING_URI is {address!r}; allowed: {allowed}; or unset it: then a database of this folder is used"
        )
