"""Compiled regions of the native runtime: one compilation for all layers and lengths, and the same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from native_fixtures import write_covered

from model_optimizer.artifacts.compiled import Engine, Layout
from model_optimizer.artifacts.memory import KvPlan
from model_optimizer.protocols import GenerationRequest
from model_optimizer.runtimes.native_options import COMPILED_REGIONS, NativeOptions
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.runtimes.torch import scoring
from model_optimizer.runtimes.torch.attention import ATTENTIONS
from model_optimizer.runtimes.torch.config import read_model_config
from model_optimizer.runtimes.torch.engine import open_native
from model_optimizer.runtimes.torch.executor import PagedModel
from model_optimizer.runtimes.torch.model import Model
from model_optimizer.runtimes.torch.regions import Regions
from model_optimizer.runtimes.torch.weights import Checkpoint

PLAN = KvPlan(page_tokens=16, num_pages=32, bytes_per_token=1, max_batch=4, max_model_len=128)
TOKENS = tuple(range(5, 45))


def loaded(directory: Path, regions: Regions) -> Model:
    cpu = torch.device("cpu")
    checkpoint = Checkpoint(directory, NativeOptions(), cpu)
    return Model(checkpoint, read_model_config(directory), ATTENTIONS.get("plain"), cpu, regions)


@pytest.mark.parametrize("name", ["smollm", "qwen3"])
def test_compile_regions_serves_all_layers_and_lengths_with_two_graphs_each(name: str, tmp_path: Path) -> None:
    directory = write_covered(name, tmp_path)
    plain, compiled = loaded(directory, Regions()), loaded(directory, Regions(2, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compile_regions()
    layout = PagedModel(plain, 16, 8, "float32").layout
    for length in (1, 2, 7, 40):
        expected = scoring.full_logits(plain, layout, TOKENS[:length])
        np.testing.assert_allclose(scoring.full_logits(compiled, layout, TOKENS[:length]), expected, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4  # before and behind attention, one token and many


def test_torch_factory_opens_an_engine_at_the_level_of_its_own_layout(tmp_path: Path) -> None:
    directory = write_covered("smollm", tmp_path)
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=torch.__version__.partition("+")[0])
    other = Layout(level=2, inputs=(), outputs=(), fused=(), fusions={"skip_norm": 4})  # of an engine of another runtime
    (directory / "layout.json").write_text(other.model_dump_json())
    runtime = RUNTIMES.get("torch").open(engine, directory, PLAN)
    assert not any("is compiled" in note for note in runtime.facts.notes)


@pytest.mark.full
def test_torch_factory_compiles_and_generates_the_same_tokens(tmp_path: Path) -> None:
    directory = write_covered("smollm", tmp_path)
    engine = Engine(runtime="torch", directory=".", num_bytes=0, framework_version=torch.__version__.partition("+")[0])
    layout = Layout(level=2, inputs=(), outputs=(), fused=(), fusions={COMPILED_REGIONS: 4})
    (directory / "layout.json").write_text(layout.model_dump_json())
    found = []
    for runtime in (open_native(directory, PLAN), RUNTIMES.get("torch").open(engine, directory, PLAN)):
        for prompt in (TOKENS[:3], TOKENS[:20]):
            runtime.submit(GenerationRequest(prompt, 12))
        found.append([])
        while events := runtime.step():
            found[-1] += [(event.request, event.token) for event in events]
    assert found[0] == found[1] and len(found[0]) == 24
    assert any("is compiled, level 2" in note for note in runtime.facts.notes)
