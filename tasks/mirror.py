"""Sign-off and deployment told to MLflow by commands that must not wait for it.

The letter is written to the outbox; a process of its own sends it, for importing MLflow alone takes seconds. Whatever fails, the
command does not: the letter stays, and the next run or command in the folder sends it.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

from model_optimizer.artifacts.release import SignOff
from tasks.tracking import DEPLOYED, Tracker, VersionRecord

log = logging.getLogger(__name__)

SIGNOFF_WAIT_S = 20.0
DEPLOY_WAIT_S = 2.0


def mirror_signoff(root: Path, name: str, source: str, record: SignOff) -> None:
    """Tell MLflow of a sign-off that was recorded outside of a run.

    `root` is the home folder, `name` the registered model, `source` the bundle's `file://` URI. Waits at most `SIGNOFF_WAIT_S`.
    """
    tracker = Tracker(root, sends=False)
    tracker.mirror_signoff(name, source, record)
    _send(root, SIGNOFF_WAIT_S)


def mirror_deployment(root: Path, bundle: str, manifest_sha256: str, by: str) -> None:
    """Move the alias `production` to the version of a bundle that is deployed now, where a tracking server is named.

    `bundle` is its name, `chat-v3`; a bundle that was never registered is left so. Waits at most `DEPLOY_WAIT_S`.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        return
    Tracker(root, sends=False).register(
        VersionRecord(
            name=bundle.rpartition("-v")[0],
            source="",
            run_record_id="",
            manifest_sha256=manifest_sha256,
            known_only=True,
            tags={"deployed.by": by},
            aliases=(DEPLOYED,),
        )
    )
    _send(root, DEPLOY_WAIT_S)


def _send(root: Path, most_s: float) -> None:
    """Start a process that empties the outbox and outlives this one; wait for it a little."""
    try:
        sender = subprocess.Popen(
            [sys.executable, "-P", "-m", "tasks.mirror", str(root)],  # -P: not what the user's folder calls `tasks`
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        sender.wait(most_s)
    except subprocess.TimeoutExpired:
        log.info("MLflow is told in the background")
    except OSError as error:
        log.warning("MLflow is told later, with the next run: %s", error)


if __name__ == "__main__":
    Tracker(Path(sys.argv[1])).flush()
