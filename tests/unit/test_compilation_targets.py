"""Target frameworks: the support matrix, versions, the load canary in another process, and results that hold on one GPU only."""

import json
import stat
import sys
from importlib import metadata
from itertools import product
from pathlib import Path

import onnx
import pytest

from model_optimizer.artifacts.compiled import Engine
from model_optimizer.artifacts.measure import Origin
from model_optimizer.artifacts.strategy import Strategy, WeightRecipe
from model_optimizer.artifacts.triple import Component, LoadCheck, Triple
from model_optimizer.compilation.canary import (
    CanaryRequest,
    check_decision,
    check_load,
    check_measures,
    judge,
    load_canary,
    prompts_for,
)
from model_optimizer.compilation.export import export_model
from model_optimizer.compilation.external_data import MODEL
from model_optimizer.compilation.fusion import fuse, fusions_of
from model_optimizer.compilation.gpu_results import GpuKey, gpu_key, read_timings, write_timings
from model_optimizer.compilation.support import (
    CAPABILITIES,
    FRAMEWORKS,
    Device,
    Scheme,
    Standing,
    refuse_unsupported,
    scheme_of,
    schemes_of,
)
from model_optimizer.compilation.target_framework import Loader, TargetFramework
from model_optimizer.errors import ConfigError, IntegrityError, UnsupportedError
from model_optimizer.formats.registry import FORMATS
from model_optimizer.models.tiny import write_tiny_llama
from model_optimizer.runtimes.onnx_graph import check_graph
from model_optimizer.runtimes.registry import RUNTIMES
from model_optimizer.runtimes.triple import origin_of, read_origin, refuse_foreign, refuse_unchecked_version, training_framework
from model_optimizer.runtimes.versions import Found, find_in, minor_of, same_release

DEVICES = (Device(), *map(Device, CAPABILITIES))
HERE = metadata.version("onnxruntime")


@pytest.mark.parametrize("name", FORMATS.names())
def test_scheme_of_says_what_the_format_is(name: str) -> None:
    form, scheme = FORMATS.get(name), scheme_of(name)
    assert (scheme is Scheme.FLOAT) is not form.on_grid
    assert scheme.startswith("fp8") is form.code_dtype.is_floating_point if form.on_grid else True
    assert ("dynamic" in scheme, "static" in scheme) == (form.activation == "dynamic-token", form.activation == "static-tensor")
    assert ("group" in scheme) is (form.group_size is not None)
    assert scheme.endswith("asymmetric") is not form.symmetric
    if form.group_size is not None:
        assert scheme.startswith(f"int{form.bits}-")


def test_schemes_of_names_mixtures_and_scales_that_may_be_negative() -> None:
    mixed = WeightRecipe(method="gptq", formats=("int4-g64", "int8-channel"), bits_budget=5.0)
    assert schemes_of(mixed) == {Scheme.INT4_GROUP, Scheme.INT8_CHANNEL, Scheme.MIXED, Scheme.NEGATIVE_SCALES}
    assert schemes_of(WeightRecipe(method="rtn", formats=("int4-g64",))) == {Scheme.INT4_GROUP}
    assert schemes_of(WeightRecipe(method="gptq", formats=("int4-g64-asym",))) == {Scheme.INT4_GROUP_ASYMMETRIC}


@pytest.mark.parametrize("name", FRAMEWORKS.names())
def test_every_framework_answers_for_every_scheme_and_device_with_a_reason(name: str) -> None:
    framework = FRAMEWORKS.get(name)
    assert framework.name == name and framework.install
    for scheme, device in product(Scheme, DEVICES):
        answer = framework.answer(scheme, device)
        assert answer.because
        if answer.standing is Standing.REFUSED:
            assert answer.advice, f"{name}, {scheme}, {device.label} is refused and nobody says what to do"
            with pytest.raises(UnsupportedError, match=f"{name} on {device.label} does not run {scheme}: "):
                refuse_unsupported(framework, [scheme], device)
        else:
            doubts = refuse_unsupported(framework, [scheme], device)
            assert bool(doubts) is (answer.standing is Standing.UNTRIED)


@pytest.mark.parametrize(("runtime", "form"), product(("onnxruntime", "openvino"), FORMATS.names()))
def test_the_matrix_refuses_on_a_cpu_what_the_runtime_refuses(runtime: str, form: str) -> None:
    recipe = WeightRecipe() if form == "float32" else WeightRecipe(method="rtn", formats=(form,))
    answers = [FRAMEWORKS.get(runtime).answer(scheme, Device()) for scheme in schemes_of(recipe)]
    refused = any(answer.standing is Standing.REFUSED for answer in answers)
    assert refused is not RUNTIMES.get(runtime).supports(Strategy(weights=recipe, runtime=runtime)).supported


@pytest.mark.parametrize(
    ("framework", "scheme", "device", "standing"),
    [
        ("vllm", Scheme.INT4_GROUP, "sm90", Standing.MEASURED),
        ("vllm", Scheme.INT4_GROUP, "7.5", Standing.DOCUMENTED),
        ("vllm", Scheme.INT4_GROUP, "7.0", Standing.REFUSED),
        ("vllm", Scheme.INT8_CHANNEL, "cpu", Standing.REFUSED),
        ("vllm", Scheme.INT8_DYNAMIC, "sm120", Standing.UNTRIED),
        ("vllm", Scheme.INT3_GROUP, "sm90", Standing.REFUSED),
        ("tensorrt", Scheme.FLOAT, "sm89", Standing.MEASURED),
        ("tensorrt", Scheme.FLOAT, "sm90", Standing.REFUSED),
        ("tensorrt", Scheme.FP8_DYNAMIC, "sm89", Standing.REFUSED),
        ("transformers", Scheme.FP8_DYNAMIC, "sm90", Standing.MEASURED),
        ("openvino", Scheme.FLOAT, "sm80", Standing.REFUSED),
        ("llamacpp", Scheme.GGUF, "cpu", Standing.MEASURED),
        ("llamacpp", Scheme.INT4_GROUP, "cpu", Standing.REFUSED),
    ],
)
def test_what_is_known_of_schemes_and_devices(framework: str, scheme: Scheme, device: str, standing: Standing) -> None:
    assert FRAMEWORKS.get(framework).answer(scheme, Device.named(device)).standing is standing


def test_device_named_reads_both_ways_of_writing() -> None:
    assert Device.named("sm120") == Device.named("12.0") == Device((12, 0)) and Device.named("cpu").label == "cpu"
    assert Device((8, 9)).label == "sm89"
    with pytest.raises(ConfigError, match="device 'gpu' is unknown; allowed: cpu, or a compute capability"):
        Device.named("gpu")
    with pytest.raises(ConfigError, match="device 'sm12345' is unknown"):
        Device.named("sm12345")


@pytest.mark.parametrize(
    ("left", "right", "release", "minor"),
    [
        ("1.32.0", "1.32", True, True),
        ("0.24.0", "0.24.1", False, True),
        ("0.24.0", "0.32.0", False, False),
        ("2.13.0+cpu", "2.13.0", True, True),
        ("1", "1.0.0", True, False),
    ],
)
def test_versions_are_the_same_release_or_the_same_minor(left: str, right: str, release: bool, minor: bool) -> None:
    assert (same_release(left, right), minor_of(left) == minor_of(right)) == (release, minor)


def peer(folder: Path, name: str, version: str, answer: str = "") -> Path:
    """Write an interpreter of a test peer: it says its version, and runs `answer` in place of a canary."""
    path = folder / "python"
    body = f'case "$1" in -c) echo \'["{name}", "{version}"]\';; *) {answer or "exit 3"};; esac'
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_stated_version_must_be_the_interpreters(tmp_path: Path) -> None:
    python = peer(tmp_path, "vllm", "0.32.0+cpu")
    assert TargetFramework.read("vllm==0.32.1", python).found() == Found("vllm", "0.32.0")
    with pytest.raises(UnsupportedError, match=r"has vllm 0\.32\.0; install vllm==0\.24\.0 there, or state vllm==0\.32\.0"):
        TargetFramework.read("vllm==0.24.0", python).found()
    doubts = TargetFramework.read("vllm==0.10.2").check([Scheme.FLOAT], Device((9, 0)))
    assert doubts == ("vllm 0.10.2: the support matrix was found with 0.24, 0.32; the load canary decides",)
    assert TargetFramework.read("vllm").check([Scheme.FLOAT], Device((9, 0))) == ()


def test_an_engines_framework_must_be_here_in_the_very_release() -> None:
    assert TargetFramework.read(f"onnxruntime=={HERE}").found() == Found("onnxruntime", HERE)
    with pytest.raises(UnsupportedError, match=f"this environment has onnxruntime {HERE}"):
        TargetFramework.read(f"onnxruntime=={minor_of(HERE)}.9").found()


def test_find_in_refuses_what_is_no_interpreter(tmp_path: Path) -> None:
    assert find_in(Path(sys.executable), ("no-such-distribution",)) is None
    (tmp_path / "python").write_text("not a program")
    with pytest.raises(UnsupportedError, match="does not run as a Python interpreter"):
        find_in(tmp_path / "python", ("vllm",))
    with pytest.raises(ConfigError, match="is no file"):
        find_in(tmp_path / "absent", ("vllm",))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("canary")
    export_model(tiny_llama, folder)
    return folder


def request_for(engine: Path, checkpoint: Path, python: Path, timeout_s: float = 120) -> CanaryRequest:
    vocab_size = json.loads((checkpoint / "config.json").read_bytes())["vocab_size"]
    return CanaryRequest(
        FRAMEWORKS.get("onnxruntime"), python, Found("onnxruntime", HERE), engine, checkpoint, vocab_size, timeout_s
    )


def test_the_load_canary_passes_where_another_process_says_the_checkpoints_tokens(engine: Path, tiny_llama: Path) -> None:
    check = load_canary(request_for(engine, tiny_llama, Path(sys.executable)))
    assert (check.framework, check.version, check.num_tokens) == ("onnxruntime", HERE, 24)
    assert check.agreement_ratio == 1.0 and check.regret_ratio == 0.0 and check.load_s > 0
    assert "load_s" not in check.model_dump()  # files that hold it are the same after a rerun
    agreement, regret, seconds = check_measures(check, "")
    assert (agreement.value, regret.value, regret.limit, seconds.unit) == (1.0, 0.0, 0.05, "s")
    assert check_decision(check).choice == "passed"


def test_the_load_canary_reads_engines_that_keep_their_cache_in_place(engine: Path, tiny_llama: Path, tmp_path: Path) -> None:
    fused, counts = fuse(onnx.load(engine / MODEL, load_external_data=False), engine, fusions_of(2, quantized=False), tmp_path)
    onnx.save(fused, tmp_path / MODEL)
    assert counts["group_query_attention"] == 2
    check_graph(tmp_path / MODEL)
    check = load_canary(request_for(tmp_path, tiny_llama, Path(sys.executable)))
    assert check.agreement_ratio == 1.0


def test_the_load_canary_refuses_an_engine_of_another_model(engine: Path, tmp_path: Path) -> None:
    other = write_tiny_llama(tmp_path / "other", seed=7)
    with pytest.raises(UnsupportedError, match="loads the result and says other tokens than its checkpoint"):
        load_canary(request_for(engine, other, Path(sys.executable)))


@pytest.mark.parametrize(
    ("answer", "timeout_s", "words"),
    [
        (
            "echo 'ValueError: Failed to find a kernel'; echo later; exit 1",
            20,
            "ended with 1 on the result: ValueError: Failed to",
        ),
        ("exec tail -f /dev/null", 0.5, "did not answer within 0.5 s; raise target.canary_timeout_s"),
        ("echo noise > $3", 20, "gave no answer that can be read"),
        ('echo \'{"version": "1", "tokens": [[1], [2]], "load_s": 1}\' > $3', 20, "ended its answers early"),
    ],
)
def test_a_canary_that_fails_is_an_error_that_says_why(
    answer: str, timeout_s: float, words: str, tiny_llama: Path, tmp_path: Path
) -> None:
    python = peer(tmp_path, "onnxruntime", HERE, answer)
    with pytest.raises(UnsupportedError, match=words):
        load_canary(request_for(tmp_path, tiny_llama, python, timeout_s))


def test_a_canary_without_an_interpreter_is_told_and_not_passed(tiny_llama: Path) -> None:
    loader = Loader(TargetFramework.read("vllm==0.24.0"), Device((9, 0)), None, ())
    check, because = check_load(loader, tiny_llama, tiny_llama)
    assert check is None and because == "no interpreter of vllm is configured (target.python)"
    (measure,) = check_measures(check, because)
    assert (
        measure.origin is Origin.NOT_MEASURED and measure.value is None and measure.verdict is None and measure.reason == because
    )


def test_judge_gives_no_regret_for_the_checkpoints_own_tokens_and_much_for_blind_ones(tiny_llama: Path) -> None:
    import torch

    from model_optimizer.formats.loading import load_dequantized

    model, (short, long) = load_dequantized(tiny_llama), prompts_for(256)
    own = []
    for prompt in (short, long):
        tokens = list(prompt)
        for _ in range(4):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        own.append(tokens[len(prompt) :])
    assert judge(tiny_llama, (short, long), own) == (1.0, 0.0)
    logits_V = model(torch.tensor([short])).logits[0, -1]
    blind = (logits_V.max() - logits_V[9]) / (logits_V.max() - logits_V.mean())
    assert judge(tiny_llama, (short,), [[9]]) == (0.0, pytest.approx(float(blind), rel=1e-4))


KEY = GpuKey(compute_capability="sm89", driver="570.86", library="tensorrt_rtx", library_version="1.7.1")


def test_timings_come_back_for_their_own_key_alone(tmp_path: Path) -> None:
    path = tmp_path / f"{KEY.name}.cache"
    assert read_timings(path, KEY) == b""
    write_timings(path, KEY, b"\n kernels \n")
    assert read_timings(path, KEY) == b"\n kernels \n"
    others = {"compute_capability": "sm90", "driver": "580.1", "library": "tensorrt", "library_version": "1.8.0"}
    for name, value in others.items():
        other = KEY.model_copy(update={name: value})
        assert other.name != KEY.name
        with pytest.raises(IntegrityError, match=rf"another {name} .* \(wanted {value}\); remove it"):
            read_timings(path, other)


def test_gpu_key_needs_a_gpu_or_a_name() -> None:
    assert gpu_key("tensorrt_rtx", "1.7", "sm120").compute_capability == "sm120"
    with pytest.raises(UnsupportedError, match=r"there is none; name one: compile\.tensorrt_gpu: sm89"):
        gpu_key("tensorrt_rtx", "1.7", None)


def test_an_engines_origin_is_written_and_held_against_the_host(tmp_path: Path) -> None:
    built = Engine(runtime="onnxruntime", directory=".", num_bytes=1, framework_version=HERE)
    (tmp_path / "engine.json").write_text(origin_of(built).model_dump_json())
    origin = read_origin(tmp_path)
    assert origin is not None and read_origin(tmp_path / "elsewhere") is None
    refuse_foreign(origin, signed=False)
    refuse_foreign(origin.model_copy(update={"optimizer_version": "0.0.9"}), signed=True)  # the sign-off record vouches
    bound = origin.model_copy(update={"compute_capability": "sm86", "driver": "470.57", "framework_version": "1.20.0"})
    said = "framework: built with onnxruntime 1.20.0, found .*; GPU: built with sm86, found none; driver: built with 470.57"
    with pytest.raises(UnsupportedError, match=said):
        refuse_foreign(bound, signed=True)


def test_a_server_of_another_minor_version_than_was_checked_is_refused() -> None:
    component = Component(name="vllm", version="0.24.0")
    check = LoadCheck(framework="vllm", version="0.24.0", num_tokens=24, agreement_ratio=1, regret_ratio=0)
    triple = Triple(training=component, optimizer=component, inference=component, checked=(check,))
    assert refuse_unchecked_version(triple, "vllm", "0.24.2") == "checked with vllm 0.24.0"
    with pytest.raises(
        UnsupportedError, match=r"checked with vllm 0\.24\.0 and vllm 0\.32\.0 would serve it; install vllm==0\.24\.0"
    ):
        refuse_unchecked_version(triple, "vllm", "0.32.0")
    unchecked = triple.model_copy(update={"checked": (), "unchecked_because": "no interpreter is configured"})
    assert refuse_unchecked_version(unchecked, "vllm", "0.32.0") == "NOT CHECKED with vllm 0.32.0 (no interpreter is configured)"


def test_training_framework_is_what_the_models_config_says(tiny_llama: Path, tmp_path: Path) -> None:
    assert training_framework(tiny_llama) == Component(name="transformers", version=metadata.version("transformers"))
    assert training_framework(tmp_path).version == "not stated"
