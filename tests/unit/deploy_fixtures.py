"""Bundles of a tiny model that really open: what deploying, going back and the self-check need."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from release_fixtures import DOCUMENTS, make_inputs
from report_fixtures import FLOAT_TORCH, INT8, compiled, stored, verification, write_stage_files

from model_optimizer.artifacts.base import Stored
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.release import Release, SampleOutput
from model_optimizer.artifacts.strategy import Strategy
from model_optimizer.protocols import GenerationRequest, Quiet
from model_optimizer.release import stage
from model_optimizer.release.health import Health
from model_optimizer.release.inputs import PackageInputs
from model_optimizer.runtimes.registry import RUNTIMES

PLAN = KvPlan(page_tokens=16, num_pages=8, bytes_per_token=512, max_batch=2, max_model_len=64)
INT8_TORCH = Strategy(weights=INT8.weights, runtime="torch")
PROMPTS = ((5, 6, 7), (11,))
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.truncate", "os.utime"}


def torch_engine(root: Path, checkpoint: Path, strategy: Strategy, name: str) -> Stored[CompiledModel]:
    """A compiled entry whose engine is the checkpoint itself, as the torch runtime wants it."""
    artifact = compiled(strategy)
    version = metadata.version("torch").partition("+")[0]
    engine = artifact.engine.model_copy(update={"framework_version": version})
    return write_stage_files(root, checkpoint, artifact.model_copy(update={"engine": engine}), name)


def greedy(checkpoint: Path, engine: Stored[CompiledModel]) -> tuple[SampleOutput, ...]:
    """What the runtime itself answers, 6 tokens a prompt."""
    runtime = RUNTIMES.get("torch").open(engine.artifact.engine, checkpoint, PLAN)
    outputs = []
    for prompt in PROMPTS:
        runtime.submit(GenerationRequest(prompt, 6))
        tokens: list[int] = []
        while events := runtime.step():
            tokens += [event.token for event in events]
        fields = {"prompt": str(prompt), "prompt_tokens": prompt, "text": "", "baseline_text": ""}
        outputs.append(SampleOutput.model_validate({**fields, "tokens": tokens, "baseline_tokens": tokens}))
    runtime.close()
    return tuple(outputs)


def make_deployable_inputs(root: Path, checkpoint: Path, verdict: Verdict = Verdict.ACCEPT) -> PackageInputs:
    """Inputs of a release whose two engines run with the torch runtime."""
    inputs = make_inputs(root, checkpoint, verdict)
    (root / "memory" / "kv_cache_config.json").write_text(json.dumps({"kv_cache_format": 1, **PLAN.model_dump(mode="json")}))
    return inputs.model_copy(
        update={
            "engine": torch_engine(root, checkpoint, INT8_TORCH, "chosen"),
            "baseline_engine": torch_engine(root, checkpoint, FLOAT_TORCH, "reference"),
        }
    )


def make_bundles(root: Path, checkpoint: Path) -> Path:
    """Publish chat-v0 (baseline), -v1 and -v2 (accepted), -v3 (rejected), -v4 (accepted, samples that no engine gives)."""
    inputs = make_deployable_inputs(root, checkpoint)
    right = greedy(checkpoint, inputs.baseline_engine)
    wrong = (right[0], right[1].model_copy(update={"tokens": (*right[1].tokens[:-1], right[1].tokens[-1] ^ 1)}))
    verdicts = (Verdict.ACCEPT, Verdict.ACCEPT, Verdict.REJECT, Verdict.ACCEPT)
    for verdict, outputs in zip(verdicts, (right, right, right, wrong), strict=True):
        publish(inputs, root, verdict, outputs)
    return root / "bundles"


def publish(inputs: PackageInputs, root: Path, verdict: Verdict, outputs: tuple[SampleOutput, ...]) -> Release:
    checked = stored("verify", verification(verdict), root / "verify")
    shutil.rmtree(root / "work", ignore_errors=True)
    (root / "work").mkdir()
    return stage.package_release(
        inputs.model_copy(update={"verification": checked}),
        root / "work",
        bundles=root / "bundles",
        documents=DOCUMENTS,
        samples=outputs,
        progress=Quiet(),
    )


def fit(_release: Path) -> Health:
    """A check that passes at once, where the health of the release is not what a test is about."""
    return Health("device: ok", 0, 0.0)


def die_at(root: Path, number: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that is killed (kill -9) before its change number `number` below `root`; return whether it was."""
    child = os.fork()
    if child == 0:
        try:
            count_down = [number]

            def hook(event: str, arguments: tuple[object, ...]) -> None:
                if _changes(event, arguments, str(root)):
                    count_down[0] -= 1
                    if count_down[0] == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    _, state = os.waitpid(child, 0)
    assert os.WIFSIGNALED(state) or os.WEXITSTATUS(state) == 0, "the action failed by itself"
    return os.WIFSIGNALED(state)


def _changes(event: str, arguments: tuple[object, ...], root: str) -> bool:
    """Return whether an audit event is about to change something below `root` (or, relative to a folder, anything)."""
    if event == "open":
        path, _, flags = arguments
        return isinstance(flags, int) and bool(flags & WRITES) and os.fspath(str(path)).startswith(root)
    if event not in CHANGES:
        return False
    if event in ("os.remove", "os.rmdir", "os.mkdir", "os.chmod") and arguments[-1] != -1:
        return True
    return any(str(argument).startswith(root) for argument in arguments[:2])
