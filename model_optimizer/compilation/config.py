"""What a profile may say about compiling."""

from typing import Literal

from pydantic import Field

from model_optimizer.spec import Spec


class CompileConfig(Spec):
    level: int = Field(
        default=1,
        ge=0,
        le=3,
        description="0 as is, 1 safe graph fusions of the runtime, 2 fused kernels and compiled regions, 3 what rounds or "
        "searches more; a level that a target has not, or that fails, falls to the next lower one",
    )
    fusion_rounds: int = Field(
        default=6, ge=0, description="interleaved rounds in which the gain of each fusion of level 2 and 3 is measured; 0: not"
    )
    parity_kl_nats: float = Field(
        default=0.01,
        gt=0,
        description="largest mean KL between engine and checkpoint; leaves room for the int8 activations of a runtime's fast "
        "kernels (0.0027 measured on SmolLM2-135M, int8 weights), while a wrong graph is off by whole nats",
    )
    onnxruntime_device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="what ONNX Runtime engines are built for and opened on; cuda needs onnxruntime-gpu and a GPU, and "
        "computes in float16 from level 2 on, where its attention kernels are",
    )
    tensorrt_gpu: str | None = Field(
        default=None,
        pattern=r"^sm\d+$",
        description="compute capability that TensorRT-RTX builds for, e.g. sm89; left out: this machine's GPU",
    )
    tensorrt_version_compatible: bool = Field(
        default=False, description="let later versions of TensorRT load the engine too; such engines are slower"
    )
    tensorrt_hardware_compatible: bool = Field(
        default=False, description="let GPUs of later generations load the engine too; TensorRT-RTX has no such engines"
    )
    timeout_s: float = Field(default=1800, gt=0)
