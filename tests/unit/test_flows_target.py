"""What a profile's target framework means before a run is started."""

from pathlib import Path

import pytest

from flows.target import aim, schemes_of_bits
from model_optimizer.compilation.support import Scheme, schemes_of
from model_optimizer.errors import ConfigError, UnsupportedError
from model_optimizer.profile import DeploymentProfile
from model_optimizer.quantization.layers import read_layers
from model_optimizer.strategy.space import recipe


def profile(target: dict[str, object], **scan: object) -> DeploymentProfile:
    sections = {"name": "chat", "model": {"ref": "m"}, "calibration": {"path": "c.jsonl"}, "verify": {"golden_sets": ["g"]}}
    return DeploymentProfile.model_validate(sections | {"target": target, "scan": scan})


@pytest.mark.parametrize("bits", [32, 8, 6, 5, 4, 3, 2])
def test_schemes_of_bits_are_those_of_the_recipe(bits: float, tiny_llama: Path) -> None:
    assert schemes_of_bits(bits, ("rtn",)) == schemes_of(recipe(bits, read_layers(tiny_llama).linears))


def test_aim_leaves_a_profile_without_target_as_it_is() -> None:
    plain = profile({})
    assert aim(plain) == (plain, None)


def test_aim_scans_the_runtime_that_the_target_names() -> None:
    aimed, loader = aim(profile({"framework": "onnxruntime", "hardware": "cpu"}))
    assert aimed.scan.runtimes == ("onnxruntime",) and loader is not None and loader.device.label == "cpu"
    with pytest.raises(ConfigError, match=r"scan\.runtimes is \['torch'\]; leave scan\.runtimes out, or state \[onnxruntime\]"):
        aim(profile({"framework": "onnxruntime", "hardware": "cpu"}, runtimes=["torch"]))


def test_aim_keeps_the_scanned_runtimes_where_the_target_loads_the_checkpoint() -> None:
    aimed, loader = aim(profile({"framework": "vllm==0.24.0", "hardware": "h200"}, bits=[32, 8, 6, 4]))
    assert aimed.scan.runtimes == ("torch", "onnxruntime") and loader is not None
    assert loader.device.label == "sm90" and loader.found is None and loader.doubts == ()


@pytest.mark.parametrize(
    ("target", "scan", "words"),
    [
        (
            {"framework": "vllm", "hardware": "cpu"},
            {"bits": [32, 8]},
            "vllm on cpu does not run int8-channel: .*; take w8a8-int8",
        ),
        ({"framework": "vllm", "hardware": "h200"}, {"bits": [32, 3]}, "vllm on sm90 does not run int3-group"),
        ({"framework": "openvino", "hardware": "l40s"}, {}, "openvino on sm89 does not run "),
        ({"framework": "tensorrt", "hardware": "h200"}, {}, "tensorrt on sm90 does not run .*; it runs nothing there"),
        ({"framework": "llamacpp"}, {}, "make a GGUF file with `model-optimizer quantize --format gguf:q4_k_m`"),
        (
            {"framework": "onnxruntime==1.20.0", "hardware": "cpu"},
            {},
            "install onnxruntime==1.20.0 there, or state onnxruntime==",
        ),
    ],
)
def test_aim_refuses_what_the_target_does_not_run(target: dict[str, object], scan: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        aim(profile(target, **scan))


def test_scales_that_may_be_negative_are_a_doubt_on_a_gpu_where_nobody_tried_them() -> None:
    _, tried = aim(profile({"framework": "vllm==0.24.0", "hardware": "h200"}, bits=[32, 4], methods=["gptq"]))
    _, loader = aim(profile({"framework": "vllm==0.24.0", "hardware": "l40s"}, bits=[32, 4], methods=["gptq"]))
    assert tried is not None and tried.doubts == () and loader is not None
    assert loader.doubts == (
        f"vllm on sm89, {Scheme.NEGATIVE_SCALES}: not tried on a GPU; scales are multiplied as they are stored",
    )
