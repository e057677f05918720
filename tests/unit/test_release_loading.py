"""The load canary before a release, what the bundle says of it, and what a server makes of that."""

import json
import shutil
import stat
import sys
from importlib import metadata
from pathlib import Path

import pytest
from release_fixtures import make_inputs, package
from serving_fixtures import PLAN

from model_optimizer.artifacts.measure import Origin
from model_optimizer.artifacts.triple import Component, LoadCheck, Triple
from model_optimizer.compilation.export import export_model
from model_optimizer.errors import UnsupportedError
from model_optimizer.release.inputs import PackageInputs, TargetLoader
from model_optimizer.release.manifest import METADATA
from model_optimizer.serving.config import ServeConfig
from model_optimizer.serving.source import read_source, refuse_served_version
from model_optimizer.store import stage_key

ORT = metadata.version("onnxruntime")


def inputs_with(root: Path, checkpoint: Path, loader: TargetLoader | None) -> PackageInputs:
    return make_inputs(root, checkpoint).model_copy(update={"loader": loader})


def triple_of(bundle: Path) -> Triple:
    return Triple.model_validate(json.loads((bundle / METADATA).read_bytes())["triple"])


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_bundle_says_its_three_frameworks_and_that_nobody_loaded_it(tiny_llama: Path, tmp_path: Path) -> None:
    made = package(inputs_with(tmp_path, tiny_llama, None), tmp_path)
    triple = triple_of(tmp_path / "bundles" / "chat-v1")
    assert triple.training == Component(name="transformers", version=metadata.version("transformers"))
    assert triple.optimizer.version == metadata.version("model-optimizer-pipeline")
    assert triple.inference.name == "onnxruntime" and triple.checked == ()
    assert triple.unchecked_because == "no target framework was stated (target.framework)"
    assert "not run" in [decision.choice for decision in made.decisions]
    (canary,) = [measure for measure in made.measures if measure.name == "load_canary_agreement"]
    assert canary.origin is Origin.NOT_MEASURED and canary.value is None


def test_a_bundle_says_who_loaded_it(tiny_llama: Path, tmp_path: Path) -> None:
    loader = TargetLoader(framework="onnxruntime", found=f"onnxruntime {ORT}", device="cpu", python=Path(sys.executable))
    inputs = inputs_with(tmp_path, tiny_llama, loader)
    export_model(tiny_llama, inputs.engine.directory / inputs.engine.artifact.engine.directory)
    made = package(inputs, tmp_path)
    (check,) = triple_of(tmp_path / "bundles" / "chat-v1").checked
    assert (check.framework, check.version, check.agreement_ratio, check.regret_ratio) == ("onnxruntime", ORT, 1.0, 0.0)
    assert triple_of(tmp_path / "bundles" / "chat-v0").unchecked_because == "the baseline is not loaded by the canary"
    assert {measure.name: measure.value for measure in made.measures}["load_canary_agreement"] == 1.0
    assert [decision.choice for decision in made.decisions][-1] == "passed"


def test_nothing_is_published_where_the_target_does_not_load(tiny_llama: Path, tmp_path: Path) -> None:
    said = """case "$1" in -c) echo '["vllm", "0.24.0"]';; *) echo 'ValueError: no kernel'; exit 1;; esac"""
    python = program(tmp_path / "python", said)
    loader = TargetLoader(framework="vllm==0.24.0", found="vllm 0.24.0", device="sm90", python=python, timeout_s=60)
    with pytest.raises(UnsupportedError, match=r"load canary: vllm 0\.24\.0 ended with 1 on the result: ValueError: no kernel"):
        package(inputs_with(tmp_path / "run", tiny_llama, loader), tmp_path / "run")
    assert not (tmp_path / "run" / "bundles").exists() and not list((tmp_path / "run" / "work").iterdir())


def test_the_key_of_a_release_holds_the_version_that_was_found_and_no_path(tiny_llama: Path, tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, tiny_llama)
    keys = [
        stage_key(inputs.model_copy(update={"loader": TargetLoader(framework="vllm", found=found, device="sm90", python=python)}))
        for found, python in (("vllm 0.24.0", Path("/a")), ("vllm 0.24.0", Path("/b")), ("vllm 0.32.0", Path("/a")))
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.fixture
def served(tiny_llama: Path, tmp_path: Path) -> Path:
    """A plain directory that vLLM 0.24.0 has loaded."""
    folder = shutil.copytree(tiny_llama, tmp_path / "chat")
    (folder / "kv_cache_config.json").write_text(json.dumps({"kv_cache_format": 1, **PLAN.model_dump(mode="json")}))
    part = Component(name="vllm", version="0.24.0")
    check = LoadCheck(framework="vllm", version="0.24.0", num_tokens=24, agreement_ratio=1, regret_ratio=0)
    triple = Triple(training=part, optimizer=part, inference=part, checked=(check,))
    (folder / "metadata.json").write_text(json.dumps({"triple": triple.model_dump(mode="json")}))
    return folder


def environment(folder: Path, version: str) -> ServeConfig:
    folder.mkdir()
    program(folder / "python", f"""echo '["vllm", "{version}"]'""")
    command = program(folder / "vllm", "exit 1")
    return ServeConfig.model_validate({"engine": "vllm", "managed": {"command": command}})


def test_a_server_of_another_minor_version_is_refused_before_it_is_started(served: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"checked with vllm 0\.24\.0 and vllm 0\.32\.0 would serve it; install"):
        read_source(served, environment(tmp_path / "other", "0.32.0+cpu"))
    source = read_source(served, environment(tmp_path / "same", "0.24.3"))
    assert source.standing == "a plain directory: nothing was verified; checked with vllm 0.24.0"


def test_a_server_that_tells_its_version_only_once_it_runs_is_refused_then(served: Path, tmp_path: Path) -> None:
    config = environment(tmp_path / "env", "0.24.0")
    (tmp_path / "env" / "python").unlink()
    source = read_source(served, config)
    assert source.standing == "a plain directory: nothing was verified"
    refuse_served_version(source, "vllm", "0.24.9")
    with pytest.raises(UnsupportedError, match=r"vllm 0\.31\.1 would serve it"):
        refuse_served_version(source, "vllm", "0.31.1")
