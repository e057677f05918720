"""What a profile may say about the scan."""

from typing import Literal

from pydantic import Field

from model_optimizer.spec import Spec

Method = Literal["rtn", "rtn-mse", "rtn-percentile", "gptq", "awq", "smoothquant", "signround"]


class ScanConfig(Spec):
    """The space to scan and how hard to look."""

    methods: tuple[Method, ...] = Field(
        default=("rtn",), min_length=1, description="how weights get their codes; 8 bits per channel is always rtn"
    )
    bits: tuple[float, ...] = Field(
        default=(4, 6, 8, 32),
        min_length=1,
        description="2, 3, 4, 8, 32 are formats; another value between 2 and 8 is a mixed budget",
    )
    runtimes: tuple[str, ...] = ("torch", "onnxruntime")
    max_kl_nats: float = Field(default=0.05, gt=0, description="whole model, held-out text; above it a candidate is infeasible")
    kl_tokens: int = Field(default=2048, ge=64, description="tokens of held-out text for KL")
    rounds: int = Field(default=5, ge=3, description="interleaved measuring rounds")
