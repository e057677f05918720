"""The load canary: a framework loads the result in its own interpreter and continues prompts; the checkpoint judges every token.

The framework runs in a process of its own with a time limit. What it answers is compared, never believed: the checkpoint is run
once over prompt and answer together, by transformers in float32 here.

Shape letters: T tokens, V vocabulary.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from model_optimizer.artifacts.measure import Dimension, Measure, Origin
from model_optimizer.artifacts.triple import LoadCheck
from model_optimizer.compilation.support import Framework, Scheme, refuse_unsupported, scheme_of
from model_optimizer.compilation.target_framework import Loader
from model_optimizer.decisions import Decision
from model_optimizer.errors import UnsupportedError
from model_optimizer.paths import PACKAGE_ROOT
from model_optimizer.runtimes.versions import Found

SCRIPTS = PACKAGE_ROOT / "compilation" / "canaries"
PROMPT_TOKENS = (1, 7)
"""The shortest prompt there is, and an odd one."""
NUM_NEW = 12
MOST_REGRET_RATIO = 0.05
"""Kernels that round inputs or add in another order swap tokens that lie close together. Source: vLLM 0.32 on a CPU, a random
Llama of two layers: float 0, int4 0.001, int4 with negative scales 0.003, fp8 0.018; another model's tokens 0.31."""
MAX_LENGTH = 64
TIMEOUT_S = 900.0
_WORDS = 400
_LAST_LINES = 30


@dataclass(frozen=True, slots=True)
class CanaryRequest:
    """What is to be loaded by whom, and which checkpoint says what is right."""

    framework: Framework
    python: Path
    found: Found
    model: Path
    """What the framework loads: the checkpoint's directory, or an engine's."""
    checkpoint: Path
    vocab_size: int
    timeout_s: float = TIMEOUT_S


class _Answer(BaseModel):
    version: str
    tokens: list[list[int]]
    load_s: float


def prompts_for(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the prompts: tokens spread over the vocabulary, the same for every framework."""
    return tuple(tuple((5 + 7 * at * at + 11 * at) % vocab_size for at in range(length)) for length in PROMPT_TOKENS)


def load_canary(request: CanaryRequest) -> LoadCheck:
    """Run the framework on the result and judge what it says.

    Raises:
        UnsupportedError: it does not load or answer in time, or its tokens are not the checkpoint's.
    """
    answer = _continued(request)
    agreement, regret_ratio = judge(request.checkpoint, prompts_for(request.vocab_size), answer.tokens)
    name = f"{request.framework.name} {answer.version}"
    if not regret_ratio <= MOST_REGRET_RATIO:
        raise UnsupportedError(
            f"load canary: {name} loads the result and says other tokens than its checkpoint (agreement {agreement:.2f}, regret "
            f"{regret_ratio:.3g}, allowed {MOST_REGRET_RATIO:g}); take another format (`model-optimizer targets`) or version"
        )
    return LoadCheck(
        framework=request.framework.name,
        version=answer.version.partition("+")[0],
        num_tokens=NUM_NEW * len(PROMPT_TOKENS),
        agreement_ratio=agreement,
        regret_ratio=regret_ratio,
        load_s=answer.load_s,
    )


def check_load(loader: Loader, place: Path, checkpoint: Path) -> tuple[LoadCheck | None, str]:
    """Let the target framework load `place` where its interpreter is known; return what came of it, or why it did not run.

    Raises:
        UnsupportedError: the framework does not run a scheme that the checkpoint has, does not load it, or says other tokens.
    """
    target = loader.target
    if target.framework.loads == "checkpoint":
        refuse_unsupported(target.framework, schemes_of_checkpoint(checkpoint), loader.device)
    if target.python is None:
        is_engine = target.framework.loads == "engine"
        also = "; compile held the engine against its checkpoint in this interpreter" if is_engine else ""
        return None, f"no interpreter of {target.name} is configured (target.python){also}"
    if target.framework.canary is None or loader.found is None:
        return None, f"{target.name} has no load canary"
    request = CanaryRequest(
        framework=target.framework,
        python=target.python,
        found=loader.found,
        model=place,
        checkpoint=checkpoint,
        vocab_size=int(json.loads((checkpoint / "config.json").read_bytes())["vocab_size"]),
        timeout_s=loader.timeout_s,
    )
    return load_canary(request), ""


def schemes_of_checkpoint(checkpoint: Path) -> frozenset[Scheme]:
    """Return the schemes of the layers as a checkpoint states them."""
    from model_optimizer.formats.compressed_tensors import read_plan

    found = {scheme_of(name) for name in set(read_plan(checkpoint).values())} or {Scheme.FLOAT}
    return frozenset(found | {Scheme.MIXED} if len(found) > 1 else found)


def _continued(request: CanaryRequest) -> _Answer:
    """Return what the framework says in its own process."""
    assert request.framework.canary is not None, "asked before"
    name = f"{request.framework.name} {request.found.version}"
    wanted = {
        "model": str(request.model.absolute()),
        "prompts": prompts_for(request.vocab_size),
        "num_tokens": NUM_NEW,
        "max_length": MAX_LENGTH,
    }
    with tempfile.TemporaryDirectory(prefix="canary-") as folder:
        question, answer, log = (Path(folder, it) for it in ("request.json", "answer.json", "log"))
        question.write_text(json.dumps(wanted))
        command = [
            str(request.python.expanduser().absolute()),
            str(SCRIPTS / request.framework.canary),
            str(question),
            str(answer),
        ]
        ended_with = _run(command, log, request.timeout_s)
        if ended_with is None:
            raise UnsupportedError(
                f"load canary: {name} did not answer within {request.timeout_s:g} s; raise target.canary_timeout_s"
            )
        if ended_with or not answer.is_file():
            raise UnsupportedError(
                f"load canary: {name} ended with {ended_with} on the result: {_last_fault(log)}; "
                "take a format that it runs (`model-optimizer targets`) or another version of it"
            )
        try:
            told = _Answer.model_validate_json(answer.read_bytes())
        except ValidationError as error:
            raise UnsupportedError(f"load canary: {name} gave no answer that can be read; run it by hand") from error
    if [len(tokens) for tokens in told.tokens] != [NUM_NEW] * len(PROMPT_TOKENS):
        raise UnsupportedError(
            f"load canary: {name} ended its answers early, at {[len(it) for it in told.tokens]} tokens of {NUM_NEW}"
        )
    return told


def _run(command: list[str], log: Path, timeout_s: float) -> int | None:
    """Return the exit status of a program, or None where time ran out; whatever it started is gone afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=log.parent, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_fault(log: Path) -> str:
    """Return the last line that names an error, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-_LAST_LINES:]
    named = [line for line in lines if "Error" in line.partition(":")[0]]
    return (named or lines or ["no output"])[-1][-_WORDS:]


def judge(checkpoint: Path, prompts: tuple[tuple[int, ...], ...], answers: list[list[int]]) -> tuple[float, float]:
    """Return the share of tokens that the checkpoint would choose too, and their mean regret.

    Regret of a token = (best logit - its own logit) / (best logit - mean logit): 0 is the checkpoint's choice, 1 a blind one.
    """
    import torch

    from model_optimizer.formats.loading import load_dequantized

    model = load_dequantized(checkpoint)
    regrets: list[float] = []
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, answers, strict=True):
            logits_TV = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
            chosen_T = logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            best_T = logits_TV.amax(-1)
            spread_T = (best_T - logits_TV.mean(-1)).clamp_min(torch.finfo(torch.float32).tiny)  # 0 after a padding token
            regrets += ((best_T - chosen_T) / spread_T).tolist()
    return sum(regret == 0 for regret in regrets) / len(regrets), sum(regrets) / len(regrets)


def check_decision(check: LoadCheck) -> Decision:
    """Return the entry of the decision log for a canary that passed."""
    return Decision(
        subject=f"load canary in {check.framework} {check.version}",
        choice="passed",
        because="it loaded the result in its own interpreter and said the checkpoint's tokens",
        numbers={
            "agreement_ratio": check.agreement_ratio,
            "regret_ratio": check.regret_ratio,
            "num_tokens": check.num_tokens,
            "load_s": check.load_s,
        },
    )


def skipped_decision(framework: str, because: str) -> Decision:
    """Return the entry of the decision log for a canary that did not run."""
    return Decision(subject=f"load canary in {framework}", choice="not run", because=because)


def check_measures(check: LoadCheck | None, because: str) -> tuple[Measure, ...]:
    """Return the canary's figures, or one that says why there are none."""
    if check is None:
        unknown = Measure(
            name="load_canary_agreement",
            dimension=Dimension.ROBUSTNESS,
            unit="ratio",
            value=None,
            higher_is_better=True,
            origin=Origin.NOT_MEASURED,
            reason=because,
        )
        return (unknown,)
    named = f"{check.framework} {check.version} in its own interpreter against the checkpoint"
    return (
        Measure(
            name="load_canary_agreement",
            dimension=Dimension.ROBUSTNESS,
            unit="ratio",
            value=check.agreement_ratio,
            higher_is_better=True,
            num_samples=check.num_tokens,
            reason=named,
        ),
        Measure(
            name="load_canary_regret",
            dimension=Dimension.ROBUSTNESS,
            unit="ratio",
            value=check.regret_ratio,
            limit=MOST_REGRET_RATIO,
            num_samples=check.num_tokens,
            reason=named,
        ),
        Measure(name="load_canary", dimension=Dimension.SPEED, unit="s", value=check.load_s, reason="to load, not to answer"),
    )
