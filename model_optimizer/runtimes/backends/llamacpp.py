"""llama.cpp as a managed server (`llama-server`): serves the one GGUF file of a directory.

It ends an answer whose bytes are no UTF-8 (build 10434: "does not match the expected Content-only format"); the request is told.
Source: llama.cpp, issue 27543. Of a character that is made of several tokens it tells the last one alone, with the whole
character and the count of all: the others are found by what they spell.
"""

from pathlib import Path

from pydantic import BaseModel

from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.managed.dialect import END_OF_TEXT, Heard, Json, Launch, Scored, decode, refuse_fault
from model_optimizer.runtimes.managed.process import HOST
from model_optimizer.runtimes.managed.runtime import ManagedFactory
from model_optimizer.runtimes.options import TUNABLES
from model_optimizer.runtimes.registry import RUNTIMES

_CACHE_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
"""Source: llama.cpp, tools/server/README.md, `--cache-type-k`."""
SPARE_TOKENS = 4
"""Asked for beyond a request's own, so that a character which its last token begins is whole and its tokens are told."""


class _Token(BaseModel):
    id: int
    logprob: float


class _Scored(_Token):
    top_logprobs: list[_Token] = []


class _Event(BaseModel):
    content: str = ""
    tokens: list[int] = []
    tokens_predicted: int | None = None
    stop: bool = False
    stop_type: str = "none"
    completion_probabilities: list[_Scored] = []


class LlamaCpp:
    """Spoken to over its own completion endpoint. Source: llama.cpp, tools/server/README.md, `POST /completion`."""

    name = "llamacpp"
    program = "llama-server"
    install = (
        "build it (`cmake -B build && cmake --build build --target llama-server` in a checkout of llama.cpp) "
        "or take it from a release of llama.cpp"
    )
    generate_path = "/completion"
    version_path = "/props"

    def find_model(self, directory: Path) -> Path:
        """Return the one GGUF file.

        Raises:
            ConfigError: there is none, or more than one.
        """
        found = sorted(directory.glob("*.gguf"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise ConfigError(
                f"{directory} must hold one GGUF file for llama.cpp, seen: {names}; make one with `quantize --format gguf:q4_k_m`"
            )
        return found[0]

    def command(self, launch: Launch) -> tuple[str, ...]:
        """Return `llama-server` with the plan's limits; its context is shared by all slots.

        Raises:
            UnsupportedError: the plan keeps keys and values in a type that it does not know, or a type was stated for weights.
        """
        plan, options = launch.plan, launch.options
        if plan.precision not in _CACHE_TYPES:
            raise UnsupportedError(
                f"the plan keeps keys and values in {plan.precision} and llama.cpp in {', '.join(_CACHE_TYPES)}; plan one"
            )
        if options.dtype != "auto" or options.utilization_ratio is not None:
            raise UnsupportedError(
                "llama.cpp takes the file's own types and no share of a GPU; leave dtype and utilization_ratio out"
            )
        stated = {
            "--model": str(launch.model),
            "--host": HOST,
            "--port": str(launch.port),
            "--ctx-size": str(plan.max_batch * (plan.max_model_len + SPARE_TOKENS)),
            "--parallel": str(plan.max_batch),
            "--cache-type-k": _CACHE_TYPES[plan.precision],
            "--cache-type-v": _CACHE_TYPES[plan.precision],
        }
        return (str(launch.program), *(part for pair in stated.items() for part in pair), "--no-webui")

    def environment(self, launch: Launch) -> dict[str, str]:
        return {"LLAMA_API_KEY": launch.key}

    def body(self, request: GenerationRequest) -> Json:
        sampling = request.sampling
        return {
            "prompt": request.prompt,
            "n_predict": request.max_new_tokens + SPARE_TOKENS,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "seed": sampling.seed % 2**32,
            "cache_prompt": request.shares_prefix,
            "ignore_eos": not request.stop_tokens,
            "stream": True,
            "return_tokens": True,
            "n_probs": max(1, request.num_top),
        }

    def hear(self, event: bytes) -> Heard:
        """Return the tokens of one event of a stream; the end of text is not told as a token.

        Raises:
            ValueError: it is none.
            StreamFault: the answer failed.
        """
        refuse_fault(event)
        said = _Event.model_validate_json(event)
        if said.stop:
            return Heard((), True, END_OF_TEXT if said.stop_type == "eos" else None)
        tops = {
            it.id: (it.logprob, tuple((top.id, top.logprob) for top in it.top_logprobs)) for it in said.completion_probabilities
        }
        scored = tuple(Scored(token, *tops.get(token, (float("nan"), ()))) for token in said.tokens)
        return Heard(scored, num_generated=said.tokens_predicted, spelled=said.content.encode())

    def version(self, answer: bytes) -> str:
        return str(decode(answer).get("build_info", "unknown")) if answer else "unknown"


FACTORY = ManagedFactory(LlamaCpp())
RUNTIMES.register("llamacpp")(FACTORY)
TUNABLES.register("llamacpp")(FACTORY)
