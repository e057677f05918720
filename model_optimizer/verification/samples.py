"""A few prompts with the greedy outputs that a healthy deployment must repeat."""

from pathlib import Path

from transformers import AutoTokenizer

from model_optimizer.artifacts.base import Stored
from model_optimizer.artifacts.compiled import CompiledModel
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.release import SampleOutput
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.registry import RUNTIMES

NUM_NEW_TOKENS = 16


def sample_outputs(
    prompts: tuple[str, ...],
    tokenizer_directory: Path,
    engine: Stored[CompiledModel],
    baseline: Stored[CompiledModel],
    plan: KvPlan,
) -> tuple[SampleOutput, ...]:
    """Return the greedy outputs of both engines, one prompt at a time, `NUM_NEW_TOKENS` tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    encoded = tuple(tuple(tokenizer.encode(prompt)) for prompt in prompts)
    chosen = _greedy(engine, encoded, plan)
    reference = chosen if baseline.key == engine.key else _greedy(baseline, encoded, plan)
    return tuple(
        SampleOutput(
            prompt=prompt,
            prompt_tokens=tokens,
            tokens=out,
            text=tokenizer.decode(list(out), skip_special_tokens=True),
            baseline_tokens=base,
            baseline_text=tokenizer.decode(list(base), skip_special_tokens=True),
        )
        for prompt, tokens, out, base in zip(prompts, encoded, chosen, reference, strict=True)
    )


def _greedy(compiled: Stored[CompiledModel], prompts: tuple[tuple[int, ...], ...], plan: KvPlan) -> list[tuple[int, ...]]:
    engine = compiled.artifact.engine
    runtime = RUNTIMES.get(engine.runtime).open(engine, compiled.directory / engine.directory, plan)
    outputs = []
    try:
        for prompt in prompts:
            runtime.submit(GenerationRequest(prompt, NUM_NEW_TOKENS))
            tokens: list[int] = []
            while events := runtime.step():
                tokens += [event.token for event in events]
            outputs.append(tuple(tokens))
    finally:
        runtime.close()
    return outputs
