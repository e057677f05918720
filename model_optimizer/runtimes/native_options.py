"""How the native runtime may be run. Free of torch, so that a server can read it from serve.yaml."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from model_optimizer.memory.controller import ResizeRules
from model_optimizer.spec import Spec

COMPILE_MODES = {2: "default", 3: "max-autotune-no-cudagraphs"}
"""Compile level -> mode of torch.compile; 3 tries kernels out and keeps the fastest. Below 2 nothing is compiled."""
COMPILED_REGIONS = "compiled_regions"
"""What layout.json calls the parts of the forward pass that are compiled when an engine is opened."""


class NativeOptions(Spec):
    """Limits of a step, what is held in memory, kernels by name. The KV plan says how many requests and pages there may be."""

    max_prefill_tokens: int = Field(
        default=512, ge=1, description="prompt tokens of one step over all requests; longer prompts are cut into chunks"
    )
    max_prefills: int = Field(default=16, ge=1, description="requests that may have prompt tokens in one step")
    initial_pages: int | None = Field(
        default=None,
        ge=1,
        description="pages set aside at the start; more come as requests need them, up to the plan's. null: all at once. "
        "Not stated to a server: 64 on a CPU, all on a GPU",
    )
    keep_packed: bool = Field(
        default=False, description="keep codes packed and unpack them at every use, small and slow; else once, when loaded"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="of weights and activations")
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    draft: Path | None = Field(
        default=None,
        description="directory of a smaller model of the same vocabulary that guesses ahead; its pages come on top of the plan's",
    )
    num_drafts: int = Field(default=4, ge=1, le=64, description="guesses that are checked at once")
    attention: str = Field(default="plain", description="kernel by name")
    packed_linear: str = Field(default="unpacking", description="kernel by name")
    resize: ResizeRules = Field(default=ResizeRules(), description="when pages are added and given back while running")
    debug: bool = Field(default=False, description="poison freed pages and check ownership after every step")
