"""Telling MLflow what a run found, without the run waiting for it or failing because of it.

A record is written to the outbox on disk and sent from there by a thread, in order. What could not be sent, because
the server was down or the process was killed, is sent by whoever works in the folder next. Sending takes milliseconds
of CPU right after a stage, when the next one still loads; importing MLflow takes seconds, so `open` waits for it
before anything is measured.
"""

import logging
import threading
import time
from pathlib import Path

from model_optimizer.artifacts.release import SignOff
from tasks.letters import Letter, RunRecord
from tasks.letters import VersionRecord as VersionRecord
from tasks.lock_holder import lock_hint
from tasks.outbox import Outbox, is_tried
from tasks.tracking_server import MANIFEST, MlflowServer, Refused, Unreachable, load, tracking_uri

log = logging.getLogger(__name__)

OPEN_S = 60.0
"""How long a run's start waits for MLflow: its import, the making of a database, a server that is slow."""

CLOSE_S = 60.0
"""How long a run's end waits for what is not sent yet."""

AGAIN_S = 20.0
"""A server that did not answer is left alone for so long."""

MOST_FAILURES = 2
"""A letter that fails so often although the server answers is left for another run, and the next one is sent."""

PACKAGED, SIGNED_OFF, DEPLOYED = "candidate", "signed-off", "production"
"""Aliases of a registered version."""


class Tracker:
    """Keeps records and sends them."""

    def __init__(self, root: Path, experiment: str = "", *, first_try: bool = False, sends: bool = True):
        """Record in the folder `root`.

        `first_try` says that the run was never started before, so that nothing is looked for. Without `sends`, records
        are kept only.
        """
        self.uri = tracking_uri(root)
        self._experiment = experiment
        self._first_try = first_try
        self._sends = sends
        self._outbox = Outbox(root)
        self._server = MlflowServer(self.uri, root)
        self._unwritten: list[Letter] = []
        self._known: set[str] = set()
        self._failures: dict[str, int] = {}
        self._down_since: float | None = None
        self._change = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._worker: threading.Thread | None = None

    def record(self, record: RunRecord) -> None:
        """Tell of a run."""
        fresh = self._first_try and record.record_id not in self._known
        self._known.add(record.record_id)
        self._post(Letter(experiment=self._experiment, fresh=fresh, kind="run", run=record))

    def register(self, record: VersionRecord) -> None:
        """Tell of a bundle: it is registered once, however often this is called."""
        self._post(Letter(experiment=self._experiment, kind="version", version=record))

    def mirror_signoff(self, name: str, source: str, record: SignOff) -> None:
        """Tell of a sign-off record: tags on the version of model `name` whose bundle lies at the URI `source`, and the alias."""
        signed = record.decision == SIGNED_OFF
        self.register(
            VersionRecord(
                name=name,
                source=source,
                run_record_id="",
                manifest_sha256=record.bundle_manifest_sha256,
                tags=signoff_tags(record),
                aliases=(SIGNED_OFF,) if signed else (),
            )
        )

    def open(self) -> None:
        """Wait until MLflow is loaded and has what was kept, at most `OPEN_S` seconds."""
        self.flush(OPEN_S)

    def flush(self, most_s: float = CLOSE_S) -> bool:
        """Try to send everything; return whether it was tried within `most_s` seconds."""
        with self._change:
            self._failures.clear()
            if self._down_since is not None:
                self._down_since = -AGAIN_S
            mine = self._ask()
            done = self._change.wait_for(lambda: self._answered >= mine or self._worker is None, most_s)
        if not done:
            log.warning("MLflow at %s is slow; what it does not have yet is kept in %s", self.uri, self._outbox.folder)
        return done

    def _post(self, letter: Letter) -> None:
        kept = self._outbox.keep(letter)
        with self._change:
            if not kept:
                self._unwritten.append(letter)
            if self._sends:
                self._ask()

    def _ask(self) -> int:
        """Wake the sender, or start it; return the number of this request."""
        self._asked += 1
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="mlflow", daemon=True)
            self._worker.start()
        self._change.notify_all()
        return self._asked

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._asked > self._answered)
                target = self._asked
            finished = False
            try:
                self._send_all()
                finished = True
            finally:
                with self._change:
                    self._answered = target
                    self._worker = self._worker if finished else None  # an error nobody thought of ends this thread, not the next
                    self._change.notify_all()

    def _send_all(self) -> None:
        if self._down_since is not None and time.monotonic() - self._down_since < AGAIN_S:
            return
        with self._outbox.turn():
            for path in self._outbox.waiting():
                if not self._send_kept(path):
                    return
        while self._unwritten:
            if not self._send(self._unwritten[0], is_new=False):
                return
            self._unwritten.pop(0)

    def _send_kept(self, path: Path) -> bool:
        """Send one letter of the outbox; return whether to go on with the next."""
        if self._failures.get(_number(path), 0) >= MOST_FAILURES:
            return True
        letter = self._outbox.read(path)
        if letter is None:
            return True
        self._failures[_number(path)] = self._failures.get(_number(path), 0) + 1
        marked = self._outbox.mark(path)
        if not self._send(letter, is_new=letter.fresh and not is_tried(path)):
            if not self._server.answers():
                self._failures.pop(_number(path), None)
            return False
        marked.unlink(missing_ok=True)
        return True

    def _send(self, letter: Letter, *, is_new: bool) -> bool:
        """Send one letter; return False where that failed, which is said once."""
        try:
            self._server.send(letter, is_new=is_new)
        except Refused as error:
            log.warning("MLflow at %s refuses a record: %s", self.uri, error)
        except Unreachable as error:
            if self._down_since is None:
                why = f"{error}{lock_hint(self.uri, str(error))}"
                log.warning("MLflow at %s does not answer (%s); records are kept in %s", self.uri, why, self._outbox.folder)
            self._down_since = time.monotonic()
            self._server.forget()
            return False
        if self._down_since is not None:
            log.warning("MLflow at %s answers again", self.uri)
        self._down_since = None
        return True


def _number(path: Path) -> str:
    """Return what a letter's file keeps of its name when it is marked."""
    return path.name.partition(".")[0]


def load_in_background() -> threading.Thread:
    """Import MLflow while the caller waits for something else.

    Prefect must be imported before: two threads that import the same libraries in different order see them half made.
    """
    thread = threading.Thread(target=load, name="import mlflow", daemon=True)
    thread.start()
    return thread


def signoff_tags(record: SignOff) -> dict[str, str]:
    """Return the tags `signoff.*` of a registered version."""
    tags = {
        MANIFEST: record.bundle_manifest_sha256,
        "mo.bundle": record.bundle,
        "signoff.decision": record.decision,
        "signoff.level": record.level,
        "signoff.method": record.method,
        "signoff.reviewer": record.reviewer,
        "signoff.identity": record.identity,
        "signoff.comment": record.comment,
        "signoff.report_sha256": record.report_sha256,
        "signoff.waivers": "; ".join(f"{waiver.gate}: {waiver.reason}" for waiver in record.waivers) or "none",
    }
    return {name: text for name, text in tags.items() if text}
