"""The memory stage on a real engine: the plan is written, run at its own concurrency, and compared with its prediction."""

import json
from pathlib import Path

import pytest
from test_memory_budget import FACTS

from model_optimizer.artifacts.base import Produced, Stored, Tree
from model_optimizer.artifacts.compiled import CompiledModel, Engine, Parity
from model_optimizer.artifacts.measure import Verdict
from model_optimizer.artifacts.memory import KvPlan, MemoryPlan
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.target import DeviceFacts, TargetProfile
from model_optimizer.errors import UnsupportedError
from model_optimizer.memory.config import MemoryConfig
from model_optimizer.memory.stage import MemoryInputs, plan_memory
from model_optimizer.models.facts import read_facts
from model_optimizer.protocols import LogitsRuntime, Quiet
from model_optimizer.runtimes.registry import RUNTIMES, framework_version
from model_optimizer.spec import Lengths, Sla, Traffic

TRAFFIC = Traffic(prompt_tokens=Lengths(p50=10, p95=40, max=60), output_tokens=Lengths(p50=5, p95=24, max=30))
PRODUCED = Produced(started_at="2026-01-01T00:00:00+00:00", wall_s=0.0, peak_rss_bytes=0)
ENGINE = Engine(runtime="torch", directory=".", num_bytes=400_000, framework_version=framework_version("torch"))


def memory_inputs(model: Path, sla: Sla, free_bytes: int = 4 * 2**30) -> MemoryInputs:
    device = DeviceFacts(
        kind="cpu",
        name="test",
        num_cores=2,
        instruction_sets=(),
        cache_bytes={},
        memory_bytes=free_bytes,
        memory_free_bytes=free_bytes,
        copy_bytes_per_s=1e9,
        read_bytes_per_s=1e9,
        matmul_flop_per_s=1e9,
    )
    target = TargetProfile(device=device, model=read_facts(model), budget=(), decision_table=(), questions=())
    parity = Parity(
        max_abs_logit_difference=0,
        mean_kl_nats=0,
        top1_agreement_ratio=1,
        greedy_tokens_equal=True,
        num_tokens=1,
        tolerance_kl_nats=0.01,
        passed=True,
    )
    compiled = CompiledModel(
        strategy=Strategy(weights=WeightRecipe(), runtime="torch"),
        engine=ENGINE,
        parity=parity,
        level=0,
        layout="layout.json",
        reproduce=None,
        build_s=0,
    )
    return MemoryInputs(
        fingerprint="test",
        engine=Stored[CompiledModel](
            kind="compile", key="0" * 64, artifact=compiled, directory=model, produced=PRODUCED, cached=False
        ),
        target=Stored[TargetProfile](
            kind="profile", key="1" * 64, artifact=target, directory=model, produced=PRODUCED, cached=False
        ),
        sla=sla,
        traffic=TRAFFIC,
        config=MemoryConfig(),
        model=Tree.of(model),
    )


def run(inputs: MemoryInputs, model: Path, workspace: Path) -> MemoryPlan:
    def open_runtime(plan: KvPlan) -> LogitsRuntime:
        return RUNTIMES.get("torch").open(ENGINE, model, plan)

    return plan_memory(inputs, workspace, open_runtime=open_runtime, progress=Quiet())


@pytest.fixture(scope="module")
def planned(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryPlan, Path]:
    workspace = tmp_path_factory.mktemp("memory")
    inputs = memory_inputs(tiny_llama, Sla(concurrency=3, max_model_len=128, memory_gib=64))
    return run(inputs, tiny_llama, workspace), workspace


def test_plan_memory_runs_the_planned_number_of_requests_at_once(planned: tuple[MemoryPlan, Path]) -> None:
    plan, _ = planned
    assert (plan.planned_concurrency, plan.ran_concurrency) == (3, 3)
    # 3 x 128 tokens in pages of 16; a p95 request has 64 tokens, 4 pages
    assert (plan.kv.num_pages, plan.capacity_requests) == (24, 6)
    assert not [warning for warning in plan.warnings if "ran at once" in warning or "stopped" in warning]


def test_plan_memory_measures_the_cache_that_the_formula_predicts(planned: tuple[MemoryPlan, Path]) -> None:
    plan, _ = planned
    values = {measure.name: measure.value for measure in plan.measures}
    # the last token is never cached, and a finished row is dropped before its step is read: 62 tokens of 3 rows
    per_token = 2 * 2 * 2 * 16 * 4
    assert values["kv_peak"] == 3 * 62 * per_token
    assert values["kv_occupancy"] == pytest.approx(3 * 62 / (24 * 16))
    assert values["kv_pool"] == 24 * 16 * per_token


def test_plan_memory_gates_the_process_by_the_service_level(planned: tuple[MemoryPlan, Path]) -> None:
    process = next(measure for measure in planned[0].measures if measure.name == "process_peak")
    assert process.limit == 64 * 2**30
    assert process.value is not None and 50 * 2**20 < process.value < 8 * 2**30
    assert process.verdict is Verdict.ACCEPT


def test_plan_memory_writes_the_config_that_the_plan_says(planned: tuple[MemoryPlan, Path]) -> None:
    plan, workspace = planned
    document = json.loads((workspace / plan.config).read_text())
    assert document["num_pages"] == plan.kv.num_pages
    assert document["pool_bytes"] == plan.kv.capacity_tokens * plan.kv.bytes_per_token
    assert sum(layer["bytes_per_token"] for layer in document["layers"]) == document["bytes_per_token"]
    assert [ref.path for ref in plan.files] == ["kv_cache_config.json"]


def test_plan_memory_explains_pages_concurrency_and_length(planned: tuple[MemoryPlan, Path]) -> None:
    decisions = {decision.subject: decision for decision in planned[0].decisions}
    assert decisions["KV pages"].because == "that is concurrency x max_model_len, all that can be used"
    assert decisions["concurrency"].numbers == {"asked": 3, "fit": 6, "ran": 3}
    assert decisions["longest request"].numbers["traffic_max_tokens"] == 90


def test_plan_memory_refuses_a_service_level_that_holds_no_request(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no request fits"):
        run(memory_inputs(tiny_llama, Sla(concurrency=2, max_model_len=128, memory_gib=0.1)), tiny_llama, tmp_path)


def test_tiny_facts_and_hand_written_facts_agree(tiny_llama: Path) -> None:
    assert read_facts(tiny_llama).kv_bytes_per_token == FACTS.kv_bytes_per_token


def test_plan_memory_keeps_the_cache_in_the_stated_precision_on_pages_of_a_measured_size(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = MemoryConfig.model_validate({"kv_precision": "int8", "page_tokens": "auto"})
    inputs = memory_inputs(tiny_llama, Sla(concurrency=3, max_model_len=128)).model_copy(update={"config": config})
    plan = run(inputs, tiny_llama, tmp_path)
    size = next(decision for decision in plan.decisions if decision.subject == "page size")
    assert plan.kv.page_tokens == size.numbers["page_tokens"] == 8  # 12 tokens on average: every size wastes over 4 %
    assert (plan.kv.precision, plan.kv.num_pages, plan.ran_concurrency) == ("int8", 3 * 16, 3)
    document = json.loads((tmp_path / plan.config).read_text())
    assert (document["precision"], document["pool_bytes"]) == ("int8", 48 * (8 * 128 + 32))
    assert [ref.path for ref in plan.files] == ["kv_cache_config.json", "page_sizes.json"]


def test_plan_memory_refuses_a_precision_that_the_runtime_would_ignore(tiny_llama: Path, tmp_path: Path) -> None:
    inputs = memory_inputs(tiny_llama, Sla()).model_copy(update={"config": MemoryConfig(kv_precision="int8")})
    compiled = inputs.engine.artifact
    other = compiled.model_copy(update={"engine": compiled.engine.model_copy(update={"runtime": "onnxruntime"})})
    inputs = inputs.model_copy(update={"engine": inputs.engine.model_copy(update={"artifact": other})})
    with pytest.raises(
        UnsupportedError, match=r"memory\.kv_precision int8: onnxruntime keeps its cache as it was compiled; only torch"
    ):
        run(inputs, tiny_llama, tmp_path)
