"""What a profile may say about compiling."""

from pydantic import Field

from model_optimizer.spec import Spec


class CompileConfig(Spec):
    level: int = Field(default=1, ge=0, le=1, description="0 as is, 1 safe graph fusions of the runtime")
    parity_kl_nats: float = Field(
        default=0.01,
        gt=0,
        description="largest mean KL between engine and checkpoint; leaves room for the int8 activations of a runtime's fast "
        "kernels (0.0027 measured on SmolLM2-135M, int8 weights), while a wrong graph is off by whole nats",
    )
    tensorrt_gpu: str | None = Field(
        default=None,
        pattern=r"^sm\d+$",
        description="compute capability that TensorRT-RTX builds for, e.g. sm89; left out: this machine's GPU",
    )
    timeout_s: float = Field(default=1800, gt=0)
