"""Engines of the CPU as arms of an interleaved run: what `compile_cpu` and `compile_time` build and measure.

Decoding alone is counted: a prompt of 64 tokens comes before the clock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.evidence import Figure
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Layout
from model_optimizer.artifacts.measure import Measure
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.levels import Bench, build_at_level
from model_optimizer.compilation.parity import Reference, parity_sequences, reference_of
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, CompileTarget, Variant
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Quiet
from model_optimizer.quantization.layers import read_layers
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.store import Store

PROMPT, NEW_TOKENS = 64, 48
VOCABULARY = 256
"""Prompts are random tokens below it."""
PLAN = KvPlan(page_tokens=16, num_pages=256, bytes_per_token=1, max_batch=8, max_model_len=512)
Arm = Callable[[int], float]
"""Batch size -> tokens per second over all rows."""


def checkpoint_of(model: Path, format_name: str, folder: Path) -> Path:
    if format_name == "float32":
        return model
    weight_format, headers = FORMATS.get(format_name), read_headers(model)
    plan = {layer.name: format_name for layer in read_layers(model).linears}
    write_checkpoint(model, folder, plan, lambda name: weight_format.quantize(read_tensor(headers[f"{name}.weight"]).float()))
    return folder


def recipe_of(format_name: str) -> WeightRecipe:
    return WeightRecipe() if format_name == "float32" else WeightRecipe(method="rtn", formats=(format_name,))


def reference_for(checkpoint: Path) -> Reference:
    """Return what a checkpoint computes on random tokens."""
    generator = np.random.default_rng(0)
    return reference_of(checkpoint, parity_sequences((tuple(generator.integers(0, VOCABULARY, 512).tolist()),)))


@dataclass(frozen=True)
class Wanted:
    """One engine to build."""

    runtime: str
    format_name: str
    level: int

    @property
    def case(self) -> str:
        return f"{self.runtime}-{self.format_name}-level{self.level}"


def built(wanted: Wanted, model: Path, checkpoint: Path, folder: Path, store: Store) -> tuple[LogitsRuntime, list[Figure]]:
    """Return the opened engine and what was found of it: the first variant that is good at this very level."""
    recipe, target = recipe_of(wanted.format_name), TARGETS.get(wanted.runtime)
    config = CompileConfig(level=wanted.level)
    bench = Bench(OneLevel(target, wanted.level), RUNTIMES.get(wanted.runtime), reference_for(checkpoint), PLAN, wanted.case)
    request = BuildRequest(Tree.of(model), checkpoint, recipe, config, "benchmark", store)
    folder.mkdir(parents=True)
    attempt = build_at_level(bench, request, folder, Quiet()).attempt
    engine, parity = attempt.built.engine, attempt.parity
    layout = Layout.model_validate_json((folder / attempt.built.layout).read_bytes())
    figures = [
        Figure(wanted.case, "build_s", attempt.build_s, "s", reason=f"make bench NAME=compile_cpu; {attempt.variant.name}"),
        Figure(wanted.case, "engine_bytes", engine.num_bytes, "bytes"),
        Figure(wanted.case, "parity_kl_nats", parity.mean_kl_nats, "nats", n=parity.num_tokens),
        Figure(wanted.case, "greedy_equal", float(parity.greedy_tokens_equal), "ratio"),
        *(_gain(wanted.case, gain) for gain in layout.gains if gain.value is not None),
    ]
    if attempt.coverage is not None:
        figures.append(Figure(wanted.case, "integer_weights_ratio", attempt.coverage.share, "ratio"))
    return RUNTIMES.get(wanted.runtime).open(engine, folder / engine.directory, PLAN), figures


def _gain(case: str, gain: Measure) -> Figure:
    assert gain.interval is not None
    return Figure(
        case, f"{gain.name}_ratio", gain.value, "ratio", gain.interval.lower, gain.interval.upper, gain.num_samples, gain.reason
    )


@dataclass(frozen=True)
class OneLevel:
    """A target that is asked for one level and may not fall."""

    target: CompileTarget
    level: int

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        assert self.level in self.target.levels(recipe), f"there is no level {self.level} for {recipe.label}"
        return (self.level,)

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return self.target.variants(recipe)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        return self.target.build(request, variant, workspace)


def runtime_arm(runtime: LogitsRuntime, vocab_size: int) -> Arm:
    def run(batch: int) -> float:
        generator = np.random.default_rng(batch)
        for _ in range(batch):
            runtime.submit(GenerationRequest(tuple(generator.integers(0, vocab_size, PROMPT).tolist()), NEW_TOKENS))
        times: list[int] = []
        tokens: list[int] = []
        while events := runtime.step():
            times.append(time.perf_counter_ns())
            tokens.append(len(events))
        full = [at for at, count in enumerate(tokens) if count == batch]  # steps in which every row decodes
        return sum(tokens[full[0] + 1 : full[-1] + 1]) / ((times[full[-1]] - times[full[0]]) / 1e9)

    return run


class TransformersArm:
    """Greedy decoding by the library's own model over a static cache, compiled or not."""

    def __init__(self, model: Path, *, compiled: bool):
        self._model = load_dequantized(model)
        self._forward = torch.compile(self._model.forward) if compiled else self._model.forward

    @torch.inference_mode()
    def __call__(self, batch: int) -> float:
        from transformers import StaticCache

        ids = torch.from_numpy(np.random.default_rng(batch).integers(0, VOCABULARY, (batch, PROMPT)))
        cache = StaticCache(config=self._model.config, max_cache_len=PROMPT + NEW_TOKENS)
        output = self._model(ids, past_key_values=cache, cache_position=torch.arange(PROMPT), logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for position in range(PROMPT, PROMPT + NEW_TOKENS - 1):
            output = self._forward(token, past_key_values=cache, cache_position=torch.tensor([position]))
            token = output.logits[:, -1:].argmax(-1)
        return batch * (NEW_TOKENS - 1) / (time.perf_counter() - start)
