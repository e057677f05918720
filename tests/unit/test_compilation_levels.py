"""Levels that fall, and the checks that make them fall: weights that went back to float, engines that break at an edge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from model_optimizer.artifacts.base import Tree
from model_optimizer.artifacts.compiled import Layout
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.artifacts.strategy import WeightRecipe
from model_optimizer.compilation.config import CompileConfig
from model_optimizer.compilation.coverage import integer_coverage, quantized_sizes
from model_optimizer.compilation.findings import decisions_of, measures_of
from model_optimizer.compilation.levels import Bench, build_at_level, levels_to_try
from model_optimizer.compilation.parity import Reference, reference_of
from model_optimizer.compilation.registry import TARGETS, BuildRequest, Built, CompileTarget, Variant
from model_optimizer.compilation.smoke import edge_lengths, smoke_run
from model_optimizer.errors import CompileError
from model_optimizer.formats.compressed_tensors import write_checkpoint
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.headers import read_headers
from model_optimizer.models.weights import read_tensor
from model_optimizer.protocols import Quiet, RuntimeFacts
from model_optimizer.runtimes.decoder_model import ModelInput
from model_optimizer.runtimes.decoding import DecodingRuntime
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.store import Store

PLAN = KvPlan(page_tokens=16, num_pages=64, bytes_per_token=0, max_batch=4, max_model_len=100)
INT4 = WeightRecipe(method="rtn", formats=("int4-g32",))
TEXT = tuple(range(5, 105))


@pytest.fixture(scope="module")
def packed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, headers, number = tmp_path_factory.mktemp("packed"), read_headers(tiny_llama), FORMATS.get("int4-g32")
    layers = [name.removesuffix(".weight") for name in headers if "_proj" in name]
    plan = dict.fromkeys(layers, number.name)
    write_checkpoint(tiny_llama, folder, plan, lambda layer: number.quantize(read_tensor(headers[f"{layer}.weight"]).float()))
    return folder


@pytest.fixture(scope="module")
def reference(packed: Path) -> Reference:
    return reference_of(packed, (TEXT[:1], TEXT[:64]))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@dataclass
class Faulty:
    """ONNX Runtime's target, some of whose levels fail to build, or say that a layer fell back to float."""

    broken: tuple[int, ...] = ()
    floating: tuple[int, ...] = ()
    asked: list[int] = field(default_factory=list)

    def levels(self, recipe: WeightRecipe) -> tuple[int, ...]:
        return self._target.levels(recipe)

    def variants(self, recipe: WeightRecipe) -> tuple[Variant, ...]:
        return (self._target.variants(recipe)[1],)

    def build(self, request: BuildRequest, variant: Variant, workspace: Path) -> Built:
        self.asked.append(level := request.config.level)
        if level in self.broken:
            raise CompileError(f"level {level} does not build", workspace / "reproduce.py")
        built = self._target.build(request, variant, workspace)
        assert built.integer_layers is not None and len(built.integer_layers) == 14
        lost = built.integer_layers[2:] if level in self.floating else built.integer_layers
        return Built(built.engine, built.layout, built.reproduce, lost)

    @property
    def _target(self) -> CompileTarget:
        return TARGETS.get("onnxruntime")


def request_of(tiny_llama: Path, packed: Path, store: Store, level: int) -> BuildRequest:
    config = CompileConfig(level=level, fusion_rounds=2, parity_kl_nats=1e-4, timeout_s=300)
    return BuildRequest(Tree.of(tiny_llama), packed, INT4, config, "test", store)


@pytest.mark.parametrize(
    ("levels", "asked", "tried"),
    [((0, 1, 2, 3), 3, (3, 2, 1, 0)), ((0, 2, 3), 1, (0,)), ((1,), 0, (1,)), ((1,), 3, (1,)), ((0, 1, 2), 3, (2, 1, 0))],
)
def test_levels_to_try_goes_down_from_the_asked_one(levels: tuple[int, ...], asked: int, tried: tuple[int, ...]) -> None:
    assert levels_to_try(levels, asked) == tried


def test_build_at_level_falls_until_a_level_builds_and_computes_from_codes(
    tiny_llama: Path, packed: Path, reference: Reference, store: Store, tmp_path: Path
) -> None:
    target = Faulty(broken=(3,), floating=(1,))
    bench = Bench(target, RUNTIMES.get("onnxruntime"), reference, PLAN, "int4/here")
    reached = build_at_level(bench, request_of(tiny_llama, packed, store, 3), tmp_path, Quiet())
    assert target.asked == [3, 2]
    assert (reached.attempt.level, reached.asked_level) == (2, 3)
    assert reached.because == "level 3 failed: int4/here at level 3 with float32 activations: level 3 does not build"
    assert len(reached.warnings) == 1
    layout = Layout.model_validate_json((tmp_path / "layout.json").read_bytes())
    assert layout.level == 2
    assert layout.fusions == {"group_query_attention": 2, "merged_projections": 2, "merged_gate_up": 2, "skip_norm": 4}
    assert {gain.name for gain in layout.gains} == {f"{name}_gain" for name in layout.fusions}
    assert all(gain.num_samples == 2 and gain.value is not None and gain.value > 0 for gain in layout.gains)
    assert {op.executed_by for op in layout.fused if "q_proj" in op.name} == {
        f"model.layers.{index}.self_attn.qkv_proj" for index in range(2)
    }
    assert [(tensor.name, tensor.shape) for tensor in layout.tensors[:3]] == [
        ("input_ids", ("batch", "sequence")),
        ("attention_mask", ("batch", "total")),
        ("position_ids", ("batch", "sequence")),
    ]
    assert layout.num_executed_ops["GroupQueryAttention"] == 2
    decisions = decisions_of("int4/here", reached)
    assert decisions[1].choice == "level 2" and decisions[1].numbers == {"asked_level": 3.0, "reached_level": 2.0}
    values = {measure.metric: measure.value for measure in measures_of(reached.attempt, quantized=True)}
    assert values["resource/integer_weights_ratio"] == 1.0 and values["robustness/smoke_requests_count"] == 11


def test_build_at_level_raises_with_what_fell_back_when_no_level_is_left(
    tiny_llama: Path, packed: Path, reference: Reference, store: Store, tmp_path: Path
) -> None:
    bench = Bench(Faulty(broken=(1,), floating=(0,)), RUNTIMES.get("onnxruntime"), reference, PLAN, "int4/here")
    with pytest.raises(CompileError, match=r"level 0 .* 2 of 14 layers fell back to float \(.*\)") as caught:
        build_at_level(bench, request_of(tiny_llama, packed, store, 1), tmp_path, Quiet())
    assert "level 1 does not build" in str(caught.value) and caught.value.reproduce.is_file()


def test_build_at_level_3_rounds_the_head_and_keeps_parity(
    tiny_llama: Path, packed: Path, reference: Reference, store: Store, tmp_path: Path
) -> None:
    request = request_of(tiny_llama, packed, store, 3)
    bench = Bench(Faulty(), RUNTIMES.get("onnxruntime"), reference, PLAN, "int4/here")
    reached = build_at_level(bench, request, tmp_path, Quiet())
    assert (reached.attempt.level, reached.because, reached.warnings) == (3, "", ())
    assert 1e-9 < reached.attempt.parity.mean_kl_nats < 1e-4  # the head is rounded, and not lost
    layout = Layout.model_validate_json((tmp_path / "layout.json").read_bytes())
    assert layout.fusions["int8_head"] == 1 and layout.num_ops["MatMulNBits"] == 2 * 4 + 1


def test_integer_coverage_weighs_layers_by_their_weights(tiny_llama: Path, packed: Path) -> None:
    sizes = quantized_sizes(packed, tiny_llama)
    assert len(sizes) == 14 and sizes["model.layers.0.mlp.up_proj"] == 64 * 128
    seen = integer_coverage({"a": 300, "b": 100}, ["a"])
    assert (seen.share, seen.lost) == (0.75, ("b",))
    assert seen.fault is not None and "only 75.0% of the quantized weights" in seen.fault and "(b)" in seen.fault
    assert integer_coverage({"a": 300}, ["a", "x"]).fault is None


class Cyclic:
    """A decoder whose next token is the last one plus one; `cache` counts columns. May break at an edge."""

    vocab_size, weight_bytes = 120, 0

    def __init__(self, *, mixes: bool = False, breaks_at: int = 10**6):
        self._mixes, self._breaks_at = mixes, breaks_at

    def forward(self, batch: ModelInput, cache: int | None) -> tuple[NDArray[np.float32], int]:
        tokens_BS = batch.input_ids_BS[:, batch.logits_from :]
        shift = len(tokens_BS) if self._mixes else 1
        logits_BSV = 9.0 * (np.arange(self.vocab_size) == ((tokens_BS + shift) % self.vocab_size)[..., None])
        columns = (cache or 0) + batch.input_ids_BS.shape[1]
        if columns > self._breaks_at:
            logits_BSV = logits_BSV * math.nan
        if self._mixes:
            logits_BSV = logits_BSV / len(tokens_BS)
        return logits_BSV.astype(np.float32), columns

    def select(self, cache: int, rows: Sequence[int], first_column: int) -> int:
        return cache - first_column

    def join(self, caches: Sequence[int]) -> int:
        return max(caches)

    def cache_bytes(self, cache: int) -> int:
        return cache

    def close(self) -> None: ...


def decoding(model: Cyclic) -> DecodingRuntime[int]:
    return DecodingRuntime(model, RuntimeFacts("cyclic", "0", "cpu", "float32", 4, 100, ()), PLAN)


def test_edge_lengths_stand_around_page_ends_and_at_the_longest() -> None:
    assert edge_lengths(PLAN) == (1, 15, 16, 17, 31, 32, 97)


def test_smoke_run_finds_nothing_in_a_sound_engine() -> None:
    trial = smoke_run(decoding(Cyclic()), TEXT, PLAN)
    assert (trial.num_requests, trial.longest, trial.fault) == (11, 100, None)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (Cyclic(breaks_at=98), "a prompt of 97 tokens gives a log-probability of nan"),
        (Cyclic(breaks_at=16), "a prompt of 15 tokens gives a log-probability of nan"),
        (Cyclic(mixes=True), "a prompt of 1 tokens gives token 7 at"),
    ],
)
def test_smoke_run_names_the_edge_at_which_an_engine_breaks(model: Cyclic, fault: str) -> None:
    found = smoke_run(decoding(model), TEXT, PLAN).fault
    assert found is not None and found.startswith(fault)
