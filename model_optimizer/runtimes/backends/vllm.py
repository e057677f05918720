"""vLLM as a managed server (`vllm serve` in an interpreter of its own): serves a checkpoint's directory, quantized or not."""

from pathlib import Path

from pydantic import BaseModel

from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.memory.budget import pages_for
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.managed.dialect import Heard, Json, Launch, Scored, decode, refuse_fault
from model_optimizer.runtimes.managed.process import HOST
from model_optimizer.runtimes.managed.runtime import ManagedFactory
from model_optimizer.runtimes.options import TUNABLES
from model_optimizer.runtimes.registry import RUNTIMES

NAME = "served"
"""The model under its own roof; clients never see it."""
_CACHE_TYPES = {"fp8": "fp8", "float32": "auto", "bfloat16": "auto", "float16": "auto"}
"""What the plan's precision is called; floats follow the weights. Source: vLLM 0.32, `CacheDType`."""
_BLOCK_TOKENS = 128
"""Largest block that it takes by itself. Source: vLLM 0.32, CPU platform; 16 on a GPU."""
_SPARE_BLOCKS = 2
"""One that it keeps empty, and the part of one that rounding costs."""


class _LogProbs(BaseModel):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Event(BaseModel):
    choices: list[_Choice]


class Vllm:
    """Spoken to over its completions endpoint, tokens in and tokens out. Source: vLLM 0.32, `CompletionRequest`."""

    name = "vllm"
    program = "vllm"
    install = "install vLLM in an environment of its own (`python -m venv ENV; ENV/bin/pip install vllm`)"
    generate_path = "/v1/completions"
    version_path = "/version"

    def find_model(self, directory: Path) -> Path:
        """Return the directory, which must hold a checkpoint.

        Raises:
            ConfigError: it holds none.
        """
        if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
            raise ConfigError(f"{directory} holds no checkpoint (config.json and *.safetensors), which is what vllm loads")
        return directory

    def command(self, launch: Launch) -> tuple[str, ...]:
        """Return `vllm serve` with the plan's limits; its cache gets the plan's bytes, or a share of the GPU where one is stated.

        Raises:
            UnsupportedError: the plan keeps keys and values in a type that it does not know.
        """
        plan, options = launch.plan, launch.options
        if plan.precision not in _CACHE_TYPES:
            raise UnsupportedError(
                f"the plan keeps keys and values in {plan.precision} and vllm in {', '.join(_CACHE_TYPES)}; "
                "plan memory.kv_precision: fp8 or auto"
            )
        memory = (
            ("--kv-cache-memory-bytes", str(_cache_bytes(plan)))
            if options.utilization_ratio is None
            else ("--gpu-memory-utilization", str(options.utilization_ratio))
        )
        stated = {
            "--served-model-name": NAME,
            "--host": HOST,
            "--port": str(launch.port),
            "--max-model-len": str(plan.max_model_len),
            "--max-num-seqs": str(plan.max_batch),
            "--kv-cache-dtype": _CACHE_TYPES[plan.precision],
            "--dtype": options.dtype,
            "--generation-config": "vllm",  # what a request does not say is said here, not in a file of the model's
        }
        return (str(launch.program), "serve", str(launch.model), *(part for pair in stated.items() for part in pair), *memory)

    def environment(self, launch: Launch) -> dict[str, str]:
        return {"VLLM_API_KEY": launch.key, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

    def body(self, request: GenerationRequest) -> Json:
        sampling = request.sampling
        return {
            "model": NAME,
            "prompt": request.prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": request.stop_tokens,
            "ignore_eos": True,  # the stop tokens are all that end an answer
            "stream": True,
            "logprobs": request.num_top,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def hear(self, event: bytes) -> Heard:
        """Return the tokens of one event of a stream.

        Raises:
            ValueError: it is none.
            StreamFault: the answer failed.
        """
        refuse_fault(event)
        choices = _Event.model_validate_json(event).choices
        if not choices:
            return Heard(())
        choice = choices[0]
        tokens = choice.token_ids or []
        scores = choice.logprobs or _LogProbs(token_logprobs=[None] * len(tokens))
        tops = scores.top_logprobs or [None] * len(tokens)
        scored = tuple(
            Scored(token, float("nan") if log_prob is None else log_prob, _top(top))
            for token, log_prob, top in zip(tokens, scores.token_logprobs, tops, strict=True)
        )
        stopped_at = choice.stop_reason if isinstance(choice.stop_reason, int) else None
        if stopped_at is not None and tokens and tokens[-1] == stopped_at:
            stopped_at = None
        return Heard(scored, choice.finish_reason is not None, stopped_at)

    def version(self, answer: bytes) -> str:
        return str(decode(answer).get("version", "unknown")) if answer else "unknown"


def _cache_bytes(plan: KvPlan) -> int:
    """Return the plan's bytes, but no less than one longest request needs in its blocks."""
    blocks = pages_for(plan.max_model_len, _BLOCK_TOKENS) + _SPARE_BLOCKS
    return max(plan.pool_bytes, blocks * _BLOCK_TOKENS * plan.bytes_per_token)


def _top(stated: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """Return `token_id:7 -> -0.5` pairs as tokens, best first."""
    pairs = [(int(name.removeprefix("token_id:")), log_prob) for name, log_prob in (stated or {}).items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))


FACTORY = ManagedFactory(Vllm())
RUNTIMES.register("vllm")(FACTORY)
TUNABLES.register("vllm")(FACTORY)
